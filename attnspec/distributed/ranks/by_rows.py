"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while the rows travel, then those that came; queries of others are weighed over
own keys and what was found is sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from attnspec.backends.common.merging import merged
from attnspec.distributed.cuts import rows_of
from attnspec.distributed.exchange import Exchange
from attnspec.distributed.planning import Group
from attnspec.distributed.ranks.collectives import Mesh, Swapping, anchor, taking, tied, travel
from attnspec.distributed.ranks.regions import (
    Partial,
    Parts,
    Region,
    finished,
    in_wide,
    joined,
    readers,
)
from attnspec.lower.work import MERGED, Call, key_heads


@dataclass(frozen=True, eq=False)
class GroupHere:
    """What one rank does for heads of one graph."""

    group: Group
    rank: int
    ratio: int
    device: torch.device
    backend: str

    @property
    def exchange(self) -> Exchange:
        return self.group.rows

    @cached_property
    def keys(self) -> list[int]:
        """The key heads that are read, each once."""
        return sorted({head // self.ratio for head in self.group.heads})

    @property
    def brings(self) -> bool:
        """Whether keys travel with this group: they do once for all graphs that read them."""
        return self.group.graph == 0

    @property
    def merges(self) -> bool:
        return self.group.work.normalize in MERGED

    @cached_property
    def own(self) -> np.ndarray:
        return self.exchange.partition.positions(self.rank)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.exchange.partition.ranks) if rank != self.rank]

    @cached_property
    def sent_keys(self) -> dict[int, np.ndarray]:
        """Own key rows by the rank that reads them."""
        return {r: rows_of(self.exchange.keys(r, self.rank)) for r in self.others}

    @cached_property
    def sent_queries(self) -> dict[int, np.ndarray]:
        """Own query rows by the rank whose keys they read."""
        queries, graph = self.exchange.queries, self.group.graph
        return {r: rows_of(queries(self.rank, r, graph)) for r in self.others}

    @cached_property
    def got_keys(self) -> dict[int, np.ndarray]:
        """Positions of the keys that come, by the rank that they come from."""
        positions = self.exchange.partition.positions
        return {r: positions(r)[rows_of(self.exchange.keys(self.rank, r))] for r in self.others}

    @cached_property
    def got_queries(self) -> dict[int, np.ndarray]:
        """Positions of the queries that come."""
        positions, queries = self.exchange.partition.positions, self.exchange.queries
        at = self.rank, self.group.graph
        return {r: positions(r)[rows_of(queries(r, *at))] for r in self.others}

    def region(self, queries: np.ndarray, keys: np.ndarray) -> Region:
        group = self.group
        return Region(group.work, group.heads, queries, keys, self.device, self.backend)

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
        """The numbers of own queries that may read keys that come."""
        return readers(self.group.work, self.own, self.guests)

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
        """Queries that come over own keys, but those that their rank is sent: the numbers of these
        keys, and the region."""
        found = {}
        for r in self.others:
            kept = np.ones(len(self.own), bool)
            kept[self.sent_keys[r]] = False
            rows = np.flatnonzero(kept)
            region = self.region(self.got_queries[r], self.own[rows])
            found[r] = rows, region
        return found

    def expanded(self, x: torch.Tensor) -> torch.Tensor:
        """Key heads as the formula takes them: each once where all are read equally often."""
        wanted = [self.keys.index(head) for head in key_heads(self.group.heads, self.ratio)]
        if wanted == list(range(len(self.keys))):
            return x
        return x[:, wanted]


