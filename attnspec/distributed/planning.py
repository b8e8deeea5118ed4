"""The plan of a sequence over several ranks: who holds which positions, and what travels.

Everything here is on paper: no process is started and no tensor is made. Every rank makes the same
plan of the same spec, so that nothing but rows is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import product
from typing import cast

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.backends.common.labels import possible
from attnspec.distributed.blocks import blocks_between
from attnspec.distributed.exchange import Exchange, Rows, exchange_between
from attnspec.distributed.partitions import EVEN, Partition, candidates
from attnspec.distributed.printed import printed
from attnspec.distributed.timing import (
    Estimate,
    Pairs,
    Rates,
    at_home,
    estimate,
    pairs_of,
    together,
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

ROWS, STATES, HEADS, ALL, MIXED = "rows", "states", "heads", "all", "mixed"
CHOICES, BOTH = "choices", "both"
"""How a layer travels: rows of keys and queries as its graphs ask for them; sums over each rank's
keys; all positions of some heads to each rank; all positions of all heads to every rank; some heads
one way, some another; rows of keys that each rank asks for, as inputs list them; rows of keys that
graphs read, and sums over all others."""

ASKING = 8
"""The bytes by which one key row of one head and sample is asked for."""


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


Works = Sequence[tuple[Work, tuple[int, ...]]]
"""What groups of heads compute, and which heads they are."""

Kinds = Sequence[tuple[tuple[int, ...], Works]]
"""Layers that do the same, with their works."""

Links = tuple[np.ndarray, np.ndarray]
"""The bytes of each link, int64 [from, to]: those that come first, and those that go back."""


@dataclass(frozen=True, eq=False)
class Group:
    """Heads of one graph that read keys of the same heads, and which rows travel for them: those of
    a graph of an exchange, by its number. Groups of other graphs that read the same key heads share
    the exchange, and its keys travel with the first of them."""

    work: Work
    heads: tuple[int, ...]
    exchange: Exchange | None
    graph: int = 0

    @property
    def rows(self) -> Exchange:
        """The exchange, of heads whose rows travel."""
        return cast(Exchange, self.exchange)


@dataclass(frozen=True, eq=False)
class Way:
    """Heads of a layer, ascending, that travel one way, and the groups of those whose rows do."""

    how: str
    heads: tuple[int, ...]
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What layers that are alike do: `how` and `why` they travel, the bytes of each link forward,
    int64 [from, to], those that come first and those that go back, and the pairs that each rank
    computes, None where nobody counted them."""

    layers: tuple[int, ...]
    how: str
    why: str
    groups: tuple[Group, ...]
    there: np.ndarray
    back: np.ndarray
    pairs: Pairs | None
    mixed: tuple[Way, ...] = ()

    @property
    def ways(self) -> tuple[Way, ...]:
        """How which heads travel."""
        heads = {head for group in self.groups for head in group.heads}
        return self.mixed or (Way(self.how, tuple(sorted(heads)), self.groups),)

    @property
    def links(self) -> np.ndarray:
        """The bytes of each link forward, int64 [from, to]."""
        return np.asarray(self.there + self.back)

    @property
    def received(self) -> np.ndarray:
        """The bytes that reach each rank in one layer, forward."""
        return np.asarray(self.links.sum(0))

    @property
    def proved(self) -> int | None:
        """The value of the flows: what no other rows of these blocks would undercut."""
        if self.how != ROWS:
            return None
        return sum(exchange.flow for exchange in exchanges(self.groups))

    @property
    def balance(self) -> float | None:
        """The most work of a rank by the mean."""
        return None if self.pairs is None else self.pairs.balance

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
            "flow": self.proved,
            "balance": self.balance,
            "travel_seconds": found.travelling,
            "work_seconds": found.computing,
            "seconds": found.together,
            "hidden": found.hidden,
        }


