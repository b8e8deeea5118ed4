"""Mechanisms: numbers at the edge, what they draw, what they learn, what they refuse."""

from __future__ import annotations

import copy
import gc
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_checks import learner_of, tensors
from population import BODIES, spec_of
from sweeps import checkered, few
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnspec.runtime import CompiledAttention
from benchmarks.accuracy.costs import peak_bytes

MECHANISMS = [
    name
    for name, body in BODIES.items()
    if any(x.mechanism and not x.graph for x in spec_of(body).program.attends)
]


@pytest.mark.parametrize(
    ("text", "size"),
    checkered(
        [
            "linear()",
            "linear(feature = exp)",
            "favor(features = 24)",
            "favor(features = 24, kind = hyperbolic)",
            "favor(features = 24, kind = trig)",
            "rbf(features = 24)",
            "rfa(features = 12)",
            "rfa(features = 12, gated = true)",
            "taylor()",
            "taylor(order = 2)",
        ],
        [0.0, 1e-30, 60.0, -60.0, 300.0],
        of=5,
    ),
)
def test_no_input_divides_by_zero(text: str, size: float) -> None:
    for causal in ("causal", *[""] * ("gated" not in text)):
        module = learner_of(f"{causal} attend {text}").float()
        q, k, v = tensors(1, 2, 70, 70, dtype=torch.float32)
        out = module(q.abs() * size, k.abs() * size, v)
        assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))))


@pytest.mark.parametrize("text", ["rfa(features = 12)", "taylor()"])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_rows_of_zeros_have_no_direction_and_no_gradient(text: str, kind: torch.dtype) -> None:
    given = [x.detach() for x in tensors(1, 2, 12, 12, dtype=kind)]
    for x in given[:2]:
        x[:, :, ::3] = 0
    q, k, v = (x.requires_grad_() for x in given)
    out = learner_of(f"causal attend {text}").float()(q, k, v)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)
    for x in grads[:2]:
        assert not x[:, :, ::3].any()
        assert x[:, :, 4].all()


def test_elu1_does_not_round_to_zero() -> None:
    q, k = (torch.full((1, 1, 3, 6), -9.0) for _ in range(2))
    k[:, :, 1] = -20.0
    assert spec_of("attend linear()").compile()(q, k, torch.eye(3)[None, None])[0, 0, 0, 1] > 0


def test_features_that_grow_by_powers_of_ten_agree_with_float64() -> None:
    module = spec_of("causal attend favor(features = 24)").compile()
    q, k, v = (x.detach() for x in tensors(1, 2, 100, 100))
    k = k * torch.linspace(0.1, 12.0, 100).double()[:, None]
    found = module(q.float(), k.float(), v.float())
    torch.testing.assert_close(found.double(), module(q, k, v), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("body", ["linformer(rank = 4, max_length = 20)", "nystrom(landmarks = 4)"])
def test_nan_in_a_query_stays_nan(body: str) -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 12, 12, dtype=torch.float32))
    q[0, 0, 5] = math.nan
    assert learner_of(f"attend {body}").float()(q, k, v)[0, 0, 5].isnan().all()


@pytest.mark.parametrize(
    ("body", "n", "by"),
    [
        ("attend linformer(rank = 8, max_length = 2100)", 1024, 100),
        ("attend nystrom(landmarks = 32, conv = 9)", 2100, 1),
        ("causal attend favor(features = 96)", 2100, 1),
        ("attend taylor(order = 2)", 2100, 1),
        ("causal attend linear()", 2100, 1),
        ("attend fourier()", 2**13 + 1, 1),
    ],
)
def test_long_sequences_with_and_without_gradients(body: str, n: int, by: float) -> None:
    """Also of scores far from zero, which must not overflow."""
    wide = [x.detach() * y for x, y in zip(tensors(1, 2, n, n), (by, by, 1), strict=True)]
    module, results = spec_of(body).compile(head_size=8), []
    for kind in (torch.float64, torch.float32):
        leaves = [x.float().to(kind).requires_grad_() for x in wide]
        out = module.to(kind)(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        results.append([out.detach(), module(*(x.detach() for x in leaves)), *grads])
    for meant, found in zip(*results, strict=True):
        assert found.isfinite().all()
        if by == 1:
            assert (found - meant).abs().max() <= 1e-2 * meant.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("name", MECHANISMS)
def test_calls_of_nothing(name: str) -> None:
    module = learner_of(BODIES[name])
    heads = spec_of(BODIES[name]).heads or 2
    for batch, n in ((2, 0), (0, 3)):
        given = tensors(batch, heads, n, n)
        out = module(*given)
        assert out.shape == given[0].shape
        out.sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        *(BODIES[name] for name in MECHANISMS if "causal" in BODIES[name]),
        "causal attend window(radius = 9) + favor(features = 8)",
    ],
)
def test_no_bit_of_a_row_depends_on_the_future(body: str) -> None:
    module = learner_of(body).float()
    q, k, v = (x.detach() for x in tensors(1, 2, 130, 130, dtype=torch.float32))
    before = module(q, k, v)
    for at in (1, 64, 100):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, at:] = 20 * torch.randn_like(x[:, :, at:])
        assert torch.equal(module(*later)[:, :, :at], before[:, :, :at])


