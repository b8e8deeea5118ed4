"""A layer whose key rows and query rows travel as its graphs ask for them.

Own keys are weighed while rows travel, then those that came; results of queries of others over own
keys are sent back. Parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

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
from attnspec.lower.work import MERGED, Call, Heads, Standing, Work, key_heads, refusal_of
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Engine, nothing

Weighing: TypeAlias = Callable[[Parts, Call], Outputs]
"""Weighs q [B, H, rows, d] over k, v [B, H_kv, keys, …]: the output and its log-sum-exps. The
call's padding and inputs are those of the whole sequence, inputs of pairs those of the queries over
it."""

Steps: TypeAlias = Generator[Any, Any, None]
"""What a rank does in a call for heads of one graph: yields rows that it sends, weighs own keys,
takes the rows that came, yields the results that it sends back, weighs keys that came, takes the
results of others, and yields the outputs."""


def weighing(
    work: Work,
    heads: Heads,
    device: torch.device,
    backend: str,
    queries: np.ndarray,
    keys: np.ndarray,
) -> Weighing:
    """What weighs queries over keys, int64 positions in the whole sequence each, by the kernel for
    one short sequence of them: by the backend that was asked for, unless it refuses this part."""
    if not (len(queries) and len(keys)):
        return lambda parts, _: nothing(*parts)
    at = torch.from_numpy(keys).to(device)
    relation, n, count = gathered(work.relation, work.n_k, queries, keys)
    changes, more = work.changes, n - len(keys)
    standing: Standing | None = None
    if changes.placed or changes.inputs:
        # a score asks for positions, or how far apart they are
        moved = queries - np.arange(n - len(queries), n)
        alike = (moved == moved[0]).all() and (keys - np.arange(len(keys)) == moved[0]).all()
        # unless their numbers in the short sequence say it
        if not alike or changes.inputs or (moved[0] and not changes.by_distance):
            standing = Standing(queries, np.pad(keys, (0, more)), work.n_k)
    laid_out = replace(work, relation=relation, n_q=count, n_k=n, standing=standing)
    if backend != AUTO and refusal_of(backend_of(backend), laid_out, device.type) is not None:
        backend = AUTO
    kernel: Any = choose(laid_out, device.type, backend).build(laid_out, heads, device)

    def of_keys(x: Tensor) -> Tensor:
        return pad(x[..., at], (0, more))

    def weigh(parts: Parts, call: Call) -> Outputs:
        q, k, v = parts
        padding = None if call.padding is None else of_keys(call.padding)
        pairs = {x: of_keys(call.tables[x]) for x in changes.pairs}
        if more:
            k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
        mine = q, k, v, replace(call, padding=padding, tables={**call.tables, **pairs})
        if work.normalize in MERGED:
            return cast(Partial, kernel.partial(*mine))
        return kernel(*mine), None

    return weigh


def _links(
    exchange: Exchange, graph: int, rank: int, device: torch.device, weigh: Callable[..., Weighing]
) -> list[Any]:
    """For each other rank its number, the own rows that it is sent as keys and as queries, those
    that its queries read here, the positions of the keys that come, how many queries come, and what
    weighs these. Rows are numbered as the rank's tensors have them."""
    there, numbers = exchange.partition.positions, partial(torch.as_tensor, device=device)
    local, links = there(rank), list[Any]()
    for r in (r for r in range(exchange.partition.ranks) if r != rank):
        (keys, ask), (come, queries) = (exchange.sent(*x, graph) for x in ((r, rank), (rank, r)))
        # queries that come are weighed over own keys, but those that their rank is sent
        kept = np.setdiff1d(np.arange(len(local)), keys, assume_unique=True)
        rows = map(numbers, (keys, queries, kept))
        over = weigh(there(r)[ask], local[kept])
        links.append((r, *rows, there(r)[come], len(ask), over))
    return links


