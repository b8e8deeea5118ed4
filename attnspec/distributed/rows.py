"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while the rows travel, then those that came; queries of others are weighed over
own keys and their partial results are sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from attnspec.backends.common.merging import merged, with_zero
from attnspec.distributed.collectives import Mesh, Swapping, anchor, taking, tied, travel
from attnspec.distributed.planning import Group
from attnspec.distributed.regions import Partial, Parts, Region, in_wide
from attnspec.lower.work import MERGED, Call, key_heads


@dataclass(frozen=True, eq=False)
class GroupHere:
    """What one rank does for heads of one graph. Rows are numbered as the rank's tensors have them;
    dictionaries go by the other rank."""

    group: Group
    rank: int
    ratio: int
    device: torch.device
    backend: str

    @cached_property
    def key_heads(self) -> list[int]:
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
        """Positions of this rank."""
        return self.group.rows.partition.positions(self.rank)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.group.rows.partition.ranks) if rank != self.rank]

    @cached_property
    def sent_keys(self) -> dict[int, np.ndarray]:
        """Own rows that others are sent as keys."""
        return {r: self.group.rows.sent_keys(r, self.rank) for r in self.others}

    @cached_property
    def sent_queries(self) -> dict[int, np.ndarray]:
        """Own rows that others are sent as queries."""
        sent, graph = self.group.rows.sent_queries, self.group.graph
        return {r: sent(self.rank, r, graph) for r in self.others}

    @cached_property
    def got_keys(self) -> dict[int, np.ndarray]:
        """Positions of the keys that come."""
        rows = self.group.rows
        found = {r: rows.sent_keys(self.rank, r) for r in self.others}
        return {r: rows.partition.positions(r)[each] for r, each in found.items()}

    @cached_property
    def got_queries(self) -> dict[int, np.ndarray]:
        """Positions of the queries that come."""
        rows, graph = self.group.rows, self.group.graph
        found = {r: rows.sent_queries(r, self.rank, graph) for r in self.others}
        return {r: rows.partition.positions(r)[each] for r, each in found.items()}

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
        """Own rows whose queries may read keys that come."""
        reading = self.group.rows.readings[self.group.graph]
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
        wanted = [self.key_heads.index(head) for head in key_heads(self.group.heads, self.ratio)]
        if wanted == list(range(len(self.key_heads))):
            return x
        return x[:, wanted]

    def parts(self, parts: Parts, kind: torch.dtype) -> Parts:
        """Own queries, keys and values of these heads."""
        q, k, v = parts
        keys, values = (self.expanded(x[:, self.key_heads]).to(kind) for x in (k, v))
        return q[:, list(self.group.heads)].to(kind), keys, values


