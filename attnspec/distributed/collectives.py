"""Rows on their way between ranks, with gradients that go the other way.

Every rank calls the same collectives in the same order, backward too: `tied` makes an output depend
on what was received where it reads nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attnspec.distributed.partitions import Partition


class LostRank(RuntimeError):
    """A rank did not answer within the time limit, or the connection to it ended."""


@dataclass
class Mesh:
    """The ranks that share a sequence: their group, how many they are, which of them this is, and
    the seconds that it waits for the others. `received` counts the bytes of rows, and of what asks
    for them."""

    group: Any
    ranks: int
    rank: int
    limit: float
    received: int = field(default=0, compare=False)

    def finish(self, work: Any) -> None:
        """Wait for a collective; raises LostRank."""
        try:
            done = work.wait(timedelta(seconds=self.limit))
        except RuntimeError as error:
            raise LostRank(
                f"rank {self.rank} of {self.ranks} waited for the others, at most"
                f" {self.limit:g} s: {str(error).splitlines()[0]:.200}"
            ) from None
        if done is False:
            raise LostRank(f"rank {self.rank} of {self.ranks} got no answer in {self.limit:g} s")

    def swap(self, flat: Tensor, sent: Sequence[int], got: Sequence[int]) -> tuple[Tensor, Any]:
        """Start to send `sent[r]` numbers of a flat tensor to each rank r and to get `got[r]`:
        these, once the work beside them is finished."""
        out = flat.new_empty(sum(got))
        try:
            work = dist.all_to_all_single(
                out, flat.contiguous(), list(got), list(sent), group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise LostRank(f"rank {self.rank} cannot reach the others: {error}") from None
        return out, work

    def everyones(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=device).repeat(self.ranks)
        each = [len(numbers)] * self.ranks
        out, work = self.swap(mine, each, each)
        self.finish(work)
        values: list[list[int]] = out.view(self.ranks, -1).tolist()
        return values

    def agreed(
        self, numbers: Sequence[int], wrong: Exception | None, device: torch.device
    ) -> list[list[int]]:
        """The numbers of every rank, of one that has a reason to refuse the call as many others;
        raises on every rank if one has: its reason there, ValueError elsewhere."""
        every = self.everyones([wrong is None, *numbers], device)
        if wrong is not None:
            raise wrong
        bad = [rank for rank, answer in enumerate(every) if not answer[0]]
        if bad:
            raise ValueError(f"rank {bad[0]} refused its part of this call: its own error says why")
        return [answer[1:] for answer in every]


class _Travel(torch.autograd.Function):
    """Starts a swap; backward the gradients of what was received go back to where it came from."""

    @staticmethod
    def forward(ctx, flat, mesh, sent, got, box):  # type: ignore[no-untyped-def]
        ctx.mesh, ctx.sent, ctx.got = mesh, sent, got
        out, work = mesh.swap(flat, sent, got)
        box.append(work)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        out, work = ctx.mesh.swap(grad, ctx.got, ctx.sent)
        ctx.mesh.finish(work)
        return out, None, None, None, None


Named = Mapping[Any, Tensor]
"""Tensors for one rank, or of one: names and their order are alike on both sides."""

Shapes = Mapping[Any, tuple[int, ...]]


Ready = Callable[[], list[dict[Any, Tensor]]]
"""Waits for what is on its way: the tensors of each rank."""


def travel(
    mesh: Mesh,
    sent: Sequence[Named],
    shapes: Sequence[Shapes],
    kind: torch.dtype,
    tie: Sequence[Tensor] = (),
) -> tuple[Tensor, Ready]:
    """Start to send each rank its tensors in a type, and to get tensors of some shapes from it,
    differentiably: the numbers that come, one behind the other, and what waits until they are
    there. What comes from others is counted. The swap has a backward on every rank or on none,
    whatever is sent, where all of them tie it to tensors that alike have gradients."""
    nothing = [x[:0].reshape(-1).to(kind) for x in tie]
    flat = torch.cat([*nothing, *(x.to(kind).reshape(-1) for each in sent for x in each.values())])
    got = [sum(map(math.prod, each.values())) for each in shapes]
    numbers = [sum(x.numel() for x in each.values()) for each in sent]
    box: list[Any] = []
    out = _Travel.apply(flat, mesh, numbers, got, box)  # type: ignore[no-untyped-call]
    mesh.received += (sum(got) - got[mesh.rank]) * flat.element_size()

    def ready() -> list[dict[Any, Tensor]]:
        mesh.finish(box[0])
        pieces = iter(torch.split(out, [math.prod(x) for each in shapes for x in each.values()]))
        return [{name: next(pieces).view(x) for name, x in each.items()} for each in shapes]

    return out, ready


def gathered(mesh: Mesh, partition: Partition, x: Tensor, dim: int) -> Tensor:
    """The whole of a tensor, of any type, of which each rank has its positions along an axis."""
    kind = torch.uint8 if x.dtype == torch.bool else x.dtype
    shapes = [{"x": (*x.shape[:dim], n, *x.shape[dim + 1 :])} for n in partition.lengths]
    flat, ready = travel(mesh, [{"x": x}] * mesh.ranks, shapes, kind)
    whole = torch.cat([shard["x"] for shard in ready()], dim).to(x.dtype)
    return tied(whole.index_select(dim, order_of(partition, x.device)), flat)


def order_of(partition: Partition, device: torch.device) -> Tensor:
    """Where each position stands among the shards one behind the other, int64 [n]."""
    return torch.from_numpy(np.argsort(partition.order, kind="stable")).to(device)


def tied(out: Tensor, received: Tensor) -> Tensor:
    """The output, which depends on what was received as far as autograd is concerned."""
    return out + received[:0].sum().to(out.dtype) if received.requires_grad else out
