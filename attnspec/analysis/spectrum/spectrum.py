"""The eigenvalue that says how fast a walk on the graph forgets where it started.

The graph is the union of all layers and heads, taken both ways: B = A or A^T, N = D^-1/2 B D^-1/2
with the degrees D. The largest eigenvalue of N is 1; asked for is the largest absolute value of the
others. An eigenvalue of 1 comes once for every connected part, -1 for every part that is bipartite.

Four ways: what has a formula (complete graphs, stars), circulant graphs such as rings by the
Fourier transform of one row, all eigenvalues of a matrix up to `LONGEST_DENSE`, and ARPACK's
Lanczos iterations: for narrow bands, whose gap is small, on the inverse of 1 - N, else on N itself.
What these find lies inside the spectrum: the gap is never more than what is found of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from attnspec.analysis.counting.progressions import Group, grouped
from attnspec.analysis.quality import Quality
from attnspec.analysis.spectrum.undirected import (
    MOST_EDGES,
    both_ways,
    degrees_both_ways,
    edges_both_ways,
    own,
)
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack

if TYPE_CHECKING:
    from scipy.sparse import csr_array

LONGEST_DENSE = 1024
"""Up to this length all eigenvalues are found."""

MOST_STEPS = 1 << 31
"""Edges, and four times as many ends of ranges, that the iterations pass over in all."""

MOST_ITERATIONS = 2000
"""The most iterations, each of which a vector is multiplied for."""

LISTED = 1 << 20
"""Up to so many edges are listed however few ranges they are."""

KEPT = 20
"""Vectors that the iterations keep, and start again from the best of."""

MOST_BANDED = 1 << 24
"""Positions times the width of their band up to which a factor of 1 - N is kept."""

WIDEST_BAND = 1 << 34
"""The same with the width squared: the operations for the factor."""

ROUNDING = 1e-13
"""Eigenvalues this near to 1 are taken for it."""

TOLERANCE = 1e-10
"""Of the residual, relative to the eigenvalue that is iterated for."""


@dataclass(frozen=True)
class Spectrum:
    """`slowest`: the largest absolute value of an eigenvalue but for one 1; of n positions.

    `volume` is the sum of the degrees, `fewest` the least of them; positions without any pair have
    degree 0. Where the quality is "bound", `slowest` is no more than the true value.
    """

    n: int
    slowest: float
    volume: int
    fewest: int
    quality: Quality = "exact"
    note: str = ""

    @property
    def gap(self) -> float:
        """1 - |second eigenvalue|."""
        return 1 - self.slowest


@lru_cache(maxsize=4)
def spectrum(stack: Stack, n: int) -> Spectrum:
    """The spectrum of all layers and heads together at n > 0 positions; raises TooMuch."""
    degrees = degrees_both_ways(stack, n)

    def found(slowest: float, quality: Quality = "exact", note: str = "") -> Spectrum:
        volume, fewest = int(degrees.sum()), int(degrees.min())
        slowest = 1.0 if slowest > 1 - ROUNDING else max(0.0, float(slowest))
        return Spectrum(n, slowest, volume, fewest, quality, note)

    formula = _by_formula(both_ways(stack, n), degrees)
    if formula is not None:
        return found(formula)
    graph = _graph(stack, n)
    if graph.parts > 1:
        return found(1.0, note=f"{graph.parts:,} parts that no pair joins")
    shifts = graph.shifts()
    if shifts is not None:
        row = np.zeros(n)
        row[shifts] = 1 / len(shifts)
        return found(np.sort(np.abs(np.fft.fft(row).real))[-2], note="but for rounding")
    if n <= LONGEST_DENSE:
        values = np.linalg.eigvalsh(graph.matrix())
        return found(max(values[-2], -values[0]), note="but for rounding")
    slowest, settled = _by_iterations(graph)
    if settled:
        return found(slowest, "estimate", "by Lanczos iterations")
    return found(slowest, "bound", "at most: the iterations did not settle")


def _by_formula(both: Relation, degrees: np.ndarray) -> float | None:
    """The slowest eigenvalue of what its degrees give away, or None."""
    n = len(degrees)
    if n == 1 or int(degrees.max()) == 0 or int(degrees.min()) == n:
        return 0.0
    hubs = np.flatnonzero(degrees == n)
    leaves = len(hubs) == 1 and int(degrees.sum()) == 3 * n - 2 and int(degrees.min()) == 2
    # a star whose leaves read the hub and themselves
    return 0.5 if leaves and own(both, n).all() else None


# --- the graph as an operator ---------------------------------------------------------------------


class _Graph:
    """The pairs of a symmetric graph: `degrees` int64 [n], and products with vectors."""

    def __init__(self, degrees: np.ndarray, edges: csr_array | None, groups: list[Group]) -> None:
        self.n, self.degrees = len(degrees), degrees
        self.edges, self.groups = edges, groups
        # no degree, no pair: such a position has an eigenvalue 0
        self.roots = np.sqrt(np.maximum(self.degrees, 1))
        self.first = np.sqrt(self.degrees / max(1, int(self.degrees.sum())))

    @property
    def work(self) -> int:
        """What a product passes over."""
        if self.edges is not None:
            return self.n + int(self.edges.nnz)
        return 4 * sum(len(group.row) + group.places for group in self.groups)

    def times(self, vector: np.ndarray) -> np.ndarray:
        """B x."""
        if self.edges is not None:
            return np.asarray(self.edges @ vector)
        total = np.zeros(self.n)
        for group in self.groups:
            total += np.bincount(group.row, group.sums(vector), self.n)
        return total

    def below(self, vector: np.ndarray) -> np.ndarray:
        """(N - u u^T) x with the first eigenvector u."""
        product = self.times(vector / self.roots) / self.roots
        return np.asarray(product - self.first * float(self.first @ vector))

    def matrix(self) -> np.ndarray:
        """N, float64 [n, n]."""
        if self.edges is not None:
            dense = self.edges.toarray().astype(float)
        else:
            dense = np.stack([self.times(row) for row in np.eye(self.n)])
        return np.asarray(dense / self.roots / self.roots[:, None])

    @property
    def parts(self) -> int:
        """Connected parts that have a pair."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        edges = self.edges
        if edges is None:
            heads, tails = zip(*(_chained(group) for group in self.groups), strict=True)
            pairs = np.concatenate(heads), np.concatenate(tails)
            ones = np.ones(len(pairs[0]), np.int8)
            edges = csr_array((ones, pairs), shape=(self.n, self.n))
        alone = int((self.degrees == 0).sum())
        return int(connected_components(edges)[0]) - alone

    def shifts(self) -> np.ndarray | None:
        """The distances (k - q) mod n where every query has the same ones, else None."""
        if self.edges is None or int(self.degrees.min()) != int(self.degrees.max()):
            return None
        n, degree = self.n, int(self.degrees[0])
        row = np.sort(self.edges.indices[:degree])
        queries = np.repeat(np.arange(n), degree)
        distances = (self.edges.indices - queries) % n
        counts = np.bincount(distances, minlength=n)
        return row if (counts[row] == n).all() else None