def exchanges(groups: Sequence[Group]) -> list[Exchange]:
    """The exchanges of some groups, each once."""
    return [each.exchange for each in groups if each.exchange is not None and each.graph == 0]


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
    n: int
    partition: Partition
    tensors: Tensors
    layers: tuple[LayerPlan, ...]
    considered: tuple[Considered, ...]
    changes: tuple[str, ...]
    rates: Rates

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
            ways = [(way.how, way.heads) for way in layer.ways]
            text.update(repr((layer.layers, ways)).encode())
            for group in layer.groups:
                if group.exchange is None:
                    continue
                queries = group.exchange.query_runs[group.graph]
                for runs in (group.exchange.key_runs, queries):
                    for pair, each in runs.items():
                        text.update(repr((group.heads, pair)).encode() + each.tobytes())
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
                {
                    "partition": str(each.partition),
                    "seconds": each.seconds,
                    "bytes": each.bytes,
                    "balance": each.balance,
                }
                for each in self.considered
            ],
            "changes": list(self.changes),
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
        raise AttnSpecError(f"plans are made for 1 to {MOST_RANKS} devices, got {ranks}")
    if n > LONGEST:
        raise AttnSpecError(f"several devices are planned for up to n = {LONGEST:,}, got {n:,}")
    heads = program.heads or 1
    tensors = tensors or Tensors(heads=heads, key_heads=heads)
    rates = rates or Rates()
    drawn = Drawing(program, n, tensors, inputs, rates)
    numbers = range(program.layers or 1) if layer is None else (layer,)
    kinds = drawn.kinds(numbers)
    if partition is None:
        choices = list(drawn.candidates(kinds, ranks))
    else:
        _check_partition(partition, n, ranks)
        choices = [partition]
    plans = [drawn.layers(kinds, each) for each in choices]
    found = [
        _considered(each, layers, tensors, rates)
        for each, layers in zip(choices, plans, strict=True)
    ]
    best = 0
    for index, each in enumerate(found):
        if each.seconds < WORTH * found[best].seconds:
            best = index
    found.insert(0, found.pop(best))
    return DistributedPlan(
        program,
        n,
        choices[best],
        tensors,
        plans[best],
        tuple(found),
        tuple(_changes(choices, plans, best, tensors, rates)),
        rates,
    )


def _check_partition(partition: Partition, n: int, ranks: int) -> None:
    if partition.n != n or partition.ranks != ranks:
        raise AttnSpecError(
            f"the partition {partition} is one of {partition.n:,} positions over"
            f" {partition.ranks} ranks, and {n:,} over {ranks} are asked for"
        )


def _considered(
    partition: Partition, layers: Sequence[LayerPlan], tensors: Tensors, rates: Rates
) -> Considered:
    links = sum(len(each.layers) * each.links for each in layers)
    balances = [each.balance for each in layers if each.balance is not None]
    return Considered(
        partition,
        sum(len(each.layers) * each.estimate(tensors, rates).together for each in layers),
        int(np.sum(links, axis=0).max(initial=0)) if len(layers) else 0,
        max(balances, default=None),
    )


