"""Measured errors of approximations against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attnspec.analysis.approximation.approximation import approximation, softmax_weights
from attnspec.analysis.quality import Figure
from attnspec.backends.factored.low_rank_definitions import segments
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def errors(
    spec: Spec, q: np.ndarray, k: np.ndarray, v: np.ndarray, **slot: int
) -> dict[str, Figure[Any]]:
    return approximation(spec.program, q, k, v, **slot)


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def rows(n: int, d: int, size: float = 1.0, seed: int = 0) -> Rows:
    q, k, v = np.random.default_rng(seed).normal(size=(3, n, d))
    return q * size, k * size, v


def segment_means(x: np.ndarray, m: int) -> np.ndarray:
    return np.array([x[list(cut)].mean(0) for cut in segments(len(x), m)])


@pytest.mark.parametrize("causal", ["", "causal "])
@pytest.mark.parametrize("kind", ["positive", "trig", "hyperbolic"])
def test_more_features_are_nearer(kind: str, causal: str) -> None:
    q, k, v = rows(48, 4, 0.4)
    seen = []
    for features in (8, 128, 2048):
        found = errors(
            spec_of(f"{causal}attend favor(features = {features}, kind = {kind})"), q, k, v
        )
        seen.append(found["output_error"].value)
        assert found["weight_error"].quality == "estimate"
    assert seen[0] > seen[1] > seen[2]
    assert seen[2] < 0.1


def test_a_kernel_is_measured_against_itself_too() -> None:
    q, k, v = rows(40, 4, 0.3)
    found = errors(spec_of("attend rbf(sigma = 1.0, features = 4096)"), q, k, v)
    assert found["kernel_error"].value < 0.05
    # keys of all lengths, and another scale: it is not softmax attention
    assert found["weight_error"].value > found["kernel_error"].value


def test_linformer_is_measured_where_it_projects() -> None:
    q, k, v = rows(64, 8)
    found = errors(spec_of("attend linformer(rank = 32)"), q, k, v)
    assert set(found) == {"weight_error", "output_error"}
    pooled = errors(spec_of("attend linformer(rank = 32, projection = mean)"), q, k, v)
    assert "output_error" not in pooled


def iterated(middle: np.ndarray, steps: int) -> np.ndarray:
    """What stands for the inverse after so many steps (Xiong et al. 2021, equation 11)."""
    sizes = np.abs(middle)
    inverse = middle.T / (sizes.sum(0).max() * sizes.sum(1).max())
    one = np.eye(len(middle))
    for _ in range(steps):
        away = middle @ inverse
        inverse = inverse @ (13 * one - away @ (15 * one - away @ (7 * one - away))) / 4
    return np.asarray(inverse)


def nystrom_weights(q: np.ndarray, k: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """The product of factors for landmarks and the inverse of their weights."""
    m = len(middle)
    left, right = softmax_weights(q, segment_means(k, m)), softmax_weights(segment_means(q, m), k)
    return np.asarray(left @ middle @ right)


def test_nystrom_is_measured_by_its_factors() -> None:
    q, k, v = rows(50, 8)
    found = errors(spec_of("attend nystrom(landmarks = 8, iterations = 4)"), q, k, v)
    exact = softmax_weights(q, k)
    middle = softmax_weights(segment_means(q, 8), segment_means(k, 8))
    four, all_ = iterated(middle, 4), np.linalg.pinv(middle)
    for inverse, name in ((four, "weight_error"), (all_, "weight_error_exact_inverse")):
        weights = nystrom_weights(q, k, inverse)
        error = np.linalg.norm(weights - exact) / np.linalg.norm(exact)
        assert found[name].value == pytest.approx(error)
        assert found[name].quality == "exact"
    conv = errors(spec_of("attend nystrom(landmarks = 8, iterations = 4, conv = 3)"), q, k, v)
    assert conv == found


def test_nystrom_of_no_more_rows_than_landmarks_is_attention_itself() -> None:
    spec = spec_of("attend nystrom(landmarks = 8)")
    for n in (1, 7, 8, 9):
        found = errors(spec, *rows(n, 8))
        assert ("weight_error_exact_inverse" in found) == (n > 8)
        if n <= 8:
            assert set(found) == {"weight_error", "output_error"}
            assert [figure.value for figure in found.values()] == [0, 0]


def test_recall_of_hashes_grows_with_rounds() -> None:
    q, k, v = rows(160, 8)
    few, many = (
        errors(spec_of(f"attend lsh(buckets = 16, rounds = {rounds})"), q, k, v)
        for rounds in (1, 16)
    )
    # a sixteenth of pairs without order, more of those with weight
    assert 1 / 16 < few["recall"].value < many["recall"].value < 1


def test_the_causal_half_alone_counts() -> None:
    q, k, v = rows(20, 4)
    later = k.copy()
    later[10:] += 5
    body = "causal attend favor(features = 16, orthogonal = false)"
    first, second = (errors(spec_of(body), q[:10], some[:10], v[:10]) for some in (k, later))
    assert first == second


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        ((4, 2), (5, 2), (4, 2), "must be"),
        ((4, 2), (4, 2), (3, 2), "must be"),
        ((0, 2), (0, 2), (0, 2), "between 1 and"),
        ((2, 4, 2), (2, 4, 2), (2, 4, 2), "must be"),
    ],
)
def test_arrays_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        errors(spec_of("attend favor()"), np.zeros(q), np.zeros(k), np.zeros(v))


def test_features_that_overflow_are_no_figures() -> None:
    q, k, v = rows(8, 4, 100.0)
    with pytest.raises(ValueError, match="too large for the features of `rbf`"):
        errors(spec_of("attend rbf()"), q, k, v)


def test_numbers_that_are_none() -> None:
    q, k, v = rows(4, 2)
    q[0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        errors(spec_of("attend favor()"), q, k, v)


@pytest.mark.parametrize(
    "body", ["attend full", "attend fourier()", "attend topk(size = 4, blocks = 1)"]
)
def test_what_approximates_nothing_is_refused(body: str) -> None:
    with pytest.raises(AttnSpecError, match="is not held against softmax attention"):
        errors(spec_of(body), *rows(8, 4))


def test_a_report_answers_for_its_length() -> None:
    q, k, v = rows(16, 4)
    spec = spec_of("attend nystrom(landmarks = 4)")
    assert spec.analyse(16).approximation(q, k, v) == errors(spec, q, k, v)
    with pytest.raises(ValueError, match="must have 8 rows, got 16"):
        spec.analyse(8).approximation(q, k, v)


def test_weights_are_those_of_softmax_under_the_mask_of_a_spec() -> None:
    q, k, _ = rows(9, 4)
    held = spec_of("causal attend where(k + 1 < q) | columns(first(1)) - self").mask(9)
    assert not held[0].any()
    scores = torch.from_numpy(q) @ torch.from_numpy(k).T / 2
    kept = torch.from_numpy(held)
    meant = torch.softmax(scores.masked_fill(~kept, -torch.inf), -1).nan_to_num()
    np.testing.assert_allclose(softmax_weights(q, k, held), meant.numpy(), atol=1e-14)
    np.testing.assert_allclose(softmax_weights(q, k), torch.softmax(scores, -1), atol=1e-14)
    np.testing.assert_allclose(
        softmax_weights(q, k, scale=1e4).sum(1), np.ones(9), err_msg="large scores"
    )
