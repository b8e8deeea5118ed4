"""The eigenvalues that say how fast a walk on the graph forgets where it started.

The graph is the union of all layers and heads, taken both ways: B = A or A^T, N = D^-1/2 B D^-1/2
with the degrees D. The largest eigenvalue of N is 1; asked for are the next one and the least. An
eigenvalue of 1 comes once for every connected part, -1 for every part that is bipartite.

Four ways: what has a formula (complete graphs, stars), circulant graphs such as rings by the
Fourier transform of one row, all eigenvalues of a matrix up to `LONGEST_DENSE`, and Lanczos
iterations: for narrow bands, whose gap is small, on the inverse of the Laplacian L = D - B, else on
N itself. What these find lies inside the spectrum: the gap is never more than what is found of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from attnspec.analysis.quality import Quality
from attnspec.analysis.stretches import Group, grouped
from attnspec.analysis.undirected import (
    MOST_EDGES,
    both_ways,
    degrees_both_ways,
    edges_both_ways,
    own,
)
from attnspec.relations import Relation
from attnspec.stack import Stack

if TYPE_CHECKING:
    from scipy.sparse import csr_array

LONGEST_DENSE = 1024
"""Up to this length all eigenvalues are found."""

MOST_STEPS = 1 << 31
"""Edges, and four times as many ends of ranges, that the iterations pass over in all."""

MOST_ITERATIONS = 2000
"""The most iterations, each of which a vector is multiplied for."""

MOST_BANDED = 1 << 24
"""Positions times the width of their band up to which a factor of the Laplacian is kept."""

WIDEST_BAND = 1 << 34
"""The same with the width squared: the operations for the factor."""

ROUNDING = 1e-13
"""Eigenvalues this near to 1 or -1 are taken for it."""

TOLERANCE = 1e-8
"""Of the residual, relative to the distance of the eigenvalue from 1 or -1."""


@dataclass(frozen=True)
class Spectrum:
    """`second`: the largest eigenvalue but for one 1; `least`: the smallest; of n positions.

    `volume` is the sum of the degrees, `fewest` the least of them; positions without any pair have
    degree 0. Where the quality is "bound", `second` is no more and `least` no less than the true.
    """

    n: int
    second: float
    least: float
    volume: int
    fewest: int
    quality: Quality = "exact"
    note: str = ""

    @property
    def slowest(self) -> float:
        """The largest absolute value but for one 1, between 0 and 1."""
        found = max(self.second, -self.least, 0.0)
        return 1.0 if found > 1 - ROUNDING else found

    @property
    def gap(self) -> float:
        """1 - |second eigenvalue|."""
        return 1 - self.slowest


@lru_cache(maxsize=4)
def spectrum(stack: Stack, n: int) -> Spectrum:
    """The spectrum of all layers and heads together at n > 0 positions; raises TooMuch."""
    degrees = degrees_both_ways(stack, n)

    def found(second: float, least: float, quality: Quality = "exact", note: str = "") -> Spectrum:
        volume, fewest = int(degrees.sum()), int(degrees.min())
        return Spectrum(n, float(second), float(least), volume, fewest, quality, note)

    formula = _by_formula(both_ways(stack, n), degrees)
    if formula is not None:
        return found(*formula)
    graph = _graph(stack, n)
    if graph.parts > 1:
        return found(1.0, -1.0, note=f"{graph.parts:,} parts that no pair joins")
    shifts = graph.shifts()
    if shifts is not None:
        row = np.zeros(n)
        row[shifts] = 1 / len(shifts)
        values = np.sort(np.fft.fft(row).real)
        return found(values[-2], values[0], note="but for rounding")
    if n <= LONGEST_DENSE:
        values = np.linalg.eigvalsh(graph.matrix())
        return found(values[-2], values[0], note="but for rounding")
    return found(*_by_iterations(graph))


def _by_formula(both: Relation, degrees: np.ndarray) -> tuple[float, float] | None:
    """The second and the least eigenvalue of what its degrees give away, or None."""
    n = len(degrees)
    if n == 1 or int(degrees.max()) == 0:
        return 0.0, 0.0
    if int(degrees.min()) == n:
        return 0.0, 0.0
    hubs = np.flatnonzero(degrees == n)
    leaves = len(hubs) == 1 and int(degrees.sum()) == 3 * n - 2 and int(degrees.min()) == 2
    if leaves and own(both, n).all():
        # a star whose leaves read the hub and themselves
        return 0.5, 1 / n - 0.5
    return None


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
            before = np.zeros(group.places + 1)
            np.cumsum(group.ordered(vector), out=before[1:])
            sums = before[group.place + group.count] - before[group.place]
            total += np.bincount(group.row, sums, self.n)
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
        return int(connected_components(edges, directed=False)[0]) - alone

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
    residue, first = np.divmod(group.place, group.width)
    start = residue + first * group.step
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
    if ranges >= sum(int(group.count.sum()) for group in every) or ranges > MOST_EDGES:
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
    size = group.places + 1
    change = np.bincount(group.place, minlength=size)
    change -= np.bincount(group.place + group.count - 1, minlength=size)
    followed = np.flatnonzero(np.cumsum(change) > 0)
    heads, tails = (
        place // group.width + place % group.width * group.step
        for place in (
            np.concatenate([group.place, followed]),
            np.concatenate([group.place, followed + 1]),
        )
    )
    heads[: len(group.row)] = group.row
    return heads, tails


# --- iterations -----------------------------------------------------------------------------------


def _by_iterations(graph: _Graph) -> tuple[float, float, Quality, str]:
    """The second and the least eigenvalue, and how far they are to be trusted."""
    most = min(MOST_ITERATIONS, max(20, MOST_STEPS // graph.work))
    wave = _wave(graph)
    banded = _inverse(graph, wave)
    if banded is None:
        found = lanczos(graph.below, wave, most)
        second, least = found.largest, found.least
        settled = found.settled
    else:
        inverse, moved = banded
        slow, found = lanczos(inverse, wave, most), lanczos(graph.below, wave, 100)
        second, least = 1 - (1 / slow.largest - moved), found.least
        # the least value hardly matters where it is far from -1
        settled = slow.settled and (found.settled or -least < 0.9 * second)
    if settled:
        return second, least, "estimate", "by Lanczos iterations"
    return second, least, "bound", "at most: the iterations did not settle"


@dataclass(frozen=True)
class Extremes:
    """The largest and the least eigenvalue that Lanczos iterations found, and whether both, or the
    one that is larger in absolute value, have settled."""

    largest: float
    least: float
    settled: bool


def lanczos(times: Callable[[np.ndarray], np.ndarray], start: np.ndarray, most: int) -> Extremes:
    """The extreme eigenvalues of a symmetric operator with values in [-1, 1], or all positive.

    Without orthogonalisation beyond three terms: copies of a value that is found may come again,
    which does no harm to the extremes.
    """
    from scipy.linalg import eigh_tridiagonal

    before = np.zeros_like(start)
    vector = start / np.linalg.norm(start)
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        product = times(vector)
        diagonal.append(float(product @ vector))
        product -= diagonal[-1] * vector
        if beside:
            product -= beside[-1] * before
        rest = float(np.linalg.norm(product))
        if len(diagonal) % 10 == 0 or len(diagonal) == most or rest < 1e-14:
            values, vectors = eigh_tridiagonal(diagonal, beside)
            at = -1 if values[-1] >= -values[0] else 0
            away = 1 - abs(values[at]) if abs(values[at]) < 1 else abs(values[at])
            settled = rest * abs(vectors[-1, at]) <= max(TOLERANCE * away, 1e-15)
            if settled or len(diagonal) == most or rest < 1e-14:
                return Extremes(float(values[-1]), float(values[0]), settled)
        beside.append(rest)
        before, vector = vector, product / rest


def _wave(graph: _Graph) -> np.ndarray:
    """A slow wave along the sequence, what a band forgets last, and a little of everything."""
    n = graph.n
    wave = np.cos(np.pi * (np.arange(n) + 0.5) / n) * graph.roots
    noise = np.random.Generator(np.random.PCG64(n)).standard_normal(n)
    start = wave / np.linalg.norm(wave) + 1e-3 * noise / np.linalg.norm(noise)
    return np.asarray(start - graph.first * float(graph.first @ start))


def _inverse(
    graph: _Graph, wave: np.ndarray
) -> tuple[Callable[[np.ndarray], np.ndarray], float] | None:
    """(1 - N + e)^-1 for a narrow band, without the first eigenvector, and the small e; None for
    others."""
    edges = graph.edges
    if edges is None:
        return None
    rows = np.repeat(np.arange(graph.n), np.diff(edges.indptr))
    away = rows - edges.indices
    reach = int(away.max(initial=0))
    if not _is_narrow(reach, graph.n):
        return None
    from scipy.linalg import cho_solve_banded, cholesky_banded

    steps = np.cos(np.pi * (np.arange(graph.n) + 0.5) / graph.n)
    slow = ((steps[rows] - steps[edges.indices]) ** 2).sum() / (2 * (graph.degrees @ steps**2))
    moved = float(slow) / 1000
    below = away > 0
    band = np.zeros((reach + 1, graph.n))
    # entry (q, k) of the lower half lies in row q - k, column k; loops cancel in the Laplacian
    band[away[below], edges.indices[below]] = -1
    loops = np.bincount(rows[away == 0], minlength=graph.n)
    # a position without a pair has an eigenvalue 0 of N
    band[0] = graph.degrees - loops + (graph.degrees == 0) + moved * graph.roots**2
    factor = cholesky_banded(band, overwrite_ab=True, lower=True, check_finite=False)

    def times(vector: np.ndarray) -> np.ndarray:
        vector = vector - graph.first * float(graph.first @ vector)
        solved = cho_solve_banded((factor, True), graph.roots * vector, check_finite=False)
        product = graph.roots * solved
        return np.asarray(product - graph.first * float(graph.first @ product))

    return times, moved
