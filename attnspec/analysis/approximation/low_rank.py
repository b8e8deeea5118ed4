"""How far methods of low rank are from softmax attention: bounds and residuals, float64.

A = U S V^T, and the first r terms are the best matrix of rank r: the error left in Frobenius' norm
is the root of the sum of s_t^2 over t > r (Eckart, Young 1936). No factorised attention of that
rank can do better: Linformer's rank, Nystroem's landmarks, the features of a kernel.

Linformer's theorems rest on the lemma of Johnson and Lindenstrauss: with E of shape [k, n] drawn
from N(0, 1 / k), one product is kept to a part e with a probability of at least
1 - 2 exp(-(e^2 - e^3) k / 4). For Nystroemformer nothing of the kind holds: its error is measured,
and so is what its pseudo-inverse leaves.
Source: Wang et al. 2020, "Linformer", theorem 1; Xiong et al. 2021, "Nystroemformer", section 3.

    >>> import numpy as np
    >>> weights = softmax_weights(*np.random.default_rng(0).normal(size=(2, 64, 8)))
    >>> bool(error_of_rank(weights, 4) > error_of_rank(weights, 8) > error_of_rank(weights, 64))
    True
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, log, sqrt

import numpy as np
from scipy.linalg import svdvals


def error_of_rank(matrix: np.ndarray, rank: int) -> float:
    """The least |A - B| / |A| over all B of that rank, for a matrix [n, m] other than 0."""
    values = svdvals(matrix)
    return float(np.linalg.norm(values[rank:]) / np.linalg.norm(values))


def softmax_weights(
    q: np.ndarray, k: np.ndarray, held: np.ndarray | None = None, scale: float | None = None
) -> np.ndarray:
    """The weights softmax(scale q k^T) [n, m] of q [n, d] and k [m, d], float64.

    `held` is bool [n, m], True for a pair of the graph, as `Spec.mask` gives it; a row without one
    is 0. `scale` is 1 / sqrt(d) where it is not given.
    """
    scores = q @ k.T * (1 / sqrt(max(1, q.shape[1])) if scale is None else scale)
    if held is not None:
        scores = np.where(held, scores, -np.inf)
    top = scores.max(1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    sums = weights.sum(1, keepdims=True)
    found: np.ndarray = weights / np.where(sums == 0, 1.0, sums)
    return found


# --- Linformer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectionBound:
    """What theorem 1 asks of the rank for an error of `tolerance` of one row of weights: `required`
    rows; `failure` bounds the probability that one product is further off at the given rank, and
    `vacuous` is whether it promises nothing there, or asks for as many rows as n."""

    required: int
    failure: float
    vacuous: bool


def projection_bound(n: int, rank: int, tolerance: float = 0.5) -> ProjectionBound:
    """The bound for sequences of n: 5 ln n / (e^2 - e^3) rows."""
    kept = tolerance**2 - tolerance**3
    required = max(1, ceil(5 * log(n) / kept))
    failure = min(1.0, 2 * exp(-kept * rank / 4))
    return ProjectionBound(required, failure, failure >= 1 or rank < required or required >= n)


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


def schur_residual(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> float:
    """|C - F A+ B| in Frobenius' norm: what is lost of a matrix where some of its rows and columns,
    by their numbers, stand for all; it lies in the rows and columns left out."""
    inside = matrix[np.ix_(rows, columns)]
    others = np.setdiff1d(np.arange(matrix.shape[0]), rows)
    beyond = np.setdiff1d(np.arange(matrix.shape[1]), columns)
    left = matrix[np.ix_(others, columns)] @ np.linalg.pinv(inside)
    rest = matrix[np.ix_(others, beyond)] - left @ matrix[np.ix_(rows, beyond)]
    return float(np.linalg.norm(rest))
