"""Bounds of approximations against simulation, and measured errors against their definitions."""

from __future__ import annotations

from math import acos, log, pi, sqrt

import numpy as np
import pytest

from attnspec.analysis import approximation as measured
from attnspec.analysis.approximation import approximation, features_product
from attnspec.analysis.collisions import (
    collision,
    hyperplane_collision,
    largest_bucket,
    overflow,
    recall,
)
from attnspec.analysis.low_rank import singular_values, softmax_weights
from attnspec.analysis.low_rank_errors import (
    nystrom_factors,
    projection_bound,
    schur_residual,
    segment_means,
    segment_middles,
)
from attnspec.analysis.random_feature_errors import (
    gaussian_errors,
    orthogonal_gain,
    rahimi_recht,
    softmax_errors,
    uniform_features,
)
from attnspec.diagnostics import AttnSpecError
from attnspec.spec import Spec, parse

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


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
        case "waves":
            found = np.cos(a - b)
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


@pytest.mark.parametrize("kind", ["positive", "trig"])
def test_gaussian_errors_are_those_of_many_draws(kind: str) -> None:
    q, k, _ = rows(3, 4, 0.5, 5)
    w = np.random.default_rng(1).standard_normal((1_000_000, 4))
    found = gaussian_errors(q, k, 2, 1.5, kind)
    x, y = q / 1.5, k / 1.5
    for i in range(3):
        drawn = products(x[i], y[i], w, "waves" if kind == "trig" else "gaussian")
        kernel = np.exp(-((x[i] - y[i]) ** 2).sum() / 2)
        assert np.exp(found.log_kernel[i, i]) == pytest.approx(kernel)
        assert drawn.mean() == pytest.approx(kernel, rel=0.01)
        square = ((drawn - kernel) ** 2).mean() / 2
        assert np.exp(found.log_square[i, i]) == pytest.approx(square, rel=0.06)


def test_orthogonal_directions_gain_what_is_promised() -> None:
    q, k, _ = rows(4, 4, 0.25, 2)
    x, y = q / sqrt(2), k / sqrt(2)
    draws = np.random.default_rng(3)
    kernel = np.exp(x @ y.T)
    low = np.exp(-((x**2).sum(1)[:, None] + (y**2).sum(1)) / 2)
    squares = np.zeros((2, *kernel.shape))
    for _ in range(20_000):
        # the tails are heavy: both kinds are drawn as often, and compared
        for index, orthogonal in enumerate((True, False)):
            w = measured._directions(draws, 4, 4, orthogonal)
            squares[index] += (low * np.exp(x @ w.T) @ np.exp(w @ y.T) / 4 - kernel) ** 2
    independent = softmax_errors(q, k, 4)
    promised = independent.less(orthogonal_gain(q, k, 4))
    ratio = np.exp(promised.log_square - independent.log_square)
    assert (ratio < 1).all()
    assert (squares[0] / squares[1] <= 1.03 * ratio).all()
    assert not orthogonal_gain(q, k, 5).any()


def test_directions_are_orthogonal_in_blocks_and_as_long_as_gaussian_ones() -> None:
    w = measured._directions(np.random.default_rng(0), 10, 4, True)
    assert w.shape == (10, 4)
    for block in (w[:4], w[4:8]):
        gram = block @ block.T
        assert np.allclose(gram, np.diag(np.diagonal(gram)))
    many = measured._directions(np.random.default_rng(0), 4000, 4, True)
    assert (many**2).sum(1).mean() == pytest.approx(4, rel=0.05)
    assert np.abs(many.mean(0)).max() < 0.1


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trig", "gaussian", "relu"])
def test_products_are_those_of_the_features_up_to_a_factor(kind: str) -> None:
    q, k, _ = rows(5, 3)
    w = np.random.default_rng(1).standard_normal((7, 3))
    found = features_product(q, k, w, kind)
    plain = np.zeros((5, 5))
    for i in range(5):
        for j in range(5):
            if kind == "relu":
                plain[i, j] = np.maximum(w @ q[i], 0) @ np.maximum(w @ k[j], 0)
            else:
                plain[i, j] = products(q[i], k[j], w, kind).sum()
    # each row of one is a multiple of the other's
    assert np.allclose(plain * found[:, [0]], found * plain[:, [0]])
    assert (np.abs(found).sum(1) > 0).all()


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
    bound = projection_bound(4096, 64, 256)
    assert bound.required == np.ceil(5 * log(4096) / 0.125)
    assert bound.required_values == np.ceil(5 * log(4096 * 64) / 0.125)
    assert bound.failure == pytest.approx(2 * np.exp(-0.125 * 256 / 4))
    assert bound.vacuous
    assert not projection_bound(4096, 64, 400).vacuous
    assert projection_bound(128, 64, 128).vacuous
    with pytest.raises(ValueError, match="tolerance between 0 and 1"):
        projection_bound(8, 8, 8, 1.0)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (8, 4), (9, 4), (5, 8)])
