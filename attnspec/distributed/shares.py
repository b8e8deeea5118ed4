"""Layers of which every rank computes a share: some heads at all positions (all-to-all over heads),
or all heads, of which it keeps its own positions (all-gather); or sums of features, of which the
sums over each rank's keys travel.

Sums travel in two steps: each rank merges its share of the rows of all sums, and gives every rank
that share of what it goes on from. Frames, the logarithms of what sums are divided by, go to
everyone; where a gate forgets, the logarithms of what it leaves of earlier sums stand in their
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from attnspec.backends.common.merging import LOWEST, Outputs, in_one_frame
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.hybrid import kernel_of
from attnspec.distributed.collectives import Mesh, Piece, Run, gathered, tied, travel
from attnspec.distributed.partitions import dealt
from attnspec.distributed.planning import ALL, DistributedPlan
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Engine, Prepared


def heads_here(
    engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
) -> Run:
    """What one rank does for a layer: its heads, over the whole sequence."""
    ratio, count, every = plan.tensors.ratio, plan.tensors.key_heads, plan.layers[0].how == ALL
    rows = [torch.from_numpy(plan.partition.positions(r)).to(device) for r in range(mesh.ranks)]
    shares = [range(count)] * mesh.ranks if every else dealt(count, mesh.ranks)
    keys = shares[mesh.rank]
    heads = range(keys.start * ratio, keys.stop * ratio)
    works = engine.binder.works(layer, plan.tensors.heads, plan.n, plan.n)
    decides, ready = any(work.decided for work, _ in works), Prepared()
    if heads:
        some = ((work, tuple(head for head in of if head in heads)) for work, of in works)
        mine = [each for each in some if each[1]]
        ready = engine.built(mine, len(heads), len(keys), device, heads.start)

    def part(x: Tensor, rank: int = mesh.rank) -> Tensor:
        """What belongs to a rank's key heads of [B, H or H_kv, …]; all of [B, 1, …]."""
        each, some = x.shape[1] // count, shares[rank]
        return x.narrow(1, some.start * each, len(some) * each) if each else x

    def returned(x: Tensor, tie: Tensor) -> Tensor:
        """Own heads [B, hs, n, …] at all positions to all heads [B, H, n_local, …] at own ones."""
        if every:
            return x.index_select(2, rows[mesh.rank])
        sizes = len(rows[mesh.rank]), *x.shape[3:]
        pieces: list[Piece] = [
            (r, "x", x.index_select(2, at), (len(x), len(of) * ratio, *sizes))
            for r, (at, of) in enumerate(zip(rows, shares, strict=True))
        ]
        flat, arrived = travel(mesh, pieces, x.dtype, [tie])
        return tied(torch.cat([each["x"] for each in arrived()], 1), flat)

    def run(layer: int, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        q, k, v = gathered(mesh, plan.partition, parts, 2, part)
        # inputs about heads have four axes
        data = {name: part(x) if x.dim() == 4 else x for name, x in call.data.items()}
        tables = {name: part(x) for name, x in call.tables.items()}
        asked = (q, k, v), replace(call, data=data, tables=tables), return_lse
        compute = partial(engine.run, replace(ready, layer=layer), *asked)
        # of heads that decide one rank may refuse what others compute
        both = mesh.agreed(lambda: (compute(), []), 0, device)[0] if decides else compute()
        out, *lse = (tied(returned(cast(Tensor, x), q), q) for x in both[: 1 + return_lse])
        return out, lse[0] if lse else None

    return run


def states_here(
    engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
) -> Run:
    """What one rank does for a layer: its keys' sums, and its queries on top of others'."""
    own = torch.from_numpy(plan.partition.positions(mesh.rank)).to(device)
    heads, key_heads = plan.tensors.heads, plan.tensors.key_heads
    works = engine.binder.works(layer, heads, plan.n, plan.n)
    kernels = ((kernel_of(*each, device), *each) for each in works)
    ready = engine.together(kernels, heads, key_heads, device)

    def run(layer: int, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        if return_lse:
            raise ValueError(
                f"`{engine.program.name}` returns no log-sum-exps over several devices: leave"
                " `return_lse` out, or call the module on one device"
            )
        outs, padding = [], None if call.padding is None else call.padding.index_select(1, own)
        for group in ready.groups:
            # a kernel of sums: of features, or of dense projections
            kernel: Any = group.kernel
            mine, tables = group.parts(*parts), engine.tables(group, layer, call.tables)
            here = *mine, replace(call, padding=padding, tables=tables)
            tie = [*mine, *tables.values()]
            before, came = _exchanged(mesh, tie, group.work.causal, *kernel.key_sums(*here, own))
            outs.append(tied(kernel.onward(*here, before), came))
        return ready.joined(outs), None

    return run


def _exchanged(
    mesh: Mesh, tie: Sequence[Tensor], causal: bool, own: State, left: Tensor | None
) -> tuple[State, Tensor]:
    """The sums that this rank goes on from, and what was received for them; `left` are the
    logarithms of what a gate leaves of the sums before own keys."""
    sums = own.sums.flatten(0, -3)
    rows, features, width = sums.shape
    base = own.base if left is None else left
    base = sums.new_zeros(rows) if base is None else base.flatten()
    lines = sums.flatten(0, 1)
    deals = dealt(len(lines), mesh.ranks)
    mine, pieces = deals[mesh.rank], list[Piece]()
    for r, d in enumerate(deals):
        pieces.append((r, "sums", lines[d.start : d.stop], (len(mine), width)))
        pieces.append((r, "base", base, (rows,)))
    _, arrived = travel(mesh, pieces, sums.dtype, tie)
    came = arrived()
    parts, bases = (torch.stack([each[name] for each in came]) for name in ("sums", "base"))
    row = torch.arange(mine.start, mine.stop, device=sums.device) // features
    if left is None:
        bases = bases.detach()
    ready = merged(parts, bases, row, causal, left is not None)
    pieces = [(r, "sums", ready[r][0], (len(d), width)) for r, d in enumerate(deals)]
    flat, arrived = travel(mesh, pieces, sums.dtype)
    whole = torch.cat([share["sums"] for share in arrived()])
    frame = None if own.base is None else ready[mesh.rank][1].view(own.base.shape)
    return State(whole.view(own.sums.shape), frame), flat


def merged(
    parts: Tensor, bases: Tensor, row: Tensor, causal: bool, gated: bool
) -> list[tuple[Tensor, Tensor]]:
    """The sums that each rank goes on from, and their frames [N], made of some lines of the sums of
    all ranks [ranks, lines, e] in the frames `bases` [ranks, N]; `row` says of which of N each line
    is. Causal sums are those of the ranks before; where a gate forgets, `bases` are the logarithms
    of what it leaves of earlier sums."""
    total, top = torch.zeros_like(parts[0]), torch.full_like(bases[0], LOWEST)
    before = []
    for part, base in zip(parts, bases, strict=True):
        before.append((total, bases[0] if gated else top))
        if gated:
            total = total * torch.exp(base)[row, None] + part
            continue
        frame, shares = in_one_frame(torch.stack([top, base]), 0)
        stays, comes = shares[:, row, None]
        total, top = total * stays + part * comes, frame[0]
    return before if causal or gated else [(total, top)] * len(parts)
