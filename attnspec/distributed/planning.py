"""The plan of a sequence over several ranks: who holds which positions, and what travels.

Everything here is on paper: no process is started and no tensor is made. Every rank makes the same
plan of the same spec, so that nothing but rows is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import cast

import numpy as np

from attnspec.distributed.exchange import Exchange, Reading, Rows, Works, exchange_of
from attnspec.distributed.partitions import EVEN, Partition, candidates
from attnspec.distributed.printed import printed
from attnspec.distributed.timing import (
    Estimate,
    Pairs,
    Rates,
    balance_of,
    estimate,
    pairs_of,
)
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Sample, Stack, TooMuch
from attnspec.graphs.token_sets import StandIn
from attnspec.ir.program import Program
from attnspec.ir.serial import fingerprint
from attnspec.lower.lower import Binder, stand_ins
from attnspec.lower.work import MERGED, Work, key_heads
from attnspec.text.diagnostics import AttnSpecError

WORTH = 0.99
"""A partition is taken in place of a simpler one if its estimate is below so much of that one's."""

LONGEST = 1 << 22
"""The longest sequence that is planned over several ranks."""

MOST_RANKS = 256
"""The most ranks that are planned for: every two of them have an exchange."""

ROWS, STATES, HEADS, ALL = "rows", "states", "heads", "all"
"""How a layer travels: rows of keys, and queries that read nearly everything; sums over each rank's
keys; all positions of some heads to each rank; all positions of all heads to every rank."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call over all ranks: q [batch, heads, n, head_dim], k with `key_heads`, v
    with heads of `value_dim`, numbers of `element` bytes."""

    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    element: int = 2

    @classmethod
    def of(cls, batch: int, heads: int, key_heads: int, head_dim: int) -> Tensors:
        """Tensors of half types; raises AttnSpecError unless key heads divide the heads."""
        if key_heads < 1 or heads % key_heads:
            raise AttnSpecError(
                f"the heads of keys must divide the {heads} heads of queries, got {key_heads}"
            )
        return cls(batch, heads, key_heads, head_dim, head_dim)

    def rows(self, heads: int, key_heads: int, merges: bool) -> Rows:
        """One row of so many heads; log-sum-exps, and what they weigh, are float32 at least."""
        wide = max(4, self.element)
        return Rows(
            key=self.batch * key_heads * (self.head_dim + self.value_dim) * self.element,
            query=self.batch * heads * self.head_dim * self.element,
            partial=self.batch * heads * (self.value_dim + 1) * wide if merges else None,
        )

    @property
    def key_row(self) -> int:
        """The bytes of one position's keys and values."""
        return self.rows(self.heads, self.key_heads, False).key


Kinds = Sequence[tuple[tuple[int, ...], Works]]
"""Layers that do the same, with their works."""

Links = tuple[np.ndarray, np.ndarray]
"""The bytes of each link, int64 [from, to]: those that come first, and those that go back."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What layers that are alike do: `how` and `why` they travel, the bytes of each link forward,
    int64 [from, to], those that come first and those that go back, the pairs that each rank
    computes, None where nobody counted them, and the rows that travel, where these do."""

    layers: tuple[int, ...]
    how: str
    why: str
    there: np.ndarray
    back: np.ndarray
    pairs: Pairs | None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def links(self) -> np.ndarray:
        """The bytes of each link forward, int64 [from, to]."""
        return np.asarray(self.there + self.back)

    @property
    def received(self) -> np.ndarray:
        """The bytes that reach each rank in one layer, forward."""
        return np.asarray(self.links.sum(0))

    @property
    def balance(self) -> float | None:
        """The most work of a rank by the mean."""
        return balance_of(self.pairs)

    def estimate(self, tensors: Tensors, rates: Rates) -> Estimate:
        """What one forward takes."""
        each = 2 * (tensors.head_dim + tensors.value_dim) * tensors.batch
        return estimate(self.there, self.back, self.pairs, each, rates)

    def to_dict(self, tensors: Tensors, rates: Rates) -> dict[str, object]:
        """The layer's plan as plain data."""
        found = self.estimate(tensors, rates)
        return {
            "layers": list(self.layers),
            "how": self.how,
            "why": self.why,
            "bytes": int(self.links.sum()),
            "balance": self.balance,
            "travel_seconds": found.travelling,
            "work_seconds": found.computing,
            "seconds": found.together,
            "hidden": found.hidden,
        }