def test_segments(n: int, m: int) -> None:
    values = np.arange(n, dtype=float)[:, None] ** 2
    m = min(n, m)
    sizes = [n // m + (index >= m - n % m) for index in range(m)]
    ends = np.cumsum(sizes)
    cuts = [values[end - size : end].mean() for end, size in zip(ends, sizes, strict=True)]
    assert segment_means(values, m)[:, 0] == pytest.approx(cuts)
    middles = segment_middles(n, m)
    assert all(end - size <= at < end for at, end, size in zip(middles, ends, sizes, strict=True))


def test_landmarks_at_every_position_are_exact() -> None:
    q, k, _ = rows(12, 4)
    found = nystrom_factors(q, k, 12, iterations=0)
    assert np.allclose(found.weights, softmax_weights(q, k))
    assert found.residual == pytest.approx(0, abs=1e-9)


def test_iterations_come_close_to_the_inverse() -> None:
    q, k, _ = rows(64, 8)
    few, usual, many, exact = (nystrom_factors(q, k, 8, steps).residual for steps in (2, 6, 20, 0))
    assert few > usual > many
    # both are roundings
    assert many < 1e-8
    assert exact < 1e-8
    assert nystrom_factors(q, k, 8).start <= 1


def test_schur_complements() -> None:
    draws = np.random.default_rng(0)
    low = draws.normal(size=(9, 3)) @ draws.normal(size=(3, 7))
    assert schur_residual(low, np.arange(3), np.arange(3)) == pytest.approx(0, abs=1e-10)
    full = draws.normal(size=(9, 7))
    at, on = np.array([0, 4, 8]), np.array([1, 2, 5])
    whole = full[:, on] @ np.linalg.inv(full[np.ix_(at, on)]) @ full[at]
    assert schur_residual(full, at, on) == pytest.approx(np.linalg.norm(full - whole))
    assert schur_residual(full, at, on) >= singular_values(full).error(3)


# --- hashing --------------------------------------------------------------------------------


def hashed(x: np.ndarray) -> np.ndarray:
    """The bucket of each row of projections."""
    return np.asarray(np.concatenate([x, -x], 1).argmax(1))


@pytest.mark.parametrize("buckets", [2, 4, 8, 64, 256])
def test_collisions_of_known_angles(buckets: int) -> None:
    assert collision(0.0, buckets) == pytest.approx(1 / buckets, abs=1e-7)
    assert collision(1.0, buckets) == 1
    assert collision(-1.0, buckets) == 0
    chances = [collision(float(cosine), buckets) for cosine in np.linspace(-1, 1, 21)]
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
    assert recall(cosine, buckets, 3) == pytest.approx(1 - (1 - found) ** 3)


def test_hyperplanes() -> None:
    assert hyperplane_collision(0.0, 3) == pytest.approx(1 / 8)
    assert hyperplane_collision(0.4, 1) == pytest.approx(collision(0.4, 2))


def test_buckets_of_uniform_hashes() -> None:
    draws = np.random.default_rng(0)
    largest = [np.bincount(draws.integers(8, size=100), minlength=8).max() for _ in range(4000)]
    assert np.mean(largest) <= largest_bucket(100, 8) <= 1.1 * np.mean(largest)
    assert np.mean(np.array(largest) > 20) <= overflow(100, 8, 20) <= 1
    assert largest_bucket(5, 1) == 5
    assert overflow(5, 1, 4) == 1
    assert overflow(5, 1, 5) == 0


@pytest.mark.parametrize(("cosine", "buckets"), [(1.5, 4), (0.5, 3), (0.5, 0)])
def test_what_is_no_angle_or_hash_is_refused(cosine: float, buckets: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        collision(cosine, buckets)


# --- measured on arrays ---------------------------------------------------------------------


@pytest.mark.parametrize("causal", ["", "causal "])
@pytest.mark.parametrize("kind", ["positive", "trig", "hyperbolic"])
def test_more_features_are_nearer(kind: str, causal: str) -> None:
    q, k, v = rows(48, 4, 0.4)
    errors = []
    for features in (8, 128, 2048):
        found = approximation(
            spec_of(f"{causal}attend favor(features = {features}, kind = {kind})"), q, k, v
        )
        errors.append(found["output_error"].value)
        assert found["weight_error"].quality == "estimate"
        assert ("weight_error_of_rank" in found) == (not causal)
        if 2 * features < 48 and not causal:
            assert found["weight_error_of_rank"].value <= found["weight_error"].value
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.1


def test_a_kernel_is_measured_against_itself_too() -> None:
    q, k, v = rows(40, 4, 0.3)
    found = approximation(spec_of("attend rbf(sigma = 1.0, features = 4096)"), q, k, v)
    assert found["kernel_error"].value < 0.05
    # keys of all lengths, and another scale: it is not softmax attention
    assert found["weight_error"].value > found["kernel_error"].value
    assert found["uniform_failure"].note.startswith("at most") == (
        found["uniform_failure"].value < 1
    )
    few = approximation(spec_of("attend rbf(features = 4)"), q, k, v)["uniform_failure"]
    assert few.value == 1
    assert few.note.startswith("vacuous")


def test_linformer_says_that_its_theorem_is_vacuous() -> None:
    q, k, v = rows(64, 8)
    found = approximation(spec_of("attend linformer(rank = 32)"), q, k, v)
    assert found["rank_required"].note.startswith("vacuous at n = 64")
    assert found["weight_error"].value > found["weight_error_of_rank"].value
    pooled = approximation(spec_of("attend linformer(rank = 32, projection = mean)"), q, k, v)
    assert "output_error" not in pooled


def test_nystrom_is_measured_by_its_factors() -> None:
    q, k, v = rows(50, 8)
    found = approximation(spec_of("attend nystrom(landmarks = 8, iterations = 4)"), q, k, v)
    exact = softmax_weights(q, k)
    factors = nystrom_factors(q, k, 8, 4)
    error = np.linalg.norm(factors.weights - exact) / np.linalg.norm(exact)
    assert found["weight_error"].value == pytest.approx(error)
    assert found["weight_error"].quality == "exact"
    assert found["inverse_residual"].value == factors.residual
    assert found["sampled_error"].value >= found["weight_error_of_rank"].value
    all_of_them = approximation(spec_of("attend nystrom(landmarks = 64)"), q, k, v)
    assert all_of_them["output_error"].value == 0


def test_recall_of_hashes_is_what_is_expected() -> None:
    q, k, v = rows(300, 8)
    found = approximation(spec_of("attend lsh(buckets = 16, rounds = 4)"), q, k, v)
    assert found["recall"].value == pytest.approx(found["expected_recall"].value, abs=0.05)
    assert found["largest_bucket"].value >= 300 / 16


def test_the_causal_half_alone_counts() -> None:
    q, k, v = rows(20, 4)
    later = k.copy()
    later[10:] += 5
    body = "causal attend favor(features = 16, orthogonal = false)"
    first, second = (approximation(spec_of(body), q[:10], some[:10], v[:10]) for some in (k, later))
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
        approximation(spec_of("attend favor()"), np.zeros(q), np.zeros(k), np.zeros(v))


def test_numbers_that_are_none() -> None:
    q, k, v = rows(4, 2)
    q[0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        approximation(spec_of("attend favor()"), q, k, v)


@pytest.mark.parametrize(
    "body", ["attend full", "attend fourier()", "attend topk(size = 4, blocks = 1)"]
)
def test_what_approximates_nothing_is_refused(body: str) -> None:
    with pytest.raises(AttnSpecError, match="is not held against softmax attention"):
        approximation(spec_of(body), *rows(8, 4))


def test_a_report_answers_for_its_length() -> None:
    q, k, v = rows(16, 4)
    spec = spec_of("attend nystrom(landmarks = 4)")
    assert spec.analyse(16).approximation(q, k, v) == approximation(spec, q, k, v)
    with pytest.raises(ValueError, match="must have 8 rows, got 16"):
        spec.analyse(8).approximation(q, k, v)