@dataclass(frozen=True, eq=False)
class Guests:
    """What came for a group: keys, values, each for the heads that read it, and queries by rank."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: dict[int, torch.Tensor]


def sent(mesh: Mesh, groups: Sequence[GroupHere], parts: Parts, kind: torch.dtype) -> Swapping:
    """Keys with values, and queries, of all groups to each rank, which travel in a type."""
    q, k, v = parts
    pieces, counts, got = [anchor(parts, kind)], [0] * mesh.ranks, [0] * mesh.ranks
    for r, here in _with_others(mesh, groups):
        if here.brings:
            rows = torch.from_numpy(here.sent_keys[r]).to(q.device)
            taken = (x[:, here.keys].index_select(2, rows) for x in (k, v))
            pieces += [x.to(kind).reshape(-1) for x in taken]
            width = len(k) * len(here.keys) * (k.shape[3] + v.shape[3])
            counts[r] += len(rows) * width
            got[r] += len(here.got_keys[r]) * width
        if here.merges:
            asked = torch.from_numpy(here.sent_queries[r]).to(q.device)
            taken_rows = q[:, list(here.group.heads)].index_select(2, asked)
            pieces.append(taken_rows.to(kind).reshape(-1))
            width = len(q) * len(here.group.heads) * q.shape[3]
            counts[r] += len(asked) * width
            got[r] += len(here.got_queries[r]) * width
    return travel(mesh, torch.cat(pieces), counts, got)


def came(mesh: Mesh, groups: Sequence[GroupHere], flat: torch.Tensor, parts: Parts) -> list[Guests]:
    """What came of all groups, by group."""
    q, k, v = parts
    taken = taking(flat)
    none = [x[:, :, :0].to(flat.dtype) for x in (k, v)]
    keys = {here: [none[0][:, here.keys]] for here in groups if here.brings}
    values = {here: [none[1][:, here.keys]] for here in keys}
    queries: dict[GroupHere, dict[int, torch.Tensor]] = {here: {} for here in groups}
    for r, here in _with_others(mesh, groups):
        if here.brings:
            for x, into in ((k, keys[here]), (v, values[here])):
                into.append(taken(len(x), len(here.keys), len(here.got_keys[r]), x.shape[3]))
        if here.merges:
            asked = len(here.got_queries[r])
            queries[here][r] = taken(len(q), len(here.group.heads), asked, q.shape[3])
    found = []
    for here in groups:
        if here.brings:
            all_keys, all_values = torch.cat(keys[here], 2), torch.cat(values[here], 2)
        every = here.expanded(all_keys), here.expanded(all_values)
        found.append(Guests(*every, queries[here]))
    return found


def _with_others(mesh: Mesh, groups: Sequence[GroupHere]) -> Iterator[tuple[int, GroupHere]]:
    """Each other rank with each group, in the order in which all of them count."""
    for r in range(mesh.ranks):
        for here in groups if r != mesh.rank else ():
            yield r, here


class RowsHere:
    """What one rank does for a layer."""

    def __init__(
        self, groups: Sequence[Group], mesh: Mesh, ratio: int, device: torch.device, backend: str
    ) -> None:
        self.mesh = mesh
        self.groups = [GroupHere(group, mesh.rank, ratio, device, backend) for group in groups]
        self.heads = [head for group in self.groups for head in group.group.heads]
        self.learning = [(here.group.work, here.group.heads) for here in self.groups]

    def run(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """The output of own queries and its log-sum-exps, for own shards of q, k and v."""
        kind = parts[0].dtype
        parts = in_wide(parts)
        coming = sent(self.mesh, self.groups, parts, kind)
        outs: list[Partial] = []
        home = [
            here.at_home.partial(*self._own(here, parts, kind), call) if here.merges else None
            for here, call in zip(self.groups, calls, strict=True)
        ]
        flat = coming.ready()
        guests = came(self.mesh, self.groups, flat, parts)
        back = self._answered(parts, kind, guests, calls)
        for here, call, first, guest in zip(self.groups, calls, home, guests, strict=True):
            q, k, v = self._own(here, parts, kind)
            keys, values = guest.keys, guest.values
            if first is None:
                every = torch.cat([k, keys], 2), torch.cat([v, values], 2)
                outs.append(here.over_all.partial(q, *every, call))
                continue
            # what is merged is rounded once, at the end
            first = first[0].to(torch.promote_types(kind, torch.float32)), first[1]
            if len(here.reading):
                rows = torch.from_numpy(here.reading).to(q.device)
                asking = q.index_select(2, rows)
                outs.append(_put(first, rows, here.over_guests.partial(asking, keys, values, call)))
            else:
                outs.append(first)
        outs, answers = self._merged(outs, back, parts)
        out, lse = joined(outs, self.heads)
        out = tied(tied(out.to(kind), flat), answers)
        return out, None if lse is None else tied(tied(lse, flat), answers)

    def _own(self, here: GroupHere, parts: Parts, kind: torch.dtype) -> Parts:
        q, k, v = parts
        keys, values = (here.expanded(x[:, here.keys]).to(kind) for x in (k, v))
        return q[:, list(here.group.heads)].to(kind), keys, values

    def _answered(
        self,
        parts: Parts,
        kind: torch.dtype,
        guests: Sequence[Guests],
        calls: Sequence[Call],
    ) -> Swapping:
        """What others' queries find among own keys, on its way back to them."""
        q, _, v = parts
        wide = torch.promote_types(q.dtype, torch.float32)
        learned = [table for call in calls for table in call.tables.values()]
        pieces, sent, got = [anchor((*parts, *learned), wide)], [], []
        for r in range(self.mesh.ranks):
            sizes = [0, 0]
            for here, guest, call in zip(self.groups, guests, calls, strict=True):
                if r == self.mesh.rank or not here.merges:
                    continue
                unit = len(q) * len(here.group.heads) * (v.shape[3] + 1)
                sizes[0] += len(here.got_queries[r]) * unit
                sizes[1] += len(here.sent_queries[r]) * unit
                if not len(here.got_queries[r]):
                    continue
                kept, region = here.for_guests[r]
                rows = torch.from_numpy(kept).to(q.device)
                _, k, values = self._own(here, parts, kind)
                out, lse = region.partial(
                    guest.queries[r], k.index_select(2, rows), values.index_select(2, rows), call
                )
                pieces += [out.to(wide).reshape(-1), cast(torch.Tensor, lse).reshape(-1)]
            sent.append(sizes[0])
            got.append(sizes[1])
        return travel(self.mesh, torch.cat(pieces), sent, got)

    def _merged(
        self, outs: list[Partial], back: Swapping, parts: Parts
    ) -> tuple[list[Partial], torch.Tensor]:
        """What was found here together with what was found elsewhere."""
        flat = back.ready()
        taken = taking(flat)
        q, _, v = parts
        for r in range(self.mesh.ranks):
            for number, here in enumerate(self.groups):
                if r == self.mesh.rank or not here.merges or not len(here.sent_queries[r]):
                    continue
                shape = len(q), len(here.group.heads), len(here.sent_queries[r])
                out, lse = taken(*shape, v.shape[3]), taken(*shape)
                rows = torch.from_numpy(here.sent_queries[r]).to(q.device)
                outs[number] = _put(outs[number], rows, (out, lse))
        each = zip(self.groups, outs, strict=True)
        return [finished(here.group.work, found) for here, found in each], flat


def _put(found: Partial, rows: torch.Tensor, more: Partial) -> Partial:
    """Partial results with more of some of their rows, merged by log-sum-exps."""
    out, lse = found[0], cast(torch.Tensor, found[1])
    other = more[0], cast(torch.Tensor, more[1])
    if len(rows) == out.shape[2]:
        # rows ascend, so that these are all of them in order
        return merged((out, lse), other)
    mine, sums = merged((out.index_select(2, rows), lse.index_select(2, rows)), other)
    return out.index_copy(2, rows, mine), lse.index_copy(2, rows, sums)
