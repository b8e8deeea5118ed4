"""Singular values of attention weights, and what follows of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_checks import spec_of

from attnspec.analysis.approximation.low_rank import best_of_rank, singular_values, softmax_weights


def matrix(n: int, m: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, m))


def largest_stretch(given: np.ndarray) -> float:
    return float(np.linalg.norm(given, 2))


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (7, 3), (3, 8)])
def test_errors_are_those_of_the_best_matrix(shape: tuple[int, int]) -> None:
    given = matrix(*shape)
    found = singular_values(given)
    for rank in range(max(shape) + 2):
        best = best_of_rank(given, rank)
        assert np.linalg.matrix_rank(best) <= rank
        for norm, size in (("frobenius", np.linalg.norm), ("spectral", largest_stretch)):
            left, whole = size(given - best), size(given)
            assert found.error(rank, norm) == pytest.approx(left, abs=1e-12)
            assert found.error(rank, norm, relative=True) == pytest.approx(left / whole, abs=1e-12)


def test_no_matrix_of_the_rank_is_closer() -> None:
    given = matrix(6, 6)
    least = singular_values(given).error(2)
    for seed in range(200):
        left, right = matrix(6, 2, seed), matrix(2, 6, seed + 1000)
        # the best right factor for this left one
        other = left @ np.linalg.lstsq(left, given, rcond=None)[0]
        assert np.linalg.norm(given - other) >= least
        assert np.linalg.norm(given - left @ right) >= least


def test_effective_rank_counts_equal_singular_values() -> None:
    for rank in (1, 3, 8):
        values = np.diag([2.0] * rank + [0.0] * (8 - rank))
        found = singular_values(values)
        assert found.effective_rank == pytest.approx(rank)
    spread = singular_values(np.diag([3.0, 1.0]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert spread.effective_rank == pytest.approx(math.exp(entropy))


def test_nothing_has_no_rank() -> None:
    for given in (np.zeros((3, 3)), np.zeros((0, 4)), np.zeros((2, 0))):
        found = singular_values(given)
        assert found.effective_rank == 0
        assert found.error(0) == found.error(2, "spectral", relative=True) == 0
        assert best_of_rank(given, 1).shape == given.shape


def test_weights_are_those_of_softmax_under_the_mask_of_a_spec() -> None:
    q, k = matrix(9, 4), matrix(9, 4, 1)
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


def test_ranks_bound_the_factorised_systems() -> None:
    # Linformer's weights P F have the rank of the projection at most
    n, rank = 40, 5
    q, k = matrix(n, 8), matrix(n, 8, 1)
    projection = matrix(rank, n, 2) / math.sqrt(rank)
    weights = softmax_weights(q, projection @ k) @ projection
    assert singular_values(weights).error(rank, relative=True) < 1e-12
    exact = softmax_weights(q, k)
    best = singular_values(exact).error(rank)
    assert np.linalg.norm(exact - weights) > best


def test_renormalised_rows_sum_to_one() -> None:
    weights = softmax_weights(matrix(9, 4), matrix(9, 4, 1))
    plain, divided = best_of_rank(weights, 2), best_of_rank(weights, 2, renormalise=True)
    assert not np.allclose(plain.sum(1), 1)
    np.testing.assert_allclose(divided.sum(1), 1)
    assert np.linalg.norm(weights - plain) <= np.linalg.norm(weights - divided)
    assert not best_of_rank(np.zeros((2, 2)), 1, renormalise=True).any()


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"two axes, got the shape \[3\]"):
        singular_values(np.zeros(3))
    with pytest.raises(ValueError, match="got NaN or infinity"):
        singular_values(np.array([[np.nan]]))
    with pytest.raises(ValueError, match="one of frobenius, spectral, got 'nuclear'"):
        singular_values(np.eye(2)).error(1, "nuclear")
    with pytest.raises(ValueError, match="rank must be at least 0, got -1"):
        singular_values(np.eye(2)).error(-1)
    with pytest.raises(ValueError, match="rank must be at least 0, got -2"):
        best_of_rank(np.eye(2), -2)
    with pytest.raises(ValueError, match="q and k must have one size, got 4 and 3"):
        softmax_weights(matrix(2, 4), matrix(2, 3))
    with pytest.raises(ValueError, match=r"held must be \(2, 3\), got \(3, 2\)"):
        softmax_weights(matrix(2, 4), matrix(3, 4), np.ones((3, 2), dtype=bool))
