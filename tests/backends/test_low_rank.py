"""Linformer and Nystroem attention: held against their formulas, exact where they must be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attention_checks import check_transforms, spec_of, tensors
from formula_checks import (
    assert_errs_by_roundings,
    assert_follows_formula,
    formula_of,
    learner_of,
    ragged,
)
from torch.nn import functional

from attnspec.backends.factored.definitions import OUTPUTS
from attnspec.backends.factored.low_rank import softmax
from attnspec.backends.factored.low_rank.nystrom import along, nystrom, pseudo_inverse
from attnspec.backends.factored.low_rank.segments import members, segment_maxima, segment_means
from attnspec.verification import verify

LENGTHS = (1, 7, 33)

LINFORMER = [
    f"linformer(rank = 8, share = {share}, projection = {projection}, max_length = 40)"
    for share in ("none", "head", "key_value", "layer")
    for projection in ("linear", "conv")
] + [f"linformer(rank = 8, projection = {pooled})" for pooled in ("mean", "max")]

NYSTROM = [
    f"nystrom(landmarks = {landmarks}, iterations = {iterations}, conv = {conv})"
    for landmarks, iterations, conv in ((1, 6, 0), (5, 6, 7), (5, 1, 0), (8, 0, 1), (40, 6, 3))
]

every_body = pytest.mark.parametrize("body", [*LINFORMER, *NYSTROM])


# --- the formulas ---------------------------------------------------------------------------------


@every_body
@pytest.mark.limits("", "tiny")
def test_values_and_gradients_are_those_of_the_formula(body: str) -> None:
    # a pseudo-inverse of a matrix that is nearly singular is known to fewer digits
    tolerance = 1e-5 if "iterations = 0" in body else 1e-9
    for n in LENGTHS:
        assert_follows_formula(f"heads 4 attend {body}", n, tolerance=tolerance)
        assert_follows_formula(
            f"heads 4 attend {body}",
            n,
            key_heads=2,
            padding=ragged(n),
            tolerance=tolerance,
        )


@pytest.mark.parametrize("body", LINFORMER)
def test_fewer_queries_are_the_last_ones(body: str) -> None:
    assert_follows_formula(f"attend {body}", 33, n_q=5)


def test_layers_and_heads_have_their_own_projections_where_they_share_none() -> None:
    shapes = {
        "none": [(3, 2, 4, 20)] * 2,
        "head": [(3, 1, 4, 20)] * 2,
        "key_value": [(3, 1, 4, 20)],
        "layer": [(1, 1, 4, 20)],
    }
    for share, meant in shapes.items():
        body = f"layers 3 heads 2 attend linformer(rank = 4, share = {share}, max_length = 20)"
        assert [tuple(p.shape) for p in learner_of(body).parameters()] == meant
        assert_follows_formula(body, 11, heads=2, layer=2)


def test_projections_start_with_the_variance_of_the_paper() -> None:
    torch.manual_seed(0)
    module = spec_of("attend linformer(rank = 64, max_length = 1000)").compile()
    (projection,) = module.parameters()
    assert projection.std().item() == pytest.approx(1 / 8, rel=0.02)
    again = projection.detach().clone()
    module.reset_parameters(torch.Generator().manual_seed(3))
    first = projection.detach().clone()
    module.reset_parameters(torch.Generator().manual_seed(3))
    assert torch.equal(first, projection)
    assert not torch.equal(first, again)


# --- where they are exact -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 9, 32])
def test_nystrom_with_a_landmark_for_each_position_is_softmax(n: int) -> None:
    q, k, v = tensors(2, 2, n, n)
    exact = functional.scaled_dot_product_attention(q, k, v)
    for landmarks in (n, n + 5):
        torch.testing.assert_close(nystrom(q, k, v, landmarks, 6), exact)
    # the formula itself, with the inverse that it means
    marks = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1)
    torch.testing.assert_close(marks @ pseudo_inverse(marks, 0) @ marks @ v, exact)


def test_linformer_of_full_rank_is_softmax_where_the_projection_only_reorders() -> None:
    # softmax acts on each number, so that of all orthogonal matrices these leave it as it is
    n = 12
    module = learner_of(f"attend linformer(rank = {n}, share = key_value, max_length = {n})", 8, 8)
    (projection,) = module.parameters()
    given = tensors(1, 2, n, n)
    for order in (torch.arange(n), torch.randperm(n)):
        with torch.no_grad():
            projection.copy_(torch.eye(n)[order])
        exact = functional.scaled_dot_product_attention(*given)
        torch.testing.assert_close(module(*given), exact)


@pytest.mark.parametrize("projection", ["mean", "max"])
def test_pooled_linformer_with_a_segment_for_each_position_is_softmax(projection: str) -> None:
    module = learner_of(f"attend linformer(rank = 20, projection = {projection})")
    given = tensors(1, 2, 13, 13)
    exact = functional.scaled_dot_product_attention(*given)
    torch.testing.assert_close(module(*given), exact)


# --- segments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "count"), [(1, 1), (5, 5), (5, 9), (6, 4), (7, 3), (64, 8), (65, 8)])
def test_segments_are_uneven_runs_of_all_positions(n: int, count: int) -> None:
    x = torch.randn(2, 1, n, 3, dtype=torch.float64)
    count = min(n, count)
    sizes = [n // count] * (count - n % count) + [n // count + 1] * (n % count)
    parts = torch.split(x, sizes, 2)
    means = torch.stack([part.mean(2) for part in parts], 2)
    maxima = torch.stack([part.amax(2) for part in parts], 2)
    real = torch.ones(2, n, dtype=torch.bool)
    for padding in (None, real):
        torch.testing.assert_close(segment_means(x, count, padding), means)
        torch.testing.assert_close(segment_maxima(x, count, padding), maxima)
    assert members(real, count).sum(-1).tolist() == [sizes, sizes]


@every_body
def test_padding_changes_nothing(body: str) -> None:
    n, real = 33, 23
    module = learner_of(f"attend {body}", 8, 8)
    given = tensors(1, 2, n, n)
    alone = module(*(x[:, :, :real] for x in given))
    padding = (torch.arange(n) < real)[None]
    loud = [x.detach().clone() for x in given]
    for x in loud:
        x[:, :, real:] = 1e3
    padded = module(*loud, key_padding_mask=padding)
    torch.testing.assert_close(padded[:, :, :real], alone)


def test_samples_do_not_depend_on_each_other() -> None:
    # published codes divide by the largest norm of the whole batch
    module = learner_of("attend nystrom(landmarks = 4)")
    given = tensors(3, 2, 30, 30)
    together = module(*given)
    for sample in range(3):
        alone = module(*(x[sample : sample + 1] for x in given))
        torch.testing.assert_close(together[sample : sample + 1], alone)


# --- the inverse ----------------------------------------------------------------------------------


def test_iterations_approach_the_pseudo_inverse() -> None:
    torch.manual_seed(0)
    weights = torch.softmax(torch.randn(2, 3, 8, 8, dtype=torch.float64) + 2 * torch.eye(8), -1)
    exact = torch.linalg.pinv(weights)
    away = [float((pseudo_inverse(weights, n) - exact).norm()) for n in (1, 3, 6, 9, 20)]
    assert all(better < worse for worse, better in itertools.pairwise(away)), away
    assert away[-1] < 1e-9
    torch.testing.assert_close(pseudo_inverse(weights, 0), exact)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (1, 9), (7, 3), (64, 5), (200, 33)])
def test_convolution_along_is_that_of_torch(n: int, width: int) -> None:
    x = torch.randn(2, 3, n, 4, dtype=torch.float64)
    kernels = torch.randn(3, width, dtype=torch.float64)
    meant = functional.conv2d(x, kernels[:, None, :, None], padding=(width // 2, 0), groups=3)
    torch.testing.assert_close(along(x, kernels), meant)


# --- how they are called --------------------------------------------------------------------------


# the condition of a pseudo-inverse says how far roundings reach, not their size
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("body", [*LINFORMER, *(x for x in NYSTROM if "iterations = 0" not in x)])
def test_narrow_types_err_by_their_roundings(body: str, dtype: torch.dtype) -> None:
    assert_errs_by_roundings(f"attend {body}", dtype)


# torch scripts the derivatives of its own operators when jvp is first used; a maximum has corners,
# and differences across them are no derivatives
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("body", [x for x in (*LINFORMER, *NYSTROM) if "= max)" not in x])
def test_transforms_see_through(body: str) -> None:
    check_transforms(learner_of(f"attend {body}", 8, 8), *(x.detach() for x in tensors(2, 2, 9, 9)))


@pytest.mark.parametrize("keys", [1, 4, 15, 16, 17, 40])
def test_what_is_no_number_stays_none(keys: int) -> None:
    q, k, v = tensors(1, 1, 12, keys, dtype=torch.float32)
    with torch.no_grad():
        q[0, 0, 5] = math.nan
        out = softmax.attend(q, k, v, 0.3)
    assert out[0, 0, 5].isnan().all()
    assert not out[0, 0, :5].isnan().any()


def test_what_cannot_be_is_refused() -> None:
    module = learner_of("attend linformer(rank = 2, max_length = 10)")
    with pytest.raises(ValueError, match="at most max_length = 10 positions, got n = 11"):
        module(*tensors(1, 1, 11, 11, size=6, out_size=5))
    module = learner_of("attend nystrom(landmarks = 3)")
    with pytest.raises(ValueError, match=r"queries of all positions.*got 2 of 9"):
        module(*tensors(1, 1, 2, 9))
    with pytest.raises(ValueError, match=r"no weights to drop: dropout_p must be 0, got 0\.5"):
        module(*tensors(1, 1, 9, 9), dropout_p=0.5)


def test_linformer_drops_weights_of_projected_keys() -> None:
    module = learner_of("attend linformer(rank = 400, max_length = 50)", 8, 8)
    given = tensors(1, 2, 50, 50)
    plain = module(*given)
    torch.manual_seed(0)
    dropped = torch.stack([module(*given, dropout_p=0.3) for _ in range(200)])
    assert not torch.equal(dropped[0], dropped[1])
    spread = dropped.std(0) / math.sqrt(len(dropped))
    assert ((dropped.mean(0) - plain).abs() <= 6 * spread + 1e-9).all()
    assert not module(*given, dropout_p=1.0).any()


# --- verification, and a wrong formula ------------------------------------------------------------


def test_verify_finds_a_wrong_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    program = spec_of("attend nystrom(landmarks = 4, conv = 3)").program
    assert verify(program, 33).ok
    right = OUTPUTS["nystrom"]
    monkeypatch.setitem(OUTPUTS, "nystrom", lambda *given: right(*given) * (1 + 1e-4))
    assert not verify(program, 33).ok


def test_the_comparison_finds_a_wrong_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OUTPUTS["linformer"]
    monkeypatch.setitem(OUTPUTS, "linformer", lambda *given: right(*given) * (1 + 1e-7))
    with pytest.raises(AssertionError):
        assert_follows_formula("attend linformer(rank = 4, max_length = 20)", 17)


def test_the_formula_of_a_module_is_put_together_head_by_head() -> None:
    module = learner_of("heads 2 attend linformer(rank = 4, share = none, max_length = 20)")
    given = tensors(1, 2, 9, 9, size=6, out_size=5)
    with torch.no_grad():
        module.get_parameter("linformer_keys")[0, 1] += 1
    torch.testing.assert_close(formula_of(module, given), module(*given))
