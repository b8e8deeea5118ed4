"""How far methods of low rank are from softmax attention at least, float64.

A = U S V^T, and the first r terms are the best matrix of rank r: the error left in Frobenius' norm
is the root of the sum of s_t^2 over t > r (Eckart, Young 1936). No factorised attention of that
rank can do better: Linformer's rank, Nystroem's landmarks, the features of a kernel.

    >>> import numpy as np
    >>> weights = softmax_weights(*np.random.default_rng(0).normal(size=(2, 64, 8)))
    >>> bool(error_of_rank(weights, 4) > error_of_rank(weights, 8) > error_of_rank(weights, 64))
    True
"""

from __future__ import annotations

from math import sqrt

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
