"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while rows travel, then those that came; results of queries of others over own
keys are sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.merging import Outputs, Partial, merged, with_zero
from attnspec.backends.common.score_formula import widened
from attnspec.backends.planner import AUTO, backend_of, choose
from attnspec.distributed.collectives import Mesh, Piece, Run, tied, travel
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
from attnspec.runtime.engine import Engine, nothing

Weighing = Callable[[Parts, Call], Outputs]
"""Weighs q [B, H, rows, d] over k, v [B, H_kv, keys, …]: the output and its log-sum-exps. The
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
        there, numbers = exchange.partition.positions, partial(torch.as_tensor, device=device)
        local = there(rank)
        every = np.arange(len(local))
        self.others = [r for r in range(exchange.partition.ranks) if r != rank]
        keys_for = {r: exchange.sent_keys(r, rank) for r in self.others}
        self.sent_keys = {r: numbers(x) for r, x in keys_for.items()}
        self.sent_queries = {r: numbers(exchange.sent_queries(rank, r, graph)) for r in self.others}
        # positions of what comes
        self.got_keys = {r: there(r)[exchange.sent_keys(rank, r)] for r in self.others}
        self.got_queries = {r: there(r)[exchange.sent_queries(r, rank, graph)] for r in self.others}
        guests = np.concatenate([local[:0], *self.got_keys.values()])
        # own rows whose queries may read keys that come
        reading = np.flatnonzero(exchange.readings[graph].read(guests, readers=True)[local])
        # what cannot be merged is weighed once, over all keys
        at_home = local if self.merges else np.append(local, guests)
        self.at_home = self.weighing(local, at_home, every)
        guests, self.reading = guests[: len(guests) * self.merges], numbers(reading)
        self.reads = self.weighing(local[reading], guests, reading)
        # queries that come are weighed over own keys, but those that their rank is sent
        kept = {r: np.setdiff1d(every, x, assume_unique=True) for r, x in keys_for.items()}
        self.kept = {r: numbers(x) for r, x in kept.items()}
        self.for_guests = {
            r: self.weighing(x, local[kept[r]], x) for r, x in self.got_queries.items()
        }

    def weighing(self, queries: np.ndarray, keys: np.ndarray, rows: np.ndarray) -> Weighing:
        """What weighs queries over keys, int64 positions in the whole sequence each, by the kernel
        for one short sequence of them: by the backend that was asked for, unless it refuses this
        part. `rows` are the numbers of the queries among own ones, for inputs of pairs, with which
        no query travels.
        """
        work, device, backend, kernel, more = self.work, self.device, self.backend, None, 0
        own, at = (torch.from_numpy(x).to(device) for x in (rows, keys))
        if len(queries) and len(keys):
            relation, n, count = gathered(work.relation, work.n_k, queries, keys)
            laid_out = replace(
                work,
                relation=relation,
                n_q=count,
                n_k=n,
                # its zero logit is added where parts are merged
                normalize="softmax" if self.adds_zero else work.normalize,
                standing=_standing(work, queries, keys, n),
                copies=len(self.heads),
                device=device.type,
            )
            asked = backend != AUTO
            if asked and refusal_of(backend_of(backend), laid_out, device.type) is not None:
                backend = AUTO
            kernel = choose(laid_out, device.type, backend).build(laid_out, self.heads, device)
            more = n - len(keys)

        def of_keys(x: Tensor) -> Tensor:
            return pad(x[..., at], (0, more))

        def weigh(parts: Parts, call: Call) -> Outputs:
            q, k, v = parts
            if kernel is None:
                out, lse = nothing(q, k, v)
                return out, lse if self.merges else None
            padding = None if call.padding is None else of_keys(call.padding)
            pairs = {x: of_keys(call.tables[x].index_select(2, own)) for x in work.changes.pairs}
            if more:
                k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
            if self.adds_zero:
                # outputs get the share of the zero logit before they are rounded
                q, k, v = widened(q), widened(k), widened(v)
            mine = replace(call, padding=padding, tables={**call.tables, **pairs})
            if not self.merges:
                return kernel(q, k, v, mine), None
            return cast(Mergeable, kernel).partial(q, k, v, mine)

        return weigh

    def asking(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Piece]:
        """Keys beside their values, and queries, for each rank."""
        for r in self.others:
            keys = (k, v), self.key_heads, self.sent_keys[r], self.got_keys[r]
            queries = (q,), [*self.heads], self.sent_queries[r], self.got_queries[r]
            moving: list[Any] = [("keys", *keys)] * self.brings
            moving += [("q", *queries)] * self.merges
            for name, parts, heads, rows, got in moving:
                x = torch.cat([x.index_select(2, rows)[:, heads] for x in parts], 3)
                yield r, (self, name), x, (*x.shape[:2], len(got), x.shape[3])

    def answering(
        self, own: Parts, call: Call, came: Sequence[Mapping[Any, Tensor]]
    ) -> Iterator[Piece]:
        """Results of others' queries over own keys, log-sum-exps beside outputs, for these."""
        q, k, v = own
        for r in self.others:
            result, count = None, len(self.sent_queries[r])
            if len(self.got_queries[r]):
                own_k, own_v = (x.index_select(2, self.kept[r]) for x in (k, v))
                found = self.for_guests[r]((came[r][self, "q"], own_k, own_v), call)
                out, lse = cast(Partial, found)
                result = torch.cat([out, lse[..., None]], 3)
            shape = len(q), len(self.heads), count, v.shape[3] + 1
            yield r, self, result, shape if count else None