def _graph(stack: Stack, n: int) -> _Graph:
    """The graph of a stack; raises TooMuch."""
    degrees = degrees_both_ways(stack, n)
    groups = _groups(both_ways(stack, n), n)
    if groups is not None and not _is_narrow(max(_reach(group) for group in groups), n):
        return _Graph(degrees, None, groups)
    return _Graph(degrees, edges_both_ways(stack, n), [])


def _is_narrow(reach: int, n: int) -> bool:
    return reach * n <= MOST_BANDED and reach * reach * n <= WIDEST_BAND


def _reach(group: Group) -> int:
    """The furthest that a member lies from its row."""
    start = group.positions(group.place)
    last = start + (group.count - 1) * group.step
    return int(np.maximum(abs(start - group.row), abs(last - group.row)).max(initial=0))


def _groups(relation: Relation, n: int) -> list[Group] | None:
    """The keys of all rows as ranges by their steps, where they are known and fewer than the
    edges."""
    found: dict[int, list[Group]] = {}
    for first, part in relation.closed_rows(n):
        if part is None:
            return None
        for group in grouped(part, n):
            group.row = group.row + first
            found.setdefault(group.step, []).append(group)
    every = list(chain.from_iterable(found.values()))
    ranges = n * len(found) + sum(len(group.row) for group in every)
    edges = sum(int(group.count.sum()) for group in every)
    if edges <= max(ranges, LISTED) or ranges > MOST_EDGES:
        return None
    return [_together(groups) for groups in found.values()]


def _together(groups: list[Group]) -> Group:
    whole = groups[0]
    for name in ("row", "place", "count"):
        setattr(whole, name, np.concatenate([getattr(group, name) for group in groups]))
    return whole


