"""A layer whose inputs list the keys that each query reads: every rank asks the others for the rows
that its own queries chose, and is sent these alone, each once for all heads that read it.

What may be read at all is known before: the keys of the widest graph. Where most of them would be
asked for, all of them are sent unasked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnspec.backends.common.labels import possible
from attnspec.backends.decided.lists import SomeKeys
from attnspec.distributed.cuts import rows_of
from attnspec.distributed.exchange import Rows, exchange_of
from attnspec.distributed.planning import ASKING, Group, exchanges
from attnspec.distributed.ranks.collectives import Mesh, anchor, tied, travel
from attnspec.distributed.ranks.regions import Partial, Parts, Region, finished, joined
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.relation import DataDependent, Relation, decided_in
from attnspec.lower.work import Call, key_heads
from attnspec.runtime.decisions import data_of, decided, decisions_of

WORTH_ASKING = 0.75
"""Rows are asked for where all ranks together then receive at most this part of what they would be
sent unasked."""


@dataclass(frozen=True, eq=False)
class Sending:
    """The rows that come and those that are sent, of all samples and key heads, as their owners
    number them, int64, those of one rank after the other; how many of each rank."""

    coming: torch.Tensor
    got: list[int]
    asked: torch.Tensor
    sent: list[int]


class ChoicesHere:
    """What one rank does for a layer."""

    def __init__(
        self, groups: Sequence[Group], mesh: Mesh, ratio: int, device: torch.device, backend: str
    ) -> None:
        self.groups, self.mesh, self.ratio = groups, mesh, ratio
        self.device, self.backend = device, backend
        self.exchanges = exchanges(groups)
        self.partition = self.exchanges[0].partition
        self.own = self.partition.positions(mesh.rank)
        self.positions = [
            torch.from_numpy(self.partition.positions(r)).to(device) for r in range(mesh.ranks)
        ]
        self.learning = [(group.work, group.heads) for group in groups]
        self.decisions = decisions_of(self.learning)
        self.heads = [head for group in groups for head in group.heads]
        self._static: dict[Relation, torch.Tensor] = {}
        self._bounds: dict[tuple[int, int], torch.Tensor] = {}

    def run(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """The output of own queries and its log-sum-exps, for own shards of q, k and v; the lists
        of choices are those of own queries."""
        wrong: ValueError | None = None
        wanted = torch.zeros(0)
        try:
            calls = self._decided(parts, calls)
            wanted = self._wanted(calls, parts)
        except ValueError as error:
            wrong = error
        sending = self._agreed(wanted, parts, wrong)
        flat, kept, keys, values = self._fetched(sending, parts)
        outs = [
            self._computed(*each, (parts[0], keys, values), kept)
            for each in zip(self.groups, calls, strict=True)
        ]
        out, lse = joined(outs, self.heads)
        return tied(out, flat), None if lse is None else tied(lse, flat)

    # --- what is read ----------------------------------------------------------------------------

    def _decided(self, parts: Parts, calls: Sequence[Call]) -> list[Call]:
        """The calls with what own queries chose among the inputs; ValueError for lists that name
        what there is not."""
        q, k, _ = parts
        shape = k.new_empty(*k.shape[:2], self.partition.n, 0)
        found = decided(self.decisions, q, shape, None, calls[0].data, lambda _: {})
        return [
            replace(call, data=data_of(work, heads, self.decisions, found, call.data))
            for (work, heads), call in zip(self.learning, calls, strict=True)
        ]

    def _wanted(self, calls: Sequence[Call], parts: Parts) -> torch.Tensor:
        """The keys of others that own queries may read by these choices, bool [B, H_kv, n]; what is
        said of own keys counts for nothing."""
        k = parts[1]
        found = torch.zeros(*k.shape[:2], self.partition.n, dtype=torch.bool, device=k.device)
        for group, call in zip(self.groups, calls, strict=True):
            read = self._read(group.work.relation, call.data)
            read = read.expand(len(k), len(group.heads), -1)
            for at, head in enumerate(group.heads):
                found[:, head // self.ratio] |= read[:, at]
        padding = calls[0].padding
        return found if padding is None else found & padding[:, None]

    def _read(self, relation: Relation, choices: Mapping[Any, Any]) -> torch.Tensor:
        """At least the keys of others that own queries read, bool [B or 1, heads or 1, n]."""
        if isinstance(relation, DataDependent):
            found: torch.Tensor = choices[relation].read
            return found
        if isinstance(relation, Union | Intersection) and decided_in(relation):
            found, *rest = (self._read(term, choices) for term in relation.terms)
            for each in rest:
                found = found | each if isinstance(relation, Union) else found & each
            return found
        if relation not in self._static:
            self._static[relation] = self._known(relation)
        return self._static[relation]

    def _known(self, relation: Relation) -> torch.Tensor:
        """At least the keys of others that own queries read whatever a call brings, bool
        [1, 1, n]."""
        exchange = exchange_of(possible(relation), self.partition, Rows(1, 1, None))
        found = torch.zeros(1, 1, self.partition.n, dtype=torch.bool)
        for owner in range(self.mesh.ranks):
            taken = rows_of(exchange.keys(self.mesh.rank, owner))
            found[:, :, self.partition.positions(owner)[taken]] = True
        return found.to(self.device)

    # --- what is asked for -----------------------------------------------------------------------

    def _agreed(self, wanted: torch.Tensor, parts: Parts, wrong: ValueError | None) -> Sending:
        """What travels: one count of every two ranks decides for all of them. Raises on every rank
        where the lists of one are wrong."""
        _, k, v = parts
        ranks, me = self.mesh.ranks, self.mesh.rank
        mine = [torch.zeros(0, dtype=torch.int64, device=self.device)] * ranks
        if wrong is None:
            mine = [
                _numbers(wanted[:, :, at] & self._bound(me, r))
                for r, at in enumerate(self.positions)
            ]
        every = self.mesh.agreed([*map(len, mine)], wrong, self.device)
        counts = np.array(every, np.int64)  # [reader, owner]
        row = (k.shape[3] + v.shape[3]) * k.element_size()
        asked = int(counts.sum()) * (row + ASKING)
        if asked > WORTH_ASKING * sum(int(each.there.sum()) for each in self.exchanges):
            return self._unasked(len(k))
        got, sent = counts[me].tolist(), counts[:, me].tolist()
        coming = torch.cat(mine)
        self.mesh.received += (sum(sent) - sent[me]) * ASKING
        return Sending(coming, got, self.mesh.swap(coming, got, sent).ready(), sent)

    def _unasked(self, batch: int) -> Sending:
        """All rows that may be read at all."""
        me, every = self.mesh.rank, range(self.mesh.ranks)
        coming = [_numbers(self._bound(me, r).expand(batch, -1, -1)) for r in every]
        sent = [_numbers(self._bound(r, me).expand(batch, -1, -1)) for r in every]
        return Sending(torch.cat(coming), [*map(len, coming)], torch.cat(sent), [*map(len, sent)])

    def _bound(self, reader: int, owner: int) -> torch.Tensor:
        """Which of the owner's rows the reader may read at all, bool [H_kv, rows]; none where it
        is the owner."""
        if (reader, owner) not in self._bounds:
            shape = len(self.heads) // self.ratio, self.partition.lengths[owner]
            found = torch.zeros(shape, dtype=torch.bool)
            for group in self.groups if reader != owner else ():
                rows = torch.from_numpy(rows_of(group.rows.keys(reader, owner)))
                found[[[head // self.ratio] for head in group.heads], rows] = True
            self._bounds[reader, owner] = found.to(self.device)
        return self._bounds[reader, owner]

    # --- what travels, and what is computed ------------------------------------------------------

    def _fetched(
        self, sending: Sending, parts: Parts
    ) -> tuple[torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor]:
        """What came; the positions of all keys that are there, ascending; and these keys and their
        values, 0 for heads that read them not."""
        _, k, v = parts
        batch, heads, _, size = k.shape
        width = size + v.shape[3]
        own = [x.reshape(-1, x.shape[3]) for x in (k, v)]
        rows = torch.cat([x.index_select(0, sending.asked) for x in own], 1)
        flat = travel(
            self.mesh,
            torch.cat([anchor(parts, k.dtype), rows.flatten()]),
            [count * width for count in sending.sent],
            [count * width for count in sending.got],
        ).ready()
        kept, index = self._placed(sending, batch * heads)
        came = torch.split(flat.view(-1, width), [size, width - size], 1)
        found = []
        for x, more in zip(own, came, strict=True):
            whole = x.new_zeros(batch * heads * len(kept), x.shape[1])
            whole = whole.index_copy(0, index, torch.cat([x, more]))
            found.append(whole.view(batch, heads, len(kept), x.shape[1]))
        return flat, kept.cpu().numpy(), found[0], found[1]

    def _placed(self, sending: Sending, lines: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of all keys that are there, int64 [m], ascending; and the places among
        `lines` samples and heads, m each, of own rows and then of those that come."""
        me = self.mesh.rank
        own = torch.arange(lines * len(self.own), device=self.device)
        numbers = [own, *torch.split(sending.coming, sending.got)]
        line, at = [], []
        for codes, positions in zip(numbers, (self.positions[me], *self.positions), strict=True):
            count = max(1, len(positions))
            line.append(codes // count)
            at.append(positions[codes % count])
        there = torch.zeros(self.partition.n, dtype=torch.bool, device=self.device)
        there[torch.cat(at)] = True
        kept = there.nonzero()[:, 0]
        return kept, torch.cat(line) * len(kept) + torch.searchsorted(kept, torch.cat(at))

    def _computed(
        self,
        group: Group,
        call: Call,
        parts: Parts,
        kept: np.ndarray,
    ) -> Partial:
        """The output of the heads of a group and its log-sum-exps, over the keys that are there."""
        work, heads = group.work, list(group.heads)
        q, k, v = parts
        read = key_heads(group.heads, self.ratio)
        region = Region(work, group.heads, self.own, kept, self.device, self.backend)
        first = max(len(self.own), len(kept)) - len(self.own)
        at = torch.from_numpy(kept).to(self.device)[None, None]
        placed = {leaf: SomeKeys(call.data[leaf], at, first) for leaf in work.decided}
        mine = replace(call, data={**call.data, **placed})
        out, lse = finished(work, region.partial(q[:, heads], k[:, read], v[:, read], mine))
        return out.to(q.dtype), lse


def _numbers(taken: torch.Tensor) -> torch.Tensor:
    """The numbers of the rows that are taken, int64."""
    return taken.flatten().nonzero()[:, 0]