@dataclass(frozen=True)
class Considered:
    """A partition, with an estimate of its seconds forward, the most bytes that a rank receives,
    and the balance of its worst layer."""

    partition: Partition
    seconds: float
    bytes: int
    balance: float | None


@dataclass(frozen=True, eq=False)
class DistributedPlan:
    """A program at n positions over several ranks; `str` gives tables and a picture.

    `bytes_received` are those of each rank in all layers of the plan, forward; backward the same
    rows go the other way as gradients. `considered` has the partition that is taken first.
    """

    program: Program
    partition: Partition
    tensors: Tensors
    layers: tuple[LayerPlan, ...]
    rates: Rates
    considered: tuple[Considered, ...] = ()

    @property
    def n(self) -> int:
        return self.partition.n

    @property
    def figures(self) -> Considered:
        """What partitions are compared by."""
        balances = [each.balance for each in self.layers if each.balance is not None]
        seconds = (
            len(each.layers) * each.estimate(self.tensors, self.rates).together
            for each in self.layers
        )
        most = max(self.bytes_received, default=0)
        return Considered(self.partition, sum(seconds), most, max(balances, default=None))

    @property
    def ranks(self) -> int:
        return self.partition.ranks

    @property
    def links(self) -> np.ndarray:
        """The bytes from each rank to each other in all layers, forward, int64 [from, to]."""
        start = np.zeros((self.ranks,) * 2, np.int64)
        return sum((len(each.layers) * each.links for each in self.layers), start)

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that reach each rank, forward."""
        return tuple(self.links.sum(0).tolist())

    @property
    def bytes_gathered(self) -> int:
        """What a rank would receive if every key and value were sent to every rank: the one that
        holds least."""
        layers = sum(len(each.layers) for each in self.layers)
        return (self.n - min(self.partition.lengths)) * self.tensors.key_row * layers

    @cached_property
    def digest(self) -> int:
        """A number below 2 ** 62 that plans share only if they say the same."""
        text = sha256(fingerprint(self.program).encode())
        text.update(repr((self.n, self.partition, self.tensors)).encode())
        for layer in self.layers:
            text.update(repr((layer.layers, layer.how)).encode())
            for exchange in layer.exchanges:
                text.update(exchange.bars.tobytes() + exchange.keys.tobytes())
        return int.from_bytes(text.digest()[:8]) >> 2

    def __str__(self) -> str:
        return printed(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data."""
        t = self.tensors
        return {
            "name": self.program.name,
            "n": self.n,
            "devices": self.ranks,
            "batch": t.batch,
            "heads": t.heads,
            "key_heads": t.key_heads,
            "head_size": t.head_dim,
            "element": t.element,
            "link": self.rates.link,
            "speed": self.rates.speed,
            "partition": str(self.partition),
            "lengths": list(self.partition.lengths),
            "bytes_received": list(self.bytes_received),
            "bytes_gathered": self.bytes_gathered,
            "links": self.links.tolist(),
            "layers": [layer.to_dict(t, self.rates) for layer in self.layers],
            "considered": [
                {**vars(each), "partition": str(each.partition)} for each in self.considered
            ],
        }


def require_one_sequence(program: Program) -> None:
    """Raises AttnSpecError for a spec that says `cross`."""
    if program.cross:
        raise AttnSpecError(
            f"`{program.name}` joins two sequences, and what is cut over devices is one: gather the"
            " keys on every device, and call the module with each device's queries and their"
            " `query_start`"
        )


