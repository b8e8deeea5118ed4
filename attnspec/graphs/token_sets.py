"""Token sets: which positions are special, `contains(i, n)` being the definition, elementwise; and
what is known of patterns whose keys are one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache, reduce
from itertools import chain
from operator import and_, or_
from typing import ClassVar, TypeAlias

import numpy as np

from attnspec.graphs.relation import (
    FULL,
    Edges,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    covered,
    in_runs,
)
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.limits import LIMITS

Runs: TypeAlias = "tuple[np.ndarray, np.ndarray, int]"
"""Progressions start, stop and their common step: disjoint, ascending, none of them empty."""


class Data:
    """A run-time input: an array of the last axis n (or lengths), compared by identity; `size` is
    that of the blocks that it is about."""

    def __init__(self, values: Elementwise, size: int = 1) -> None:
        self.values = values
        self.size = size


class TokenSet:
    """A set of positions 0 <= i < n."""

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        """Whether position i is in the set: the definition, elementwise."""
        raise NotImplementedError

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        """EMPTY, SOME or FULL for each tile; SOME also where nothing is decided."""
        if tiles.step == 1:
            before = _members_before(self, n)
            counts = before[np.minimum(tiles.stop, n)] - before[np.minimum(tiles.start, n)]
            count = tiles.stop - tiles.start
        else:
            position = tiles.start[..., None] + np.arange(int(np.max(tiles.count, initial=1))) * (
                tiles.step
            )
            real = position < tiles.stop[..., None]
            inside = np.asarray(self.contains(np.where(real, position, 0), n), dtype=bool)
            counts, count = (inside & real).sum(-1), tiles.count
        return covered(counts == count, counts > 0)

    def phase(self, tiles: Tiles, n: int) -> np.ndarray:
        """Integers for each tile, equal where equally many positions are in the set at the same
        places of it."""
        _, first, number = np.unique(tiles.start, return_index=True, return_inverse=True)
        start, stop = (
            np.broadcast_to(x, tiles.start.shape).ravel()[first] for x in (tiles.start, tiles.stop)
        )
        width = -(-int(np.max(stop - start, initial=0)) // tiles.step)
        inside = np.zeros((len(start), width), bool)
        some = max(1, LIMITS.pairs_at_once // max(1, width))
        for low in range(0, len(start), some):
            part = np.s_[low : low + some]
            at = start[part, None] + np.arange(width) * tiles.step
            real = at < stop[part, None]
            inside[part] = np.asarray(self.contains(np.where(real, at, 0), n), dtype=bool) & real
        _, alike = np.unique(np.packbits(inside, axis=1), axis=0, return_inverse=True)
        return np.asarray(alike.ravel()[number].reshape(tiles.start.shape), np.int64)

    def runs(self, n: int) -> Runs | None:
        """The members in closed form, or None."""
        return None

    def predicate(self, i: Symbol) -> Scalar | None:
        """The set as a predicate of position i and n; None where inputs say what is in it."""
        return None

    def members(self, n: int) -> np.ndarray:
        """The positions of the set in a sequence of n, ascending, int64; raises RelationError where
        they are too many to list."""
        runs = self.runs(n)
        if runs is None:
            _require_listed(n)
            return np.flatnonzero(np.asarray(self.contains(np.arange(n), n), dtype=bool))
        start, stop, step = runs
        counts = -((start - stop) // step)
        _require_listed(int(counts.sum()))
        return np.asarray(np.repeat(start, counts) + in_runs(0, counts) * step, np.int64)

    def size(self, n: int) -> int:
        """The number of members; raises RelationError where they are too many to look at."""
        runs = self.runs(n)
        if runs is None:
            return len(self.members(n))
        start, stop, step = runs
        return int((-((start - stop) // step)).sum())

    def progressions(self, n: int) -> Runs | None:
        """The members as few progressions start, stop and their common step, or None."""
        runs = self.runs(n)
        if runs is None:
            return _progressions(self, n)
        if len(runs[0]) > LIMITS.runs:
            return None
        if len(runs[0]) == 0:
            return np.zeros(1, np.int64), np.zeros(1, np.int64), 1
        return runs


@dataclass(frozen=True)
class First(TokenSet):
    """The first `count` positions."""

    count: int

    def predicate(self, i: Symbol) -> Scalar | None:
        return member("first", (self.count,), i)

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return i < self.count

    def runs(self, n: int) -> Runs | None:
        return _clipped([(0, self.count - 1)], n)

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return _range_cover(tiles, 0, self.count)


@dataclass(frozen=True)
class Last(TokenSet):
    """The last `count` positions."""

    count: int

    def predicate(self, i: Symbol) -> Scalar | None:
        return member("last", (self.count,), i)

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return i >= n - self.count

    def runs(self, n: int) -> Runs | None:
        return _clipped([(n - self.count, n - 1)], n)

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return _range_cover(tiles, n - self.count, n)


@dataclass(frozen=True)
class Every(TokenSet):
    """Positions offset, offset + step, offset + 2 step, …"""

    step: int
    offset: int

    def predicate(self, i: Symbol) -> Scalar | None:
        return member("every", (self.step, self.offset), i)

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return (i >= self.offset) & ((i - self.offset) % self.step == 0)

    def runs(self, n: int) -> Runs | None:
        if self.offset + self.step >= n:
            return _clipped([(self.offset, self.offset)], n)
        return np.array([self.offset]), np.array([n]), self.step


@dataclass(frozen=True)
class Positions(TokenSet):
    """Listed ranges of positions, each (first, last) with both ends included."""

    ranges: tuple[tuple[int, int], ...]

    def predicate(self, i: Symbol) -> Scalar | None:
        return member("positions", tuple(chain.from_iterable(self.ranges)), i)

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        inside = i != i
        for first, last in self.merged:
            inside = inside | ((i >= first) & (i <= last))
        return inside

    @cached_property
    def merged(self) -> tuple[tuple[int, int], ...]:
        """The same ranges, ascending, those that touch as one."""
        return tuple(_merged(self.ranges))

    def runs(self, n: int) -> Runs | None:
        return _clipped(self.merged, n)

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        if len(self.merged) == 1:
            first, last = self.merged[0]
            return _range_cover(tiles, first, last + 1)
        return TokenSet.cover(self, tiles, n)


@dataclass(frozen=True)
class InputTokens(TokenSet):
    """The positions that a run-time input marks, bool [..., n]."""

    data: Data

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return self.data.values[..., i]


@dataclass(frozen=True)
class Within(TokenSet):
    """The set as it is in a sequence of `length` positions, whatever else stands behind them."""

    term: TokenSet
    length: int

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        if self.length == 0:
            return i != i
        inside = i < self.length
        return inside & self.term.contains(i * inside, self.length)

    def runs(self, n: int) -> Runs | None:
        return self.term.runs(self.length) if n >= self.length else None


@dataclass(frozen=True)
class _Joined(TokenSet):
    """Sets that an operator joins; `inside` and `tiles` do so with truths and with covers."""

    terms: tuple[TokenSet, ...]
    op: ClassVar[str]
    inside: ClassVar[Callable[..., Elementwise]]
    tiles: ClassVar[Callable[..., np.ndarray]]

    def predicate(self, i: Symbol) -> Scalar | None:
        return combined(self.op, [term.predicate(i) for term in self.terms])

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return reduce(self.inside, (term.contains(i, n) for term in self.terms))

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return reduce(self.tiles, (term.cover(tiles, n) for term in self.terms))


@dataclass(frozen=True)
class TokenUnion(_Joined):
    op: ClassVar = "|"
    inside: ClassVar = or_
    tiles: ClassVar = np.maximum

    def runs(self, n: int) -> Runs | None:
        parts = [_ranges(term, n) for term in self.terms]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return None
        return _clipped(_merged(each for part in present for each in part), n)


@dataclass(frozen=True)
class TokenIntersection(_Joined):
    op: ClassVar = "&"
    inside: ClassVar = and_
    tiles: ClassVar = np.minimum

    def runs(self, n: int) -> Runs | None:
        return TokenComplement(TokenUnion(tuple(map(TokenComplement, self.terms)))).runs(n)


@dataclass(frozen=True)
class TokenComplement(TokenSet):
    term: TokenSet

    def predicate(self, i: Symbol) -> Scalar | None:
        return combined("~", [self.term.predicate(i)])

    def contains(self, i: Elementwise, n: int) -> Elementwise:
        return self.term.contains(i, n) ^ True

    def runs(self, n: int) -> Runs | None:
        ranges = _ranges(self.term, n)
        if ranges is None:
            return None
        after = [0, *(last + 1 for _, last in ranges)]
        before = [*(first - 1 for first, _ in ranges), n - 1]
        return _clipped(zip(after, before, strict=True), n)

    def cover(self, tiles: Tiles, n: int) -> np.ndarray:
        return np.asarray(FULL - self.term.cover(tiles, n), dtype=np.uint8)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges, ends included, in ascending order; those that touch are one, empty ones left out."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if last < first:
            continue
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = runs[-1][0], max(last, runs[-1][1])
        else:
            runs.append((first, last))
    return runs


def _clipped(ranges: Iterable[tuple[int, int]], n: int) -> Runs:
    """Ascending ranges, ends included, as far as they lie in a sequence of n."""
    inside = [(max(0, first), min(n - 1, last) + 1) for first, last in ranges]
    kept = np.array([each for each in inside if each[0] < each[1]], np.int64).reshape(-1, 2)
    return kept[:, 0], kept[:, 1], 1


def _ranges(tokens: TokenSet, n: int) -> list[tuple[int, int]] | None:
    """The members as ranges, ends included, or None."""
    runs = tokens.runs(n)
    if runs is None or runs[2] > 1:
        return None
    start, stop, _ = runs
    return list(zip(start.tolist(), (stop - 1).tolist(), strict=True))


def _require_listed(count: int) -> None:
    if count > LIMITS.positions_listed:
        raise RelationError(
            f"a token set lists at most {LIMITS.positions_listed:,} tokens, got {count:,}"
        )


def member(kind: str, values: Sequence[Scalar], i: Symbol) -> Scalar:
    """Whether position i is among the tokens of a kind, as a predicate."""
    match kind, values:
        case "first", (count,):
            return Apply("<", (i, count))
        case "last", (count,):
            return Apply(">=", (i, Apply("-", (Symbol("n"), count))))
        case "every", (step, 0):
            return Apply("==", (Apply("%", (i, step)), 0))
        case "every", (step, offset):
            apart = Apply("==", (Apply("%", (Apply("-", (i, offset)), step)), 0))
            return Apply("and", (Apply(">=", (i, offset)), apart))
        case _:
            ends = zip(values[::2], values[1::2], strict=True)
            ranges = tuple(Apply("within", (i, first, last)) for first, last in ends)
            return ranges[0] if len(ranges) == 1 else Apply("or", ranges) if ranges else False


def combined(op: str, parts: Sequence[Scalar | None]) -> Scalar | None:
    """`| & - ~` between predicates; None where one is not known."""
    present = tuple(part for part in parts if part is not None)
    if len(present) < len(parts):
        return None
    if op == "~":
        return Apply("not", present)
    if op == "-":
        return Apply("and", (present[0], *(Apply("not", (part,)) for part in present[1:])))
    return Apply("or" if op == "|" else "and", present)


@lru_cache(maxsize=32)
def _members_before(tokens: TokenSet, n: int) -> np.ndarray:
    """For each position 0 … n the number of members before it, int64 [n + 1]."""
    _require_listed(n)
    before = np.zeros(n + 1, np.int64)
    np.cumsum(np.asarray(tokens.contains(np.arange(n), n), dtype=bool), out=before[1:])
    return before


@lru_cache(maxsize=32)
def _progressions(tokens: TokenSet, n: int) -> tuple[np.ndarray, np.ndarray, int] | None:
    return None if n > LIMITS.positions_listed else progressions_of(tokens.members(n))


def progressions_of(members: np.ndarray) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Ascending positions as few progressions start, stop and their common step, or None."""
    gaps = np.diff(members)
    if len(gaps) and gaps[0] > 1 and (gaps == gaps[0]).all():
        return members[:1], members[-1:] + 1, int(gaps[0])
    breaks = np.flatnonzero(gaps > 1)
    if len(breaks) >= LIMITS.runs:
        return None
    if len(members) == 0:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), 1
    start = members[np.append(0, breaks + 1)]
    stop = members[np.append(breaks, len(gaps))] + 1
    return start, stop, 1


