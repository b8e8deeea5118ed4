"""Random features: what they estimate and how well, and when they are drawn."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_checks import spec_of
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attnspec.backends.factored.features.directions import directions, one_head
from attnspec.backends.factored.features.maps import Differentiated, Elementwise, Features
from attnspec.backends.factored.features.random_features import RandomFeatures, UnitWaves
from attnspec.backends.factored.features.taylor import SecondOrder
from attnspec.graphs.counter_rng import philox
from attnspec.lower.work import BackendError
from attnspec.runtime import CompiledAttention
from attnspec.text.diagnostics import SpecError

DRAWS = 5_000
FAVOR_KINDS = ("positive", "trig", "hyperbolic", "relu")
LINEAR_FEATURES = ("elu1", "relu", "squared_relu", "exp", "identity")
SIZE = 6

# --- derivatives ---------------------------------------------------------------------------------

MAPS: dict[str, Differentiated] = {
    **{kind: RandomFeatures(kind, 5, 0.7) for kind in FAVOR_KINDS},
    "gaussian": RandomFeatures("gaussian", 5, 1.3),
    **{name: Elementwise(name) for name in LINEAR_FEATURES},
    "second order": SecondOrder(None),
}


@pytest.mark.parametrize("size", [1, 7, 19])
@pytest.mark.parametrize("name", MAPS)
def test_maps_know_how_many_features_there_are(name: str, size: int) -> None:
    wanted = 7, 0, (0, 1, 2), 0, 5, size, False
    tables = {"directions": directions(wanted, torch.float64, torch.device("cpu"))}
    found = MAPS[name].queries(torch.ones(2, 3, 4, size, dtype=torch.float64), tables)
    assert found.values.shape == (2, 3, 4, MAPS[name].width(size))


@pytest.mark.parametrize("size", [1, 7, 19])
@pytest.mark.parametrize("name", MAPS)
def test_maps_know_their_derivatives(name: str, size: int) -> None:
    source = torch.Generator().manual_seed(size)
    x = torch.randn(2, 3, 4, size, generator=source, dtype=torch.float64)
    x[0, 0, 0, 0] = 0.0
    wanted = 7, 0, (0, 1, 2), 0, 5, size, False
    tables = {"directions": directions(wanted, torch.float64, torch.device("cpu"))}
    how = MAPS[name]
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        meant = how.queries(leaf, tables)
    grad = torch.randn(meant.values.shape, generator=source, dtype=torch.float64)
    (slope,) = torch.autograd.grad(meant.values, leaf, grad)
    with torch.no_grad():
        found = how.queries(x, tables)
        if found.log is not None and meant.log is not None:
            # what is taken out of the values and put into the frame is a factor of a row
            grad = grad * torch.exp(found.log - meant.log)[..., None]
        torch.testing.assert_close(how.back(x, found.values.clone(), grad, tables), slope)


# --- how well ------------------------------------------------------------------------------------


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, as the estimators see them, so short that errors have no heavy tails."""
    source = torch.Generator().manual_seed(4)
    return tuple(  # type: ignore[return-value]
        0.15 * torch.randn(SIZE, generator=source, dtype=torch.float64) for _ in range(2)
    )


def drawn(count: int, orthogonal: bool) -> torch.Tensor:
    """Directions of many draws [DRAWS, count, SIZE]: fewer are the first of more, which are drawn
    once."""
    wanted = 7, 0, tuple(range(DRAWS)), 0, SIZE, SIZE, orthogonal
    return directions(wanted, torch.float64, torch.device("cpu"))[:, :count]


def test_fewer_directions_are_the_first_of_more() -> None:
    for orthogonal in (False, True):
        few = directions((7, 0, (0, 3), 0, 2, SIZE, orthogonal), torch.float64, torch.device("cpu"))
        assert torch.equal(few, drawn(2, orthogonal)[[0, 3]])


