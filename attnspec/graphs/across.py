"""Pairs between two sequences, as every room below takes pairs: within one.

A `Crossing` lays m queries and n keys out as one sequence: both from its first position on where
pairs are examined, the queries last, as in a call with a cache, where they are computed. `Across`
is what a graph holds of these positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import (
    EMPTY,
    SOME,
    Edges,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    phase_of,
)
from attnspec.graphs.token_sets import inputs_in
from attnspec.ir.crossing import evened
from attnspec.ir.program import (
    Compound,
    Crossing,
    InputRef,
    Leaf,
    Program,
    Term,
    TokenCompound,
    Tokens,
)
from attnspec.ir.scalars import Apply, Symbol, symbols


@dataclass(frozen=True)
class Across(Relation):
    """The pairs of a term whose queries and keys are numbered in their own sequences."""

    term: Relation
    crossing: Crossing

    name: ClassVar = "cross"

    @property
    def length(self) -> int:
        """A length that holds the numbers of all queries and keys."""
        return max(self.crossing.m, self.crossing.keys)

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        inside, query, present = self.places(q, k)
        return inside & self.term.holds(query, present, self.length)

    def places(
        self, q: Elementwise, k: Elementwise
    ) -> tuple[Elementwise, Elementwise, Elementwise]:
        """Whether these are a query and a key, and their numbers in their own sequences; of others
        some number."""
        low, stop = self.ends
        real, present = (q >= low) & (q < stop), k < self.crossing.keys
        query = (q - low + self.crossing.start) * real + self.crossing.start * (real ^ True)
        return real & present, query, k * present

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        (low, end), first = self.ends, self.crossing.start
        real = (q >= low) & (q < end)
        closed = self.term.progressions(np.where(real, q - low + first, first), self.length)
        if closed is None:
            return None
        start, stop, step = closed
        return start, np.minimum(stop, np.where(real, self.crossing.keys, 0)[:, None]), step

    def rows(self, first: int, last: int, n: int) -> Edges:
        (low, end), start = self.ends, self.crossing.start
        first, last = max(first, low), min(last, end)
        if start or first >= last:
            # far into the queries the term would look at more keys than there are
            return super().rows(first, max(first, last), n)
        q, k = self.term.rows(first - low, last - low, self.length)
        present = k < self.crossing.keys
        return q[present] + low, k[present]

    def parts(self) -> tuple[Relation, ...] | None:
        parts = self.term.parts()
        return None if parts is None else tuple(Across(part, self.crossing) for part in parts)

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        q, k = self.term.listing(self.length)
        low, start = self.crossing.first, self.crossing.start
        if q is not None:
            q = q[(q >= start) & (q < self.crossing.m)] - start + low
        return q, None if k is None else k[k < self.crossing.keys]

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        inside = self._inside(q, k)
        within = phase_of(self.term, self._queries(q), self._keys(k), self.length)
        outside = [np.where(inside, -1, tiles.start) for tiles in (q, k)]
        return [*(np.where(inside, part, 0) for part in within), *outside]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        outside = (q.last < self.ends[0]) | (q.start >= self.ends[1])
        outside = outside | (k.start >= self.crossing.keys)
        counts = self.term.cover(self._queries(q), self._keys(k), self.length)
        # a tile of which a part is outside is never full; empty it is where all the rest is
        rest = np.where(self._whole(q) & (counts == EMPTY), EMPTY, SOME)
        answer = np.where(outside, EMPTY, np.where(self._inside(q, k), counts, rest))
        return answer.astype(np.uint8)

    @property
    def ends(self) -> tuple[int, int]:
        """The positions of the first query and behind the last one."""
        return self.crossing.first, self.crossing.first + self.crossing.queries

    def _whole(self, q: Tiles) -> np.ndarray:
        """Which tiles have queries alone."""
        return np.asarray((q.start >= self.ends[0]) & (q.last < self.ends[1]))

    def _inside(self, q: Tiles, k: Tiles) -> np.ndarray:
        return np.asarray(self._whole(q) & (k.last < self.crossing.keys))

    def _queries(self, tiles: Tiles) -> Tiles:
        """The queries of tiles in their own sequence; of tiles that have others too the first."""
        whole, (low, stop) = self._whole(tiles), self.ends
        start = self.crossing.start
        return Tiles(
            np.where(whole, tiles.start - low + start, start),
            np.where(whole, np.minimum(tiles.stop, stop) - low + start, start + 1),
            tiles.step,
        )

    def _keys(self, tiles: Tiles) -> Tiles:
        """What of tiles are keys; of tiles that have none the first."""
        keys = self.crossing.keys
        some = tiles.start < keys
        return Tiles(
            np.where(some, tiles.start, 0),
            np.where(some, np.minimum(tiles.stop, keys), 1),
            tiles.step,
        )


def placed(relation: Relation, crossing: Crossing) -> Relation:
    """The relation of a term as positions of one sequence hold it; what tensors will decide is
    decided for those positions."""
    if isinstance(relation, Union | Intersection):
        return type(relation)(tuple(placed(term, crossing) for term in relation.terms))
    settled = getattr(relation, "by_inputs", False) and not inputs_in(relation)
    if relation.data_dependent and not settled:
        # the choice still waits for tensors: of queries and keys, or for an input
        return relation
    return Across(relation, crossing)


# --- what a term reads of which sequence ----------------------------------------------------------


def sided(
    term: Term, patterns: Mapping[str, type[Relation]], turned: bool = False
) -> Iterator[tuple[Leaf, str, object, str]]:
    """Every argument of a term's patterns: the pattern, the argument's name and value, and the
    sides that the pattern asks about, "q", "k" or both, `turned` round under `transpose`."""
    if not isinstance(term, Leaf):
        for child in term.terms:
            yield from sided(child, patterns, turned ^ (term.op == "transpose"))
        return
    sides = patterns[term.pattern].sides if isinstance(patterns[term.pattern].sides, str) else ""
    sides = _turned(sides, turned)
    for name, value in term.arguments:
        yield term, name, value, sides
        for read in sorted(symbols(value)) if isinstance(value, Symbol | Apply) else ():
            # a predicate says itself at which position it reads an input, `time(q)`
            entry, _, side = read.removesuffix(")").partition("(")
            if side:
                yield term, name, InputRef(entry, "ids"), _turned(side, turned)
        if isinstance(value, Leaf | Compound):
            yield from sided(value, patterns, turned)


def _turned(sides: str, turned: bool) -> str:
    return sides.translate(str.maketrans("qk", "kq")) if turned else sides


def reads_m(program: Program) -> bool:
    """Whether a spec between two sequences asks how many queries there are."""
    return evened(program).attends != program.attends or any(
        _moves_back(graph)
        or any("q" in sides and counts(value) for _, _, value, sides in sided(graph, BY_NAME))
        for graph in program.graphs
    )


def _moves_back(term: Term) -> bool:
    """Whether a part is shifted to earlier positions, so that the last queries lose their keys."""
    if isinstance(term, Leaf):
        return any(_moves_back(x) for _, x in term.arguments if isinstance(x, Leaf | Compound))
    moved = term.op == "shift" and not (isinstance(term.by, int) and term.by >= 0)
    return moved or any(map(_moves_back, term.terms))


def counts(value: object) -> bool:
    """Whether a token set is another one in a longer sequence."""
    if isinstance(value, TokenCompound):
        return any(map(counts, value.terms))
    return isinstance(value, Tokens) and value.kind == "last"
