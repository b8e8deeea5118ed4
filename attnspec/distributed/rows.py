"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while the rows travel, then those that came; queries of others are weighed over
own keys and their partial results are sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import pad

from attnspec.backends.common.merging import merged, with_zero
from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.planner import AUTO, backend_of, choose
from attnspec.distributed.collectives import Mesh, Named, Partial, Travelling, tied, travel
from attnspec.distributed.exchange import Exchange
from attnspec.distributed.planning import DistributedPlan
from attnspec.graphs.gathered import gathered
from attnspec.lower.work import (
    MERGED,
    Call,
    Kernel,
    Mergeable,
    Standing,
    Work,
    key_heads,
    refusal_of,
)
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Engine, Request, rows_of


@dataclass(frozen=True, eq=False)
class Region:
    """Queries and keys by their positions in the whole sequence, int64 each, laid out as one short
    sequence; `work` is that of the heads at its whole length, `backend` the one that was asked for
    by name, or `auto`."""

    work: Work
    heads: tuple[int, ...]
    queries: np.ndarray
    keys: np.ndarray
    device: torch.device
    backend: str

    @cached_property
    def laid_out(self) -> Work:
        """The work of this part as one sequence; the zero logit of `softmax1` is added where parts
        are merged."""
        whole = self.work
        relation, n, count = gathered(whole.relation, whole.n_k, self.queries, self.keys)
        return replace(
            whole,
            relation=relation,
            n_q=count,
            n_k=n,
            normalize="softmax" if whole.normalize == "softmax1" else whole.normalize,
            standing=self._standing(n),
            copies=len(self.heads),
            device=self.device.type,
        )

    def _standing(self, n: int) -> Standing | None:
        """Where positions stand, if a score asks for it and they say it not."""
        if not self.work.changes.placed:
            return None
        moved = self.queries - np.arange(n - len(self.queries), n)
        alike = (moved == moved[0]).all()
        alike &= (self.keys - np.arange(len(self.keys)) == moved[0]).all()
        if alike and (self.work.changes.by_distance or not moved[0]):
            return None
        return Standing(self.queries, np.pad(self.keys, (0, n - len(self.keys))), self.work.n_k)

    @cached_property
    def kernel(self) -> Kernel:
        """What runs it: the backend that was asked for, unless it refuses this part."""
        work, kind, name = self.laid_out, self.device.type, self.backend
        if name != AUTO and refusal_of(backend_of(name), work, kind) is not None:
            name = AUTO
        # what outlives a call is not built in its modes
        return apart(lambda: choose(work, kind, name).build(work, self.heads, self.device))

    def partial(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Partial:
        """The output and its log-sum-exps of q [B, H, rows, d], k and v [B, H_kv, keys, …]. The
        call's padding and inputs are those of the whole sequence."""
        merges = self.work.normalize in MERGED
        if not (len(self.queries) and len(self.keys)):
            out = q.new_zeros(*q.shape[:3], v.shape[-1])
            wide = torch.promote_types(q.dtype, torch.float32)
            return out, q.new_full(q.shape[:3], -torch.inf, dtype=wide) if merges else None
        more, padding = self.laid_out.n_k - len(self.keys), call.padding
        if padding is not None:
            padding = pad(padding[:, torch.from_numpy(self.keys).to(self.device)], (0, more))
        if more:
            k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
        mine = replace(call, padding=padding)
        if self.work.normalize == "softmax1":
            # outputs get the share of the zero logit before they are rounded
            q, k, v = widened(q), widened(k), widened(v)
        if not merges:
            return self.kernel(q, k, v, mine), None
        return cast(Mergeable, self.kernel).partial(q, k, v, mine)


class GroupHere:
    """What one rank does for heads of one graph. Rows are numbered as the rank's tensors have them;
    dictionaries go by the other rank."""

    def __init__(
        self,
        exchange: Exchange,
        graph: int,
        rank: int,
        ratio: int,
        device: torch.device,
        backend: str,
    ) -> None:
        self.work, self.heads = exchange.works[graph]
        self.key_heads = sorted({head // ratio for head in self.heads})
        wanted = [self.key_heads.index(head) for head in key_heads(self.heads, ratio)]
        self.expand = None if wanted == list(range(len(self.key_heads))) else wanted
        self.merges = self.work.normalize in MERGED
        # keys travel once for all graphs that read them
        self.brings = graph == 0
        partition = exchange.partition
        own = partition.positions(rank)
        others = self.others = [r for r in range(partition.ranks) if r != rank]
        self.sent_keys = {r: exchange.sent_keys(r, rank) for r in others}
        self.sent_queries = {r: exchange.sent_queries(rank, r, graph) for r in others}
        # positions of what comes
        there = partition.positions
        self.got_keys = {r: there(r)[exchange.sent_keys(rank, r)] for r in others}
        self.got_queries = {r: there(r)[exchange.sent_queries(r, rank, graph)] for r in others}

        def region(queries: np.ndarray, keys: np.ndarray) -> Region:
            return Region(self.work, self.heads, queries, keys, device, backend)

        guests = np.concatenate([own[:0], *self.got_keys.values()])
        # own rows whose queries may read keys that come
        self.reading = np.flatnonzero(exchange.readings[graph].readers(guests)[own])
        self.at_home, self.over_guests = region(own, own), region(own[self.reading], guests)
        self.over_all = region(own, np.concatenate([own, guests]))
        # queries that come are weighed over own keys, but those that their rank is sent
        kept = {
            r: np.setdiff1d(np.arange(len(own)), self.sent_keys[r], assume_unique=True)
            for r in others
        }
        self.for_guests = {
            r: (rows, region(self.got_queries[r], own[rows])) for r, rows in kept.items()
        }

    def expanded(self, x: torch.Tensor) -> torch.Tensor:
        """Key heads as the formula takes them: each once where all are read equally often."""
        return x if self.expand is None else x[:, self.expand]

    def parts(self, parts: Parts, kind: torch.dtype) -> Parts:
        """Own queries, keys and values of these heads."""
        q, k, v = parts
        keys, values = (self.expanded(x[:, self.key_heads]).to(kind) for x in (k, v))
        return q[:, list(self.heads)].to(kind), keys, values


class RowsHere:
    """What one rank does for a layer."""

    def __init__(
        self, engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
    ) -> None:
        self.engine, self.mesh, ratio = engine, mesh, plan.tensors.ratio
        self.groups = [
            GroupHere(exchange, graph, mesh.rank, ratio, device, engine.backend)
            for exchange in plan.layers[0].exchanges
            for graph in range(len(exchange.works))
        ]

    def run(self, request: Request) -> Partial:
        """The output of own queries and its log-sum-exps, for own shards of q, k and v."""
        parts, calls = request.parts, [self._call(here, request) for here in self.groups]
        kind, grads = parts[0].dtype, torch.is_grad_enabled()
        # gradients from several ranks add up
        q, k, v = (widened(x) if grads and x.requires_grad else x for x in parts)
        parts = q, k, v
        coming = self._sent(parts, kind)
        own = [here.parts(parts, kind) for here in self.groups]
        each = list(zip(self.groups, own, calls, strict=True))
        outs = [
            here.at_home.partial(*mine, call) if here.merges else None for here, mine, call in each
        ]
        came = coming.ready()
        back = self._answered(parts, own, calls, came)
        guests: tuple[torch.Tensor, ...] = ()
        for number, (here, mine, call) in enumerate(each):
            if here.brings:
                none = (x[:, here.key_heads, :0].to(kind) for x in parts[1:])
                guests = tuple(
                    torch.cat([x, *(came[r][number, name] for r in here.others)], 2)
                    for name, x in zip("kv", none, strict=True)
                )
            keys, values = (here.expanded(x) for x in guests)
            outs[number] = _over_guests(here, mine, call, outs[number], (keys, values))
        answers = back.ready()
        for number, here in enumerate(self.groups):
            for r in here.others:
                if (number, "out") in answers[r]:
                    more = answers[r][number, "out"], answers[r][number, "lse"]
                    outs[number] = _put(cast(Partial, outs[number]), here.sent_queries[r], more)
        out, lse = self._joined(cast("list[Partial]", outs))
        out = tied(tied(out.to(kind), coming.flat), back.flat)
        return out, None if lse is None else tied(tied(lse, coming.flat), back.flat)

    def _call(self, here: GroupHere, request: Request) -> Call:
        """The call with what these heads have learned, by what a kernel calls it."""
        learned, names = request.call.tables, self.engine.tables_of(here.work)
        tables = {x: rows_of(learned[name], request.layer, here.heads) for x, name in names}
        return replace(request.call, tables=tables)

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
                    sent[r][number, name] = _rows(x[:, heads], own)
                    shapes[r][number, name] = len(x), len(heads), len(got), x.shape[3]
        return travel(self.mesh, sent, shapes, kind, parts)

    def _answered(
        self, parts: Parts, own: Sequence[Parts], calls: Sequence[Call], came: Sequence[Named]
    ) -> Travelling:
        """Partial results of others' queries over own keys, on their way back to them."""
        q, _, v = parts
        sent: list[dict[Any, torch.Tensor]] = [{} for _ in range(self.mesh.ranks)]
        shapes: list[dict[Any, tuple[int, ...]]] = [{} for _ in sent]
        for number, (here, (_, k, values), call) in enumerate(
            zip(self.groups, own, calls, strict=True)
        ):
            for r in here.others if here.merges else ():
                if len(here.sent_queries[r]):
                    shape = len(q), len(here.heads), len(here.sent_queries[r])
                    shapes[r] |= {(number, "out"): (*shape, v.shape[3]), (number, "lse"): shape}
                if len(here.got_queries[r]):
                    kept, region = here.for_guests[r]
                    keys = _rows(k, kept), _rows(values, kept)
                    out, lse = region.partial(came[r][number, "q"], *keys, call)
                    sent[r] |= {(number, "out"): out, (number, "lse"): cast(torch.Tensor, lse)}
        learned = [table for call in calls for table in call.tables.values()]
        wide = torch.promote_types(q.dtype, torch.float32)
        return travel(self.mesh, sent, shapes, wide, (*parts, *learned))

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


def _rows(x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return x.index_select(2, torch.from_numpy(rows).to(x.device))


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
    more = here.over_guests.partial(_rows(q, here.reading), *guests, call)
    return _put(first, here.reading, more)


def _put(found: Partial, rows: np.ndarray, more: Partial) -> Partial:
    """Partial results with more of some of their rows, merged by log-sum-exps."""
    out, lse = found[0], cast(torch.Tensor, found[1])
    other = more[0], cast(torch.Tensor, more[1])
    if len(rows) == out.shape[2]:
        # rows ascend, so that these are all of them in order
        return merged((out, lse), other)
    mine, sums = merged((_rows(out, rows), _rows(lse, rows)), other)
    at = torch.from_numpy(rows).to(out.device)
    return out.index_copy(2, at, mine), lse.index_copy(2, at, sums)
