"""Launches: every step of a graph through the kernels, one launch each, all heads together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attnspec.backends.common.dropping import factor_of, least_of
from attnspec.backends.common.flash import in_rows
from attnspec.backends.common.score_formula import bucket_table, slopes_of
from attnspec.backends.triton import kernels
from attnspec.backends.triton.blocks import Changes, Drops, Heads, Lists, Look, Masks, Rows, Side
from attnspec.backends.triton.tables import Step, TileLists
from attnspec.backends.triton.tuning import LEAST, block_of, power
from attnspec.lower.work import Alibi, Bias, Call, Softcap, Work

DIGITS: Mapping[type, int] = {Softcap: 1, Alibi: 2, Bias: 3}
"""How a kernel is told of a change of scores."""


class Scores:
    """The changes of a work's scores as numbers on a device."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.count = len(work.changes)
        self.code = sum(DIGITS[type(x)] * 4**place for place, x in enumerate(work.changes))
        slopes = slopes_of(work.changes, heads)
        numbers = [
            slopes[x] if isinstance(x, Alibi) else [getattr(x, "cap", 0.0)] * len(heads)
            for x in work.changes
        ]
        wide = torch.tensor(numbers or [[0.0]], dtype=torch.float64)
        self.numbers = {x: wide.to(device, x) for x in (torch.float32, torch.float64)}
        self.bias = next((x for x in work.changes if isinstance(x, Bias)), None)
        self.buckets = torch.zeros(1, dtype=torch.int32, device=device)
        if self.bias is not None:
            self.buckets = bucket_table(self.bias, work.n_k, device, torch.int32)

    def changes(
        self, kind: torch.dtype, tables: Mapping[str, torch.Tensor], learns: bool
    ) -> Changes:
        """What kernels are handed."""
        table = numbers = self.numbers[kind]
        learned = 1
        if self.bias is not None:
            table = in_rows(tables[self.bias.table])
            learned = block_of(self.bias.buckets) if learns else 1
        farthest, constants = len(self.buckets) // 2, (self.code, self.count, learned)
        given = numbers, numbers.shape[1], self.buckets, farthest, table, table.stride(0)
        return Changes(*given, *map(tl.constexpr, constants))


class Blocks(NamedTuple):
    """Rows of a block of queries and of keys, and how a program runs."""

    q: int
    k: int
    warps: int
    stages: int


LARGE = 227 << 10
"""Bytes of shared memory that a program of a data centre's GPU may have; others give some 99 KB."""

TIGHT = 160 << 10
"""Bytes below which blocks are smaller: the 99 KB of other GPUs, and not the 163 of 8.0."""


@cache
def room_on(device: torch.device) -> int:
    """The bytes of shared memory that a program may have on a device."""
    if device.type != "cuda":
        return LARGE
    # what triton itself holds a kernel against
    known = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    room: int = known["max_shared_mem"]
    return room


@lru_cache(maxsize=256)
def blocks_for(
    size: int, dtype: torch.dtype, back: bool, gathers: bool, room: int = LARGE
) -> Blocks:
    """The largest blocks for heads of a size that leave room for the next keys to be fetched, and
    for what is gathered from a table for every pair.

    What programs take was read off kernels that were compiled: half types of 256 numbers 176 KB on
    compute capability 9.0, 120 on 8.6, where there are 99; float32 of 512, backward, 264.
    """
    tight, wide = room < 128 << 10, dtype.itemsize > 2
    size = block_of(size) * (2 if wide else 1) * (2 if back else 1) * (2 if gathers else 1)
    if size <= 64:
        # keys and values of 64 leave room for four warps of more registers each
        return Blocks(128, 64, 4, 3)
    if size <= 128:
        return Blocks(128, 64, 8, 3) if not back else Blocks(64, 64, 4, 3)
    if size <= 256:
        return Blocks(64, 32, 4, 2) if wide or (tight and not back) else Blocks(64, 64, 4, 2)
    rows = 16 if size > (256 if tight else 1024) else 32
    return Blocks(rows, rows, 4, 2)


