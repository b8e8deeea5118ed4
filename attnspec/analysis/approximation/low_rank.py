"""How well a matrix of attention weights can be written with few factors: its singular values.

A = U S V^T, and the first r terms are the best matrix of rank r: the error left is s_(r+1) in the
spectral norm and the root of the sum of s_t^2 over t > r in Frobenius' (Eckart, Young 1936; Mirsky
1960). No factorised attention of that rank can do better: Linformer's rank, Nystroem's landmarks,
the features of a kernel, the size of a head for elu + 1. Time n^3, memory n^2: a diagnostic.

    >>> import numpy as np
    >>> found = singular_values(softmax_weights(*np.random.default_rng(0).normal(size=(2, 64, 8))))
    >>> found.error(64)
    0.0
    >>> bool(found.error(4) > found.error(8) > found.error(16) > 0)
    True
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import svd, svdvals

NORMS = ("frobenius", "spectral")


@dataclass(frozen=True, eq=False)
class SingularValues:
    """The singular values of one matrix, float64 in falling order."""

    values: np.ndarray

    def error(self, rank: int, norm: str = "frobenius", *, relative: bool = False) -> float:
        """The least |A - B| over all B of that rank; `relative` divides it by |A|."""
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
        if rank < 0:
            raise ValueError(f"rank must be at least 0, got {rank}")
        left, whole = self.values[rank:], self.values
        sizes = [
            float(np.linalg.norm(x) if norm == "frobenius" else x.max(initial=0.0))
            for x in (left, whole)
        ]
        return sizes[0] / sizes[1] if relative and sizes[1] else sizes[0]

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of s / sum(s): the number of equal singular values that would be as
        spread; 0 for a matrix of zeros. Source: Roy, Vetterli 2007, "The effective rank"."""
        total = self.values.sum()
        if not total:
            return 0.0
        shares = self.values[self.values > 0] / total
        return math.exp(-float(shares @ np.log(shares)))


def singular_values(matrix: np.ndarray) -> SingularValues:
    """The singular values of a matrix [n, m]; ValueError for one that is not of finite numbers."""
    return SingularValues(svdvals(_checked(matrix)) if np.size(matrix) else np.zeros(0))


def best_of_rank(matrix: np.ndarray, rank: int, *, renormalise: bool = False) -> np.ndarray:
    """The matrix of that rank that is closest to a matrix [n, m], in both norms.

    The rows of weights no longer sum to 1 then, and may hold numbers below 0; `renormalise` divides
    each by its sum, where that is not 0, and gives up being the closest for it.
    """
    if rank < 0:
        raise ValueError(f"rank must be at least 0, got {rank}")
    checked = _checked(matrix)
    if not checked.size:
        return checked
    left, values, right = svd(checked, full_matrices=False)
    found: np.ndarray = (left[:, :rank] * values[:rank]) @ right[:rank]
    if renormalise:
        sums = found.sum(1, keepdims=True)
        found = found / np.where(sums == 0, 1.0, sums)
    return found


def softmax_weights(
    q: np.ndarray, k: np.ndarray, held: np.ndarray | None = None, scale: float | None = None
) -> np.ndarray:
    """The weights softmax(scale q k^T) [n, m] of q [n, d] and k [m, d], float64.

    `held` is bool [n, m], True for a pair of the graph, as `Spec.mask` gives it; a row without one
    is 0. `scale` is 1 / sqrt(d) where it is not given.
    """
    q, k = _checked(q), _checked(k)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q and k must have one size, got {q.shape[1]} and {k.shape[1]}")
    scores = q @ k.T * (1 / math.sqrt(max(1, q.shape[1])) if scale is None else scale)
    if held is not None:
        if held.shape != scores.shape:
            raise ValueError(f"held must be {scores.shape}, got {held.shape}")
        scores = np.where(held, scores, -np.inf)
    top = scores.max(1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    sums = weights.sum(1, keepdims=True)
    found: np.ndarray = weights / np.where(sums == 0, 1.0, sums)
    return found


def _checked(matrix: np.ndarray) -> np.ndarray:
    found = np.asarray(matrix, dtype=np.float64)
    if found.ndim != 2:
        raise ValueError(f"a matrix has two axes, got the shape {list(found.shape)}")
    if not np.isfinite(found).all():
        raise ValueError("a matrix of finite numbers is needed, got NaN or infinity among them")
    return found