def group_here(
    exchange: Exchange, graph: int, rank: int, device: torch.device, backend: str
) -> Callable[[Parts, Parts, Call, torch.dtype], Steps]:
    """What one rank does for heads of one graph of an exchange: steps for all own rows, those of
    these heads, and the type of a call."""
    (work, heads), ratio = exchange.works[graph], exchange.tensors.ratio
    merges, adds_zero = work.normalize in MERGED, work.normalize == "softmax1"
    # its zero logit is added where parts are merged
    normalize = "softmax" if adds_zero else work.normalize
    work = replace(work, normalize=normalize, copies=len(heads), device=device.type)
    weigh = partial(weighing, work, heads, device, backend)
    moving = sorted({head // ratio for head in heads})
    # of the key heads that travel those that the formula takes
    read = [moving.index(head) for head in key_heads(heads, ratio)]
    links, local = _links(exchange, graph, rank, device, weigh), exchange.partition.positions(rank)
    guests = np.concatenate([local[:0], *(come for *_, come, _, _ in links)])
    # own rows whose queries may read keys that come; what cannot be merged is weighed once
    may = exchange.readings[graph].read(guests, readers=True)[local] | (not merges)
    home = weigh(local, local[: len(local) * merges])
    reads = weigh(local[may], guests if merges else np.append(local, guests))
    reading = torch.from_numpy(np.flatnonzero(may)).to(device)

    def steps(whole: Parts, mine: Parts, call: Call, kind: torch.dtype) -> Steps:
        yield _asked(exchange, graph, links, moving, whole)
        # outputs get the share of the zero logit before they are rounded
        inner = torch.promote_types(kind, torch.float32) if adds_zero else kind
        q, k, v = (x.to(inner) for x in mine)
        first = home((q, k, v), call)
        came, replies = (yield), list[Piece]()
        for r, _, queries, kept, _, ask, over in links:
            result = q[:0]
            if ask:
                rows = (
                    came[r][exchange, graph].to(inner),
                    *(x.index_select(2, kept) for x in (k, v)),
                )
                out, lse = over(rows, call)
                result = torch.cat([out, lse[..., None]], 3)
            shape = *q.shape[:2], len(queries), v.shape[3] + 1
            replies.append((r, (exchange, graph), result, shape))
        yield replies
        sizes, own = [k.shape[3], v.shape[3]], len(local) * (not merges)
        parts = (came[r][exchange][:, read].split(sizes, 3) for r, *_ in links)
        both = zip((k[:, :, :own], v[:, :, :own]), *parts, strict=True)
        keys, values = (torch.cat(x, 2) for x in both)
        pairs = {x: call.tables[x].index_select(2, reading) for x in work.changes.pairs}
        some = replace(call, tables={**call.tables, **pairs})
        out = reads((q.index_select(2, reading), keys, values), some)
        if merges:
            # what is merged is rounded once, at the end
            out = _merged((widened(first[0]), first[1]), reading, out)
        last = yield
        for r, _, queries, *_ in links:
            if len(queries):
                x = last[r][exchange, graph]
                out = _merged(out, queries, (x[..., :-1], x[..., -1]))
        # no part has the zero logit
        yield with_zero(cast(Partial, out)) if adds_zero else out

    return steps


def _asked(
    exchange: Exchange, graph: int, links: list[Any], moving: list[int], whole: Parts
) -> Iterator[Piece]:
    """Keys beside their values, once for all graphs that read them, and queries, for each rank."""
    heads = [*exchange.works[graph][1]]
    for r, keys, queries, _, come, ask, _ in links:
        moved: list[Any] = [(exchange, whole[1:], moving, keys, len(come))] * (graph == 0)
        moved.append(((exchange, graph), whole[:1], heads, queries, ask))
        for name, parts, some, rows, count in moved:
            x = torch.cat([x.index_select(2, rows)[:, some] for x in parts], 3)
            yield r, name, x, (*x.shape[:2], count, x.shape[3])


def _merged(first: Outputs, rows: Tensor, more: Outputs) -> Outputs:
    """Results with more of some of their rows, merged by log-sum-exps."""
    out, lse = cast(Partial, first)
    here = out.index_select(2, rows), lse.index_select(2, rows)
    mine, sums = merged(here, cast(Partial, more))
    return out.index_copy(2, rows, mine), lse.index_copy(2, rows, sums)


def rows_here(
    engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
) -> Run:
    """What one rank does for a layer."""
    kernels: list[Any] = [
        (group_here(exchange, graph, mesh.rank, device, engine.backend), *work)
        for exchange in plan.layers[0].exchanges
        for graph, work in enumerate(exchange.works)
    ]
    ready = engine.together(kernels, plan.tensors.heads, plan.tensors.key_heads, device)

    def run(layer: int, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        kind, grads = parts[0].dtype, torch.is_grad_enabled()
        # gradients from several ranks add up
        whole: Any = tuple(widened(x) if grads and x.requires_grad else x for x in parts)
        steps, learned = list[Steps](), list[Tensor]()
        for group in ready.groups:
            tables, here = engine.tables(group, layer, call.tables), cast(Any, group.kernel)
            steps.append(here(whole, group.parts(*whole), replace(call, tables=tables), kind))
            learned += tables.values()
        came, flats = None, list[Tensor]()
        wide = torch.promote_types(kind, torch.float32)
        # what is asked for depends on nothing that is learned
        for sent, tie in ((kind, whole), (wide, (*whole, *learned))):
            pieces = [piece for each in steps for piece in each.send(came)]
            flat, arrived = travel(mesh, pieces, sent, tie)
            flats.append(flat)
            for each in steps:
                next(each)
            came = arrived()
        every, sums = zip(*(each.send(came) for each in steps), strict=True)
        asked = (every, sums)[: 1 + return_lse]
        out, *lse = (tied(tied(ready.joined(x), flats[0]), flats[1]) for x in asked)
        return out.to(kind), lse[0] if lse else None

    return run
