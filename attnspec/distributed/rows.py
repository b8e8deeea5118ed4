"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while the rows travel, then those that came; queries of others are weighed over
own keys and their partial results are sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from attnspec.backends.common.merging import merged, with_zero
from attnspec.distributed.collectives import Mesh, Named, Travelling, tied, travel
from attnspec.distributed.exchange import Exchange
from attnspec.distributed.regions import Partial, Parts, Region, in_wide
from attnspec.lower.work import MERGED, Call, Work, key_heads


@dataclass(frozen=True, eq=False)
class GroupHere:
    """What one rank does for heads of one graph. Rows are numbered as the rank's tensors have them;
    dictionaries go by the other rank."""

    exchange: Exchange
    graph: int
    rank: int
    ratio: int
    device: torch.device
    backend: str

    @property
    def work(self) -> Work:
        return self.exchange.works[self.graph][0]

    @property
    def heads(self) -> tuple[int, ...]:
        return self.exchange.works[self.graph][1]

    @cached_property
    def key_heads(self) -> list[int]:
        """The key heads that are read, each once."""
        return sorted({head // self.ratio for head in self.heads})

    @property
    def brings(self) -> bool:
        """Whether keys travel with this graph: they do once for all graphs that read them."""
        return self.graph == 0

    @property
    def merges(self) -> bool:
        return self.work.normalize in MERGED

    @cached_property
    def own(self) -> np.ndarray:
        """Positions of this rank."""
        return self.exchange.partition.positions(self.rank)

    @cached_property
    def others(self) -> list[int]:
        return [rank for rank in range(self.exchange.partition.ranks) if rank != self.rank]

    @cached_property
    def sent_keys(self) -> dict[int, np.ndarray]:
        """Own rows that others are sent as keys."""
        return {r: self.exchange.sent_keys(r, self.rank) for r in self.others}

    @cached_property
    def sent_queries(self) -> dict[int, np.ndarray]:
        """Own rows that others are sent as queries."""
        sent = self.exchange.sent_queries
        return {r: sent(self.rank, r, self.graph) for r in self.others}

    @cached_property
    def got_keys(self) -> dict[int, np.ndarray]:
        """Positions of the keys that come."""
        rows = {r: self.exchange.sent_keys(self.rank, r) for r in self.others}
        return {r: self.exchange.partition.positions(r)[each] for r, each in rows.items()}

    @cached_property
    def got_queries(self) -> dict[int, np.ndarray]:
        """Positions of the queries that come."""
        sent = self.exchange.sent_queries
        rows = {r: sent(r, self.rank, self.graph) for r in self.others}
        return {r: self.exchange.partition.positions(r)[each] for r, each in rows.items()}

    def region(self, queries: np.ndarray, keys: np.ndarray) -> Region:
        return Region(self.work, self.heads, queries, keys, self.device, self.backend)

    @cached_property
    def at_home(self) -> Region:
        """Own queries over own keys."""
        return self.region(self.own, self.own)

    @cached_property
    def guests(self) -> np.ndarray:
        """Positions of all keys that come."""
        return np.concatenate([self.own[:0], *(self.got_keys[r] for r in self.others)])

    @cached_property
    def reading(self) -> np.ndarray:
        """Own rows whose queries may read keys that come."""
        reading = self.exchange.readings[self.graph]
        return np.flatnonzero(reading.readers(self.guests)[self.own])

    @cached_property
    def over_guests(self) -> Region:
        """Those over the keys that come."""
        return self.region(self.own[self.reading], self.guests)

    @cached_property
    def over_all(self) -> Region:
        """Own queries over own keys and those that come, of weights that are not merged."""
        return self.region(self.own, np.concatenate([self.own, self.guests]))

    @cached_property
    def for_guests(self) -> dict[int, tuple[np.ndarray, Region]]:
        """Queries that come over own keys, but those that their rank is sent: the rows of these
        keys, and the region."""
        found = {}
        for r in self.others:
            rows = np.setdiff1d(np.arange(len(self.own)), self.sent_keys[r], assume_unique=True)
            found[r] = rows, self.region(self.got_queries[r], self.own[rows])
        return found

    def expanded(self, x: torch.Tensor) -> torch.Tensor:
        """Key heads as the formula takes them: each once where all are read equally often."""
        wanted = [self.key_heads.index(head) for head in key_heads(self.heads, self.ratio)]
        if wanted == list(range(len(self.key_heads))):
            return x
        return x[:, wanted]

    def parts(self, parts: Parts, kind: torch.dtype) -> Parts:
        """Own queries, keys and values of these heads."""
        q, k, v = parts
        keys, values = (self.expanded(x[:, self.key_heads]).to(kind) for x in (k, v))
        return q[:, list(self.heads)].to(kind), keys, values


class RowsHere:
    """What one rank does for a layer."""

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        mesh: Mesh,
        ratio: int,
        device: torch.device,
        backend: str,
    ) -> None:
        self.mesh = mesh
        self.groups = [
            GroupHere(exchange, graph, mesh.rank, ratio, device, backend)
            for exchange in exchanges
            for graph in range(len(exchange.works))
        ]
        self.learning = [(here.work, here.heads) for here in self.groups]

    def run(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """The output of own queries and its log-sum-exps, for own shards of q, k and v."""
        kind = parts[0].dtype
        parts = in_wide(parts)
        coming = self._sent(parts, kind)
        own = [here.parts(parts, kind) for here in self.groups]
        each = list(zip(self.groups, own, calls, strict=True))
        home = [
            here.at_home.partial(*mine, call) if here.merges else None for here, mine, call in each
        ]
        came = coming.ready()
        back = self._answered(parts, own, calls, came)
        outs = []
        guests: tuple[torch.Tensor, ...] = ()
        for number, ((here, mine, call), first) in enumerate(zip(each, home, strict=True)):
            if here.brings:
                none = (x[:, here.key_heads, :0].to(kind) for x in parts[1:])
                guests = tuple(
                    torch.cat([x, *(came[r][number, name] for r in here.others)], 2)
                    for name, x in zip("kv", none, strict=True)
                )
            keys, values = (here.expanded(x) for x in guests)
            outs.append(_over_guests(here, mine, call, first, (keys, values)))
        out, lse = self._joined(self._merged(outs, back.ready()))
        out = tied(tied(out.to(kind), coming.flat), back.flat)
        return out, None if lse is None else tied(tied(lse, coming.flat), back.flat)

    def _sent(self, parts: Parts, kind: torch.dtype) -> Travelling:
        """Keys with values, and queries, on their way to each rank."""
        q, k, v = parts
        sent: list[dict[Any, torch.Tensor]] = [{} for _ in range(self.mesh.ranks)]
        shapes: list[dict[Any, tuple[int, ...]]] = [{} for _ in sent]
        for number, here in enumerate(self.groups):
            for r in here.others:
                keys = here.key_heads, here.sent_keys[r], here.got_keys[r]
                queries = [*here.heads], here.sent_queries[r], here.got_queries[r]
                moving = [("k", k, *keys), ("v", v, *keys)] if here.brings else []
                for name, x, heads, own, got in [*moving, *[("q", q, *queries)] * here.merges]:
                    rows = torch.from_numpy(own).to(q.device)
                    sent[r][number, name] = x[:, heads].index_select(2, rows)
                    shapes[r][number, name] = len(x), len(heads), len(got), x.shape[3]
        return travel(self.mesh, sent, shapes, kind, parts)

    def _answered(
        self, parts: Parts, own: Sequence[Parts], calls: Sequence[Call], came: Sequence[Named]
    ) -> Travelling:
        """Partial results of others' queries over own keys, on their way back to them."""
        q, _, v = parts
        sent: list[dict[Any, torch.Tensor]] = [{} for _ in range(self.mesh.ranks)]
        shapes: list[dict[Any, tuple[int, ...]]] = [{} for _ in sent]
        for number, (here, (_, *mine), call) in enumerate(
            zip(self.groups, own, calls, strict=True)
        ):
            for r in here.others if here.merges else ():
                if len(here.sent_queries[r]):
                    shape = len(q), len(here.heads), len(here.sent_queries[r])
                    shapes[r] |= {(number, "out"): (*shape, v.shape[3]), (number, "lse"): shape}
                if len(here.got_queries[r]):
                    kept, region = here.for_guests[r]
                    rows = torch.from_numpy(kept).to(q.device)
                    k, values = (x.index_select(2, rows) for x in mine)
                    out, lse = region.partial(came[r][number, "q"], k, values, call)
                    sent[r] |= {(number, "out"): out, (number, "lse"): cast(torch.Tensor, lse)}
        learned = [table for call in calls for table in call.tables.values()]
        wide = torch.promote_types(q.dtype, torch.float32)
        return travel(self.mesh, sent, shapes, wide, (*parts, *learned))

    def _merged(self, outs: list[Partial], came: Sequence[Named]) -> list[Partial]:
        """Partial results of this rank together with those that came back."""
        for number, here in enumerate(self.groups):
            for r in here.others:
                if (number, "out") in came[r]:
                    more = came[r][number, "out"], came[r][number, "lse"]
                    rows = torch.from_numpy(here.sent_queries[r]).to(more[0].device)
                    outs[number] = _put(outs[number], rows, more)
        return outs

    def _joined(self, outs: Sequence[Partial]) -> Partial:
        """Groups as one, heads in their order; no log-sum-exps where some have none. The zero logit
        of `softmax1`, which no part has, is added here."""
        found: list[Partial] = []
        for here, (out, lse) in zip(self.groups, outs, strict=True):
            zero = here.work.normalize == "softmax1" and lse is not None
            found.append(with_zero((out, cast(torch.Tensor, lse))) if zero else (out, lse))
        order = np.argsort([head for here in self.groups for head in here.heads]).tolist()
        sums = [lse for _, lse in found if lse is not None]
        out = torch.cat([out for out, _ in found], 1)[:, order]
        return out, torch.cat(sums, 1)[:, order] if len(sums) == len(found) else None


def _over_guests(
    here: GroupHere,
    own: Parts,
    call: Call,
    first: Partial | None,
    guests: tuple[torch.Tensor, torch.Tensor],
) -> Partial:
    """Own queries over own keys, of which partial results are there unless they cannot be merged,
    and over the keys and values that came."""
    q, k, v = own
    if first is None:
        k, v = (torch.cat(pair, 2) for pair in zip((k, v), guests, strict=True))
        return here.over_all.partial(q, k, v, call)
    # what is merged is rounded once, at the end
    first = first[0].to(torch.promote_types(q.dtype, torch.float32)), first[1]
    if not len(here.reading):
        return first
    rows = torch.from_numpy(here.reading).to(q.device)
    return _put(first, rows, here.over_guests.partial(q.index_select(2, rows), *guests, call))


def _put(found: Partial, rows: torch.Tensor, more: Partial) -> Partial:
    """Partial results with more of some of their rows, merged by log-sum-exps."""
    out, lse = found[0], cast(torch.Tensor, found[1])
    other = more[0], cast(torch.Tensor, more[1])
    if len(rows) == out.shape[2]:
        # rows ascend, so that these are all of them in order
        return merged((out, lse), other)
    mine, sums = merged((out.index_select(2, rows), lse.index_select(2, rows)), other)
    return out.index_copy(2, rows, mine), lse.index_copy(2, rows, sums)
