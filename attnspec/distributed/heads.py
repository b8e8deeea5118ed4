"""A layer in which every rank computes some heads at all positions: queries, keys and values go
there and outputs come back (all-to-all over heads); or all heads, of which it keeps what is its
own (all-gather)."""

from __future__ import annotations

from collections.abc import Callable
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
    order = order_of(plan.partition, device)
    rows = torch.split(torch.from_numpy(plan.partition.order).to(device), list(lengths))

    def heads_of(name: str, rank: int = mesh.rank) -> range:
        """The heads of q, k or v that a rank computes."""
        share, ratio = (0, 1) if every else (rank, mesh.ranks), tensors.ratio if name == "q" else 1
        keys = dealt(*share, tensors.key_heads)
        return range(keys.start * ratio, keys.stop * ratio)

    def part(name: str, x: Tensor, rank: int = mesh.rank) -> Tensor:
        """Of q, k or v [B, heads, …] those heads."""
        heads = heads_of(name, rank)
        return x.narrow(1, heads.start, len(heads))

    works, local = engine.binder.works(layer, tensors.heads, plan.n, plan.n), heads_of("q")
    decides, ready = any(work.decided for work, _ in works), Prepared()
    if local:
        some = [(work, tuple(head for head in of if head in local)) for work, of in works]
        mine = [each for each in some if each[1]]
        ready = engine.built(mine, len(local), len(heads_of("k")), device, local.start)

    def returned(x: Tensor, came: Tensor) -> Tensor:
        """Own heads [B, hs, n, …] at all positions to all heads [B, H, n_local, …] at own ones."""
        if every:
            return x.index_select(2, rows[mesh.rank])
        sizes = lengths[mesh.rank], *x.shape[3:]
        pieces: list[Piece] = [
            (r, "x", x.index_select(2, at), (len(x), len(heads_of("q", r)), *sizes))
            for r, at in enumerate(rows)
        ]
        _, arrived = travel(mesh, pieces, x.dtype, [came])
        return torch.cat([each["x"] for each in arrived()], 1)

    def run(layer: int, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        pieces: list[Piece] = [
            (r, name, part(name, x, r), (len(x), len(heads_of(name)), n, x.shape[3]))
            for r, n in enumerate(lengths)
            for name, x in zip("qkv", parts, strict=True)
        ]
        flat, arrived = travel(mesh, pieces, parts[0].dtype)
        came = arrived()
        q, k, v = (torch.cat([x[name] for x in came], 2).index_select(2, order) for name in "qkv")
        mine = _of_heads(call, tensors.heads, part)
        compute = partial(engine.run, replace(ready, layer=layer), (q, k, v), mine, return_lse)
        # of heads that decide one rank may refuse what others compute
        both = mesh.agreed(lambda: (compute(), []), 0, device)[0] if decides else compute()
        out, *lse = (tied(returned(cast(Tensor, x), flat), flat) for x in both[: 1 + return_lse])
        return out, lse[0] if lse else None

    return run


def _of_heads(call: Call, heads: int, part: Callable[[str, Tensor], Tensor]) -> Call:
    """The call with the part of own heads, of so many, of inputs about heads [B, H or H_kv or 1, …]
    and of what is learned."""
    data, tables = dict(call.data), dict(call.tables)
    for name, x in data.items():
        if x.dim() == 4 and x.shape[1] > 1:
            data[name] = part("q" if x.shape[1] == heads else "k", x)
    for name, x in tables.items():
        tables[name] = part("q", x) if x.shape[1] > 1 else x
    return replace(call, data=data, tables=tables)