def fits(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the least blocks do on the device of q: rows of queries, keys, values and gradients.
    Compiled for compute capability 8.6 they take just that, 131 KB for float32 of 512."""
    size = max(block_of(x.shape[-1]) for x in (q, v))
    return 4 * LEAST * size * q.element_size() <= room_on(q.device)


class Launches:
    """A call of the kernels: q [B, H, n_q, d], k [B, K, n_k, d] and v [B, K, n_k, e], so many query
    heads of a key head together in each program; `labels` int64 [B, L, n_k] are those that a pair
    must have in common; `back` says that it is for gradients. Dropped weights are counted by
    `sizes`: query heads in each sample, and queries and keys of each of the lists that lie one
    behind the other."""

    def __init__(
        self,
        scores: Scores,
        tensors: Sequence[torch.Tensor],
        call: Call,
        scale: float,
        back: bool,
        sizes: tuple[int, int, int],
        group: int = 1,
        labels: torch.Tensor | None = None,
    ) -> None:
        self.q, self.k, self.v = (in_rows(x) for x in tensors)
        self.batch, self.kind = len(self.q), torch.promote_types(self.q.dtype, torch.float32)
        groups, keys = self.q.shape[1] // group, self.k.shape[1]
        self.heads, self.key_heads = Heads(groups, groups // keys, group), Heads(keys, 1, 1)
        self.tables = call.tables
        self.learns = back and scores.bias is not None
        self.learns &= any(x.requires_grad for x in call.tables.values())
        size, gathers = max(self.q.shape[3], self.v.shape[3]), scores.bias is not None
        self.blocks = blocks_for(size, self.q.dtype, back, gathers, room_on(self.q.device))
        self.given = [rows_of(x) for x in (self.q, self.k, self.v)]
        padding = Rows(self.q, 0, 0, 0)
        if call.padding is not None:
            bits = call.padding.view(torch.uint8)
            padding = Rows(bits, bits.stride(0), 0, bits.stride(1))
        drops = None
        if call.seed is not None:
            p = call.dropout_p
            drops = Drops(call.seed, least_of(p), factor_of(p), call.line, *sizes)
        self.look = Look(
            None,
            padding,
            scores.changes(self.kind, call.tables, self.learns),
            scale,
            self.k.shape[2] - self.q.shape[2],
            drops,
            padding if labels is None else rows_of(labels),
            tl.constexpr(0 if labels is None else labels.shape[1]),
            tl.constexpr(tl.float64 if self.kind == torch.float64 else tl.float32),
            tl.constexpr(call.padding is not None),
            None,
        )

    def attend(self, steps: Sequence[Step], out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges what steps give into an output [B, H, n_q, e] and its log-sum-exps [B, H, n_q]."""
        into, heads = (rows_of(out), rows_of(lse)), self.heads
        with self._place:
            for step in steps:
                sides, look = self._sides(step)
                lists, held = step.rows, into
                if lists.slots:
                    room = self._slots(out, lists, sides[0], heads)
                    held = rows_of(room), rows_of(room.new_empty(room.shape[:3]))
                work = _work(lists, lists.programs, sides[0])
                self._launch(
                    kernels.attend, work, heads, *self.given, *into, held, sides, work, heads, look
                )
                if lists.slots:
                    work = _work(lists, lists.spans, sides[0])
                    self._launch(
                        kernels.merge, work, heads, *into, held, sides[0], work, heads, look
                    )

    def derive(
        self, steps: Sequence[Step], above: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Adds the gradients of q, k and v, and returns those of the table of a bias; `above` are
        the gradient of the output, its log-sum-exps, and delta [B, H, n_q], the sums of that
        gradient times the output less the gradients of the log-sum-exps."""
        found = [torch.zeros_like(x, dtype=self.kind) for x in self.tables.values()]
        upper = tuple(map(rows_of, above))
        with self._place:
            for step in steps:
                sides, look = self._sides(step)
                shares = self._of_queries(step, sides, look, upper, into[0])
                self._of_keys(step, sides, look, upper, into[1:])
                if self.learns:
                    found[0] += shares.sum((0, 2))[:, : found[0].shape[1]]
        return [x.to(table.dtype) for x, table in zip(found, self.tables.values(), strict=True)]

    def _of_queries(
        self,
        step: Step,
        sides: tuple[Side, Side],
        look: Look,
        upper: tuple[Rows, ...],
        into: torch.Tensor,
    ) -> torch.Tensor:
        """Adds the gradients of queries; returns the shares of programs in that of the table of a
        bias [B, H, programs, buckets or more]."""
        lists, heads, learned = step.rows, self.heads, look.changes.learned.value
        work = _work(lists, lists.programs, sides[0])
        shares = self.q
        if self.learns:
            shape = self.batch, heads.groups, work.count, learned
            shares = self.q.new_empty(shape, dtype=self.kind)
        target = held = rows_of(into)
        if lists.slots:
            held = rows_of(self._slots(into, lists, sides[0], heads))
        given = *self.given, upper, target, held, shares, sides, work, heads, look
        self._launch(kernels.of_queries, work, heads, *given)
        self._add_up(lists, target, held, sides[0], heads, look)
        return shares

    def _of_keys(
        self,
        step: Step,
        sides: tuple[Side, Side],
        look: Look,
        upper: tuple[Rows, ...],
        into: Sequence[torch.Tensor],
    ) -> None:
        """Adds the gradients of keys and values."""
        lists, heads = step.columns, self.key_heads
        work = _work(lists, lists.programs, sides[1])
        targets = held = tuple(map(rows_of, into))
        if lists.slots:
            held = tuple(rows_of(self._slots(x, lists, sides[1], heads)) for x in into)
        given = *self.given, upper, targets, held, sides, work, self.heads, look
        self._launch(kernels.of_keys, work, heads, *given)
        for target, slots in zip(targets, held, strict=True):
            self._add_up(lists, target, slots, sides[1], heads, look)

    def _add_up(
        self, lists: TileLists, into: Rows, slots: Rows, side: Side, heads: Heads, look: Look
    ) -> None:
        """Adds what long lists have in slots."""
        if lists.slots:
            work = _work(lists, lists.spans, side)
            self._launch(kernels.add_up, work, heads, into, slots, side, work, heads, look)

    # --- what kernels are handed ---------------------------------------------------------------

    @property
    def _place(self) -> AbstractContextManager[Any]:
        """Where kernels are launched."""
        return torch.cuda.device(self.q.device) if self.q.is_cuda else nullcontext()

    def _sides(self, step: Step) -> tuple[tuple[Side, Side], Look]:
        """Both sides of a step in blocks, and how its scores are made."""
        q = _in_blocks(step.q, self.blocks.q, self.heads.group)
        k = _in_blocks(step.k, self.blocks.k, 1)
        whole = tl.constexpr(k.size == k.parts * k.block.value)
        masks = Masks(step.words, *step.words.shape[1:])
        return (q, k), self.look._replace(masks=masks, whole=whole)

    def _slots(
        self, like: torch.Tensor, lists: TileLists, side: Side, heads: Heads
    ) -> torch.Tensor:
        """Room for what the programs of long lists find [B, heads, rows, size]."""
        rows = lists.slots * side.parts * side.count.value
        return like.new_empty((self.batch, heads.groups, rows, like.shape[3]), dtype=self.kind)

    def _launch(self, kernel: Any, work: Lists, heads: Heads, *given: object) -> None:
        """Runs a kernel once for every program of every group of heads."""
        if count := work.count * self.batch * heads.groups:
            launch(kernel, count, given, *self.blocks[2:])


def launch(kernel: Any, count: int, given: Sequence[object], warps: int, stages: int) -> None:
    """Runs so many programs of a kernel."""
    kernel[(count,)](*given, num_warps=warps, num_stages=stages)


def rows_of(x: torch.Tensor) -> Rows:
    """A tensor [B, heads, n, size] or [B, heads, n] as kernels take it."""
    if x.dim() == 3:
        return Rows(x, x.stride(0), x.stride(1), x.stride(2))
    samples, heads, rows, _ = x.stride()
    size = x.shape[3]
    return Rows(x, samples, heads, rows, tl.constexpr(size), tl.constexpr(block_of(size)))


def _in_blocks(side: Side, most: int, group: int) -> Side:
    heads = power(group)
    # with the heads of a group a block has as many rows as without
    block = max(min(max(1, most // heads), power(side.size)), LEAST // heads)
    constants = (tl.constexpr(x) for x in (block, block * heads, side.step == 0))
    return Side(*side[:5], -(-side.size // block), *constants)


def _work(lists: TileLists, work: torch.Tensor, side: Side) -> Lists:
    """What programs, or spans, do in the blocks of their tiles."""
    samples = work.stride(0) if len(work) > 1 else 0
    return Lists(work, lists.tiles, lists.kinds, work.shape[1] * side.parts, samples)
