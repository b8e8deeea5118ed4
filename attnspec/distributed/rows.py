"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while the rows travel, then those that came; queries of others are weighed over
own keys and their partial results are sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.merging import Partial, merged, with_zero
from attnspec.backends.common.score_formula import widened
from attnspec.backends.planner import AUTO, backend_of, choose
from attnspec.distributed.collectives import Mesh, Named, Ready, tied, travel
from attnspec.distributed.exchange import Exchange
from attnspec.distributed.planning import DistributedPlan
from attnspec.graphs.gathered import gathered
from attnspec.lower.work import (
    MERGED,
    Call,
    Mergeable,
    Standing,
    Work,
    key_heads,
    refusal_of,
)
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Engine, Outputs

Weighing = Callable[[Tensor, Tensor, Tensor, Call], Outputs]
"""Weighs q [B, H, rows, d] over k and v [B, H_kv, keys, …]: the output and its log-sum-exps. The
call's padding and inputs are those of the whole sequence, inputs of pairs those of all own queries.
"""


def _standing(work: Work, queries: np.ndarray, keys: np.ndarray, n: int) -> Standing | None:
    """Where positions stand, if a score asks for them or how far apart they are, and their numbers
    in a short sequence of n do not say it."""
    changes = work.changes
    if not (changes.placed or changes.inputs):
        return None
    moved = queries - np.arange(n - len(queries), n)
    alike = (moved == moved[0]).all() and (keys - np.arange(len(keys)) == moved[0]).all()
    if alike and not changes.inputs and (changes.by_distance or not moved[0]):
        return None
    return Standing(queries, np.pad(keys, (0, n - len(keys))), work.n_k)