@pytest.mark.parametrize("name", few(MECHANISMS, 3))
def test_derivatives_of_derivatives(name: str) -> None:
    if "maxima" in name:
        pytest.skip("differences across the corners of a maximum are not derivatives")
    module = learner_of(BODIES[name], 2)
    given = tensors(1, spec_of(BODIES[name]).heads or 1, 5, 5, size=2)
    assert torch.autograd.gradgradcheck(module, given, fast_mode=True, rtol=1e-4, atol=1e-6)


MEMORY = (
    "attend random(keys = 4)",
    "attend linear()",
    "causal attend linear()",
    "attend rfa(features = 32)",
    "attend taylor()",
    "causal attend taylor(order = 2)",
    "causal attend favor(features = 256)",
    "causal attend rfa(features = 32, gated = true)",
    "attend linformer(rank = 16, projection = max)",
    "attend nystrom(landmarks = 16, conv = 33)",
    "attend fourier()",
    "causal attend window(before = 20, after = 0) + linear()",
    "attend window(radius = 20) + favor(features = 64)",
    "attend sinkhorn(size = 128)",
    "attend cluster(of = q)",
)


@pytest.mark.parametrize(
    ("body", "padded"), few(((body, at % 6 < 3) for at, body in enumerate(MEMORY)), 5)
)
def test_memory_is_that_of_a_few_tensors(body: str, padded: bool) -> None:
    """n x n numbers, like n x d x d_v, are 16 times as many as q, k, v and the output."""
    n, size = 4096, 64
    module = learner_of(body, size).float()
    given = tensors(1, 1, n, n, size=size, dtype=torch.float32)
    padding = torch.ones(1, n, dtype=torch.bool) if padded else None

    def step() -> None:
        torch.autograd.grad(
            module(*given, key_padding_mask=padding).sum(), given, allow_unused=True
        )

    # what is made once for a length is not of the step
    step()
    gc.collect()
    assert peak_bytes(step) < 12 * 4 * n * size * 4


def test_draws_are_those_of_every_version() -> None:
    """The direction w of layer 1 and head 2, whose features of x are exp(w x - x x / 2)."""
    body = "layers 2 heads 3 attend favor(features = 1, seed = 5, orthogonal = false)"
    q = 2**0.25 * torch.eye(2, dtype=torch.float64).expand(1, 3, 2, 2)
    k = torch.zeros(1, 3, 2, 2, dtype=torch.float64)
    lse = spec_of(body).compile()(q, k, k, layer=1, return_lse=True)[1][0, 2]
    found = lse + 0.5 - math.log(2)
    assert found.tolist() == pytest.approx([0.16204514, -0.63113199], abs=1e-7)


def test_draws_depend_on_seed_layer_and_head_alone() -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 50, 50))
    spec = "layers 2 heads 2 causal attend favor(features = 8, seed = SEED)"
    seen = []
    for seed in ("1", "2"):
        module = spec_of(spec.replace("SEED", seed)).compile()
        outs = [module(*(x.expand(2, 2, -1, -1) for x in (q, k, v)), layer=i) for i in (0, 1)]
        seen += [x[0, head].numpy().tobytes() for x in outs for head in (0, 1)]
        short = module(*(x[:, :, :9].expand(1, 2, -1, -1) for x in (q, k, v)))
        torch.testing.assert_close(short, outs[0][:1, :, :9])
    assert len(set(seen)) == 8


def redrawing(every: int) -> CompiledAttention:
    return spec_of(f"layers 2 attend favor(features = 4, redraw = {every})").compile()


