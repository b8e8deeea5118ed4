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


def inverse_residual(middle: np.ndarray, inverse: np.ndarray) -> float:
    """|A Z A - A| / |A| in Frobenius' norm of A and what stands for its inverse, [m, m]: 0 for a
    pseudo-inverse."""
    rest = middle @ inverse @ middle - middle
    return float(np.linalg.norm(rest) / np.linalg.norm(middle))


def inverse_start(middle: np.ndarray) -> float:
    """|A A+ - A Z0| in the spectral norm, with Z0 = A^T / (|A|_1 |A|_inf), from which the
    iterations start: they converge where it is below 1."""
    sizes = np.abs(middle)
    start = middle.T / (sizes.sum(0).max() * sizes.sum(1).max())
    return float(np.linalg.norm(middle @ (np.linalg.pinv(middle) - start), 2))


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


def schur_residual(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> float:
    """|C - F A+ B| in Frobenius' norm: what is lost of a matrix where some of its rows and columns,
    by their numbers, stand for all; it lies in the rows and columns left out."""
    inside = matrix[np.ix_(rows, columns)]
    others = np.setdiff1d(np.arange(matrix.shape[0]), rows)
    beyond = np.setdiff1d(np.arange(matrix.shape[1]), columns)
    left = matrix[np.ix_(others, columns)] @ np.linalg.pinv(inside)
    rest = matrix[np.ix_(others, beyond)] - left @ matrix[np.ix_(rows, beyond)]
    return float(np.linalg.norm(rest))
