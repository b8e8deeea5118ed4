"""The mixings, fourier, synthesizer, mixer and gmlp: held against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import check_transforms, spec_of, tensors
from formula_checks import assert_errs_by_roundings, assert_follows_formula, learner_of, ragged
from torch.nn import functional

from attnspec.backends.factored.low_rank.mixing import fourier
from attnspec.cli.specs import length_of
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.verification import verify

LENGTHS = (1, 2, 7, 33)

SYNTHESIZERS = [
    f"synthesizer(kind = {kind}, rank = 3, max_length = 35, products = {products})"
    for kind in ("dense", "random", "factorized_dense", "factorized_random")
    for products in ("false", "true")
]

MIXINGS = ["fourier()", "mixer(hidden = 7, max_length = 35)", "gmlp(max_length = 35)"]

CAUSAL = [*SYNTHESIZERS, "gmlp(max_length = 35)"]

every_body = pytest.mark.parametrize("body", [*SYNTHESIZERS, *MIXINGS])
every_causal_body = pytest.mark.parametrize("body", CAUSAL)


# --- the formulas ---------------------------------------------------------------------------------


@every_body
@pytest.mark.limits("", "tiny")
def test_values_and_gradients_are_those_of_the_formula(body: str) -> None:
    for n, size in zip(LENGTHS, (6, 5, 6, 5), strict=True):
        assert_follows_formula(f"heads 4 attend {body}", n, size=size, out_size=size)
        assert_follows_formula(
            f"heads 4 attend {body}", n, key_heads=2, size=4, out_size=4, padding=ragged(n)
        )
        assert_follows_formula(f"attend {body}", n, n_q=(n + 1) // 2, size=4, out_size=4)


@every_causal_body
@pytest.mark.limits("", "tiny")
def test_causal_forms_are_those_of_the_formula(body: str) -> None:
    for n in LENGTHS:
        assert_follows_formula(f"heads 4 causal attend {body}", n, size=6, out_size=6)
        assert_follows_formula(
            f"causal attend {body}", n, key_heads=2, size=4, out_size=4, padding=ragged(n)
        )
        assert_follows_formula(f"causal attend {body}", n, n_q=(n + 1) // 2, size=4, out_size=4)


@every_causal_body
def test_causal_rows_know_nothing_of_later_positions(body: str) -> None:
    module = learner_of(f"causal attend {body}", 4, 4)
    given = [x.detach() for x in tensors(1, 2, 20, 20, size=4)]
    before = module(*given)
    for x in given:
        x[:, :, 11:] = torch.randn(1, 2 if x.shape[1] == 2 else 1, 9, 4, dtype=torch.float64)
    after = module(*given)
    assert torch.equal(before[:, :, :11], after[:, :, :11])
    assert not torch.equal(before[:, :, 11:], after[:, :, 11:])


# --- fourier --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (6, 1), (7, 4), (8, 9)])
def test_the_transform_is_that_of_both_axes(shape: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *shape, dtype=torch.float64)
    torch.testing.assert_close(fourier(x), torch.fft.fft2(x).real)


def test_transforming_twice_gives_the_even_part() -> None:
    n, size = 6, 5
    x = torch.randn(n, size, dtype=torch.float64)
    at = [-torch.arange(extent) % extent for extent in (n, size)]
    even = (x + x[at[0]][:, at[1]]) / 2
    torch.testing.assert_close(fourier(fourier(x)), n * size * even)


# --- synthesizer ----------------------------------------------------------------------------------


def test_random_weights_do_not_depend_on_queries_and_keys() -> None:
    for kind, same in (("random", True), ("factorized_random", True), ("dense", False)):
        module = learner_of(f"attend synthesizer(kind = {kind}, max_length = 20)")
        q, k, v = tensors(1, 2, 9, 9, size=6)
        others = tensors(1, 2, 9, 9, size=6)
        assert torch.equal(module(q, others[1], v), module(q, k, v))
        assert torch.equal(module(others[0], k, v), module(q, k, v)) is same


def test_a_share_of_zero_is_attention_by_products() -> None:
    given = tensors(1, 2, 9, 9)
    exact = functional.scaled_dot_product_attention(*given)
    for body in SYNTHESIZERS[1::2]:
        module = learner_of(f"attend {body}", 8, 8)
        with torch.no_grad():
            module.get_parameter("synthesizer_mix").fill_(-80.0)
        torch.testing.assert_close(module(*given), exact)


def test_factors_cover_every_position() -> None:
    from attnspec.ir.mechanisms.synthesizer import Synthesizer

    for longest in range(1, 200):
        short, long = Synthesizer(max_length=longest).factors
        assert longest <= short * long < longest + short
        assert abs(short - math.sqrt(longest)) < 1


def test_every_layer_and_head_learns_its_own() -> None:
    body = "layers 2 heads 3 attend synthesizer(kind = random, max_length = 9)"
    module = learner_of(body)
    (logits,) = module.parameters()
    assert logits.shape == (2, 3, 9, 9)
    assert_follows_formula(body, 7, heads=3, layer=1)
    assert spec_of(body).compile().get_parameter("synthesizer_logits").std().item() > 0.9


# --- mixer and gmlp -------------------------------------------------------------------------------


def test_gmlp_starts_near_the_identity() -> None:
    module = spec_of("attend gmlp(max_length = 64)").compile()
    q, k, v = (x.detach().float() for x in tensors(1, 1, 50, 50))
    assert (module(q, k, v) - q).abs().max() < 1e-2
    with torch.no_grad():
        module.get_parameter("gmlp_weight").zero_()
    torch.testing.assert_close(module(q, k, v), q)


def test_mixer_is_linear_layers_on_the_transposed_sequence() -> None:
    n, hidden = 12, 7
    module = learner_of(f"attend mixer(hidden = {hidden}, max_length = {n})", 8, 8)
    learned = {name.removeprefix("mixer_"): p[0, 0] for name, p in module.named_parameters()}
    _, _, v = given = tensors(1, 1, n, n)
    normal = functional.layer_norm(v[0, 0], (8,), learned["gain"], learned["shift"])
    inner = functional.linear(normal.T, learned["inner"], learned["inner_bias"])
    outer = functional.linear(functional.gelu(inner), learned["outer"], learned["outer_bias"])
    torch.testing.assert_close(module(*given)[0, 0], v[0, 0] + outer.T)


# --- how they are called --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@every_body
def test_narrow_types_err_by_their_roundings(body: str, dtype: torch.dtype) -> None:
    assert_errs_by_roundings(f"attend {body}", dtype)


# torch scripts the derivatives of its own operators when jvp is first used
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@every_body
def test_transforms_see_through(body: str) -> None:
    class Turned(torch.nn.Module):
        """Values first, because some mixings read nothing else."""

        def forward(self, v: torch.Tensor, k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = module(q, k, v)
            return out

    module = learner_of(f"attend {body}", 8, 8)
    check_transforms(Turned(), *(x.detach() for x in tensors(2, 2, 9, 9)))


def test_what_cannot_be_is_refused() -> None:
    for body in [*SYNTHESIZERS, *MIXINGS[1:]]:
        module = learner_of(f"attend {body}", 8, 8)
        with pytest.raises(ValueError, match="at most max_length = 35 positions, got n = 36"):
            module(*tensors(1, 1, 36, 36))
    for body in MIXINGS:
        module = learner_of(f"attend {body}", 8, 8)
        with pytest.raises(ValueError, match=r"no weights to drop: dropout_p must be 0, got 0\.1"):
            module(*tensors(1, 1, 9, 9), dropout_p=0.1)
    with pytest.raises(ValueError, match="both have one head size, got 8 and 3"):
        learner_of("attend gmlp(max_length = 35)", 8, 3)(*tensors(1, 1, 9, 9, out_size=3))


@pytest.mark.parametrize("body", SYNTHESIZERS)
def test_synthesizers_drop_their_weights(body: str) -> None:
    module = learner_of(f"attend {body}", 8, 8)
    given = tensors(1, 2, 12, 12)
    plain = module(*given).detach()
    torch.manual_seed(0)
    # every sample of a batch drops others
    many = [x.detach().expand(300, -1, -1, -1) for x in given]
    dropped = module(*many, dropout_p=0.3)[:, None].detach()
    spread = dropped.std(0) / math.sqrt(len(dropped))
    assert ((dropped.mean(0) - plain).abs() <= 6 * spread + 1e-9).all()
    assert dropped.std() > 0
    assert not module(*given, dropout_p=1.0).any()


def test_what_is_learned_bounds_the_length() -> None:
    first, second = "mixer(hidden = 3, max_length = 40)", "gmlp(max_length = 30)"
    program = spec_of(f"layers 2 attend {first} layer 1 {{ attend {second} }}").program
    assert longest_of(program) == 30
    assert longest_of(spec_of("attend full").program) is None
    assert longest_of(spec_of("attend linformer(projection = mean)").program) is None
    assert [length_of(program, asked, 4096) for asked in (None, 20, 50)] == [30, 20, 50]
    report = spec_of("attend mixer(hidden = 3, max_length = 40)").analyse(41)
    assert report.flops is None
    assert "learned for at most 40 positions" in str(report)


@every_body
def test_modules_verify(body: str) -> None:
    program = spec_of(f"layers 2 heads 2 attend {body}").program
    for n in (1, 7, 35):
        found = verify(program, n)
        assert found.ok, str(found)
