"""Bounds of approximations against simulation, and measured errors against their definitions."""

from __future__ import annotations

from itertools import product
from math import acos, log, pi, sqrt
from typing import Any

import numpy as np
import pytest

from attnspec.analysis.approximation.approximation import approximation
from attnspec.analysis.approximation.collisions import collision, largest_bucket, overflow
from attnspec.analysis.approximation.low_rank import (
    error_of_rank,
    inverse_residual,
    inverse_start,
    projection_bound,
    schur_residual,
    softmax_weights,
)
from attnspec.analysis.approximation.random_feature_errors import (
    gaussian_errors,
    orthogonal_gain,
    rahimi_recht,
    softmax_errors,
    uniform_features,
)
from attnspec.analysis.quality import Figure
from attnspec.backends.factored.arrays import inverse_array
from attnspec.backends.factored.features.directions import one_head
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


# --- random features ------------------------------------------------------------------------


def products(x: np.ndarray, y: np.ndarray, w: np.ndarray, kind: str) -> np.ndarray:
    """Estimates [draws] of one pair by one direction each, as the formulas are written."""
    a, b = w @ x, w @ y
    low, high = np.exp(-(x @ x + y @ y) / 2), np.exp((x @ x + y @ y) / 2)
    match kind:
        case "positive":
            found = low * np.exp(a + b)
        case "hyperbolic":
            found = low * (np.exp(a + b) + np.exp(-a - b)) / 2
        case "gaussian":
            found = low**2 * np.exp(a + b)
        case _:
            found = high * np.cos(a - b)
    return np.asarray(found)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trig"])
def test_softmax_errors_are_those_of_many_draws(kind: str) -> None:
    q, k, _ = rows(3, 4, 0.5)
    w = np.random.default_rng(1).standard_normal((1_000_000, 4))
    found = softmax_errors(q, k, 3, kind)
    x, y = q / sqrt(2), k / sqrt(2)
    for i in range(3):
        for j in range(3):
            drawn = products(x[i], y[j], w, kind)
            kernel = np.exp(x[i] @ y[j])
            assert np.exp(found.log_kernel[i, j]) == pytest.approx(kernel)
            assert drawn.mean() == pytest.approx(kernel, rel=0.01)
            square = ((drawn - kernel) ** 2).mean() / 3
            assert np.exp(found.log_square[i, j]) == pytest.approx(square, rel=0.06)
            assert found.relative[i, j] == pytest.approx(sqrt(square) / kernel, rel=0.03)


def test_gaussian_errors_are_those_of_many_draws() -> None:
    q, k, _ = rows(3, 4, 0.5, 5)
    w = np.random.default_rng(1).standard_normal((1_000_000, 4))
    found = gaussian_errors(q, k, 2, 1.5)
    x, y = q / 1.5, k / 1.5
    for i in range(3):
        drawn = products(x[i], y[i], w, "gaussian")
        kernel = np.exp(-((x[i] - y[i]) ** 2).sum() / 2)
        assert np.exp(found.log_kernel[i, i]) == pytest.approx(kernel)
        assert drawn.mean() == pytest.approx(kernel, rel=0.01)
        square = ((drawn - kernel) ** 2).mean() / 2
        assert np.exp(found.log_square[i, i]) == pytest.approx(square, rel=0.06)


@pytest.mark.parametrize(
    ("draws", "slack"), [(2_000, 1.1), pytest.param(20_000, 1.03, marks=pytest.mark.slow)]
)
def test_orthogonal_directions_gain_what_is_promised(draws: int, slack: float) -> None:
    q, k, _ = rows(4, 4, 0.25, 2)
    x, y = q / sqrt(2), k / sqrt(2)
    kernel = np.exp(x @ y.T)
    low = np.exp(-((x**2).sum(1)[:, None] + (y**2).sum(1)) / 2)
    squares = np.zeros((2, *kernel.shape))
    for draw in range(draws):
        # the tails are heavy: both kinds are drawn as often, and compared
        for index, orthogonal in enumerate((True, False)):
            w = one_head(3, 0, index, draw, 4, 4, orthogonal)
            squares[index] += (low * np.exp(x @ w.T) @ np.exp(w @ y.T) / 4 - kernel) ** 2
    independent = softmax_errors(q, k, 4)
    promised = independent.less(orthogonal_gain(q, k, 4))
    ratio = np.exp(promised.log_square - independent.log_square)
    assert (ratio < 1).all()
    assert (squares[0] / squares[1] <= slack * ratio).all()


