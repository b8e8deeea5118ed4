"""Rows on their way between ranks, with gradients that go the other way.

Every rank calls the same collectives in the same order, backward too: `tied` makes an output depend
on what was received where it reads nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class LostRank(RuntimeError):
    """A rank did not answer within the time limit, or the connection to it ended."""


@dataclass
class Mesh:
    """The ranks that share a sequence: their group, how many they are, which of them this is, and
    the seconds that it waits for the others. `received` counts the bytes of rows,
    and of what asks for them."""

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

    def swap(self, flat: torch.Tensor, sent: Sequence[int], got: Sequence[int]) -> Swapping:
        """Start to send `sent[r]` numbers of a flat tensor to each rank r and to get `got[r]`."""
        out = flat.new_empty(sum(got))
        try:
            work = dist.all_to_all_single(
                out, flat.contiguous(), list(got), list(sent), group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise LostRank(f"rank {self.rank} cannot reach the others: {error}") from None
        return Swapping(self, out, work)

    def everyones(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=device).repeat(self.ranks)
        each = [len(numbers)] * self.ranks
        found: list[list[int]] = self.swap(mine, each, each).ready().view(self.ranks, -1).tolist()
        return found

    def agreed(
        self, numbers: Sequence[int], wrong: Exception | None, device: torch.device
    ) -> list[list[int]]:
        """The numbers of every rank, of one that has a reason to refuse the call as many others;
        raises on every rank if one has: its reason there, ValueError elsewhere."""
        every = self.everyones([wrong is None, *numbers], device)
        if wrong is not None:
            raise wrong
        bad = [rank for rank, said in enumerate(every) if not said[0]]
        if bad:
            raise ValueError(f"rank {bad[0]} refused its part of this call: its own error says why")
        return [said[1:] for said in every]

    def gathered(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """Shards of every rank one behind the other along an axis, of any type, without a
        gradient."""
        kind = x.dtype
        plain = (x.to(torch.uint8) if kind == torch.bool else x).movedim(dim, 0)
        rest, each = plain.shape[1:], plain.shape[1:].numel()
        flat = plain.reshape(-1).repeat(self.ranks)
        mine = [plain.numel()] * self.ranks
        found = self.swap(flat, mine, [length * each for length in lengths]).ready()
        return found.view(sum(lengths), *rest).movedim(0, dim).to(kind)


@dataclass
class Swapping:
    """Numbers that are on their way."""

    mesh: Mesh
    out: torch.Tensor
    work: Any

    def ready(self) -> torch.Tensor:
        """The numbers, once they are there."""
        if self.work is not None:
            self.mesh.finish(self.work)
            self.work = None
        return self.out


class _Travel(torch.autograd.Function):
    """Starts a swap; backward the gradients of what was received go back to where it came from."""

    @staticmethod
    def forward(ctx, flat, mesh, sent, got, box):  # type: ignore[no-untyped-def]
        ctx.mesh, ctx.sent, ctx.got = mesh, sent, got
        swapping = mesh.swap(flat, sent, got)
        box.append(swapping)
        return swapping.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.mesh.swap(grad, ctx.got, ctx.sent).ready(), None, None, None, None


def travel(mesh: Mesh, flat: torch.Tensor, sent: Sequence[int], got: Sequence[int]) -> Swapping:
    """Start to send rows, differentiably; they are counted where they arrive."""
    box: list[Swapping] = []
    out = _Travel.apply(flat, mesh, list(sent), list(got), box)  # type: ignore[no-untyped-call]
    mesh.received += sum(size for r, size in enumerate(got) if r != mesh.rank) * flat.element_size()
    return Swapping(mesh, out, box[0].work)


def taking(flat: torch.Tensor) -> Callable[..., torch.Tensor]:
    """What takes the next tensor of a shape from what came, as often as it is called."""
    at = 0

    def taken(*shape: int) -> torch.Tensor:
        nonlocal at
        low, at = at, at + math.prod(shape)
        return flat[low:at].view(shape)

    return taken


def unpacked(
    flat: torch.Tensor, batch: int, sides: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> list[torch.Tensor]:
    """What came from all ranks, of each its shards [batch, heads, n, size] of all sides (heads,
    size) one behind the other: each side's shards joined, [batch, heads, sum of n, size]."""
    shapes = [(batch, heads, n, size) for n in lengths for heads, size in sides]
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    shards = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return [torch.cat(shards[at :: len(sides)], 2) for at in range(len(sides))]


def tied(out: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """The output, which depends on what was received as far as autograd is concerned."""
    return out + received[:0].sum().to(out.dtype)


def anchor(parts: Sequence[torch.Tensor], kind: torch.dtype) -> torch.Tensor:
    """No numbers, that depend on tensors as far as autograd is concerned: with them a swap has a
    backward on every rank or on none, whatever it sends."""
    return torch.cat([x.reshape(-1)[:0].to(kind) for x in parts])