@dataclass(frozen=True, eq=False)
class Guests:
    """What came for a group: keys, values, each for the heads that read it, and queries by rank."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: dict[int, torch.Tensor]


class RowsHere:
    """What one rank does for a layer."""

    def __init__(
        self, groups: Sequence[Group], mesh: Mesh, ratio: int, device: torch.device, backend: str
    ) -> None:
        self.mesh = mesh
        self.groups = [GroupHere(group, mesh.rank, ratio, device, backend) for group in groups]
        self.learning = [(here.group.work, here.group.heads) for here in self.groups]

    def run(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """The output of own queries and its log-sum-exps, for own shards of q, k and v."""
        kind = parts[0].dtype
        parts = in_wide(parts)
        coming = self._sent(parts, kind)
        home = [
            here.at_home.partial(*here.parts(parts, kind), call) if here.merges else None
            for here, call in zip(self.groups, calls, strict=True)
        ]
        flat = coming.ready()
        guests = self._came(flat, parts)
        back = self._answered(parts, kind, guests, calls)
        outs = [
            _over_guests(here, here.parts(parts, kind), call, first, guest)
            for here, call, first, guest in zip(self.groups, calls, home, guests, strict=True)
        ]
        answers = back.ready()
        out, lse = self._joined(self._merged(outs, answers, parts))
        out = tied(tied(out.to(kind), flat), answers)
        return out, None if lse is None else tied(tied(lse, flat), answers)

    def _with_others(self) -> Iterator[tuple[int, GroupHere]]:
        """Each other rank with each group, in the order in which all ranks count."""
        for r in range(self.mesh.ranks):
            for here in self.groups if r != self.mesh.rank else ():
                yield r, here

    def _sent(self, parts: Parts, kind: torch.dtype) -> Swapping:
        """Keys with values, and queries, on their way to each rank."""
        q, k, v = parts
        pieces, counts, got = [anchor(parts, kind)], [0] * self.mesh.ranks, [0] * self.mesh.ranks
        for r, here in self._with_others():
            if here.brings:
                rows = torch.from_numpy(here.sent_keys[r]).to(q.device)
                taken = (x[:, here.key_heads].index_select(2, rows) for x in (k, v))
                pieces += [x.to(kind).reshape(-1) for x in taken]
                width = len(k) * len(here.key_heads) * (k.shape[3] + v.shape[3])
                counts[r] += len(rows) * width
                got[r] += len(here.got_keys[r]) * width
            if here.merges:
                rows = torch.from_numpy(here.sent_queries[r]).to(q.device)
                asked = q[:, list(here.group.heads)].index_select(2, rows)
                pieces.append(asked.to(kind).reshape(-1))
                width = len(q) * len(here.group.heads) * q.shape[3]
                counts[r] += len(rows) * width
                got[r] += len(here.got_queries[r]) * width
        return travel(self.mesh, torch.cat(pieces), counts, got)

    def _came(self, flat: torch.Tensor, parts: Parts) -> list[Guests]:
        """What came, by group."""
        q, k, v = parts
        taken = taking(flat)
        none = [x[:, :, :0].to(flat.dtype) for x in (k, v)]
        keys = {here: [none[0][:, here.key_heads]] for here in self.groups if here.brings}
        values = {here: [none[1][:, here.key_heads]] for here in keys}
        queries: dict[GroupHere, dict[int, torch.Tensor]] = {here: {} for here in self.groups}
        for r, here in self._with_others():
            if here.brings:
                count = len(here.got_keys[r])
                for x, into in ((k, keys[here]), (v, values[here])):
                    into.append(taken(len(x), len(here.key_heads), count, x.shape[3]))
            if here.merges:
                asked = len(here.got_queries[r])
                queries[here][r] = taken(len(q), len(here.group.heads), asked, q.shape[3])
        found = []
        for here in self.groups:
            if here.brings:
                all_keys, all_values = torch.cat(keys[here], 2), torch.cat(values[here], 2)
            every = here.expanded(all_keys), here.expanded(all_values)
            found.append(Guests(*every, queries[here]))
        return found

    def _answered(
        self, parts: Parts, kind: torch.dtype, guests: Sequence[Guests], calls: Sequence[Call]
    ) -> Swapping:
        """Partial results of others' queries over own keys, on their way back to them."""
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
                _, *own = here.parts(parts, kind)
                keys, values = (x.index_select(2, rows) for x in own)
                out, lse = region.partial(guest.queries[r], keys, values, call)
                pieces += [out.to(wide).reshape(-1), cast(torch.Tensor, lse).reshape(-1)]
            sent.append(sizes[0])
            got.append(sizes[1])
        return travel(self.mesh, torch.cat(pieces), sent, got)

    def _merged(self, outs: list[Partial], flat: torch.Tensor, parts: Parts) -> list[Partial]:
        """Partial results of this rank together with those that came back."""
        taken = taking(flat)
        q, _, v = parts
        for r in range(self.mesh.ranks):
            for number, here in enumerate(self.groups):
                if r == self.mesh.rank or not here.merges or not len(here.sent_queries[r]):
                    continue
                shape = len(q), len(here.group.heads), len(here.sent_queries[r])
                more = taken(*shape, v.shape[3]), taken(*shape)
                rows = torch.from_numpy(here.sent_queries[r]).to(q.device)
                outs[number] = _put(outs[number], rows, more)
        return outs

    def _joined(self, outs: Sequence[Partial]) -> Partial:
        """Groups as one, heads in their order; no log-sum-exps where some have none. The zero logit
        of `softmax1`, which no part has, is added here."""
        found: list[Partial] = []
        for here, (out, lse) in zip(self.groups, outs, strict=True):
            zero = here.group.work.normalize == "softmax1" and lse is not None
            found.append(with_zero((out, cast(torch.Tensor, lse))) if zero else (out, lse))
        order = np.argsort([head for here in self.groups for head in here.group.heads]).tolist()
        sums = [lse for _, lse in found if lse is not None]
        out = torch.cat([out for out, _ in found], 1)[:, order]
        return out, torch.cat(sums, 1)[:, order] if len(sums) == len(found) else None


def _over_guests(
    here: GroupHere, own: Parts, call: Call, first: Partial | None, guest: Guests
) -> Partial:
    """Own queries over own keys, of which partial results are there unless they cannot be merged,
    and over those that came."""
    q, k, v = own
    if first is None:
        return here.over_all.partial(
            q, torch.cat([k, guest.keys], 2), torch.cat([v, guest.values], 2), call
        )
    # what is merged is rounded once, at the end
    first = first[0].to(torch.promote_types(q.dtype, torch.float32)), first[1]
    if not len(here.reading):
        return first
    rows = torch.from_numpy(here.reading).to(q.device)
    more = here.over_guests.partial(q.index_select(2, rows), guest.keys, guest.values, call)
    return _put(first, rows, more)


def _put(found: Partial, rows: torch.Tensor, more: Partial) -> Partial:
    """Partial results with more of some of their rows, merged by log-sum-exps."""
    out, lse = found[0], cast(torch.Tensor, found[1])
    other = more[0], cast(torch.Tensor, more[1])
    if len(rows) == out.shape[2]:
        # rows ascend, so that these are all of them in order
        return merged((out, lse), other)
    mine, sums = merged((out.index_select(2, rows), lse.index_select(2, rows)), other)
    return out.index_copy(2, rows, mine), lse.index_copy(2, rows, sums)