def test_bounds_for_all_pairs() -> None:
    bound = rahimi_recht(8, 2.0, 1000, 0.25)
    assert bound.probability == pytest.approx(
        min(1, 2**8 * 8 * (2 / 0.25) ** 2 * np.exp(-1000 * 0.0625 / 40))
    )
    assert bound.vacuous
    enough = rahimi_recht(8, 2.0, bound.required, 0.25)
    assert enough.probability <= 0.5 < rahimi_recht(8, 2.0, bound.required - 1, 0.25).probability
    assert not enough.vacuous
    assert rahimi_recht(8, 0.0, 1, 0.25).probability == 0
    assert uniform_features(16, 1.0, 0.1) < uniform_features(16, 2.0, 0.1)
    delta = 0.1 / np.exp(1 / 4)
    assert uniform_features(16, 1.0, 0.1) == np.ceil(16 / delta**2 * log(4 * 8 / delta))


# --- low rank -------------------------------------------------------------------------------


def test_projection_bounds() -> None:
    bound = projection_bound(4096, 256)
    assert bound.required == np.ceil(5 * log(4096) / 0.125)
    assert bound.failure == pytest.approx(2 * np.exp(-0.125 * 256 / 4))
    assert bound.vacuous
    assert not projection_bound(4096, 400).vacuous
    assert projection_bound(128, 128).vacuous


def segment_means(x: np.ndarray, m: int) -> np.ndarray:
    return np.array([x[list(cut)].mean(0) for cut in segments(len(x), m)])


def test_iterations_come_close_to_the_inverse() -> None:
    q, k, _ = rows(64, 8)
    middle = softmax_weights(segment_means(q, 8), segment_means(k, 8))
    few, usual, many, exact = (
        inverse_residual(middle, inverse_array(middle, steps)) for steps in (2, 6, 20, 0)
    )
    assert few > usual > many
    # both are roundings
    assert many < 1e-8
    assert exact < 1e-8
    assert inverse_start(middle) <= 1
    sizes = np.abs(middle)
    start = middle.T / (sizes.sum(0).max() * sizes.sum(1).max())
    away = np.eye(8) - middle @ start
    assert inverse_start(middle) == pytest.approx(np.linalg.norm(away, 2))


def test_schur_complements() -> None:
    draws = np.random.default_rng(0)
    low = draws.normal(size=(9, 3)) @ draws.normal(size=(3, 7))
    assert schur_residual(low, np.arange(3), np.arange(3)) == pytest.approx(0, abs=1e-10)
    full = draws.normal(size=(9, 7))
    at, on = np.array([0, 4, 8]), np.array([1, 2, 5])
    whole = full[:, on] @ np.linalg.inv(full[np.ix_(at, on)]) @ full[at]
    assert schur_residual(full, at, on) == pytest.approx(np.linalg.norm(full - whole))
    assert schur_residual(full, at, on) >= error_of_rank(full, 3) * np.linalg.norm(full)


# --- hashing --------------------------------------------------------------------------------


def hashed(x: np.ndarray) -> np.ndarray:
    """The bucket of each row of projections."""
    return np.asarray(np.concatenate([x, -x], 1).argmax(1))


@pytest.mark.parametrize("buckets", [2, 4, 8, 64, 256])
def test_collisions_of_known_angles(buckets: int) -> None:
    assert collision(0.0, buckets) == pytest.approx(1 / buckets, abs=1e-7)
    assert collision(1.0, buckets) == 1
    assert collision(-1.0, buckets) == 0
    chances = [collision(float(cosine), buckets) for cosine in np.linspace(-1, 1, 11)]
    assert chances == sorted(chances)
    for cosine in (-0.7, 0.3, 0.999):
        assert collision(cosine, 2) == pytest.approx(1 - acos(cosine) / pi)


