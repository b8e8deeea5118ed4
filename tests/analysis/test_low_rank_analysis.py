"""Singular values of attention weights, and what follows of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_checks import spec_of

from attnspec.analysis.approximation.low_rank import error_of_rank, softmax_weights


def matrix(n: int, m: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, m))


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (7, 3), (3, 8)])
def test_errors_are_those_of_the_best_matrix(shape: tuple[int, int]) -> None:
    given = matrix(*shape)
    left, values, right = np.linalg.svd(given, full_matrices=False)
    for rank in range(max(shape) + 2):
        best = (left[:, :rank] * values[:rank]) @ right[:rank]
        rest = np.linalg.norm(given - best) / np.linalg.norm(given)
        assert error_of_rank(given, rank) == pytest.approx(rest, abs=1e-12)


def test_no_matrix_of_the_rank_is_closer() -> None:
    given = matrix(6, 6)
    least = error_of_rank(given, 2) * np.linalg.norm(given)
    for seed in range(200):
        left, right = matrix(6, 2, seed), matrix(2, 6, seed + 1000)
        # the best right factor for this left one
        other = left @ np.linalg.lstsq(left, given, rcond=None)[0]
        assert np.linalg.norm(given - other) >= least
        assert np.linalg.norm(given - left @ right) >= least


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
    assert error_of_rank(weights, rank) < 1e-12
    exact = softmax_weights(q, k)
    best = error_of_rank(exact, rank) * np.linalg.norm(exact)
    assert np.linalg.norm(exact - weights) > best