def _chained(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that connect what the ranges connect: a row with the first of its range, and each
    member of a range with the next."""
    change = np.bincount(group.place, minlength=group.places)
    change -= np.bincount(group.place + group.count - 1, minlength=group.places)
    followed = np.flatnonzero(np.cumsum(change) > 0)
    heads = group.positions(np.concatenate([group.place, followed]))
    tails = group.positions(np.concatenate([group.place, followed + 1]))
    heads[: len(group.row)] = group.row
    return heads, tails


# --- iterations -----------------------------------------------------------------------------------


def _by_iterations(graph: _Graph) -> tuple[float, bool]:
    """The slowest eigenvalue, and whether the iterations have settled on it."""
    most = min(MOST_ITERATIONS, max(KEPT, MOST_STEPS // graph.work))
    edges, wave = graph.edges, _wave(graph)
    if edges is None or not _is_narrow(_width(edges), graph.n):
        return _largest(graph.below, wave, most)
    second, settled = _beside(graph, edges, 1, most)
    # where all read themselves, no circle of Gershgorin comes nearer to -1
    own_share = float((edges.diagonal() / graph.roots**2).min())
    if 1 - second <= 2 * own_share:
        return second, settled
    turned, surely = _largest(lambda x: x - graph.below(x), wave, most, tolerance=1e-3)
    if surely and turned - 1 < 0.9 * second:
        return second, settled
    # nearly bipartite
    least, too = _beside(graph, edges, -1, most)
    return max(second, least), settled and too


def _largest(
    times: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    most: int,
    tolerance: float = TOLERANCE,
) -> tuple[float, bool]:
    """The largest absolute eigenvalue of a symmetric operator on vectors [n], and whether `most`
    products were enough for it; if not, how much the most of them lengthened a vector, which is no
    more."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n, longest = len(start), 0.0

    def measured(vector: np.ndarray) -> np.ndarray:
        nonlocal longest
        product = times(vector.ravel())
        longest = max(longest, float(np.linalg.norm(product) / np.linalg.norm(vector)))
        return product

    operator = LinearOperator((n, n), matvec=measured, dtype=np.float64)
    if np.linalg.norm(measured(start)) <= ROUNDING * np.linalg.norm(start):
        return 0.0, True
    kept = min(n, KEPT)
    rounds = max(1, most // kept)
    try:
        (value,) = eigsh(
            operator, 1, None, None, "LM", start, kept, rounds, tolerance, return_eigenvectors=False
        )
    except ArpackNoConvergence:
        return longest, False
    return abs(float(value)), True


def _beside(graph: _Graph, edges: csr_array, sign: int, most: int) -> tuple[float, bool]:
    """The largest eigenvalue of N but for the first, or of -N, by the inverse of 1 - N or 1 + N,
    a little more of 1, and whether it has settled."""
    from scipy.sparse import csc_array, diags_array
    from scipy.sparse.linalg import splu

    moved = 1 / graph.n**2
    matrix = diags_array((1 + moved) * graph.roots**2) - sign * edges
    # definite: its own order keeps the band, and no pivot is needed
    symmetric = {"SymmetricMode": True}
    factor = splu(csc_array(matrix), "NATURAL", diag_pivot_thresh=0.0, options=symmetric)
    first = graph.first if sign > 0 else np.zeros(graph.n)

    def times(vector: np.ndarray) -> np.ndarray:
        product = graph.roots * factor.solve(graph.roots * (vector - first * (first @ vector)))
        return np.asarray(product - first * (first @ product))

    value, settled = _largest(times, _wave(graph), most)
    return 1 + moved - 1 / value, settled


def _wave(graph: _Graph) -> np.ndarray:
    """A slow wave along the sequence, what a band forgets last, and a little of everything."""
    wave = np.cos(np.pi * (np.arange(graph.n) + 0.5) / graph.n) * graph.roots
    noise = np.random.Generator(np.random.PCG64(graph.n)).standard_normal(graph.n)
    start = wave / np.linalg.norm(wave) + 1e-3 * noise / np.linalg.norm(noise)
    return np.asarray(start - graph.first * float(graph.first @ start))


def _width(edges: csr_array) -> int:
    """How far from the diagonal the furthest pair lies."""
    rows = np.repeat(np.arange(edges.shape[0]), np.diff(edges.indptr))
    return int(np.abs(rows - edges.indices).max(initial=0))