def plan(
    program: Program,
    n: int,
    ranks: int,
    tensors: Tensors | None = None,
    *,
    layer: int | None = None,
    partition: Partition | None = None,
    inputs: Sample | None = None,
    rates: Rates | None = None,
) -> DistributedPlan:
    """The cheapest of the partitions, with its exchange, of one layer or of all.

    With `inputs`, one sample of the run-time inputs, graphs are those of that sample; `rates` are
    what estimates assume. Raises
    AttnSpecError for lengths or ranks that are not planned for, and as a plan for one device.
    """
    require_one_sequence(program)
    if not 1 <= ranks <= MOST_RANKS:
        raise TooMuch(f"plans are made for 1 to {MOST_RANKS} devices, got {ranks}")
    if n > LONGEST:
        raise TooMuch(f"several devices are planned for up to n = {LONGEST:,}, got {n:,}")
    heads = program.heads or 1
    tensors = tensors or Tensors(heads=heads, key_heads=heads)
    planner = Planner(program, n, tensors, inputs, rates)
    kinds = planner.kinds(range(program.layers or 1) if layer is None else (layer,))
    if partition is None:
        partitions = planner.candidates(kinds, ranks)
    elif (partition.n, partition.ranks) == (n, ranks):
        partitions = [partition]
    else:
        raise AttnSpecError(
            f"the partition {partition} is one of {partition.n:,} positions over"
            f" {partition.ranks} ranks, and {n:,} over {ranks} are asked for"
        )
    plans = []
    for each in partitions:
        layers = tuple(planner.layer(*kind, each) for kind in kinds)
        plans.append(DistributedPlan(program, each, tensors, layers, planner.rates))
    figures = [each.figures for each in plans]
    best = 0
    for index, one in enumerate(figures):
        if one.seconds < WORTH * figures[best].seconds:
            best = index
    taken = figures.pop(best)
    return replace(plans[best], considered=(taken, *figures))