def outputs(module: CompiledAttention, times: int, layer: int = 0) -> list[Tensor]:
    q, k, v = torch.randn(3, 1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    return [module(q, k, v, layer=layer) for _ in range(times)]


def changes(outs: list[Tensor]) -> list[bool]:
    return [not torch.equal(a, b) for a, b in pairwise(outs)]


def test_features_are_drawn_anew_in_training_alone() -> None:
    module = redrawing(2)
    assert changes(outputs(module, 5)) == [False, True, False, True]
    assert not any(changes(outputs(module.eval(), 4)))
    # layers count for themselves
    assert changes(outputs(module.train(), 3, layer=1)) == [False, True]
    assert not any(changes(outputs(spec_of("attend favor(features = 4)").compile(), 4)))


def test_a_draw_may_be_asked_for_and_is_the_only_state() -> None:
    module = redrawing(100).eval()
    before = outputs(module, 1)[0]
    module.redraw()
    assert not torch.equal(before, outputs(module, 1)[0])
    with pytest.raises(ValueError, match="no mechanism of `sample` redraws"):
        spec_of("attend favor()").compile().redraw()
    assert list(spec_of("attend favor()").compile().state_dict()) == []
    again = redrawing(100)
    again.load_state_dict(module.state_dict())
    for each in (again.eval(), copy.deepcopy(module)):
        assert torch.equal(outputs(each, 1)[0], outputs(module, 1)[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_recomputed_and_traced_calls_keep_their_draw() -> None:
    drawn = torch.randn(3, 1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    given = [x.clone().requires_grad_() for x in drawn]
    found = []
    for again in (False, True):
        module = redrawing(1)
        outputs(module, 2)
        out = checkpoint(module, *given, use_reentrant=False) if again else module(*given)
        found.append(torch.autograd.grad(out.square().sum(), given))
    torch.testing.assert_close(*found)
    torch._dynamo.reset()
    traced = torch.compile(redrawing(1), backend="eager", fullgraph=True)
    for each in [traced(*given) for _ in range(3)]:
        torch.testing.assert_close(each, redrawing(1)(*given))


def test_learned_parts_wait_for_the_size_of_a_head() -> None:
    body = "causal heads 2 attend rfa(features = 4, gated = true)"
    module, other = (spec_of(body).compile() for _ in range(2))
    names = ["rfa_spread", "rfa_gate", "rfa_gate_bias"]
    assert [name for name, _ in module.named_parameters()] == names
    copy.deepcopy(module).state_dict()
    q, k, v = torch.randn(3, 1, 2, 5, 6)
    module(q, k, v)
    assert [list(x.shape) for x in module.parameters()] == [[1, 2, 6], [1, 2, 6], [1, 2]]
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v), module(q, k, v))
    # a generator decides what is drawn
    for each in (module, other):
        each.reset_parameters(torch.Generator().manual_seed(9))
    assert torch.equal(other.get_parameter("rfa_gate"), module.get_parameter("rfa_gate"))


def test_parameters_are_initialised_as_in_the_papers() -> None:
    torch.manual_seed(0)
    (projection,) = spec_of("attend linformer(rank = 64, max_length = 1000)").compile().parameters()
    assert projection.std().item() == pytest.approx(1 / 8, rel=0.02)
    q, k, v = torch.randn(3, 1, 1, 50, 8)
    module = spec_of("attend gmlp(max_length = 64)").compile()
    assert (module(q, k, v) - q).abs().max() < 1e-2
    weights = spec_of("attend synthesizer(kind = random, max_length = 9)").compile()
    assert weights.get_parameter("synthesizer_logits").std().item() > 0.7


def test_parameters_for_a_maximum_length_bound_the_length() -> None:
    report = spec_of("attend mixer(hidden = 3, max_length = 40)").analyse(41)
    assert report.flops is None
    assert "above n = 40, its `max_length`" in str(report)


@pytest.mark.parametrize(
    "body",
    [
        "linformer(rank = 400, max_length = 50)",
        *(
            f"synthesizer(kind = {kind}, rank = 3, max_length = 50, products = true)"
            for kind in ("dense", "random", "factorized_dense", "factorized_random")
        ),
    ],
)
def test_dropped_weights_keep_the_mean(body: str) -> None:
    module = learner_of(f"attend {body}")
    given = [x.detach() for x in tensors(1, 2, 12, 12)]
    plain = module(*given)
    torch.manual_seed(0)
    # every sample of a batch drops others
    dropped = module(*(x.expand(300, -1, -1, -1) for x in given), dropout_p=0.3).detach()
    spread = dropped.std(0) / math.sqrt(len(dropped))
    assert ((dropped.mean(0) - plain).abs() <= 6 * spread + 1e-9).all()
    assert dropped.std() > 0
    assert not module(*given, dropout_p=1.0).any()
    assert not np.array_equal(dropped[0], dropped[1])
