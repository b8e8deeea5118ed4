"""A layer of which every rank computes some heads at all positions (all-to-all over heads), or all
heads, of which it keeps its own positions (all-gather)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from attnspec.backends.common.merging import Outputs
from attnspec.distributed.collectives import Mesh, Piece, Run, order_of, tied, travel
from attnspec.distributed.planning import ALL, DistributedPlan, dealt
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Engine, Prepared


def heads_here(
    engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
) -> Run:
    """What one rank does for a layer: its heads, over the whole sequence."""
    tensors, lengths, every = plan.tensors, plan.partition.lengths, plan.layers[0].how == ALL
    order, ratio, count = order_of(plan.partition, device), tensors.ratio, tensors.key_heads
    rows = torch.split(torch.from_numpy(plan.partition.order).to(device), list(lengths))
    shares = [range(count) if every else dealt(r, mesh.ranks, count) for r in range(mesh.ranks)]
    keys = shares[mesh.rank]
    heads = range(keys.start * ratio, keys.stop * ratio)
    works = engine.binder.works(layer, tensors.heads, plan.n, plan.n)
    decides, ready = any(work.decided for work, _ in works), Prepared()
    if heads:
        some = [(work, tuple(head for head in of if head in heads)) for work, of in works]
        mine = [each for each in some if each[1]]
        ready = engine.built(mine, len(heads), len(keys), device, heads.start)

    def part(x: Tensor, keys: range = keys) -> Tensor:
        """What belongs to some key heads of [B, H or H_kv, …]; all of [B, 1, …]."""
        each = x.shape[1] // count
        return x.narrow(1, keys.start * each, len(keys) * each) if each else x

    def returned(x: Tensor, came: Tensor) -> Tensor:
        """Own heads [B, hs, n, …] at all positions to all heads [B, H, n_local, …] at own ones."""
        if every:
            return x.index_select(2, rows[mesh.rank])
        sizes = lengths[mesh.rank], *x.shape[3:]
        pieces: list[Piece] = [
            (r, "x", x.index_select(2, at), (len(x), len(of) * ratio, *sizes))
            for r, (at, of) in enumerate(zip(rows, shares, strict=True))
        ]
        _, arrived = travel(mesh, pieces, x.dtype, [came])
        return torch.cat([each["x"] for each in arrived()], 1)

    def run(layer: int, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        pieces: list[Piece] = [
            (r, name, part(x, shares[r]), (*part(x).shape[:2], n, x.shape[3]))
            for r, n in enumerate(lengths)
            for name, x in zip("qkv", parts, strict=True)
        ]
        flat, arrived = travel(mesh, pieces, parts[0].dtype)
        came = arrived()
        q, k, v = (torch.cat([x[name] for x in came], 2).index_select(2, order) for name in "qkv")
        # inputs about heads have four axes
        data = {name: part(x) if x.dim() == 4 else x for name, x in call.data.items()}
        tables = {name: part(x) for name, x in call.tables.items()}
        asked = (q, k, v), replace(call, data=data, tables=tables), return_lse
        compute = partial(engine.run, replace(ready, layer=layer), *asked)
        # of heads that decide one rank may refuse what others compute
        both = mesh.agreed(lambda: (compute(), []), 0, device)[0] if decides else compute()
        out, *lse = (tied(returned(cast(Tensor, x), flat), flat) for x in both[: 1 + return_lse])
        return out, lse[0] if lse else None

    return run