def estimates(kind: str, count: int, orthogonal: bool) -> torch.Tensor:
    """Products of the features of the two rows for many draws [DRAWS]."""
    tables = {"directions": drawn(count, orthogonal)}
    features = RandomFeatures(kind, count, 1.0)
    x, y = (row.expand(1, DRAWS, 1, SIZE) for row in rows())

    def true(found: Features) -> torch.Tensor:
        if found.log is None:
            return found.values
        return found.values * torch.exp(found.log)[..., None]

    one, other = true(features.queries(x, tables)), true(features.keys(y, tables))
    return (one * other).sum(-1)[0, :, 0]


def error_of(kind: str, count: int) -> tuple[float, float]:
    """What is estimated, and the mean squared error of independent directions in the paper."""
    x, y = rows()
    total, apart = ((x + y) @ (x + y)).item(), ((x - y) @ (x - y)).item()
    halves = ((x @ x + y @ y) / 2).item()
    softmax = math.exp((x @ y).item())
    positive = math.exp(total) * softmax**2 * (1 - math.exp(-total)) / count
    match kind:
        case "positive":
            return softmax, positive
        case "hyperbolic":
            return softmax, (1 - math.exp(-total)) * positive / 2
        case "gaussian":
            return math.exp(-apart / 2), positive * math.exp(-2 * halves)
        case _:
            error = math.exp(total) / softmax**2 * (1 - math.exp(-apart)) ** 2
            return softmax, error / (2 * count)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trig", "gaussian"])
def test_errors_follow_the_formulas(kind: str, count: int) -> None:
    meant, error = error_of(kind, count)
    found = estimates(kind, count, False)
    wrong = (found - meant).square()
    # within five standard errors of a mean
    assert abs(found.mean().item() - meant) < 5 * found.std().item() / DRAWS**0.5
    assert abs(wrong.mean().item() - error) < 5 * wrong.std().item() / DRAWS**0.5


@pytest.mark.parametrize("count", [2, SIZE])
def test_orthogonal_directions_err_less(count: int) -> None:
    meant, error = error_of("positive", count)
    x, y = rows()
    below = math.exp(-((x @ x + y @ y) / 2).item())
    bound = error - 2 * (count - 1) / (count * (SIZE + 2)) * (meant - below) ** 2
    found = estimates("positive", count, True)
    wrong = (found - meant).square()
    assert abs(found.mean().item() - meant) < 5 * found.std().item() / DRAWS**0.5
    assert bound < error
    assert wrong.mean().item() < bound + 5 * wrong.std().item() / DRAWS**0.5


def test_waves_of_unit_rows_follow_the_formula() -> None:
    tables = {
        "directions": drawn(4, orthogonal=False),
        "spread": torch.full((1, SIZE), 0.7, dtype=torch.float64),
    }
    x, y = (row.expand(1, DRAWS, 1, SIZE) for row in rows())
    waves = UnitWaves(4)
    found = (waves.queries(x, tables).values * waves.keys(y, tables).values).sum(-1)[0, :, 0]
    units = [row / row.norm() for row in rows()]
    apart = 0.49 * (units[0] - units[1]).square().sum().item()
    wrong = (found - math.exp(-apart / 2)).square()
    error = (1 - math.exp(-apart)) ** 2 / 8
    assert abs(wrong.mean().item() - error) < 5 * wrong.std().item() / DRAWS**0.5


def test_many_features_are_softmax_attention() -> None:
    source = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=source, dtype=torch.float64) for _ in range(3))
    q, k = q / 2, k / 2
    meant = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    errors = []
    for count in (64, 16_384):
        found = spec_of(f"attend favor(features = {count})").compile()(q, k, v)
        errors.append((found - meant).abs().mean().item())
    assert errors[1] < errors[0] / 5
    assert errors[1] < 0.02


# --- what is drawn -------------------------------------------------------------------------------


