"""A layer of sums of features, of which the sums over each rank's keys travel, in two steps: each
rank merges its share of the rows of all sums, and gives every rank that share of what it goes on
from. Frames, the logarithms of what sums are divided by, go to everyone; where a gate forgets, the
logarithms of what it leaves of earlier sums stand in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.common.merging import LOWEST, Outputs, in_one_frame
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.hybrid import kernel_of
from attnspec.distributed.collectives import Mesh, Piece, Run, tied, travel
from attnspec.distributed.planning import DistributedPlan, dealt
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Engine


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
                f"the sums of features of `{engine.program.name}` come without log-sum-exps"
                " over several devices: leave `return_lse` out, one device has them"
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
    lines = sums.reshape(rows * features, width)
    deals = [dealt(rank, mesh.ranks, len(lines)) for rank in range(mesh.ranks)]
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
