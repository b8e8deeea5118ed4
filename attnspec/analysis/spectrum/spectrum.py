"""The eigenvalue that says how fast a walk on the graph forgets where it started.

The graph is the union of all layers and heads, taken both ways: B = A or A^T, N = D^-1/2 B D^-1/2
with the degrees D. The largest eigenvalue of N is 1; asked for is the largest absolute value of the
others. An eigenvalue of 1 comes once for every connected part, -1 for every part that is bipartite.

All eigenvalues of a matrix are found up to n = `LIMITS.eigenvalues`, beyond it those at the ends
by ARPACK's Lanczos iterations on a sparse matrix: near 1 and near -1 for narrow bands, whose gap is
small. What these find lies inside the spectrum: the gap is never more than what is found of it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.counting.conjunctions import Listed
from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.quality import Quality
from attnspec.graphs.operators import Union, transpose_of
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.limits import LIMITS

if TYPE_CHECKING:
    from scipy.sparse import csr_array

KEPT = 20
"""Vectors that the iterations keep, and start again from the best of."""

ROUNDING = 1e-13
"""Eigenvalues this near to 1 are taken for it."""

TOLERANCE = 1e-10
"""Of the residual, relative to the eigenvalue that is iterated for."""


@dataclass(frozen=True)
class Spectrum:
    """`slowest`: the largest absolute value of an eigenvalue but for one 1. Where the quality is
    "bound", it is no more than the true value."""

    slowest: float
    quality: Quality = "exact"
    note: str = ""

    @property
    def gap(self) -> float:
        """1 - |second eigenvalue|."""
        return 1 - self.slowest


@lru_cache(maxsize=4)
def spectrum(stack: Stack, n: int) -> Spectrum:
    """The spectrum of all layers and heads together at n > 0 positions; raises TooMuch."""
    from scipy.sparse.csgraph import connected_components

    edges = edges_both_ways(stack, n)
    degrees = np.asarray(edges.sum(axis=1)).ravel()
    parts = int(connected_components(edges)[0]) - int((degrees == 0).sum())
    if parts > 1:
        return Spectrum(1.0, note=f"{parts:,} parts that no pair joins")
    if n == 1 or not degrees.any():
        return Spectrum(0.0)
    # no degree, no pair: such a position has an eigenvalue 0
    roots = np.sqrt(np.maximum(degrees, 1))
    edges.data = edges.data / (np.repeat(roots, np.diff(edges.indptr)) * roots[edges.indices])
    if n <= LIMITS.eigenvalues:
        values = np.linalg.eigvalsh(edges.toarray())
        return Spectrum(_rounded(max(values[-2], -values[0])), note="but for rounding")
    slowest, settled = _by_iterations(edges, np.sqrt(degrees / degrees.sum()))
    if settled:
        return Spectrum(_rounded(slowest), "estimate", "by Lanczos iterations")
    return Spectrum(_rounded(slowest), "bound", "at most: the iterations did not settle")


def _rounded(slowest: float) -> float:
    return 1.0 if slowest > 1 - ROUNDING else max(0.0, float(slowest))


def edges_both_ways(stack: Stack, n: int) -> csr_array:
    """The pairs of all layers and heads, both ways, as a float64 matrix of ones [n, n] with sorted
    indices; raises TooMuch."""
    from scipy.sparse import csr_array

    relations = {relation for _, _, relation in stack.bound(n).found}
    ways = sorted(relations | {transpose_of(each) for each in relations}, key=repr)
    if int(degrees_of(Union(tuple(ways)), n).sum()) > LIMITS.edges_kept:
        raise TooMuch(f"more than {LIMITS.edges_kept:,} pairs are not listed, n = {n:,}")
    total: Any = csr_array((n, n), dtype=np.int8)
    for relation in ways:
        listed = Listed(relation, n)
        ones = np.ones(len(listed.keys), np.int8)
        part = csr_array((ones, listed.keys, listed.pointers), shape=(n, n))
        total = (total + part).minimum(1)
    edges: csr_array = csr_array(total.astype(np.float64))
    edges.sort_indices()
    return edges


def _by_iterations(matrix: csr_array, first: np.ndarray) -> tuple[float, bool]:
    """The slowest eigenvalue of N with its first eigenvector, and whether the iterations have
    settled on it; if not, the most that a product lengthened a vector, which is no more."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n, longest = len(first), 0.0
    most = min(LIMITS.iterations, max(KEPT, LIMITS.pairs_passed // (n + matrix.nnz)))
    settings: dict[str, Any] = {
        "ncv": min(n, KEPT),
        "maxiter": max(1, most // KEPT),
        "tol": TOLERANCE,
        "return_eigenvectors": False,
        "v0": _wave(first),
    }

    def below(vector: np.ndarray) -> np.ndarray:
        nonlocal longest
        vector = vector.ravel()
        product = matrix @ vector - first * float(first @ vector)
        longest = max(longest, float(np.linalg.norm(product) / np.linalg.norm(vector)))
        return np.asarray(product)

    if np.linalg.norm(below(settings["v0"])) <= ROUNDING * np.linalg.norm(settings["v0"]):
        return 0.0, True
    try:
        if n * _width(matrix) <= LIMITS.banded:
            return _of_a_band(matrix, settings), True
        operator = LinearOperator((n, n), matvec=below, dtype=np.float64)
        return abs(float(eigsh(operator, 1, **settings)[0])), True
    except ArpackNoConvergence:
        return longest, False


def _of_a_band(matrix: csr_array, settings: dict[str, Any]) -> float:
    """The slowest eigenvalue by inverses at some distance of the ends, where 1 - N and 1 + N have
    none; raises ArpackNoConvergence."""
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    away = 1 / matrix.shape[0] ** 2
    second = float(min(eigsh(matrix, 2, sigma=1 + away, **settings)))
    # where all read themselves, no circle of Gershgorin comes nearer to -1
    if 1 - second <= 2 * float(matrix.diagonal().min()):
        return second
    with suppress(ArpackNoConvergence):
        if -float(eigsh(matrix, 1, which="SA", **{**settings, "tol": 1e-3})[0]) < 0.9 * second:
            return second
    # nearly bipartite
    return max(second, -float(eigsh(matrix, 1, sigma=-1 - away, **settings)[0]))


def _wave(first: np.ndarray) -> np.ndarray:
    """A slow wave along the sequence, what a band forgets last, and a little of everything."""
    n = len(first)
    wave = np.cos(np.pi * (np.arange(n) + 0.5) / n) * first
    noise = np.random.Generator(np.random.PCG64(n)).standard_normal(n)
    start = wave / np.linalg.norm(wave) + 1e-3 * noise / np.linalg.norm(noise)
    return np.asarray(start - first * float(first @ start))


def _width(edges: csr_array) -> int:
    """How far from the diagonal the furthest pair lies."""
    rows = np.repeat(np.arange(edges.shape[0]), np.diff(edges.indptr))
    return int(np.abs(rows - edges.indices).max(initial=0))