class Planner:
    """Makes plans of one program at one length, for partitions that are compared."""

    def __init__(
        self,
        program: Program,
        n: int,
        tensors: Tensors,
        inputs: Sample | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.program, self.n, self.tensors = program, n, tensors
        self.rates = rates or Rates()
        self.binder = Binder(program, stand_ins(program))
        self.stack = None if inputs is None else Stack(program, inputs)
        self.readings: dict[Relation, Reading] = {}

    def kinds(self, layers: Sequence[int]) -> Kinds:
        """Layers that do the same, with their works."""
        found: dict[tuple[tuple[Work, tuple[int, ...]], ...], list[int]] = {}
        if self.n == 0:
            return []
        for layer in layers:
            works = self.binder.works(layer, self.tensors.heads, self.n, self.n)
            key = tuple((self._bound(replace(work, layer=0), layer, of), of) for work, of in works)
            found.setdefault(key, []).append(layer)
        return [(tuple(numbers), works) for works, numbers in found.items()]

    def _bound(self, work: Work, layer: int, heads: tuple[int, ...]) -> Work:
        """The work with the graph that the inputs make of it, if they are there."""
        if self.stack is None or work.mechanism is not None or work.decided or not work.reads:
            return work
        return replace(work, relation=self.stack.relation(self.n, layer, heads[0]))

    def reading(self, work: Work) -> Reading:
        """What the queries of a graph read."""
        if work.relation not in self.readings:
            self.readings[work.relation] = Reading(work.relation, self.n)
        return self.readings[work.relation]

    def candidates(self, kinds: Kinds, ranks: int) -> list[Partition]:
        """Partitions worth a plan."""
        works = dict.fromkeys(work for _, works in kinds for work, _ in works)
        readings = [self.reading(work) for work in works if is_graph(work)]
        counted = [each.degrees for each in readings if each.degrees is not None]
        relations = [each.relation for each in readings]
        return list(candidates(relations, self.n, ranks, counted))

    def layer(self, numbers: tuple[int, ...], works: Works, partition: Partition) -> LayerPlan:
        """The cheapest of what a layer can do: of graphs by the time that it takes, else by the
        bytes that reach a rank."""
        t = self.tensors
        if all(is_graph(work) for work, _ in works):
            rows = self.rows(numbers, works, partition)
            if t.key_heads < partition.ranks:
                return rows
            why = f"{_most(rows.links):,} bytes would reach a rank as rows"
            if rows.balance is not None:
                why += f", with a balance of {rows.balance:.3f}"
            links, pairs = head_links(partition, t), self.pairs_by_heads(works, partition.ranks)
            heads = LayerPlan(numbers, HEADS, why, *links, pairs)
            return heads if self._sooner(heads, rows) else rows
        links_of = {STATES: state_links(works, partition, t)}
        links_of[HEADS] = head_links(partition, t) if all(_by_heads(w) for w, _ in works) else None
        links_of[ALL] = all_links(partition, t)
        most = {how: _most(each[0] + each[1]) for how, each in links_of.items() if each is not None}
        how = min(most, key=lambda each: most[each])
        others = [
            f"{most[each]:,} bytes would reach a rank as {each}" for each in most if each != how
        ]
        why = "; ".join([_not_rows(works), *others])
        return LayerPlan(numbers, how, why, *cast(Links, links_of[how]), None)

    def _sooner(self, one: LayerPlan, other: LayerPlan) -> bool:
        """Whether a plan takes less time; of two that take about as long, fewer bytes."""
        seconds = [each.estimate(self.tensors, self.rates).together for each in (one, other)]
        fewer = _most(one.links) < _most(other.links)
        return seconds[0] * (WORTH if fewer else 1 / WORTH) < seconds[1]

    def rows(self, numbers: tuple[int, ...], works: Works, partition: Partition) -> LayerPlan:
        """Keys, and queries of rows that read nearly everything; or keys alone, where work comes
        out so much more evenly that more bytes are worth it."""
        both = self.by_rows(numbers, works, partition)
        if both.balance is None or both.balance <= EVEN:
            return both
        keys = self.by_rows(numbers, works, partition, queries=False)
        seconds = [each.estimate(self.tensors, self.rates).together for each in (both, keys)]
        if seconds[1] >= WORTH * seconds[0]:
            return both
        why = (
            f"keys alone, at {_most(keys.links):,} bytes at most, balance {keys.balance:.3f}; with"
            f" queries {_most(both.links):,} and {both.balance:.3f}"
        )
        return replace(keys, why=why)

    def by_rows(
        self, numbers: tuple[int, ...], works: Works, partition: Partition, queries: bool = True
    ) -> LayerPlan:
        """Keys and, where these may travel, queries."""
        exchanges = self.exchanges(works, partition, queries)
        there, back = (
            np.sum([getattr(each, way) for each in exchanges], 0) for way in ("there", "back")
        )
        pairs = [
            pairs_of(exchange, graph, len(heads))
            for exchange in exchanges
            for graph, (_, heads) in enumerate(exchange.works)
        ]
        counted = [each for each in pairs if each is not None]
        total = np.sum(counted, 0) if len(counted) == len(pairs) else None
        return LayerPlan(numbers, ROWS, "", there, back, total, exchanges)

    def exchanges(self, works: Works, partition: Partition, queries: bool) -> tuple[Exchange, ...]:
        """One for each set of graphs that share key heads: a key row is sent once for all heads
        that read it."""
        t, found = self.tensors, []
        ratio = t.heads // t.key_heads
        sharing: dict[tuple[int, ...], set[int]] = {}
        for key in range(t.key_heads):
            reading = {at for at, (_, of) in enumerate(works) if any(h // ratio == key for h in of)}
            sharing.setdefault(tuple(sorted(reading)), set()).add(key)
        for members, keys in sharing.items():
            graphs = tuple(
                (works[at][0], tuple(h for h in works[at][1] if h // ratio in keys))
                for at in members
            )
            rows = [t.rows(len(of), len(keys), work.normalize in MERGED) for work, of in graphs]
            readings = [self.reading(work) for work, _ in graphs]
            found.append(exchange_of(readings, partition, rows, queries, graphs))
        return tuple(found)

    def pairs_by_heads(self, works: Works, ranks: int) -> Pairs | None:
        """The pairs of each rank's heads; None where counting them is too much."""
        t = self.tensors
        found = np.zeros((3, ranks))
        owner = {h: r for r in range(ranks) for h in dealt(r, ranks, t.key_heads)}
        for work, heads in works:
            degrees = self.reading(work).degrees
            if degrees is None:
                return None
            for head in heads:
                found[0, owner[head * t.key_heads // t.heads]] += degrees.sum(dtype=np.float64)
        return found


def is_graph(work: Work) -> bool:
    """Whether heads read pairs that are known before a call, or that run-time inputs tell."""
    return work.mechanism is None and not work.decided


def _not_rows(works: Works) -> str:
    """Why graphs do not say what travels."""
    for work, _ in works:
        if work.decided:
            leaf = work.decided[0]
            who = "inputs" if leaf.by_inputs else "queries and keys"
            return f"{who} decide the pairs of `{leaf.name}`"
    formula = next(work.mechanism for work, _ in works if work.mechanism is not None)
    return f"`{formula.name}` is a formula of the whole sequence"


def _by_heads(work: Work) -> bool:
    """Whether some heads decide by their own queries and keys alone, or by what an input says of
    them, whatever others do; other inputs and what is learned are about all of them."""
    each = work.decided
    if any(leaf.across_heads or leaf.learned for leaf in each):
        return False
    values = (getattr(leaf, entry.name) for leaf in each for entry in fields(leaf))  # type: ignore[arg-type]
    read = {value.name for value in values if isinstance(value, StandIn)}
    return not each or read.issuperset(work.reads)


def _most(links: np.ndarray) -> int:
    """The most bytes that reach a rank."""
    return int(links.sum(0).max())


def dealt(rank: int, ranks: int, count: int) -> range:
    """Which of so many things, such as key heads, are a rank's, where they are dealt out."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def state_links(works: Works, partition: Partition, t: Tensors) -> Links | None:
    """The bytes of each link where sums over keys travel: each rank merges its share of their rows
    from all ranks, and gives every rank what it goes on from. With a share go the frames of all
    sums. None where there are no such sums, or no position before a rank's on the ranks before.
    """
    ranks, unit = partition.ranks, max(4, t.element)
    there = back = np.zeros(ranks, np.int64)
    for work, heads in works:
        kept = None
        if work.mechanism is not None and not work.hybrid:
            kept = work.mechanism.key_sums(t.head_dim)
        if kept is None or (work.causal and not partition.in_order):
            return None
        many = len(heads if kept.by_head else key_heads(heads, t.heads // t.key_heads)) * t.batch
        rows = [len(dealt(rank, ranks, many * kept.features)) for rank in range(ranks)]
        sums = np.array(rows, np.int64) * (t.value_dim + kept.divides + kept.keys) * unit
        there, back = there + sums + many * unit, back + sums
    every = np.zeros((ranks, ranks), np.int64)
    return _between(every + there[None]), _between(every + back[:, None])


def _between(links: np.ndarray) -> np.ndarray:
    """Links without those of a rank with itself."""
    return np.asarray(links * (1 - np.eye(len(links), dtype=np.int64)))


def head_links(partition: Partition, t: Tensors) -> Links:
    """The bytes of each link where every rank computes some heads at all positions."""
    ranks = partition.ranks
    lengths = np.array(partition.lengths, np.int64)
    mine = np.array([len(dealt(rank, ranks, t.key_heads)) for rank in range(ranks)])
    ratio, unit = t.heads // t.key_heads, t.batch * t.element
    there = mine * (ratio * t.head_dim + t.head_dim + t.value_dim) * unit
    back = mine * ratio * t.value_dim * unit
    return _between(lengths[:, None] * there[None]), _between(back[:, None] * lengths[None])


def all_links(partition: Partition, t: Tensors) -> Links:
    """The bytes of each link where every rank is sent everything."""
    row = t.rows(t.heads, t.key_heads, False)
    sent = np.array(partition.lengths, np.int64) * (row.key + row.query)
    every = np.repeat(sent[:, None], partition.ranks, axis=1)
    return _between(every), np.zeros_like(every)
