"""A graph is a relation with one defining predicate: `holds(q, k, n)`.

Everything else about a relation has a slow default derived from `holds` in this one base class. A
pattern overrides what it knows in closed form, and one generic test compares every override with
the default.

`holds` is written with operators that work elementwise, so the same formula answers for Python
integers, numpy arrays and torch tensors: `&`, `|`, `^ True` instead of `and`, `or`, `not`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from attnspec.ir.mechanisms.declaration import Part
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Scalar
from attnspec.limits import LIMITS

EMPTY, SOME, FULL = 0, 1, 2
"""What a relation says of a tile: no pair, undecided, every pair. `&` is min, `|` is max."""

Elementwise: TypeAlias = Any
"""Python integers, numpy arrays or torch tensors, and the truth values that come of them."""

Progressions: TypeAlias = "tuple[np.ndarray, np.ndarray, np.ndarray | int]"
Edges: TypeAlias = "tuple[np.ndarray, np.ndarray]"


@dataclass(frozen=True)
class Tiles:
    """Arithmetic progressions of positions `start, start + step, … < stop`, one per array entry.

    Queries and keys of a tile pair are two `Tiles` whose arrays broadcast against each other. No
    progression is empty.
    """

    start: np.ndarray
    stop: np.ndarray
    step: int = 1

    @property
    def last(self) -> np.ndarray:
        return np.asarray(self.start + (self.stop - 1 - self.start) // self.step * self.step)

    @property
    def count(self) -> np.ndarray:
        return np.asarray((self.stop - 1 - self.start) // self.step + 1)

    @property
    def shape(self) -> list[np.ndarray]:
        """Integers that are equal where tiles differ by their first position alone."""
        return [self.count]

    def take(self, index: np.ndarray) -> Tiles:
        """The tiles with these numbers."""
        return Tiles(self.start[index], self.stop[index], self.step)


@dataclass(frozen=True, kw_only=True)
class Spans(Tiles):
    """Tiles of listed positions, in any order: rows `which` of `lists` int64 [m, size], short ones
    filled up with their last.

    As tiles they are their spans: what is known of a span is true of the positions listed in it.
    """

    lists: np.ndarray
    which: np.ndarray

    def take(self, index: np.ndarray) -> Spans:
        start, stop, which = self.start[index], self.stop[index], self.which[index]
        return Spans(start, stop, lists=self.lists, which=which)


@dataclass(frozen=True)
class Changing:
    """Why the pairs of a pattern are others at another n though its sizes are not, what would mend
    that, and whether it is so under the statement `causal` too."""

    why: str
    mend: str
    under_causal: bool = True


@dataclass(frozen=True)
class Ahead:
    """A query whose output may change with a later token though it reads no later key, and why."""

    query: int
    token: int
    why: str


class Relation:
    """A set of pairs (q, k): query position q reads key position k, 0 <= q, k < n."""

    name: ClassVar[str] = ""

    word: ClassVar[str] = ""
    """How the language writes the pattern where that is not its name: what is made of another one
    by the compiler cannot be called."""

    data_dependent: ClassVar[bool] = False
    """Whether queries and keys decide the pairs, so that `holds` cannot answer."""

    needs_grid: ClassVar[bool] = False
    """Whether the positions must be cells of a grid."""

    numpy_only: ClassVar[bool] = False
    """Whether `holds` looks numbers up in tables and so takes no tensors."""

    scattered: ClassVar[bool] = False
    """Whether pairs are drawn position by position: only a table tells which tiles they lie in."""

    reads_itself: ClassVar[bool] = False
    """Whether every query, on a grid every cell, reads itself, where no predicate tells it."""

    symmetric: ClassVar[bool] = False
    """Whether (q, k) implies (k, q); proofs ask the predicate of a pattern that has one."""

    moves_by: ClassVar[int | None] = None
    """How far both ends of a pair may move, where no predicate tells it."""

    sides: ClassVar[str] = "qk"
    """Which of query and key decide; the pairs that one of them decides are a rectangle."""

    changes: ClassVar[Changing | None] = None
    """How pairs change with n where no size does; None where (q, k) is a pair at every n or none,
    as far as both positions exist."""

    anchored: ClassVar[bool] = True
    """Whether pairs change where all tokens move on by as many positions, inputs with them."""

    one_sequence: ClassVar[str] = ""
    """Why there are no such pairs between two sequences, "" where there are; what is to be read
    after its name."""

    @classmethod
    def not_across(cls, given: Mapping[str, object]) -> str:
        """The same with these arguments."""
        return cls.one_sequence

    @classmethod
    def changing(cls, causal: bool) -> Changing | None:
        """How pairs change with n, in a spec with or without the statement `causal`."""
        return None if causal and cls.changes and not cls.changes.under_causal else cls.changes

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar | None:
        """How many pairs there are with these arguments, but for a constant factor, where no
        predicate tells it; of data-dependent patterns, what is examined and sorted."""
        return None

    @classmethod
    def factors(cls, given: Mapping[str, Any]) -> str:
        """What `order` leaves out, in words; "" where that is not said."""
        return ""

    @classmethod
    def readings(cls, size: int) -> tuple[str, ...]:
        """The calls that a bare size may stand for, each with what it means, where they differ from
        one library to the next."""
        return ()

    @classmethod
    def anchors(cls, given: Mapping[str, Any]) -> bool:
        """Whether the pattern is anchored with these arguments."""
        return cls.anchored

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        """Whether q reads k in a sequence of n positions: the definition, elementwise."""
        raise NotImplementedError

    # --- with a default derived from `holds` ---------------------------------------------------

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        """The keys of each query in closed form, or None.

        For q of shape [m], arrays start, stop (and step) that broadcast to [m, p]: row i reads the
        p pairwise disjoint progressions `range(start[i, j], stop[i, j], step[i, j])`, all inside
        0 <= key < n; an empty one has stop <= start.
        """
        return None

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        """EMPTY, SOME or FULL for each pair of tiles, uint8 of the broadcast shape.

        EMPTY and FULL are always right; SOME may also be said of a tile that is neither examined
        nor decided by a formula. The default evaluates every pair and is exact.
        """
        return exact_cover(self, q, k, n)

    def phase(self, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
        """Integers for each pair of tiles, equal only where the masks are equal.

        They are compared between pairs of tiles that have the same steps and numbers of positions.
        The default is that of the parts, or tells every pair of tiles apart.
        """
        parts = self.parts()
        if parts is not None:
            return [phase for part in parts for phase in phase_of(part, q, k, n)]
        return [q.start + 0 * k.start, k.start + 0 * q.start]

    def parts(self) -> tuple[Relation, ...] | None:
        """Simpler relations of which this one is the union, or None."""
        return None

    def taken_apart(self, n: int) -> Relation | None:
        """The same pairs at n as operators of relations whose rows are known, or None."""
        return None

    def strides(self, n: int) -> tuple[tuple[int, int], ...]:
        """Steps (of queries, of keys) whose residue classes bring pairs together; 1 goes unsaid."""
        return ()

    def boxes(self) -> tuple[tuple[int, ...], int] | None:
        """The extents of a grid and its first position, if pairs come together in boxes of it."""
        return None

    def listing(self, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The only queries, and the only keys, that have pairs, where they are few and known."""
        return None, None

    def classes(self, n: int) -> np.ndarray | None:
        """A number [n] of each position that both ends of a pair share, where inputs say so."""
        return None

    def rows(self, first: int, last: int, n: int) -> Edges:
        """The edges of queries first <= q < last as (q, k), sorted by q, then k, no repeats."""
        closed = self.progressions(np.arange(first, last), n)
        if closed is not None:
            return expand(first, closed)
        return rows_by_cover(self, first, last, n)

    def row_keys(self, first: int, last: int, n: int) -> np.ndarray:
        """The keys of queries first <= q < last one after the other, as `rows` has them."""
        closed = self.progressions(np.arange(first, last), n)
        if closed is None or np.broadcast_shapes(*(np.shape(p) for p in closed))[-1] != 1:
            return self.rows(first, last, n)[1]
        start, stop, step = (np.broadcast_to(p, (last - first, 1))[:, 0] for p in closed)
        counts = np.maximum(0, -((start - stop) // step))
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
        if (step == 1).all():
            within += np.repeat(start - (ends - counts), counts)
            return within
        within -= np.repeat(ends - counts, counts)
        within *= np.repeat(step, counts)
        within += np.repeat(start, counts)
        return within

    def edges(self, n: int) -> int:
        """The number of pairs, an exact Python integer."""
        return int(self.degrees(n).sum())

    def degrees(self, n: int) -> np.ndarray:
        """The number of keys of each query, int64 [n]."""
        counted = self.counted(n)
        if counted is not None:
            return counted
        parts = []
        for first, last in self.chunks(n):
            q, _ = self.rows(first, last, n)
            parts.append(np.bincount(q - first, minlength=last - first))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def transposed(self) -> Relation | None:
        """The relation of the reversed pairs where a pattern knows it, or None."""
        return self if self.symmetric else None

    # --- helpers of the defaults ---------------------------------------------------------------

    def counted(self, n: int) -> np.ndarray | None:
        """The degrees where every row is known as progressions: however many keys these hold, it
        is their ends that are examined."""
        parts = []
        for _, closed in self.closed_rows(n):
            if closed is None:
                return None
            parts.append(lengths(closed))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def closed_rows(
        self, n: int, most: int = LIMITS.listed_at_once
    ) -> Iterator[tuple[int, Progressions | None]]:
        """The progressions of all rows, about `most` at a time, each with the first of its rows.

        A closed form may exist for some rows alone, so that any of them may be None.
        """
        step = n
        if n > LIMITS.rows_listed:
            sample = self.progressions(np.zeros(1, np.int64), n)
            width = 1 if sample is None else max(1, np.broadcast(*sample).size)
            step = max(1, most // width)
        for first in range(0, n, step or 1):
            yield first, self.progressions(np.arange(first, min(n, first + step)), n)

    def chunks(self, n: int) -> Iterator[tuple[int, int]]:
        """Ranges of queries that together have about so many edges, judged from sampled rows."""
        size = max(1, min(n, int(LIMITS.pairs_at_once / max(1.0, self.typical_degree(n))), 1 << 18))
        for first in range(0, n, size):
            yield first, min(n, first + size)

    def typical_degree(self, n: int) -> float:
        """The mean number of keys of a few rows spread over the sequence."""
        if n == 0:
            return 0.0
        sample = probes(n)
        closed = self.progressions(sample, n)
        if closed is not None:
            return float(np.mean(lengths(closed)))
        if len(sample) * n <= LIMITS.pairs_sampled and type(self).holds is not DataDependent.holds:
            # one look at all keys of all samples, where tiles would be looked for row by row
            mask = evaluate_pairs(self, sample[:, None], np.arange(n)[None], n)
            return float(mask.sum(axis=1).mean())
        return float(np.mean([len(self.rows(int(q), int(q) + 1, n)[0]) for q in sample]))


TYPICAL = 1024
"""Keys that a query is taken to read where nothing tells how many."""


def chosen_text(pattern: str) -> str:
    """Why the pairs of a data-dependent pattern are not known."""
    return f"the pairs of `{pattern}` are chosen from the tensors of each call"


class DataDependent(Relation):
    """A graph that tensors decide: its pairs exist only when a module runs, and until then it
    stands in for the choice that is made there."""

    by_inputs: ClassVar[bool] = False
    """Whether an input lists its pairs, so that a relation says them and nothing is chosen."""

    replaced: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Arguments that have no meaning where another one, an input, is given."""

    @property
    def given_choice(self) -> bool:
        """Whether inputs make the choice, with these arguments, so that it is taken as given."""
        return self.by_inputs

    def ahead(self, n: int) -> Ahead | None:
        """The first query, as far as it is known, whose choice of earlier keys later tokens may
        change; None where no choice does at n positions."""
        return None

    share: ClassVar[str | None] = "head"
    """Whose scores decide: those of the `head`, its `group` or `all`; None for a group if there
    is one."""

    @property
    def counts_by_length(self) -> str:
        """What the choice counts by n, padding included, in words; "" for nothing."""
        return ""

    @property
    def waits(self) -> str:
        """What the choice owes to queries that are yet to come, in words; "" for nothing."""
        return ""

    @property
    def counts_queries(self) -> str:
        """What the choice owes to the earlier queries of a call, of which a step has none, in
        words; "" for nothing."""
        return ""

    def doubt(self, n: int) -> str:
        """What is to be said of sizes that leave it little to choose at n positions, "" for
        nothing; what is to be read after its name."""
        return ""

    def most_keys(self, n: int) -> int:
        """At most so many keys are chosen for one query."""
        return n

    def about_keys(self, n: int) -> int:
        """Keys whose scores a query costs, about: what estimates of time go by."""
        return min(n, TYPICAL)

    def scoring(self, n: int, d: int) -> tuple[int, str]:
        """The operations by which one head decides, for heads of size d, and which they are."""
        return 0, ""

    @property
    def learned(self) -> tuple[Part, ...]:
        """What it learns, or keeps, for each layer and head."""
        return ()

    @property
    def weighs(self) -> str:
        """What it changes of the scores and weights of its pairs, in words; "" for nothing."""
        return ""

    @property
    def weighs_pairs(self) -> bool:
        """Whether pairs have weights, or keys and values factors, besides their scores."""
        return False

    @property
    def averages(self) -> bool:
        """Whether means of queries attend in their place."""
        return False

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        """Why, with these arguments, it stands alone and without `causal`, "" where it need not."""
        return ""

    governs: ClassVar[tuple[str, ...]] = ()
    """Arguments that hold for the whole `attend` that it stands in."""

    @classmethod
    def shares_keys(cls, arguments: Mapping[str, object]) -> bool:
        """Whether, with these arguments, keys are the queries, scored at unit length."""
        return False

    @classmethod
    def own_scale(cls, arguments: Mapping[str, object]) -> float | None:
        """What, with these arguments, scores are multiplied with in place of 1 / sqrt(d)."""
        return None

    @classmethod
    def beside(cls, arguments: Mapping[str, object]) -> bool:
        """Whether, with these arguments, its pairs have the weights of a softmax, so that it may
        stand beside a mechanism."""
        return True

    data_dependent: ClassVar[bool] = True
    changes: ClassVar[Changing | None] = Changing(
        "has pairs that are chosen in each call", "use a graph of positions alone"
    )

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        raise RelationError(f"{chosen_text(self.name)}: `module.pairs(q, k)` gives them")


def phase_of(relation: Relation, q: Tiles, k: Tiles, n: int) -> list[np.ndarray]:
    """The phase of pairs of tiles; a relation that decides a tile has but two phases there."""
    kinds = np.asarray(relation.cover(q, k, n), dtype=np.int64)
    decided = kinds != SOME
    parts = [np.where(decided, 0, part) for part in relation.phase(q, k, n)]
    return [*parts, np.where(decided, kinds + 1, 0)]


def lengths(closed: Progressions) -> np.ndarray:
    """The number of keys of each row."""
    start, stop, step = closed
    return np.asarray(np.maximum(0, -((start - stop) // step)).sum(axis=-1))


def in_runs(begin: np.ndarray | int, counts: np.ndarray) -> np.ndarray:
    """Runs of numbers, each so long and from its first one on, one behind the other."""
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(counts.sum()) + np.repeat(begin - before, counts))


def expand(first: int, closed: Progressions) -> Edges:
    """The edges of consecutive queries from `first` on, given their keys as progressions."""
    start, stop, step = np.broadcast_arrays(*closed)
    shape = start.shape
    counts = np.maximum(0, -((start - stop) // step)).ravel()
    within = in_runs(0, counts)
    if (step == 1).all():
        k = np.repeat(start.ravel(), counts) + within
    else:
        k = np.repeat(start.ravel(), counts) + within * np.repeat(step.ravel(), counts)
    q = np.repeat(np.arange(first, first + shape[0]), counts.reshape(shape).sum(axis=-1))
    return (q, k) if shape[1] == 1 else sort_edges(q, k)


def concatenated(parts: Iterable[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Parts of several arrays, one part at least, as one: each array behind those before it."""
    return [np.concatenate(side) for side in zip(*parts, strict=True)]


def sort_edges(q: np.ndarray, k: np.ndarray, unique: bool = False) -> Edges:
    """Edges sorted by q, then k; with `unique` also without repeats."""
    if len(q) == 0:
        return q, k
    width = int(k.max()) + 1
    code = q * width + k
    # the sort is stable on runs that are sorted already, and then costs little more than a pass
    code = np.sort(code, kind="stable")
    if unique:
        code = code[np.diff(code, prepend=-1) > 0]
    return code // width, code % width


def values_of(tiles: Tiles, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What [n] values are at the positions of tiles: a row for each different tile, short ones
    filled up with their last, and which row each tile has, of the shape of the tiles.

    Pairs of tiles repeat tiles: each is examined once.
    """
    if isinstance(tiles, Spans):
        return values[tiles.lists], tiles.which
    start, stop = np.broadcast_arrays(tiles.start, tiles.stop)
    ends = np.stack([start.ravel(), stop.ravel()], axis=1)
    single, which = np.unique(ends, axis=0, return_inverse=True)
    once = Tiles(single[:, 0], single[:, 1], tiles.step)
    steps = np.arange(int(np.max(once.count, initial=1))) * tiles.step
    listed = values[np.minimum(once.start[:, None] + steps, once.last[:, None])]
    return listed, which.reshape(start.shape)


def covered(full: np.ndarray, some: np.ndarray) -> np.ndarray:
    """FULL where every pair holds, EMPTY where none does, uint8."""
    return np.where(full, FULL, np.where(some, SOME, EMPTY)).astype(np.uint8)


def exact_cover(relation: Relation, q: Tiles, k: Tiles, n: int) -> np.ndarray:
    """The cover of every pair of tiles by evaluating `holds` on all of its positions."""
    starts = np.broadcast_arrays(q.start, q.stop, k.start, k.stop)
    answer = np.empty(starts[0].shape, np.uint8)
    for index in np.ndindex(answer.shape):
        q_start, q_stop, k_start, k_stop = (int(a[index]) for a in starts)
        mask = evaluate_pairs(
            relation,
            np.arange(q_start, q_stop, q.step)[:, None],
            np.arange(k_start, k_stop, k.step)[None, :],
            n,
        )
        answer[index] = FULL if mask.all() else SOME if mask.any() else EMPTY
    return answer


def evaluate_pairs(relation: Relation, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    """`holds` on arrays of positions, bool of the broadcast shape."""
    mask = np.asarray(relation.holds(q, k, n), dtype=bool)
    return np.broadcast_to(mask, np.broadcast_shapes(q.shape, k.shape, mask.shape))


# --- the arguments of a pattern are the fields of its dataclass ----------------------------------


def is_closed(relation: Relation) -> bool:
    """Whether every pattern in the relation has a cover of its own."""
    parts = _parts(relation)
    return all(map(is_closed, parts)) if parts else type(relation).cover is not Relation.cover


def is_scattered(relation: Relation) -> bool:
    """Whether a pattern in the relation is drawn position by position."""
    return relation.scattered or any(map(is_scattered, _parts(relation)))


def takes_tensors(relation: Relation) -> bool:
    """Whether `holds` of the relation takes tensors of positions, wherever they are."""
    return not relation.numpy_only and all(map(takes_tensors, _parts(relation)))


Value = TypeVar("Value")


def heads_in(value: object) -> set[int]:
    """The heads that a relation, or a part of it, draws for."""
    heads: set[int] = set()
    for part in value if isinstance(value, tuple) else ():
        heads |= heads_in(part)
    for entry in fields(value) if is_dataclass(value) else ():
        content, parameter = getattr(value, entry.name), entry.metadata.get("parameter")
        heads |= {content} if parameter and parameter.context == "head" else heads_in(content)
    return heads


def with_head(value: Value, head: int | None) -> Value:
    """A relation, or a part of it, as another head draws it, None for the same."""
    if head is None:
        return value
    if isinstance(value, tuple):
        return type(value)(with_head(part, head) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {}
    for entry in fields(value):
        content, parameter = getattr(value, entry.name), entry.metadata.get("parameter")
        of_head = parameter is not None and parameter.context == "head"
        changed[entry.name] = head if of_head else with_head(content, head)
    return replace(value, **changed)


def _parts(relation: object) -> list[Relation]:
    """The relations that another one is made of."""
    entries = fields(relation) if is_dataclass(relation) else ()
    values = [getattr(relation, entry.name) for entry in entries]
    parts = chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in values)
    return [part for part in parts if isinstance(part, Relation)]


def decided_in(relation: Relation) -> tuple[DataDependent, ...]:
    """The different parts of a relation that tensors decide, those of its arguments first."""
    choices = [choice for part in _parts(relation) for choice in decided_in(part)]
    own = [relation] if isinstance(relation, DataDependent) else []
    return tuple(dict.fromkeys([*choices, *own]))


def probes(n: int, count: int = 9) -> np.ndarray:
    """Up to `count` positions spread evenly over n, ascending, none twice, int64."""
    if n == 0:
        return np.zeros(0, np.int64)
    # numpy's unique loads its masked arrays, a tenth of what a short command takes to start
    places = set(np.linspace(0, n - 1, count).astype(np.int64).tolist())
    return np.array(sorted(places), np.int64)


def with_ranges(q: np.ndarray, size: int, n: int) -> Edges:
    """Each of some queries with the first key of every range of so many keys."""
    return np.repeat(q, -(-n // size)), np.tile(np.arange(0, n, size), len(q))


def finer_ranges(q: np.ndarray, k: np.ndarray, size: int, n: int) -> Edges:
    """The same with the ranges of so many keys that are in the given ones, the next coarser."""
    q, k = np.repeat(q, LIMITS.fanout), (k[:, None] + size * np.arange(LIMITS.fanout)).ravel()
    return q[k < n], k[k < n]


def rows_by_cover(relation: Relation, first: int, last: int, n: int) -> Edges:
    """The edges of queries first <= q < last, as `Relation.rows` has them."""
    none = np.zeros(0, np.int64)
    if n == 0 or first >= last:
        return none, none
    size = LIMITS.side
    closed = type(relation).cover is not Relation.cover
    while closed and size * LIMITS.side < n:
        size *= LIMITS.fanout
    q, k = with_ranges(np.arange(first, last, LIMITS.side), size, n)
    while closed:
        ends = np.minimum(q + LIMITS.side, last), np.minimum(k + size, n)
        some = relation.cover(Tiles(q, ends[0]), Tiles(k, ends[1]), n) != EMPTY
        q, k = q[some], k[some]
        if size == LIMITS.side:
            break
        size //= LIMITS.fanout
        q, k = finer_ranges(q, k, size, n)
    edges = [(none, none)]
    # often a single query is asked for
    down, across = np.arange(min(LIMITS.side, last - first)), np.arange(LIMITS.side)
    step = LIMITS.pairs_at_once // (len(down) * LIMITS.side)
    for low in range(0, len(q), step):
        part = np.s_[low : low + step]
        q_at, k_at = q[part, None, None] + down[:, None], k[part, None, None] + across
        real = (q_at < last) & (k_at < n)
        mask = evaluate_pairs(relation, np.minimum(q_at, last - 1), np.minimum(k_at, n - 1), n)
        tile, row, key = np.nonzero(mask & real)
        edges.append((q[part][tile] + row, k[part][tile] + key))
    q, k = concatenated(edges)
    return sort_edges(q, k)
