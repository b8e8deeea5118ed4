"""Measured errors of approximations against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from population import spec_of

from attnspec import AttnSpecError

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def errors(body: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Any]:
    return dict(spec_of(body).analyse(len(q)).approximation(q, k, v))


def rows(n: int, d: int, size: float = 1.0, seed: int = 0) -> Rows:
    q, k, v = np.random.default_rng(seed).normal(size=(3, n, d))
    return q * size, k * size, v


def softmax(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    weights = np.exp(q @ k.T / q.shape[1] ** 0.5)
    return np.asarray(weights / weights.sum(1, keepdims=True))


@pytest.mark.parametrize("causal", ["", "causal "])
@pytest.mark.parametrize("kind", ["positive", "trig", "hyperbolic"])
def test_more_features_are_nearer(kind: str, causal: str) -> None:
    seen = []
    for features in (8, 128, 2048):
        body = f"{causal}attend favor(features = {features}, kind = {kind})"
        found = errors(body, *rows(48, 4, 0.4))
        seen.append(found["output_error"].value)
        assert found["weight_error"].quality == "estimate"
    assert seen[0] > seen[1] > seen[2]
    assert seen[2] < 0.1


def test_a_kernel_is_measured_against_itself_too() -> None:
    found = errors("attend rbf(sigma = 1.0, features = 4096)", *rows(40, 4, 0.3))
    assert found["kernel_error"].value < 0.05
    # keys of all lengths, and another scale: it is not softmax attention
    assert found["weight_error"].value > found["kernel_error"].value


def test_linformer_is_measured_where_it_projects() -> None:
    found = errors("attend linformer(rank = 32)", *rows(64, 8))
    assert set(found) == {"weight_error", "output_error"}
    assert "output_error" not in errors(
        "attend linformer(rank = 32, projection = mean)", *rows(64, 8)
    )


def test_nystrom_is_measured_by_its_factors() -> None:
    """Landmarks and an iterated inverse (Xiong et al. 2021, equation 11)."""
    q, k, v = rows(48, 8)
    found = errors("attend nystrom(landmarks = 8, iterations = 4)", q, k, v)
    means = [x.reshape(8, 6, 8).mean(1) for x in (q, k)]
    exact, middle = softmax(q, k), softmax(means[0], means[1])
    inverse = middle.T / (np.abs(middle).sum(0).max() * np.abs(middle).sum(1).max())
    one = np.eye(8)
    for _ in range(4):
        away = middle @ inverse
        inverse = inverse @ (13 * one - away @ (15 * one - away @ (7 * one - away))) / 4
    named = {"weight_error": inverse, "weight_error_exact_inverse": np.linalg.pinv(middle)}
    for name, each in named.items():
        weights = softmax(q, means[1]) @ each @ softmax(means[0], k)
        error = np.linalg.norm(weights - exact) / np.linalg.norm(exact)
        assert found[name].value == pytest.approx(error)
        assert found[name].quality == "exact"
    assert errors("attend nystrom(landmarks = 8, iterations = 4, conv = 3)", q, k, v) == found
    for n in (1, 7, 8, 9):
        few = errors("attend nystrom(landmarks = 8)", *rows(n, 8))
        # of no more rows than landmarks it is attention itself
        assert ("weight_error_exact_inverse" in few) == (n > 8)
        assert n > 8 or [figure.value for figure in few.values()] == [0, 0]


def test_recall_of_hashes_grows_with_rounds() -> None:
    few, many = (
        errors(f"attend lsh(buckets = 16, rounds = {rounds})", *rows(160, 8))["recall"].value
        for rounds in (1, 16)
    )
    # a sixteenth of pairs without order, more of those with weight
    assert 1 / 16 < few < many < 1


@pytest.mark.parametrize(
    ("body", "shapes", "said"),
    [
        ("attend favor()", ((4, 2), (5, 2), (4, 2)), "must be"),
        ("attend favor()", ((4, 2), (4, 2), (3, 2)), "must be"),
        ("attend favor()", ((2, 4, 2),) * 3, "must have 4 rows"),
        ("attend favor()", ((3, 2),) * 3, "must have 4 rows, got 3"),
        ("attend full", ((4, 2),) * 3, "cannot be compared with softmax"),
        ("attend fourier()", ((4, 2),) * 3, "cannot be compared with softmax"),
        (
            "attend topk(size = 4, blocks = 1)",
            ((4, 2),) * 3,
            "cannot be compared with softmax attention",
        ),
    ],
)
def test_arrays_and_specs_that_do_not_fit(
    body: str, shapes: tuple[tuple[int, ...], ...], said: str
) -> None:
    with pytest.raises((ValueError, AttnSpecError), match=said):
        spec_of(body).analyse(4).approximation(*map(np.ones, shapes))


def test_numbers_that_overflow_or_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="too large for the features of `rbf`"):
        errors("attend rbf()", *rows(8, 4, 100.0))
    q, k, v = rows(4, 2)
    q[0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        errors("attend favor()", q, k, v)
