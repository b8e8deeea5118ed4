"""The pairs for which a predicate holds.

Edges: no closed form; tiles are decided by the predicate's bounds where these suffice.
Source: none; the general form of which the other patterns are special cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from attnspec.graphs.grid import AXES, grid_for
from attnspec.graphs.patterns.where_inputs import WhereInputs
from attnspec.graphs.predicates.asked import OfPredicate, at_length
from attnspec.graphs.predicates.inputs import computes_in_tensors
from attnspec.graphs.predicates.listable import listable
from attnspec.graphs.predicates.periods import comparisons, period_of
from attnspec.graphs.predicates.predicates import conjuncts, disjuncts, taken_apart
from attnspec.graphs.predicates.symmetry import says_the_same_turned, turned
from attnspec.graphs.relation import Elementwise, Progressions, Relation, Tiles
from attnspec.graphs.token_sets import progressions_of
from attnspec.ir.intervals import Bounds, bounds, reach_of
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.scalars import (
    LARGEST,
    Apply,
    Scalar,
    ScalarError,
    Value,
    evaluate,
    evaluate_exactly,
    symbols,
)
from attnspec.limits import LIMITS

_LONG = 1 << 20
"""Positions up to which a predicate of tensors must be exact."""


@dataclass(frozen=True)
class Where(OfPredicate):
    """The pairs (q, k) for which a predicate of q, k, n and their grid coordinates holds.

    A predicate that asks for the coordinates of a position holds for no pair in which that position
    is not a cell of the grid.
    """

    predicate: Scalar = argument("predicate", "a comparison of q, k and n", positional=True)
    extents: tuple[int, ...] = context("grid")
    extra_tokens: int = context("extra_tokens")

    name: ClassVar = "where"

    def __post_init__(self) -> None:
        asked = {name for name in symbols(self.predicate) if "." in name}
        if asked:
            grid_for(self.name, self.extents, self.extra_tokens)
            names = {f"{side}.{axis}" for side in "qk" for axis in AXES[len(self.extents)]}
            for name in sorted(asked - names):
                raise RelationError(f"`{name}` needs `sequence grid(T, H, W)`")

    @property
    def numpy_only(self) -> bool:  # type: ignore[override]
        """Whether the predicate has what is not an operation of tensors, or numbers beyond them."""
        return not computes_in_tensors(self.predicate) or _largest(self, _LONG) > LARGEST

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        if hasattr(q, "new_full"):
            return WhereInputs(self.predicate, (), self.extents, self.extra_tokens).holds(q, k, n)
        predicate = at_length(self.predicate, n)
        values: dict[str, Value] = {"q": _plain(q), "k": _plain(k)}
        allowed: Elementwise = True
        for side, position in tuple(values.items()):
            if self._asks(side):
                grid = self._grid
                allowed = allowed & grid.inside(position)
                cell = grid.cell(position)
                for axis, name in enumerate(f"{side}.{axis}" for axis in grid.axes):
                    if name in self._coordinates:
                        values[name] = grid.coordinate(cell, axis)
        try:
            if _fits(self, n):
                mask = evaluate(predicate, values)
            else:
                mask = np.asarray(evaluate_exactly(predicate, values)).astype(bool)
        except ScalarError as error:
            raise RelationError(f"the condition of `where` has no value: {error}") from None
        return mask & allowed & (q == q) & (k == k)

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        if self.sides == "k":
            closed = _columns(self, n)
            if closed is None:
                return None
            start, stop, step = closed
            shape = len(q), len(start)
            return np.broadcast_to(start, shape), np.broadcast_to(stop, shape), step
        if self.sides in ("", "q"):
            mask = np.asarray(self.holds(q, np.zeros(1, np.int64), n), bool) & (n > 0)
            return np.zeros((len(q), 1), np.int64), np.where(mask, n, 0)[:, None], 1
        simpler = listable(self, n)
        return None if simpler is self else simpler.progressions(q, n)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        if self.extents:
            return super().phase(q, k, n)
        phases = []
        for part in comparisons(at_length(self.predicate, n)):
            low, high = self._truth(part, q, k)
            period = period_of(part)
            if period.both and not (period.q and period.k):
                keys = [q.start % period.both, k.start - q.start]
            else:
                keys = [q.start % period.q if period.q else q.start]
                keys.append(k.start % period.k if period.k else k.start)
            phases.append(np.where(low == high, 1 + low, 0).astype(np.int64))
            phases.extend(np.where(low == high, 0, key) for key in keys)
        return phases

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        pairs = (period_of(part) for part in comparisons(at_length(self.predicate, n)))
        return tuple((each.q, each.k) for each in pairs if each.q and each.k)

    @property
    def sides(self) -> str:  # type: ignore[override]
        return "".join(sorted(_sides(self.predicate), reverse=True))

    def parts(self) -> tuple[Relation, ...] | None:
        groups: dict[object, tuple[Scalar, ...]] = {}
        for part in disjuncts(self.predicate):
            sides = _sides(part)
            # single queries, or keys, are listed together
            alike = len(sides) == 1 and not any(map(_has_stride, comparisons(part)))
            key = sides if alike else part
            groups[key] = (*groups.get(key, ()), part)
        if len(groups) < 2:
            return None
        joined = (each[0] if len(each) == 1 else Apply("or", each) for each in groups.values())
        parts = tuple(Where(part, self.extents, self.extra_tokens) for part in joined)
        if self.extra_tokens and any(part._asked != self._asked for part in parts):
            # a part that asks for no coordinates would hold for positions that have none
            return None
        return parts

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return _listing(self, n)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        return self._cover(self._truth(at_length(self.predicate, n), q, k), q, k)

    def _truth(self, predicate: Scalar, q: Tiles, k: Tiles) -> Bounds:
        """Whether a part of the predicate always holds in tiles, and whether it ever does."""
        if isinstance(predicate, Apply) and predicate.op in ("and", "or", "not"):
            parts = [self._truth(part, q, k) for part in predicate.args]
            if predicate.op == "not":
                return 1 - parts[0][1], 1 - parts[0][0]
            join = np.minimum if predicate.op == "and" else np.maximum
            low, high = parts[0]
            for part in parts[1:]:
                low, high = join(low, part[0]), join(high, part[1])
            return low, high
        ranges = self.ranges(q, k)
        if q.step > 1 or k.step > 1:
            # whoever moves by whole periods might as well stay where it is
            period = period_of(predicate)
            if period.q and q.step % period.q == 0:
                ranges["q"] = q.start, q.start
            if period.k and k.step % period.k == 0:
                ranges["k"] = k.start, k.start
        return bounds(predicate, ranges)

    def transposed(self) -> Relation:
        if says_the_same_turned(self.predicate):
            return self
        return replace(self, predicate=turned(self.predicate))

    def taken_apart(self, n: int) -> Relation | None:
        return _taken_apart(self, n)

    def boxes(self) -> tuple[tuple[int, ...], int] | None:
        return (self.extents, self.extra_tokens) if self._asks("q") and self._asks("k") else None


def _plain(position: Elementwise) -> Value:
    """Positions as Python integers where they are single numbers, else as int64 arrays."""
    return int(position) if np.ndim(position) == 0 else np.asarray(position, np.int64)


@lru_cache(maxsize=256)
def _taken_apart(relation: Where, n: int) -> Relation | None:
    """As the method, which many ways of counting ask for at the same length."""
    return taken_apart(relation.predicate, relation.extents, relation.extra_tokens, n, Where)


@lru_cache(maxsize=64)
def _columns(relation: Where, n: int) -> tuple[np.ndarray, np.ndarray, int] | None:
    """The keys of a predicate of the key alone: as a comb for each of few residues, else as few
    progressions; None where they are many."""
    period = math.lcm(
        *(period_of(part).k for part in comparisons(at_length(relation.predicate, n)))
    )
    columns = np.asarray(relation.holds(np.zeros(1, np.int64), np.arange(n), n), bool)
    if 1 < period < n:
        residues = np.flatnonzero(columns[:period])
        if len(residues) <= LIMITS.runs:
            return residues, np.full(len(residues), n), period
    return progressions_of(np.flatnonzero(columns))


def _sides(predicate: Scalar) -> frozenset[str]:
    """Which of q and k a predicate asks for."""
    return frozenset(name.split(".")[0] for name in symbols(predicate)) & {"q", "k"}


def _has_stride(comparison: Scalar) -> bool:
    """Whether queries and keys may move each by itself without a change."""
    period = period_of(comparison)
    return bool(period.q and period.k)


@lru_cache(maxsize=64)
def _listing(relation: Where, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The queries and the keys that meet what is asked of one side alone."""
    position, first = np.arange(n), np.zeros(1, np.int64)
    lists: dict[str, np.ndarray] = {}
    for part in conjuncts(at_length(relation.predicate, n)):
        sides = _sides(part)
        if len(sides) != 1:
            continue
        (side,) = sides
        alone = Where(part, relation.extents, relation.extra_tokens)
        pair = (position, first) if side == "q" else (first, position)
        lists[side] = lists.get(side, True) & np.asarray(alone.holds(*pair, n), bool)
    rows, columns = (np.flatnonzero(lists[side]) if side in lists else None for side in "qk")
    return rows, columns


def _fits(relation: Where, n: int) -> bool:
    """Whether every number met on the way to the predicate's value is known to fit in 64 bits."""
    if not relation.extents and "n" not in symbols(relation.predicate):
        # what holds up to the next power of two is not asked again while a sequence grows
        if _largest(relation, 1 << max(0, n - 1).bit_length()) <= LARGEST:
            return True
    return _largest(relation, n) <= LARGEST


@lru_cache(maxsize=256)
def _largest(relation: Where, n: int) -> float:
    """A bound of the absolute value of every number met on the way to the predicate's value."""
    all_positions = Tiles(np.zeros(1, np.int64), np.full(1, max(n, 1)))
    ranges = relation.ranges(all_positions, all_positions)
    return reach_of(at_length(relation.predicate, n), ranges)