def test_rows_are_orthogonal_in_blocks() -> None:
    found = one_head(1, 0, 0, 0, 20, 8, True)
    for low in (0, 8, 16):
        block = found[low : low + 8]
        product = block @ block.T
        np.testing.assert_allclose(product, np.diag(np.diag(product)), atol=1e-12)
    # lengths are those of Gaussian rows, not all one
    assert np.std(np.linalg.norm(found, axis=1)) > 0.1


def test_every_seed_layer_head_and_draw_has_its_own() -> None:
    places = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)]
    seen = [one_head(s, layer, h, d, 4, 4, True).tobytes() for s, layer, h, d in places]
    assert len(set(seen)) == 5
    assert one_head(0, 0, 0, 0, 4, 4, True).tobytes() == seen[4]


def test_numbers_do_not_change_from_version_to_version() -> None:
    found = one_head(5, 1, 2, 0, 3, 2, False)
    words = philox((0, 0, 1 | 2 << 16, 1 << 31), (5, 0))
    length, angle = math.sqrt(-2 * math.log((words[0] + 1) / 2**32)), 2 * math.pi * words[1] / 2**32
    meant = [length * math.cos(angle), length * math.sin(angle)]
    np.testing.assert_allclose(found[0], meant, rtol=1e-12)
    np.testing.assert_allclose(found[0], [0.16204514, -0.63113199], atol=1e-7)


def test_draws_do_not_depend_on_the_length_or_the_batch() -> None:
    module = spec_of("causal attend favor(features = 8)").compile()
    q, k, v = (torch.randn(2, 2, 50, 4) for _ in range(3))
    long, short = module(q, k, v), module(q[:1, :, :9], k[:1, :, :9], v[:1, :, :9])
    torch.testing.assert_close(long[:1, :, :9], short)


# --- when ----------------------------------------------------------------------------------------


def redrawing(every: int) -> CompiledAttention:
    return spec_of(f"layers 2 attend favor(features = 4, redraw = {every})").compile()


def outputs(module: CompiledAttention, times: int, layer: int = 0) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 4, generator=source) for _ in range(3))
    return [module(q, k, v, layer=layer) for _ in range(times)]


def changes(outs: list[torch.Tensor]) -> list[bool]:
    return [not torch.equal(a, b) for a, b in pairwise(outs)]


def test_features_are_drawn_anew_in_training_alone() -> None:
    module = redrawing(2)
    assert changes(outputs(module, 5)) == [False, True, False, True]
    module.eval()
    assert not any(changes(outputs(module, 4)))
    # layers count for themselves
    module.train()
    assert changes(outputs(module, 3, layer=1)) == [False, True]
    assert not any(changes(outputs(spec_of("attend favor(features = 4)").compile(), 4)))


def test_a_draw_may_be_asked_for() -> None:
    module = redrawing(100).eval()
    before = outputs(module, 1)[0]
    module.redraw()
    assert not torch.equal(before, outputs(module, 1)[0])
    with pytest.raises(ValueError, match="no mechanism of `sample` redraws"):
        spec_of("attend favor()").compile().redraw()


def test_how_often_is_the_only_state() -> None:
    assert list(spec_of("attend favor()").compile().state_dict()) == []
    module = redrawing(1)
    outputs(module, 3)
    module.redraw()
    state = module.state_dict()
    assert list(state) == ["draws._extra_state"]
    again = redrawing(1)
    again.load_state_dict(state)
    for each in (again.eval(), copy.deepcopy(module).eval()):
        assert torch.equal(outputs(each, 1)[0], outputs(module.eval(), 1)[0])


def test_what_is_computed_again_for_a_backward_has_the_same_draw() -> None:
    source = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 1, 5, 4, generator=source).requires_grad_() for _ in range(3)]
    found = []
    for again in (False, True):
        module = redrawing(1)
        outputs(module, 2)
        out = checkpoint(module, *given, use_reentrant=False) if again else module(*given)
        found.append(torch.autograd.grad(out.square().sum(), given))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_traced_calls_keep_the_draw_in_training() -> None:
    torch._dynamo.reset()
    module = redrawing(1)
    traced = torch.compile(module, backend="eager", fullgraph=True)
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 4, generator=source) for _ in range(3))
    found = [traced(q, k, v) for _ in range(3)]
    for each in found:
        torch.testing.assert_close(each, redrawing(1)(q, k, v))


