"""The eigenvalue that says how fast a walk on the graph forgets where it started.

The graph is the union of all layers and heads, taken both ways: B = A or A^T, N = D^-1/2 B D^-1/2
with the degrees D. The largest eigenvalue of N is 1; asked for is the largest absolute value of the
others. An eigenvalue of 1 comes once for every connected part, -1 for every part that is bipartite.

All eigenvalues are computed up to n = `LIMITS.eigenvalues`, beyond it the largest by ARPACK's
Lanczos iterations on the sparse matrix. Where these do not settle, as for long narrow bands, the
gap is a bound: what they reach lies inside the spectrum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.counting.conjunctions import Listed
from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.quality import Figure
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


@lru_cache(maxsize=4)
def spectral_gap(stack: Stack, n: int) -> Figure[float]:
    """1 - |second eigenvalue| of all layers and heads together at n > 0 positions; the gap is no
    more than a bound. Raises TooMuch."""
    from scipy.sparse.csgraph import connected_components

    edges = edges_both_ways(stack, n)
    degrees = np.asarray(edges.sum(axis=1)).ravel()
    parts = int(connected_components(edges)[0]) - int((degrees == 0).sum())
    if parts > 1:
        return Figure(0.0, note=f"{parts:,} parts that no pair joins")
    if n == 1 or not degrees.any():
        return Figure(1.0)
    # no degree, no pair: such a position has an eigenvalue 0
    roots = np.sqrt(np.maximum(degrees, 1))
    edges.data = edges.data / (np.repeat(roots, np.diff(edges.indptr)) * roots[edges.indices])
    if n <= LIMITS.eigenvalues:
        values = np.linalg.eigvalsh(edges.toarray())
        return Figure(_gap(max(values[-2], -values[0])), note="but for rounding")
    slowest, settled = _by_iterations(edges, np.sqrt(degrees / degrees.sum()))
    if settled:
        return Figure(_gap(slowest), "estimate", "by Lanczos iterations")
    return Figure(_gap(slowest), "bound", "at most: the iterations did not settle")


def _gap(slowest: float) -> float:
    return 0.0 if slowest > 1 - ROUNDING else 1 - max(0.0, float(slowest))


def edges_both_ways(stack: Stack, n: int) -> csr_array:
    """The pairs of all layers and heads, both ways, as a float64 matrix of ones [n, n] with sorted
    indices; raises TooMuch."""
    from scipy.sparse import csr_array

    relations = {relation for _, _, relation in stack.bound(n).found}
    ways = relations | {transpose_of(each) for each in relations}
    union = Union(tuple(sorted(ways, key=repr)))
    if int(degrees_of(union, n).sum()) > LIMITS.edges_kept:
        raise TooMuch(f"more than {LIMITS.edges_kept:,} pairs are not listed, n = {n:,}")
    listed = Listed(union, n)
    return csr_array((np.ones(len(listed.keys)), listed.keys, listed.pointers), shape=(n, n))


def _by_iterations(matrix: csr_array, first: np.ndarray) -> tuple[float, bool]:
    """The slowest eigenvalue of N with its first eigenvector, and whether the iterations have
    settled on it; if not, the most that a product lengthened a vector, which is a lower bound."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n, longest = len(first), 0.0
    most = min(LIMITS.iterations, max(KEPT, LIMITS.pairs_passed // (n + matrix.nnz)))
    start = _wave(first)

    def below(vector: np.ndarray) -> np.ndarray:
        nonlocal longest
        vector = vector.ravel()
        product = matrix @ vector - first * float(first @ vector)
        longest = max(longest, float(np.linalg.norm(product) / np.linalg.norm(vector)))
        return np.asarray(product)

    if np.linalg.norm(below(start)) <= ROUNDING * np.linalg.norm(start):
        return 0.0, True
    operator = LinearOperator((n, n), matvec=below, dtype=np.float64)
    settings: dict[str, Any] = {"tol": TOLERANCE, "v0": start, "return_eigenvectors": False}
    try:
        found = eigsh(operator, 1, ncv=min(n, KEPT), maxiter=max(1, most // KEPT), **settings)
    except ArpackNoConvergence:
        return longest, False
    return abs(float(found[0])), True


def _wave(first: np.ndarray) -> np.ndarray:
    """A slow wave along the sequence, what a band forgets last, and a little of everything."""
    n = len(first)
    wave = np.cos(np.pi * (np.arange(n) + 0.5) / n) * first
    noise = np.random.Generator(np.random.PCG64(n)).standard_normal(n)
    start = wave / np.linalg.norm(wave) + 1e-3 * noise / np.linalg.norm(noise)
    return np.asarray(start - first * float(first @ start))
