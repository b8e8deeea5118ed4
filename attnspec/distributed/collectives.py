"""Rows on their way between ranks, with gradients that go the other way.

Every rank calls the same collectives in the same order, backward too: `tied` makes an output depend
on what was received where it reads nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from attnspec.backends.common.merging import Outputs
from attnspec.distributed.partitions import Partition
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import Parts

T = TypeVar("T")


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
    received: int = 0

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

    def swap(self, flat: Tensor, sent: list[int], got: list[int]) -> tuple[Tensor, Any]:
        """Start to send `sent[r]` numbers of a flat tensor to each rank r and to get `got[r]`:
        these, once the work beside them is finished."""
        out = flat.new_empty(sum(got))
        try:
            work = dist.all_to_all_single(
                out, flat.contiguous(), got, sent, group=self.group, async_op=True
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
        self, compute: Callable[[], tuple[T, list[int]]], count: int, device: torch.device
    ) -> tuple[T, list[list[int]]]:
        """What this rank computes, and the `count` numbers that each rank has beside it; raises on
        every rank if one cannot compute it: its reason there, ValueError elsewhere."""
        mine, numbers, wrong = cast(T, None), [0] * count, None
        try:
            mine, numbers = compute()
        except (TypeError, ValueError) as error:
            wrong = error
        every = self.everyones([wrong is None, *numbers], device)
        if wrong is not None:
            raise wrong
        bad = [rank for rank, answer in enumerate(every) if not answer[0]]
        if bad:
            raise ValueError(
                f"rank {bad[0]} refused its part of this call: see the error of that rank"
            )
        return mine, [answer[1:] for answer in every]


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


Piece = tuple[int, Any, Tensor, tuple[int, ...]]
"""A rank, what is sent to it by a name, and the shape of what comes from it by the same. The order
of the names is alike on both sides."""

Run = Callable[[int, Parts, Call, bool], Outputs]
"""Runs a layer, by its number, of those that differ in what they have learned alone, on one rank:
the output of own q, k and v, and its log-sum-exps if asked for, for the call of all positions."""


def travel(
    mesh: Mesh, pieces: Iterable[Piece], kind: torch.dtype, tie: Sequence[Tensor] = ()
) -> tuple[Tensor, Callable[[], list[dict[Any, Tensor]]]]:
    """Start to send pieces in a type, and to get others, differentiably: the numbers that come, one
    behind the other, and what waits for the tensors of each rank. What comes from others is
    counted. The swap has a backward on every rank or on none, whatever is sent, where all of them
    tie it to tensors that alike have gradients."""
    sent: list[list[Tensor]] = [[] for _ in range(mesh.ranks)]
    shapes: list[dict[Any, tuple[int, ...]]] = [{} for _ in sent]
    for rank, name, x, shape in pieces:
        sent[rank].append(x)
        shapes[rank][name] = shape
    flat = torch.cat([x.to(kind).reshape(-1) for x in (*(x[:0] for x in tie), *chain(*sent))])
    got = [sum(map(math.prod, each.values())) for each in shapes]
    box: list[Any] = []
    numbers = [sum(x.numel() for x in each) for each in sent]
    out = _Travel.apply(flat, mesh, numbers, got, box)  # type: ignore[no-untyped-call]
    mesh.received += (sum(got) - got[mesh.rank]) * flat.element_size()

    def arrived() -> list[dict[Any, Tensor]]:
        mesh.finish(box[0])
        parts = iter(torch.split(out, [math.prod(x) for each in shapes for x in each.values()]))
        return [{name: next(parts).view(x) for name, x in each.items()} for each in shapes]

    return out, arrived


def gathered(
    mesh: Mesh,
    partition: Partition,
    shards: Sequence[Tensor],
    dim: int,
    part: Callable[[Tensor, int], Tensor] = lambda x, _: x,
) -> list[Tensor]:
    """The whole of tensors, of one type, of which each rank has its positions along an axis; of
    each the `part` that is for a rank."""
    kind, pieces = shards[0].dtype, list[Piece]()
    for r, n in enumerate(partition.lengths):
        for at, x in enumerate(shards):
            shape = part(x, mesh.rank).shape
            pieces.append((r, at, part(x, r), (*shape[:dim], n, *shape[dim + 1 :])))
    flat, arrived = travel(mesh, pieces, torch.uint8 if kind == torch.bool else kind)
    order = torch.from_numpy(partition.order).to(flat.device)
    came = zip(*(each.values() for each in arrived()), strict=True)
    return [tied(torch.cat(x, dim).to(kind).index_select(dim, order), flat) for x in came]


def tied(out: Tensor, received: Tensor) -> Tensor:
    """The output, which depends on what was received as far as autograd is concerned."""
    return out + received[:0].sum().to(out.dtype) if received.requires_grad else out