def _range_cover(tiles: Tiles, low: int, high: int) -> np.ndarray:
    """The cover of the range low <= i < high."""
    inside = (tiles.start >= low) & (tiles.last < high)
    return covered(inside, (tiles.last >= low) & (tiles.start < high))


class OfKeys(Relation):
    """What the key alone decides: the columns of a set of tokens."""

    sides: ClassVar = "k"

    def keys(self) -> TokenSet:
        """The keys that every query reads."""
        raise NotImplementedError

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        closed = self.keys().progressions(n)
        if closed is None:
            return None
        start, stop, step = closed
        shape = (len(q), len(start))
        return np.broadcast_to(start, shape), np.broadcast_to(stop, shape), step

    def rows(self, first: int, last: int, n: int) -> Edges:
        members = self.keys().members(n)
        queries = max(0, last - first)
        return np.repeat(np.arange(first, first + queries), len(members)), np.tile(members, queries)

    def edges(self, n: int) -> int:
        return self.keys().size(n) * n

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return None, self.keys().members(n)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        return [self.keys().phase(k, n) + 0 * q.start]

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        answer = self.keys().cover(k, n)
        return np.broadcast_to(answer, np.broadcast_shapes(q.start.shape, k.start.shape))


class StandIn(Data):
    """Stands in a relation for a run-time input whose tensor every call brings anew."""

    def __init__(self, name: str, size: int = 1) -> None:
        super().__init__(None, size)
        self.name = name


def inputs_of(leaf: object) -> tuple[str, ...]:
    """The names of the run-time inputs that a data-dependent graph reads by itself, not those that
    its arguments read."""
    values = (getattr(leaf, entry.name) for entry in fields(leaf))  # type: ignore[arg-type]
    return tuple(value.name for value in values if isinstance(value, StandIn))


def inputs_in(value: object) -> tuple[str, ...]:
    """The names of the run-time inputs that stand in a relation, sorted."""
    return tuple(sorted({part.name for part in _contents(value) if isinstance(part, StandIn)}))


def reads_data(value: object) -> bool:
    """Whether a relation, or a part of one, is known once there are tensors: it stands on a
    run-time input, or is data-dependent."""
    return any(
        isinstance(part, StandIn) or getattr(part, "data_dependent", False)
        for part in _contents(value)
    )


def _contents(value: object) -> Iterator[object]:
    """A value and all that it is made of."""
    yield value
    parts: Iterable[object] = value if isinstance(value, tuple) else ()
    if is_dataclass(value):
        parts = (getattr(value, entry.name) for entry in fields(value))
    for part in parts:
        yield from _contents(part)