@pytest.mark.parametrize(("buckets", "cosine"), [(4, -0.5), (8, 0.9), (16, 0.5), (64, 0.9)])
def test_collisions_are_those_of_many_draws(buckets: int, cosine: float) -> None:
    draws = np.random.default_rng(buckets)
    first = draws.standard_normal((200_000, buckets // 2))
    other = draws.standard_normal(first.shape)
    second = cosine * first + sqrt(1 - cosine**2) * other
    chance = float((hashed(first) == hashed(second)).mean())
    found = collision(cosine, buckets)
    assert found == pytest.approx(chance, abs=4 * sqrt(found * (1 - found) / len(first)))


def test_buckets_of_uniform_hashes() -> None:
    draws = np.random.default_rng(0)
    largest = [np.bincount(draws.integers(8, size=100), minlength=8).max() for _ in range(4000)]
    assert np.mean(largest) <= largest_bucket(100, 8) <= 1.1 * np.mean(largest)
    assert np.mean(np.array(largest) > 20) <= overflow(100, 8, 20) <= 1
    assert largest_bucket(5, 1) == 5
    assert overflow(5, 1, 4) == 1
    assert overflow(5, 1, 5) == 0


@pytest.mark.parametrize("buckets", [1, 2, 3])
@pytest.mark.parametrize("n", range(7))
def test_bounds_of_buckets_are_those_of_all_ways_to_fill_them(n: int, buckets: int) -> None:
    ways = np.array([*product(range(buckets), repeat=n)], int)
    filled = (ways[:, :, None] == np.arange(buckets)).sum(1)
    # by the union bound, the chance of a bucket with more, and the sum of it over all sizes
    beyond = [min(1.0, float((filled > size).sum(1).mean())) for size in range(n)]
    for size, chance in enumerate(beyond):
        assert overflow(n, buckets, size) == overflow(n, buckets, size + 0.5)
        assert overflow(n, buckets, size) == pytest.approx(chance)
    found = largest_bucket(n, buckets)
    assert found == pytest.approx(sum(beyond))
    # some bucket gets its share at least, and none more than all
    assert -(-n // buckets) - 1e-9 <= filled.max(1).mean() <= found + 1e-9 <= n + 1e-8
    assert largest_bucket(n, 64) <= n


# --- measured on arrays ---------------------------------------------------------------------


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
        assert ("weight_error_of_rank" in found) == (not causal)
        if 2 * features < 48 and not causal:
            assert found["weight_error_of_rank"].value <= found["weight_error"].value
    assert seen[0] > seen[1] > seen[2]
    assert seen[2] < 0.1


def test_a_kernel_is_measured_against_itself_too() -> None:
    q, k, v = rows(40, 4, 0.3)
    found = errors(spec_of("attend rbf(sigma = 1.0, features = 4096)"), q, k, v)
    assert found["kernel_error"].value < 0.05
    # its directions are orthogonal: no worse than what is known of independent ones
    assert found["relative_deviation"].quality == "bound"
    # keys of all lengths, and another scale: it is not softmax attention
    assert found["weight_error"].value > found["kernel_error"].value
    assert found["uniform_failure"].note.startswith("at most") == (
        found["uniform_failure"].value < 1
    )
    few = errors(spec_of("attend rbf(features = 4)"), q, k, v)["uniform_failure"]
    assert few.value == 1
    assert few.note.startswith("vacuous")


def test_linformer_says_that_its_theorem_is_vacuous() -> None:
    q, k, v = rows(64, 8)
    found = errors(spec_of("attend linformer(rank = 32)"), q, k, v)
    assert found["rank_required"].note.startswith("vacuous at n = 64")
    assert found["weight_error"].value > found["weight_error_of_rank"].value
    pooled = errors(spec_of("attend linformer(rank = 32, projection = mean)"), q, k, v)
    assert "output_error" not in pooled


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
    four, all_ = inverse_array(middle, 4), np.linalg.pinv(middle)
    for inverse, name in ((four, "weight_error"), (all_, "weight_error_exact_inverse")):
        weights = nystrom_weights(q, k, inverse)
        error = np.linalg.norm(weights - exact) / np.linalg.norm(exact)
        assert found[name].value == pytest.approx(error)
        assert found[name].quality == "exact"
    assert found["inverse_residual"].value == inverse_residual(middle, four)
    conv = errors(spec_of("attend nystrom(landmarks = 8, iterations = 4, conv = 3)"), q, k, v)
    assert conv == found
    assert found["sampled_error"].value >= found["weight_error_of_rank"].value


def test_nystrom_of_no_more_rows_than_landmarks_is_attention_itself() -> None:
    spec = spec_of("attend nystrom(landmarks = 8)")
    for n in (1, 7, 8, 9):
        found = errors(spec, *rows(n, 8))
        assert ("inverse_residual" in found) == (n > 8)
        if n <= 8:
            assert set(found) == {"weight_error", "output_error"}
            assert [figure.value for figure in found.values()] == [0, 0]


def test_recall_of_hashes_is_what_is_expected() -> None:
    q, k, v = rows(160, 8)
    found = errors(spec_of("attend lsh(buckets = 16, rounds = 4)"), q, k, v)
    assert found["recall"].value == pytest.approx(found["expected_recall"].value, abs=0.05)
    assert found["largest_bucket"].value >= 160 / 16


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
