"""How far Linformer and Nystroemformer are from softmax attention: bounds and residuals, float64.

Linformer's theorems rest on the lemma of Johnson and Lindenstrauss: with E of shape [k, n] drawn
from N(0, 1 / k), one product is kept to a part e with a probability of at least
1 - 2 exp(-(e^2 - e^3) k / 4). For Nystroemformer nothing of the kind holds: its error is measured,
and so is what its pseudo-inverse leaves.
Source: Wang et al. 2020, "Linformer", theorems 1 and 2; Xiong et al. 2021, "Nystroemformer",
section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np

from attnspec.analysis.low_rank import softmax_weights

# --- Linformer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectionBound:
    """What the theorems ask of the rank for an error of `tolerance`: `required` rows for one row of
    weights (theorem 1), `required_values` for the values of heads of some size, too (the step to
    theorem 2); `failure` bounds the probability that one product is further off at the given rank.
    """

    rank: int
    n: int
    tolerance: float
    required: int
    required_values: int
    failure: float

    @property
    def vacuous(self) -> bool:
        """Whether the theorem promises nothing at this rank, or asks for as many rows as n."""
        return self.failure >= 1 or self.rank < self.required or self.required >= self.n


def projection_bound(n: int, size: int, rank: int, tolerance: float = 0.5) -> ProjectionBound:
    """The bound for sequences of n and heads of `size`: 5 ln n / (e^2 - e^3) rows and
    5 ln (n size) / (e^2 - e^3)."""
    if n < 1 or size < 1 or rank < 1 or not 0 < tolerance < 1:
        raise ValueError(
            "n, size and rank must be at least 1 and tolerance between 0 and 1, got"
            f" {n}, {size}, {rank}, {tolerance}"
        )
    kept = tolerance**2 - tolerance**3
    required, required_values = (ceil(5 * log(amount) / kept) for amount in (n, n * size))
    failure = min(1.0, 2 * exp(-kept * rank / 4))
    return ProjectionBound(rank, n, tolerance, max(1, required), max(1, required_values), failure)


# --- Nystroemformer -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Landmarks:
    """The factors of S ~ F Z B, float64: `queries` F [n, m], `inverse` Z [m, m] of `middle` A, and
    `keys` B [m, n]."""

    queries: np.ndarray
    middle: np.ndarray
    inverse: np.ndarray
    keys: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """The weights that stand for the softmax, [n, n]; they may be negative."""
        return np.asarray(self.queries @ self.inverse @ self.keys)

    @property
    def residual(self) -> float:
        """|A Z A - A| / |A| in Frobenius' norm: 0 for a pseudo-inverse."""
        middle = self.middle
        rest = middle @ self.inverse @ middle - middle
        return float(np.linalg.norm(rest) / np.linalg.norm(middle))

    @property
    def start(self) -> float:
        """|A A+ - A Z0| in the spectral norm: the iterations converge where it is below 1."""
        middle = self.middle
        exact = middle @ np.linalg.pinv(middle)
        return float(np.linalg.norm(exact - middle @ first_inverse(middle), 2))


def nystrom_factors(
    q: np.ndarray, k: np.ndarray, landmarks: int, iterations: int = 6, scale: float | None = None
) -> Landmarks:
    """The factors for queries and keys [n, d]: landmarks are the means of segments of n // m rows,
    the last n mod m of which have one more; 0 iterations stand for the exact pseudo-inverse."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    if landmarks < 1 or iterations < 0:
        raise ValueError(
            f"landmarks must be at least 1 and iterations at least 0, got {landmarks}, {iterations}"
        )
    q_means, k_means = segment_means(q, landmarks), segment_means(k, landmarks)
    middle = softmax_weights(q_means, k_means, scale=scale)
    inverse = np.linalg.pinv(middle) if iterations == 0 else first_inverse(middle)
    eye = np.eye(len(middle))
    for _ in range(iterations):
        product = middle @ inverse
        step = 13 * eye - product @ (15 * eye - product @ (7 * eye - product))
        inverse = inverse @ step / 4
    return Landmarks(
        softmax_weights(q, k_means, scale=scale),
        middle,
        inverse,
        softmax_weights(q_means, k, scale=scale),
    )


def segment_means(rows: np.ndarray, segments: int) -> np.ndarray:
    """The means of so many segments of consecutive rows [n, d]; of each row where there are no more
    rows than segments."""
    starts = _starts(len(rows), segments)
    sizes = np.diff(np.append(starts, len(rows)))
    return np.asarray(np.add.reduceat(rows, starts, axis=0) / sizes[:, None])


def segment_middles(n: int, segments: int) -> np.ndarray:
    """The position in the middle of each of so many segments of n positions."""
    starts = _starts(n, segments)
    return np.asarray((starts + np.append(starts[1:], n)) // 2)


def _starts(n: int, segments: int) -> np.ndarray:
    """The first of n positions of each segment: n // m of them in the first m - n mod m segments,
    one more in the others; no segment is empty."""
    segments = min(n, segments)
    sizes = np.full(segments, n // segments)
    sizes[segments - n % segments :] += 1
    return np.asarray(np.cumsum(sizes) - sizes)


def first_inverse(matrix: np.ndarray) -> np.ndarray:
    """Z0 = A^T / (|A|_1 |A|_inf), from which the iterations start."""
    sizes = np.abs(matrix)
    return np.asarray(matrix.T / (sizes.sum(0).max() * sizes.sum(1).max()))


def schur_residual(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> float:
    """|C - F A+ B| in Frobenius' norm: what is lost of a matrix where some of its rows and columns,
    by their numbers, stand for all; it lies in the rows and columns left out."""
    inside = matrix[np.ix_(rows, columns)]
    others = np.setdiff1d(np.arange(matrix.shape[0]), rows)
    beyond = np.setdiff1d(np.arange(matrix.shape[1]), columns)
    left = matrix[np.ix_(others, columns)] @ np.linalg.pinv(inside)
    rest = matrix[np.ix_(others, beyond)] - left @ matrix[np.ix_(rows, beyond)]
    return float(np.linalg.norm(rest))
