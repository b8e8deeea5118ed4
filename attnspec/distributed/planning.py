"""The plan of a sequence over several ranks, on paper: who holds which positions, and what travels.
Every rank makes the same plan of the same spec, so that nothing but rows is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from hashlib import sha256

import numpy as np

from attnspec.distributed.exchange import Exchange, Reading, Tensors, between
from attnspec.distributed.partitions import EVEN, Partition, balance_of, candidates, dealt
from attnspec.distributed.printed import printed
from attnspec.graphs.relation import Relation, chosen_text
from attnspec.graphs.stack import Sample, Stack, TooMuch
from attnspec.graphs.token_sets import inputs_of
from attnspec.ir.program import Program
from attnspec.ir.serial import fingerprint
from attnspec.lower.lower import Binder, pair_inputs
from attnspec.lower.work import Heads, Work, Works, key_heads
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


Links = tuple[np.ndarray, np.ndarray]
"""The bytes of each link forward, int64 [from, to]: those that come first, and those that go
back."""


@dataclass(frozen=True)
class Rates:
    """What is assumed: `link`, bytes a second that reach a rank (5e10 is a network of 400 Gbit/s);
    `speed`, its operations a second."""

    link: float = 5e10
    speed: float = 2e14


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What layers that are alike do: `how` and `why` they travel, the bytes of each link, the pairs
    of heads that each rank computes, as `Exchange` has them, None where nobody counted them, and
    the rows that travel, where these do."""

    tensors: Tensors
    rates: Rates
    how: str
    why: str
    there: np.ndarray
    back: np.ndarray
    pairs: np.ndarray | None = None
    exchanges: tuple[Exchange, ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def links(self) -> np.ndarray:
        """The bytes of each link forward, int64 [from, to]."""
        return np.asarray(self.there + self.back)

    @property
    def most(self) -> int:
        """The most bytes that reach a rank in one layer, forward."""
        return int(self.links.sum(0).max())

    @property
    def balance(self) -> float | None:
        """The most work of a rank by the mean; None where nobody counted it, or there is none."""
        if self.pairs is None or not self.pairs.any():
            return None
        return balance_of(self.pairs.sum(0))

    @cached_property
    def times(self) -> tuple[float, float, float]:
        """Seconds of one layer forward, in the order in which ranks do it: of computing, 0 where
        nobody counted the pairs, of travelling, and of both. Where bytes travel while pairs are
        computed, the longer of the two is what it takes; no rank answers another's queries before
        they are there, so that each step ends when the slowest rank is through."""
        t, none = self.tensors, np.zeros(len(self.there))
        each = 2 * (t.head_dim + t.value_dim) * t.batch / self.rates.speed
        work = np.stack([none] * 3) if self.pairs is None else self.pairs * each
        links = np.stack([self.there.sum(0), none, self.back.sum(0)]) / self.rates.link
        steps = work, links, np.maximum(work, links)
        computing, travelling, both = (float(x.max(1, initial=0).sum()) for x in steps)
        return computing, travelling, both

    @property
    def seconds(self) -> float:
        """The estimate of one layer, forward."""
        return self.times[2]

    @property
    def hidden(self) -> float:
        """The share of the time of travelling in which ranks compute, 1 where nothing travels."""
        computing, travelling, both = self.times
        return (computing + travelling - both) / travelling if travelling else 1.0

    def to_dict(self) -> dict[str, object]:
        return {
            "layers": list(self.layers),
            "bytes": int(self.links.sum()),
            "travel_seconds": self.times[1],
            "work_seconds": self.times[0],
            **_said(self, "how", "why", "balance", "seconds", "hidden"),
        }


@dataclass(frozen=True, eq=False)
class DistributedPlan:
    """A program at n positions over several ranks; `str` gives tables and a picture.

    `bytes_received` are those of each rank in all layers of the plan, forward; backward the same
    rows go the other way as gradients. `considered` has a plan for each partition that was
    compared, first that which is taken.
    """

    program: Program
    partition: Partition
    tensors: Tensors
    layers: tuple[LayerPlan, ...]
    rates: Rates
    considered: tuple[DistributedPlan, ...] = ()

    @property
    def n(self) -> int:
        return self.partition.n

    @property
    def ranks(self) -> int:
        return self.partition.ranks

    @cached_property
    def seconds(self) -> float:
        """The estimate of all layers, forward."""
        return sum(len(each.layers) * each.seconds for each in self.layers)

    @property
    def balance(self) -> float | None:
        """That of the worst layer; None where nobody counted its work."""
        return max((x.balance for x in self.layers if x.balance is not None), default=None)

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
    def bytes(self) -> int:
        """The most bytes that a rank receives."""
        return max(self.bytes_received)

    @property
    def bytes_gathered(self) -> int:
        """What a rank would receive if every key and value were sent to every rank: the one that
        holds least."""
        layers, t = sum(len(each.layers) for each in self.layers), self.tensors
        return (self.n - min(self.partition.lengths)) * t.key_heads * t.key_bytes * layers

    @cached_property
    def digest(self) -> int:
        """A number below 2 ** 62 that plans share only if they say the same."""
        text = sha256(fingerprint(self.program).encode())
        text.update(repr((self.n, self.partition, self.tensors)).encode())
        for layer in self.layers:
            text.update(repr((layer.layers, layer.how)).encode())
            for exchange in layer.exchanges:
                text.update(exchange.bars.tobytes() + exchange.there.tobytes())
        return int.from_bytes(text.digest()[:8]) >> 2

    def __str__(self) -> str:
        return printed(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.program.name,
            "devices": self.ranks,
            "head_size": self.tensors.head_dim,
            "partition": str(self.partition),
            "lengths": list(self.partition.lengths),
            "bytes_received": list(self.bytes_received),
            "links": self.links.tolist(),
            "layers": [layer.to_dict() for layer in self.layers],
            "considered": [
                {"partition": str(x.partition), **_said(x, "seconds", "bytes", "balance")}
                for x in self.considered
            ],
            **_said(self, "n", "bytes_gathered"),
            **_said(self.tensors, "batch", "heads", "key_heads", "element"),
            **_said(self.rates, "link", "speed"),
        }


def _said(plan: object, *names: str) -> dict[str, object]:
    return {name: getattr(plan, name) for name in names}


def require_one_sequence(program: Program) -> None:
    """Raises AttnSpecError for a spec that says `cross`."""
    if program.cross:
        raise AttnSpecError(
            f"`{program.name}` joins two sequences, and only one sequence can be cut over devices:"
            " gather the keys on every device, and call the module with each device's queries and"
            " their `query_start`"
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
    what estimates assume. Raises AttnSpecError for lengths or ranks that are not planned for, and
    as a plan for one device.
    """
    require_one_sequence(program)
    if not 1 <= ranks <= MOST_RANKS:
        raise TooMuch(f"plans are made for 1 to {MOST_RANKS} devices, got {ranks}")
    if n > LONGEST:
        raise TooMuch(f"several devices are planned for up to n = {LONGEST:,}, got {n:,}")
    heads = program.head_count
    tensors = tensors or Tensors(heads=heads, key_heads=heads)
    if not tensors.pairs:
        # on paper each head has its own
        each = len(pair_inputs(program)) * tensors.heads * tensors.element
        tensors = replace(tensors, pairs=each)
    planner = Planner(program, n, tensors, inputs, rates)
    kinds = planner.kinds(range(program.layer_count) if layer is None else (layer,))
    if partition is None:
        works = dict.fromkeys(work for _, works in kinds for work, _ in works)
        readings = [planner.reading(work.relation) for work in works if is_graph(work)]
        counted = [each.degrees for each in readings if each.degrees is not None]
        partitions = list(candidates([x.relation for x in readings], n, ranks, counted))
    elif (partition.n, partition.ranks) == (n, ranks):
        partitions = [partition]
    else:
        raise AttnSpecError(
            f"the partition {partition} is for {partition.n:,} positions over {partition.ranks}"
            f" ranks, and {n:,} over {ranks} are asked for"
        )
    plans = []
    for where in partitions:
        layers = tuple(replace(planner.layer(x, where), layers=numbers) for numbers, x in kinds)
        plans.append(DistributedPlan(program, where, tensors, layers, planner.rates))
    best = reduce(lambda a, b: b if b.seconds < WORTH * a.seconds else a, plans)
    return replace(best, considered=(best, *(plan for plan in plans if plan is not best)))


class Planner:
    """Makes plans of one program at one length, for partitions that are compared."""

    def __init__(
        self, program: Program, n: int, tensors: Tensors, inputs: Sample | None, rates: Rates | None
    ) -> None:
        self.n, self.tensors, self.rates = n, tensors, rates or Rates()
        self.binder = Binder(program)
        self.stack = None if inputs is None else Stack(program, inputs)
        # what the queries of a graph read
        self.reading: Callable[[Relation], Reading] = cache(partial(Reading, n=n))

    def kinds(self, layers: Sequence[int]) -> list[tuple[Heads, Works]]:
        """Layers that do the same, with their works; graphs are of the inputs, if given."""
        kinds: dict[Works, list[int]] = {}
        for layer in layers if self.n else ():
            works = []
            for work, of in self.binder.works(layer, self.tensors.heads, self.n, self.n):
                if self.stack is not None and is_graph(work) and work.reads:
                    work = replace(work, relation=self.stack.relation(self.n, layer, of[0]))
                works.append((replace(work, layer=0), of))
            kinds.setdefault(tuple(works), []).append(layer)
        return [(tuple(numbers), works) for works, numbers in kinds.items()]

    def layer(self, works: Works, partition: Partition) -> LayerPlan:
        """The cheapest of what a layer can do: of graphs by the time that it takes, else by the
        bytes that reach a rank."""
        t, rates = self.tensors, self.rates
        if all(is_graph(work) for work, _ in works):
            rows = self.rows(works, partition)
            if rows.balance is not None and rows.balance > EVEN:
                # keys alone, where work comes out so much more evenly that more bytes are worth it
                keys = self.rows(works, partition, queries=False)
                why = (
                    f"keys alone, at {keys.most:,} bytes at most, balance {keys.balance:.3f}; with"
                    f" queries {rows.most:,} and {rows.balance:.3f}"
                )
                rows = replace(keys, why=why) if keys.seconds < WORTH * rows.seconds else rows
            if pairs := dict.fromkeys(name for work, _ in works for name in work.changes.pairs):
                names = ", ".join(f"`{name}`" for name in pairs)
                why = f"keys alone for heads that read {names}, whose rows stay with their queries"
                return replace(rows, why="; ".join(filter(None, [why, rows.why])))
            if t.key_heads < partition.ranks:
                return rows
            why = f"{rows.most:,} bytes would reach a rank as rows"
            if rows.balance is not None:
                why += f", with a balance of {rows.balance:.3f}"
            counted = self.pairs_by_heads(works, partition.ranks)
            heads = LayerPlan(t, rates, HEADS, why, *head_links(partition, t), counted)
            # of two that take about as long, fewer bytes
            margin = WORTH if heads.most >= rows.most else 1 / WORTH
            return heads if heads.seconds < margin * rows.seconds else rows
        links = {
            STATES: state_links(works, partition, t),
            HEADS: head_links(partition, t) if all(_by_heads(x) for x, _ in works) else None,
            ALL: head_links(partition, t, every=True),
        }
        plans = [LayerPlan(t, rates, how, "", *x) for how, x in links.items() if x is not None]
        best = min(plans, key=lambda each: each.most)
        said = (f"{x.most:,} bytes would reach a rank as {x.how}" for x in plans if x is not best)
        # why graphs do not say what travels
        decided = [work.decided[0].name for work, _ in works if work.decided]
        formulas = [work.mechanism.name for work, _ in works if work.mechanism is not None]
        why = (
            chosen_text(decided[0])
            if decided
            else f"`{formulas[0]}` is a formula of the whole sequence"
        )
        return replace(best, why="; ".join([why, *said]))

    def rows(self, works: Works, where: Partition, queries: bool = True) -> LayerPlan:
        """Keys and, where these may travel, queries: an exchange for each set of graphs that share
        key heads, in which a key row is sent once for all heads that read it."""
        t, exchanges = self.tensors, []
        sharing: dict[tuple[int, ...], list[int]] = {}
        for key in range(t.key_heads):
            reading = (at for at, (_, of) in enumerate(works) if key in {h // t.ratio for h in of})
            sharing.setdefault(tuple(reading), []).append(key)
        for members, keys in sharing.items():
            graphs = [
                (work, tuple(head for head in of if head // t.ratio in keys))
                for work, of in map(works.__getitem__, members)
            ]
            readings = [self.reading(work.relation) for work, _ in graphs]
            exchanges.append(Exchange(where, t, graphs, readings, len(keys), queries))
        links = sum(each.there for each in exchanges), sum(each.back for each in exchanges)
        counted = [each.pairs for each in exchanges if each.pairs is not None]
        pairs = np.sum(counted, 0) if len(counted) == len(exchanges) else None
        return LayerPlan(t, self.rates, ROWS, "", *links, pairs, tuple(exchanges))

    def pairs_by_heads(self, works: Works, ranks: int) -> np.ndarray | None:
        """The pairs of each rank's heads; None where counting them is too much."""
        t, pairs = self.tensors, np.zeros((3, ranks))
        for work, heads in works:
            degrees = self.reading(work.relation).degrees
            if degrees is None:
                return None
            keys = [head // t.ratio for head in heads]
            mine = [sum(map(keys.count, share)) for share in dealt(t.key_heads, ranks)]
            pairs[0] += degrees.sum(dtype=np.float64) * np.array(mine)
        return pairs


def is_graph(work: Work) -> bool:
    """Whether heads read pairs that are known before a call, or that run-time inputs tell."""
    return work.mechanism is None and not work.decided


def _by_heads(work: Work) -> bool:
    """Whether some heads decide by their own queries and keys alone, or by what an input says of
    them, whatever others do; other inputs and what is learned are about all of them."""
    each = work.decided
    if any(leaf.share == "all" or leaf.learned for leaf in each):
        return False
    read = {name for leaf in each for name in inputs_of(leaf)}
    return not each or read.issuperset(work.reads)


def state_links(works: Works, partition: Partition, t: Tensors) -> Links | None:
    """The bytes of each link where sums over keys travel: each rank merges its share of their rows
    from all ranks, and gives every rank what it goes on from. With a share go the frames of all
    sums. None where there are no such sums, or no position before a rank's on the ranks before.
    """
    ranks, unit = partition.ranks, max(4, t.element)
    there = back = np.zeros((ranks, ranks), np.int64)
    for work, heads in works:
        kept = None
        if work.mechanism is not None and not work.hybrid:
            kept = work.mechanism.key_sums(t.head_dim)
        if kept is None or (work.causal and not partition.in_order):
            return None
        many = len(heads if kept.by_head else key_heads(heads, t.ratio)) * t.batch
        rows = np.array([len(share) for share in dealt(many * kept.features, ranks)])
        sums = rows * (t.value_dim + kept.divides + kept.keys) * unit
        there, back = there + sums + many * unit, back + sums
    return between(there), between(back.T)


def head_links(partition: Partition, t: Tensors, every: bool = False) -> Links:
    """The bytes of each link where every rank computes some heads at all positions, or `every` head
    and keeps its own positions."""
    lengths = np.array(partition.lengths, np.int64)
    keys = np.array([len(share) for share in dealt(t.key_heads, partition.ranks)])
    back = keys * t.batch * t.ratio * t.value_dim * t.element
    if every:
        keys[:], back[:] = t.key_heads, 0
    there = keys * (t.ratio * t.query_bytes + t.key_bytes) + partition.n * t.batch * t.pairs
    return between(np.outer(lengths, there)), between(np.outer(back, lengths))