def rows_here(
    engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
) -> Run:
    """What one rank does for a layer."""
    groups = [
        GroupHere(exchange, graph, mesh.rank, device, engine.backend)
        for exchange in plan.layers[0].exchanges
        for graph in range(len(exchange.works))
    ]
    kernels: list[Any] = [(here, here.work, here.heads) for here in groups]
    ready = engine.together(kernels, plan.tensors.heads, plan.tensors.key_heads, device)

    def run(layer: int, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        kind, grads = parts[0].dtype, torch.is_grad_enabled()
        # gradients from several ranks add up
        q, k, v = (widened(x) if grads and x.requires_grad else x for x in parts)
        asked, arrived = travel(mesh, chain(*(x.asking(q, k, v) for x in groups)), kind, (q, k, v))
        own: list[tuple[GroupHere, Parts, Call]] = []
        for here, group in zip(groups, ready.groups, strict=True):
            tables = engine.tables(group, layer, call.tables)
            mine: Any = tuple(x.to(kind) for x in group.parts(q, k, v))
            own.append((here, mine, replace(call, tables=tables)))
        firsts = [here.at_home(mine, some) if here.merges else None for here, mine, some in own]
        came = arrived()
        replies = chain(*(here.answering(mine, some, came) for here, mine, some in own))
        learned = [table for *_, some in own for table in some.tables.values()]
        wide = torch.promote_types(q.dtype, torch.float32)
        answered, arrived = travel(mesh, replies, wide, (q, k, v, *learned))
        guests, outs = parts[1], list[Outputs]()
        for (here, mine, some), first in zip(own, firsts, strict=True):
            if here.brings:
                none = torch.cat([x[:, here.key_heads, :0].to(kind) for x in (k, v)], 3)
                guests = torch.cat([none, *(came[r][here, "keys"] for r in here.others)], 2)
            keys, values = torch.split(guests[:, here.read], [k.shape[3], v.shape[3]], 3)
            if first is None:
                both = torch.cat([mine[1], keys], 2), torch.cat([mine[2], values], 2)
                outs.append(here.at_home((mine[0], *both), some))
            else:
                more = here.reads((mine[0].index_select(2, here.reading), keys, values), some)
                # what is merged is rounded once, at the end
                outs.append(_merged((widened(first[0]), first[1]), [(here.reading, more)]))
        last = arrived()
        for at, here in enumerate(groups):
            answers = ((here.sent_queries[r], last[r].get(here)) for r in here.others)
            results = [(rows, (x[..., :-1], x[..., -1])) for rows, x in answers if x is not None]
            outs[at] = _merged(outs[at], results)
            # no part has the zero logit
            outs[at] = with_zero(cast(Partial, outs[at])) if here.adds_zero else outs[at]
        every, sums = zip(*outs, strict=True)
        out = tied(tied(ready.joined(every).to(kind), asked), answered)
        return out, None if None in sums else tied(tied(ready.joined(sums), asked), answered)

    return run


def _merged(first: Outputs, more: Iterable[tuple[Tensor, Outputs]]) -> Outputs:
    """Results with more of some of their rows, merged by log-sum-exps."""
    for rows, part in more:
        out, lse = cast(Partial, first)
        here = out.index_select(2, rows), lse.index_select(2, rows)
        mine, sums = merged(here, cast(Partial, part))
        first = out.index_copy(2, rows, mine), lse.index_copy(2, rows, sums)
    return first