class GroupHere:
    """What one rank does for heads of one graph. Rows are numbered as the rank's tensors have them;
    dictionaries go by the other rank."""

    def __init__(
        self, exchange: Exchange, graph: int, rank: int, device: torch.device, backend: str
    ) -> None:
        (work, self.heads), ratio = exchange.works[graph], exchange.tensors.ratio
        self.work, self.device, self.backend = work, device, backend
        self.key_heads = sorted({head // ratio for head in self.heads})
        # of the key heads that travel those that the formula takes
        self.read = [self.key_heads.index(head) for head in key_heads(self.heads, ratio)]
        self.merges, self.adds_zero = work.normalize in MERGED, work.normalize == "softmax1"
        # keys travel once for all graphs that read them
        self.brings = graph == 0
        there = exchange.partition.positions
        local, others = there(rank), [r for r in range(exchange.partition.ranks) if r != rank]
        self.sent_keys = {r: exchange.sent_keys(r, rank) for r in others}
        self.sent_queries = {r: exchange.sent_queries(rank, r, graph) for r in others}
        # positions of what comes
        self.got_keys = {r: there(r)[exchange.sent_keys(rank, r)] for r in others}
        self.got_queries = {r: there(r)[exchange.sent_queries(r, rank, graph)] for r in others}

        guests, every = np.concatenate([local[:0], *self.got_keys.values()]), np.arange(len(local))
        # own rows whose queries may read keys that come
        self.reading = np.flatnonzero(exchange.readings[graph].read(guests, readers=True)[local])
        # what cannot be merged is weighed once, over all keys
        at_home = local if self.merges else np.append(local, guests)
        self.at_home = self.weighing(local, at_home, every)
        guests = guests[: len(guests) * self.merges]
        self.reads = self.weighing(local[self.reading], guests, self.reading)
        # queries that come are weighed over own keys, but those that their rank is sent
        self.kept = {
            r: np.setdiff1d(every, x, assume_unique=True) for r, x in self.sent_keys.items()
        }
        queries = self.got_queries
        self.for_guests = {r: self.weighing(queries[r], local[x]) for r, x in self.kept.items()}

    def weighing(
        self, queries: np.ndarray, keys: np.ndarray, rows: np.ndarray | None = None
    ) -> Weighing:
        """What weighs queries over keys, int64 positions in the whole sequence each, by the kernel
        for one short sequence of them: by the backend that was asked for, unless it refuses this
        part. `rows` are the numbers of the queries among own ones, None for those of other ranks.
        """
        work, device, backend, kernel, more = self.work, self.device, self.backend, None, 0
        places = [torch.from_numpy(x).to(device) for x in (queries[:0], keys)]
        if len(queries) and len(keys):
            relation, n, count = gathered(work.relation, work.n_k, queries, keys)
            laid_out = replace(
                work,
                relation=relation,
                n_q=count,
                n_k=n,
                # its zero logit is added where parts are merged
                normalize="softmax" if work.normalize == "softmax1" else work.normalize,
                standing=_standing(work, queries, keys, n),
                copies=len(self.heads),
                device=device.type,
            )
            asked = backend != AUTO
            if asked and refusal_of(backend_of(backend), laid_out, device.type) is not None:
                backend = AUTO
            kernel = choose(laid_out, device.type, backend).build(laid_out, self.heads, device)
            more = n - len(keys)
            if rows is not None:
                places[0] = torch.from_numpy(rows).to(device)

        def weigh(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
            if kernel is None:
                out = q.new_zeros(*q.shape[:3], v.shape[-1])
                wide = torch.promote_types(q.dtype, torch.float32)
                return out, q.new_full(q.shape[:3], -torch.inf, dtype=wide) if self.merges else None
            padding, tables = call.padding, dict(call.tables)
            if padding is not None:
                padding = pad(padding[:, places[1]], (0, more))
            for name in work.changes.pairs:
                rows_of_keys = tables[name].index_select(2, places[0])[..., places[1]]
                tables[name] = pad(rows_of_keys, (0, more))
            if more:
                k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
            if work.normalize == "softmax1":
                # outputs get the share of the zero logit before they are rounded
                q, k, v = widened(q), widened(k), widened(v)
            mine = replace(call, padding=padding, tables=tables)
            if not self.merges:
                return kernel(q, k, v, mine), None
            return cast(Mergeable, kernel).partial(q, k, v, mine)

        return weigh

    def over_guests(
        self,
        first: Outputs | None,
        own: Parts,
        keys: Tensor,
        values: Tensor,
        call: Call,
    ) -> Outputs:
        """Own queries over own keys, `first` if that can be merged, and over what came."""
        q, k, v = own
        if first is None:
            return self.at_home(q, torch.cat([k, keys], 2), torch.cat([v, values], 2), call)
        # what is merged is rounded once, at the end
        first = first[0].to(torch.promote_types(q.dtype, torch.float32)), first[1]
        if not len(self.reading):
            return first
        return _put(first, self.reading, self.reads(_rows(q, self.reading), keys, values, call))


class RowsHere:
    """What one rank does for a layer."""

    def __init__(
        self, engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
    ) -> None:
        self.engine, self.layer, self.mesh, t = engine, layer, mesh, plan.tensors
        self.others = [r for r in range(mesh.ranks) if r != mesh.rank]
        self.groups = [
            GroupHere(exchange, graph, mesh.rank, device, engine.backend)
            for exchange in plan.layers[0].exchanges
            for graph in range(len(exchange.works))
        ]
        kernels: list[Any] = [(here, here.work, here.heads) for here in self.groups]
        self.ready = engine.together(kernels, t.heads, t.key_heads, device)

    def run(self, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        """The output of own queries and its log-sum-exps, for own shards of q, k and v."""
        kind, grads = parts[0].dtype, torch.is_grad_enabled()
        # gradients from several ranks add up
        q, k, v = (widened(x) if grads and x.requires_grad else x for x in parts)
        asked, arrived = self._sent((q, k, v), kind)
        parts_here: list[Own] = []
        for here, group in zip(self.groups, self.ready.groups, strict=True):
            tables = self.engine.tables(group, self.layer, call.tables)
            own_q, own_k, own_v = (x.to(kind) for x in group.parts(q, k, v))
            parts_here.append((here, (own_q, own_k, own_v), replace(call, tables=tables)))
        outs = [x.at_home(*mine, some) if x.merges else None for x, mine, some in parts_here]
        came = arrived()
        answered, arrived = self._answered((q, k, v), parts_here, came)
        guests: list[Tensor] = []
        for number, (here, mine, some) in enumerate(parts_here):
            if here.brings:
                none = [x[:, here.key_heads, :0].to(kind) for x in (k, v)]
                guests = [
                    torch.cat([x, *(came[r][number, name] for r in self.others)], 2)
                    for name, x in zip("kv", none, strict=True)
                ]
            keys, values = (x[:, here.read] for x in guests)
            outs[number] = here.over_guests(outs[number], mine, keys, values, some)
        answers = arrived()
        for number, here in enumerate(self.groups):
            for r in self.others:
                if (number, "out") in answers[r]:
                    more = answers[r][number, "out"], answers[r][number, "lse"]
                    outs[number] = _put(cast(Outputs, outs[number]), here.sent_queries[r], more)
            if here.adds_zero:
                # no part has the zero logit
                outs[number] = with_zero(cast(Partial, outs[number]))
        every, sums = zip(*cast("list[Outputs]", outs), strict=True)
        out = tied(tied(self.ready.joined(every).to(kind), asked), answered)
        if None in sums:
            return out, None
        return out, tied(tied(self.ready.joined(sums), asked), answered)

    def _sent(self, parts: Parts, kind: torch.dtype) -> Travel:
        """Keys with values, and queries, on their way to each rank."""
        q, k, v = parts
        sent: list[dict[Any, Tensor]] = [{} for _ in range(self.mesh.ranks)]
        shapes: list[dict[Any, tuple[int, ...]]] = [{} for _ in sent]
        for (number, here), r in product(enumerate(self.groups), self.others):
            keys = here.key_heads, here.sent_keys[r], here.got_keys[r]
            queries = [*here.heads], here.sent_queries[r], here.got_queries[r]
            moving = [("k", k, *keys), ("v", v, *keys)] if here.brings else []
            for name, x, heads, rows, got in [*moving, *[("q", q, *queries)] * here.merges]:
                sent[r][number, name] = _rows(x[:, heads], rows)
                shapes[r][number, name] = len(x), len(heads), len(got), x.shape[3]
        return travel(self.mesh, sent, shapes, kind, parts)

    def _answered(self, parts: Parts, own: Sequence[Own], came: Sequence[Named]) -> Travel:
        """Results of others' queries over own keys, on their way back to them."""
        q, _, v = parts
        sent: list[dict[Any, Tensor]] = [{} for _ in range(self.mesh.ranks)]
        shapes: list[dict[Any, tuple[int, ...]]] = [{} for _ in sent]
        for (number, (here, (_, k, values), call)), r in product(enumerate(own), self.others):
            if len(here.sent_queries[r]):
                shape = len(q), len(here.heads), len(here.sent_queries[r])
                shapes[r] |= {(number, "out"): (*shape, v.shape[3]), (number, "lse"): shape}
            if len(here.got_queries[r]):
                keys = _rows(k, here.kept[r]), _rows(values, here.kept[r])
                out, lse = here.for_guests[r](came[r][number, "q"], *keys, call)
                sent[r] |= {(number, "out"): out, (number, "lse"): cast(Tensor, lse)}
        learned = [table for *_, call in own for table in call.tables.values()]
        wide = torch.promote_types(q.dtype, torch.float32)
        return travel(self.mesh, sent, shapes, wide, (*parts, *learned))


Own = tuple[GroupHere, Parts, Call]
"""Heads of one graph, with their own queries, keys and values and their call."""

Travel = tuple[Tensor, Ready]
"""What `travel` returns."""


def _rows(x: Tensor, rows: np.ndarray) -> Tensor:
    return x.index_select(2, torch.from_numpy(rows).to(x.device))


def _put(found: Outputs, rows: np.ndarray, more: Outputs) -> Outputs:
    """Results with more of some of their rows, merged by log-sum-exps."""
    out, lse = cast(Partial, found)
    other = cast(Partial, more)
    if len(rows) == out.shape[2]:
        # rows ascend, so that these are all of them in order
        return merged((out, lse), other)
    mine, sums = merged((_rows(out, rows), _rows(lse, rows)), other)
    at = torch.from_numpy(rows).to(out.device)
    return out.index_copy(2, at, mine), lse.index_copy(2, at, sums)