# --- what is learned -----------------------------------------------------------------------------


def test_learned_parts_wait_for_the_size_of_a_head() -> None:
    module = spec_of("causal heads 2 attend rfa(features = 4, gated = true)").compile()
    names = ["rfa_spread", "rfa_gate", "rfa_gate_bias"]
    assert [name for name, _ in module.named_parameters()] == names
    copy.deepcopy(module).state_dict()
    q, k, v = (torch.randn(1, 2, 5, 6) for _ in range(3))
    module(q, k, v)
    shapes = {name: list(x.shape) for name, x in module.named_parameters()}
    assert shapes == {"rfa_spread": [1, 2, 6], "rfa_gate": [1, 2, 6], "rfa_gate_bias": [1, 2]}
    assert torch.equal(module.get_parameter("rfa_spread"), torch.ones(1, 2, 6))
    other = spec_of("causal heads 2 attend rfa(features = 4, gated = true)").compile()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v), module(q, k, v))
    # a generator decides what is drawn
    for each in (module, other):
        each.reset_parameters(torch.Generator().manual_seed(9))
    assert torch.equal(other.get_parameter("rfa_gate"), module.get_parameter("rfa_gate"))


def test_a_gate_needs_the_causal_form() -> None:
    with pytest.raises(SpecError, match="a gate forgets earlier keys"):
        spec_of("attend rfa(gated = true)")


def test_scales_that_depend_on_n_are_refused_when_it_is_known() -> None:
    with pytest.raises(BackendError, match="takes the root of `scale`, which is -1"):
        spec_of("scale 4095 - n attend favor()").plan(4096)


# --- what sums are divided by --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["", "causal", "causal gated"])
@pytest.mark.parametrize("n", [1, 5, 70])
def test_sums_of_waves_are_divided_by_no_less_than_their_floor(form: str, n: int) -> None:
    causal, gated = form != "", form == "causal gated"
    options = f"features = 2, floor = {math.exp(-2)}, gated = {str(gated).lower()}"
    module = spec_of(f"{'causal' if causal else ''} attend rfa({options})").compile(head_size=4)
    module.double()
    with torch.no_grad():
        module.get_parameter("rfa_spread").fill_(1.5)
        if gated:
            module.get_parameter("rfa_gate_bias").fill_(1.0)
    source = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 1, n, 4, generator=source, dtype=torch.float64) for _ in range(3))
    # keys that are alike, far from some queries
    k = k[:, :, :1] + 0.2 * k
    for x in (q, k, v):
        x.requires_grad_()
    w = torch.from_numpy(one_head(0, 0, 0, 0, 2, 4, False)).double() * 1.5
    # a cosine of the difference for each direction: the same as products of sines and cosines
    away = (
        functional.normalize(q, dim=-1)[:, :, :, None] - functional.normalize(k, dim=-1)[:, :, None]
    )
    weights = torch.cos(away @ w.T).mean(-1)
    if causal:
        weights = weights.tril()
    if gated:
        gate = torch.sigmoid(k @ module.get_parameter("rfa_gate")[0, 0] + 1.0)
        # of each key, what later gates leave of it
        kept = torch.cumprod(
            torch.where(torch.ones(n, n).triu(1).bool(), gate[..., None, :], 1.0), -1
        )
        weights = weights * (kept.transpose(-1, -2) * (1 - gate)[..., None, :])
    total = weights.sum(-1, keepdim=True)
    low = total < math.exp(-2)
    assert low.any()
    if n > 1:
        assert (total < 0).any()
        assert not low.all()
    meant = weights @ v / torch.where(low, math.exp(-2), total)
    found = module(q, k, v)
    torch.testing.assert_close(found, meant, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, meant)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)