def _changes(
    choices: Sequence[Partition],
    plans: Sequence[Sequence[LayerPlan]],
    best: int,
    tensors: Tensors,
    rates: Rates,
) -> list[str]:
    """Where layers would be better off on their own with another partition, and what it costs to
    change to it and back: every position's numbers once each way."""
    said = []
    n, ranks = choices[best].n, choices[best].ranks
    moved = 2 * tensors.batch * tensors.heads * tensors.head_dim * tensors.element
    price = moved * (n // ranks) * (ranks - 1) // ranks / rates.link
    for at, layer in enumerate(plans[best]):
        each = [layers[at].estimate(tensors, rates).together for layers in plans]
        other = int(np.argmin(each))
        gain = each[best] - each[other]
        if other == best or gain <= 0:
            continue
        worth = "worth it" if gain > price else "not worth it"
        said.append(
            f"layers {numbers_of(layer.layers)} alone: {choices[other]} would save {1e3 * gain:.3g}"
            f" ms a layer, changing to it and back costs {1e3 * price:.3g} ms: {worth}"
        )
    return said


def numbers_of(layers: Sequence[int]) -> str:
    """Layers in a few words."""
    return ", ".join(map(str, layers[:6])) + (", …" if len(layers) > 6 else "")


class Drawing:
    """Draws plans of one program at one length, for partitions that are held against each other."""

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
        self._degrees: dict[Relation, np.ndarray | None] = {}

    def kinds(self, layers: Sequence[int]) -> Kinds:
        """Layers that do the same, with their works."""
        found: dict[tuple[tuple[Work, tuple[int, ...]], ...], list[int]] = {}
        if self.n == 0:
            return []
        for layer in layers:
            works = self.binder.works(layer, self.tensors.heads, self.n, self.n)
            key = tuple((self._given(replace(work, layer=0), layer, of), of) for work, of in works)
            found.setdefault(key, []).append(layer)
        return [(tuple(numbers), works) for works, numbers in found.items()]

    def _given(self, work: Work, layer: int, heads: tuple[int, ...]) -> Work:
        """The work with the graph that the inputs make of it, if they are given."""
        if self.stack is None or work.mechanism is not None or work.decided or not work.reads:
            return work
        return replace(work, relation=self.stack.relation(self.n, layer, heads[0]))

    def candidates(self, kinds: Kinds, ranks: int) -> list[Partition]:
        """Partitions worth a plan."""
        works = dict.fromkeys(work for _, works in kinds for work, _ in works)
        relations = [possible(work.relation) for work in works if not how_all(work)]
        degrees = [self.degrees(relation) for relation in relations]
        counted = [each for each in degrees if each is not None]
        return list(candidates(relations, self.n, ranks, counted))

    def degrees(self, relation: Relation) -> np.ndarray | None:
        """The pairs of each query, None where counting them is too much."""
        if relation not in self._degrees:
            try:
                self._degrees[relation] = degrees_of(relation, self.n)
            except TooMuch:
                self._degrees[relation] = None
        return self._degrees[relation]

    def layers(self, kinds: Kinds, partition: Partition) -> tuple[LayerPlan, ...]:
        """What each kind of layer does on this partition."""
        return tuple(self.layer(numbers, works, partition) for numbers, works in kinds)

    def layer(self, numbers: tuple[int, ...], works: Works, partition: Partition) -> LayerPlan:
        """The cheaper of what a layer can do."""
        t, ranks = self.tensors, partition.ranks
        decided = next((work for work, _ in works if work.decided), None)
        if decided is not None and all(_is_listed(work) for work, _ in works):
            return self.asked(numbers, works, partition)
        if decided is not None:
            why = f"queries and keys decide the pairs of `{decided.decided[0].name}`"
            everything, heads = all_links(partition, t), head_links(partition, t)
            if _most(heads) < _most(everything) and all(_by_heads(work) for work, _ in works):
                why += f", {_most(everything):,} bytes would reach a rank with everything"
                return _alone(numbers, HEADS, why, works, heads, None)
            return _alone(numbers, ALL, why, works, everything, None)
        formula = next((work.mechanism for work, _ in works if work.mechanism is not None), None)
        if formula is not None:
            mixed = self.mixed(numbers, works, partition)
            if mixed is not None:
                return mixed
            why = f"`{formula.name}` is a formula of the whole sequence"
            heads, states = head_links(partition, t), state_links(works, partition, t)
            both = self.beside(works, partition)
            if both is not None:
                through = _most(heads), _most(both[:2])
                if through[1] < through[0]:
                    why = f"{through[0]:,} bytes would reach a rank as heads"
                    return LayerPlan(numbers, BOTH, why, both[2], *both[:2], None)
                why += f", and {through[1]:,} bytes would reach a rank as rows and sums"
            if states is not None:
                through = _most(heads), _most(states)
                if through[1] < through[0]:
                    why = f"{through[0]:,} bytes would reach a rank as heads"
                    return _alone(numbers, STATES, why, works, states, None)
                why += f", and {through[1]:,} bytes would reach a rank as sums over keys"
            return _alone(numbers, HEADS, why, works, heads, head_work(works, self, t, ranks))
        rows = self.rows(numbers, works, partition)
        if t.key_heads < ranks:
            return rows
        why = f"{int(rows.received.max()):,} bytes would reach a rank as rows"
        if rows.balance is not None:
            why += f", with a balance of {rows.balance:.3f}"
        work = head_work(works, self, t, ranks)
        dealt_out = _alone(numbers, HEADS, why, works, head_links(partition, t), work)
        seconds = [each.estimate(t, self.rates).together for each in (rows, dealt_out)]
        # where neither is sooner done, fewer bytes
        less = _most((dealt_out.there, dealt_out.back)) < _most((rows.there, rows.back))
        return dealt_out if seconds[1] * (WORTH if less else 1 / WORTH) < seconds[0] else rows

    def rows(self, numbers: tuple[int, ...], works: Works, partition: Partition) -> LayerPlan:
        """The fewest rows; or keys alone, where work comes out so much more evenly that more bytes
        are worth it."""
        found = self.cut(numbers, works, partition, True)
        if found.balance is None or found.balance <= EVEN:
            return found
        other = self.cut(numbers, works, partition, False)
        seconds = [each.estimate(self.tensors, self.rates).together for each in (found, other)]
        if seconds[1] >= WORTH * seconds[0]:
            return found
        why = (
            f"keys alone, at {int(other.received.max()):,} bytes at most, balance"
            f" {other.balance:.3f}; with queries {int(found.received.max()):,} and"
            f" {found.balance:.3f}"
        )
        return replace(other, why=why)

    def cut(
        self, numbers: tuple[int, ...], works: Works, partition: Partition, queries: bool
    ) -> LayerPlan:
        """The fewest rows of keys and, where these may travel, of queries."""
        groups = self.groups(works, partition, queries)
        links, pairs = row_links(groups, partition), self.pairs(groups, partition)
        return LayerPlan(numbers, ROWS, "", groups, *links, pairs)

    def asked(self, numbers: tuple[int, ...], works: Works, partition: Partition) -> LayerPlan:
        """The key rows that a call's lists may name at most, and that each is asked for."""
        found, t = self.cut(numbers, works, partition, False), self.tensors
        asked = found.there.T // ((t.head_dim + t.value_dim) * t.element) * ASKING
        found = replace(found, how=CHOICES, there=found.there + asked, pairs=None)
        most = int(found.received.max())
        return replace(found, why=f"two phases: at most {most:,} bytes reach a rank")

    def mixed(
        self, numbers: tuple[int, ...], works: Works, partition: Partition
    ) -> LayerPlan | None:
        """A layer of which not all heads go one way: of graphs by rows or by heads, of sums by
        states or by heads, of both by both or by heads, the others by heads, whichever is least;
        None where that is one way."""
        best: tuple[int, LayerPlan] | None = None
        sorts = [(work, of, _sort(work, self.tensors)) for work, of in works]
        for graphs, sums, both in product((ROWS, HEADS), (STATES, HEADS), (BOTH, HEADS)):
            taken = {ROWS: graphs, STATES: sums, BOTH: both, HEADS: HEADS}
            if any(way not in {sort for *_, sort in sorts} for way in taken if taken[way] != way):
                # what is not there has one way
                continue
            ways: dict[str, list[tuple[Work, tuple[int, ...]]]] = {}
            for work, of, sort in sorts:
                ways.setdefault(taken[sort], []).append((work, of))
            links = self.together(ways, partition)
            if links is not None and (best is None or _most(links[:2]) < best[0]):
                best = _most(links[:2]), self._mixed(numbers, ways, links)
        return best[1] if best is not None and len(best[1].mixed) > 1 else None

    def together(
        self, ways: Mapping[str, Works], partition: Partition
    ) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[Group, ...]]] | None:
        """The bytes of each link where works go several ways, and the groups of those of which rows
        travel; None where sums cannot."""
        t, groups = self.tensors, {ROWS: self.groups(ways.get(ROWS, ()), partition, True)}
        found: list[Links | None] = [row_links(groups[ROWS], partition)]
        if BOTH in ways:
            beside = self.beside(ways[BOTH], partition)
            if beside is None:
                return None
            found.append(beside[:2])
            groups[BOTH] = beside[2]
        if STATES in ways:
            found.append(state_links(ways[STATES], partition, t))
        if HEADS in ways:
            heads = tuple(sorted(head for _, of in ways[HEADS] for head in of))
            keys = len(key_heads(heads, t.heads // t.key_heads))
            found.append(head_links(partition, replace(t, heads=len(heads), key_heads=keys)))
        known = [links for links in found if links is not None]
        if len(known) < len(found):
            return None
        there, back = (sum(each[1:], each[0]) for each in zip(*known, strict=True))
        return there, back, groups

    def _mixed(
        self,
        numbers: tuple[int, ...],
        ways: Mapping[str, Works],
        links: tuple[np.ndarray, np.ndarray, Mapping[str, tuple[Group, ...]]],
    ) -> LayerPlan:
        found: list[Way] = []
        groups: list[Group] = []
        for how in (ROWS, STATES, BOTH, HEADS):
            heads = tuple(sorted(head for _, of in ways.get(how, ()) for head in of))
            mine = links[2].get(how, ())
            if heads:
                found.append(Way(how, heads, mine))
            groups += mine or [Group(work, of, None) for work, of in ways.get(how, ())]
        why = ", ".join(f"heads {numbers_of(way.heads)} by {way.how}" for way in found)
        return LayerPlan(numbers, MIXED, why, tuple(groups), *links[:2], None, tuple(found))

    def beside(
        self, works: Works, partition: Partition
    ) -> tuple[np.ndarray, np.ndarray, tuple[Group, ...]] | None:
        """The bytes of each link where graphs stand beside sums: keys that they read, and from each
        rank the sums over its others; None where there are no such sums, or, of causal ones, no
        position before a rank's on the ranks before."""
        t, ranks = self.tensors, range(partition.ranks)
        for work, _ in works:
            if _sort(work, t) != BOTH or (work.causal and not partition.in_order):
                return None
        groups = self.groups(works, partition, False)
        there, back = row_links(groups, partition)
        for group in groups:
            rows, features, width = sums_of(group, t)
            size = rows * (features * width + 1) * max(4, t.element)
            sends = [[sends_sums(group, owner, reader) for reader in ranks] for owner in ranks]
            there = there + size * np.array(sends)
        return there, back, groups

    def groups(self, works: Works, partition: Partition, queries: bool) -> tuple[Group, ...]:
        """The heads of each graph, apart by the key heads that they share with other graphs: a key
        row is sent once for all heads that read it."""
        t, found = self.tensors, []
        ratio = t.heads // t.key_heads
        sharing: dict[tuple[int, ...], set[int]] = {}
        for key in range(t.key_heads):
            reading = {at for at, (_, of) in enumerate(works) if any(h // ratio == key for h in of)}
            if reading:
                sharing.setdefault(tuple(sorted(reading)), set()).add(key)
        for members, keys in sharing.items():
            parts = [
                (works[at][0], tuple(h for h in works[at][1] if h // ratio in keys))
                for at in members
            ]
            exchange = exchange_between(
                [blocks_between(possible(work.relation), partition) for work, _ in parts],
                partition,
                [
                    t.rows(len(of), len(keys), queries and work.normalize in MERGED)
                    for work, of in parts
                ],
            )
            found += [Group(*part, exchange, at) for at, part in enumerate(parts)]
        return tuple(found)

    def pairs(self, groups: Sequence[Group], partition: Partition) -> Pairs | None:
        """The pairs that each rank computes, None where counting them is too much."""
        parts = []
        for group in groups:
            degrees = self.degrees(possible(group.work.relation))
            if degrees is None or group.exchange is None:
                return None
            parts.append(
                pairs_of(group.exchange, group.graph, len(group.heads), degrees, partition)
            )
        return together(parts)


def how_all(work: Work) -> bool:
    """Whether the whole sequence is needed for one head's output, whatever the graph."""
    return work.mechanism is not None or bool(work.decided)


def _is_listed(work: Work) -> bool:
    """Whether inputs alone list what is not known before of what is read."""
    return work.mechanism is None and all(leaf.by_inputs for leaf in work.decided)


def _by_heads(work: Work) -> bool:
    """Whether some heads decide by their own queries and keys alone, or by what an input says of
    them, whatever others do; other inputs and what is learned are about all of them."""
    each = work.decided
    own = not any(leaf.by_inputs or leaf.across_heads or leaf.learned for leaf in each)
    values = (getattr(leaf, entry.name) for leaf in each for entry in fields(leaf))  # type: ignore[arg-type]
    given = {value.name for value in values if isinstance(value, StandIn)}
    return not each or (own and given.issuperset(work.reads))


def _sort(work: Work, t: Tensors) -> str:
    """The way that a work may go beside that of heads, which all may go."""
    if work.mechanism is None:
        return ROWS
    if work.mechanism.key_sums(t.head_dim) is None:
        return HEADS
    if work.hybrid:
        return HEADS if work.reads or work.decided or not work.mechanism.sums else BOTH
    return STATES


def _most(links: Links) -> int:
    """The most bytes that reach a rank."""
    return int((links[0] + links[1]).sum(0).max())


def _alone(
    numbers: tuple[int, ...],
    how: str,
    why: str,
    works: Works,
    links: Links,
    work: np.ndarray | None,
) -> LayerPlan:
    """A layer whose graphs do not say what travels: work waits for all of it."""
    groups = tuple(Group(work, heads, None) for work, heads in works)
    return LayerPlan(numbers, how, why, groups, *links, None if work is None else at_home(work))


def dealt(rank: int, ranks: int, count: int) -> range:
    """Which of so many things, such as key heads, are a rank's, where they are dealt out."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def row_links(groups: Sequence[Group], partition: Partition) -> Links:
    """The bytes of each link where rows travel."""
    there = back = np.zeros((partition.ranks,) * 2, np.int64)
    for each in exchanges(groups):
        there, back = there + each.there, back + each.back
    return there, back


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


def sums_of(group: Group, t: Tensors) -> tuple[int, int, int]:
    """How many sums over keys a group has, one for each key head or head and sample, and of each
    the features and the numbers of a feature."""
    work, ratio = group.work, t.heads // t.key_heads
    kept = None if work.mechanism is None else work.mechanism.key_sums(t.head_dim)
    if kept is None:
        raise ValueError("a graph alone has no sums over keys")
    many = len(group.heads if kept.by_head else key_heads(group.heads, ratio)) * t.batch
    return many, kept.features, t.value_dim + kept.divides


def sends_sums(group: Group, owner: int, reader: int) -> bool:
    """Whether a rank sends another one the sums over keys that do not travel there: there are some,
    and, where they are causal, the queries come behind them."""
    if group.exchange is None or owner == reader or (group.work.causal and owner > reader):
        return False
    lengths = group.exchange.partition.lengths
    return bool(lengths[reader]) and lengths[owner] > group.exchange.key_rows[reader, owner]


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


def head_work(works: Works, drawn: Drawing, t: Tensors, ranks: int) -> np.ndarray | None:
    """The pairs of each rank's heads; of formulas, whose work is not counted in pairs, none."""
    found = np.zeros(ranks)
    owner = {h: r for r in range(ranks) for h in dealt(r, ranks, t.key_heads)}
    for work, heads in works:
        if how_all(work):
            return None
        degrees = drawn.degrees(possible(work.relation))
        if degrees is None:
            return None
        for head in heads:
            found[owner[head * t.key_heads // t.heads]] += float(degrees.sum(dtype=np.float64))
    return found


def all_links(partition: Partition, t: Tensors) -> Links:
    """The bytes of each link where every rank is sent everything."""
    row = t.rows(t.heads, t.key_heads, False)
    sent = np.array(partition.lengths, np.int64) * (row.key + row.query)
    every = np.repeat(sent[:, None], partition.ranks, axis=1)
    return _between(every), np.zeros_like(every)
