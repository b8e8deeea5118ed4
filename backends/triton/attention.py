"""Launches: every step of a graph through the kernels, one launch each, all heads together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from attnspec.backends.common.dropping import factor_of, least_of
from attnspec.backends.common.flash import in_rows
from attnspec.backends.common.score_formula import bucket_table, slopes_of
from attnspec.backends.triton import kernels
from attnspec.backends.triton.blocks import Changes, Drops, Heads, Lists, Look, Masks, Rows, Side
from attnspec.backends.triton.tables import Tables, TileLists, TileSide
from attnspec.backends.triton.tuning import LEAST, block_of, power
from attnspec.lower.work import Alibi, Bias, Call, Softcap, Work

DIGITS: Mapping[type, int] = {Softcap: 1, Alibi: 2, Bias: 3}
"""How a kernel is told of a change of scores."""


class ScoreTables:
    """The changes of a work's scores as numbers on a device."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.work, self.device = work, device
        self.code = sum(DIGITS[type(x)] * 4**place for place, x in enumerate(work.changes))
        slopes = slopes_of(work.changes, heads)
        numbers = [
            slopes[x] if isinstance(x, Alibi) else [getattr(x, "cap", 0.0)] * len(heads)
            for x in work.changes
        ]
        self.numbers = torch.tensor(numbers or [[0.0]], dtype=torch.float64, device=device)
        self.bias = next((x for x in work.changes if isinstance(x, Bias)), None)
        self.buckets = torch.zeros(1, dtype=torch.int32, device=device)
        if self.bias is not None:
            self.buckets = bucket_table(self.bias, work.n_k, device, torch.int32)

    def given(self, kind: torch.dtype, tables: Mapping[str, torch.Tensor], learns: bool) -> Changes:
        """What kernels are handed."""
        numbers = self.numbers.to(kind)
        table, learned = numbers, 1
        if self.bias is not None:
            table = in_rows(tables[self.bias.table])
            learned = block_of(self.bias.buckets) if learns else 1
        return Changes(
            numbers,
            numbers.shape[1],
            self.buckets,
            len(self.buckets) // 2,
            table,
            table.stride(0),
            tl.constexpr(self.code),
            tl.constexpr(len(self.work.changes)),
            tl.constexpr(learned),
        )


@dataclass(frozen=True)
class Blocks:
    """Rows of a block of queries and of keys, and how a program runs."""

    q: int
    k: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


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


def drops_of(call: Call, heads: int, q_rows: int, k_rows: int) -> Drops | None:
    """Which weights a call drops, of so many heads in each sample, and rows of a list."""
    if call.seed is None:
        return None
    p = call.dropout_p
    return Drops(call.seed, least_of(p), factor_of(p), call.line, heads, q_rows, k_rows)


class Passing:
    """The tensors of a call as kernels take them: q [B, H, n_q, d], k [B, K, n_k, d] and
    v [B, K, n_k, e], so many query heads of a key head together in each program; `labels` int64
    [B, L, n_k] are those that a pair must have in common."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        scale: float,
        group: int = 1,
        drops: Drops | None = None,
        labels: torch.Tensor | None = None,
    ) -> None:
        self.q, self.k, self.v = (in_rows(x) for x in tensors)
        self.kind = torch.promote_types(self.q.dtype, torch.float32)
        self.sums = tl.constexpr(tl.float64 if self.kind == torch.float64 else tl.float32)
        self.padding, self.scale, self.drops, self.labels = padding, scale, drops, labels
        groups = self.q.shape[1] // group
        self.heads = Heads(groups, groups // self.k.shape[1], group)
        self.key_heads = Heads(self.k.shape[1], 1, 1)

    @property
    def place(self) -> AbstractContextManager[Any]:
        """Where kernels are launched."""
        return torch.cuda.device(self.q.device) if self.q.is_cuda else nullcontext()

    @property
    def size(self) -> int:
        """The size of the larger heads."""
        return max(self.q.shape[3], self.v.shape[3])

    def blocks(self, back: bool, gathers: bool) -> Blocks:
        """The blocks of its programs."""
        return blocks_for(self.size, self.q.dtype, back, gathers, room_on(self.q.device))

    def sides(self, step: Tables, blocks: Blocks) -> tuple[Side, Side]:
        """Both sides of a step, in blocks."""
        return _side(step.q, blocks.q, self.heads.group), _side(step.k, blocks.k, 1)

    def look(self, step: Tables, k_side: Side, changes: Changes) -> Look:
        masks = Masks(step.words, *step.words.shape[1:])
        padding = Rows(step.words, 0, 0, 0)
        if self.padding is not None:
            bits = self.padding.view(torch.uint8)
            padding = Rows(bits, bits.stride(0), 0, bits.stride(1))
        return Look(
            masks,
            padding,
            changes,
            self.scale,
            self.k.shape[2] - self.q.shape[2],
            self.drops,
            step.words if self.labels is None else rows_of(self.labels),
            tl.constexpr(0 if self.labels is None else self.labels.shape[1]),
            self.sums,
            tl.constexpr(self.padding is not None),
            tl.constexpr(k_side.size == k_side.parts * k_side.block.value),
        )


class TileAttention:
    """Softmax attention over disjoint steps, each of them merged into what is there."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.scores = ScoreTables(work, heads, device)

    def attend(
        self,
        steps: Sequence[Tables],
        passing: Passing,
        tables: Mapping[str, torch.Tensor],
        into: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Merges what steps give into an output [B, H, n_q, e] and its log-sum-exps [B, H, n_q]."""
        changes = self.scores.given(passing.kind, tables, False)
        blocks = passing.blocks(False, self.scores.bias is not None)
        given = [rows_of(x) for x in (passing.q, passing.k, passing.v)]
        target, batch, heads = tuple(map(rows_of, into)), len(passing.q), passing.heads
        with passing.place:
            for step in steps:
                sides = passing.sides(step, blocks)
                look = passing.look(step, sides[1], changes)
                slots = _slots(heads, into[0], step.rows, sides[0], passing.kind)
                held = rows_of(slots), rows_of(slots.new_empty(slots.shape[:3]))
                lists = _lists(step.rows, sides[0])
                _launch(kernels.attend, lists, batch, heads, blocks)(
                    *given, *target, held, sides, lists, heads, look
                )
                if step.rows.slots:
                    spans = _spans(step.rows, sides[0])
                    _launch(kernels.merge, spans, batch, heads, blocks)(
                        *target, held, sides[0], spans, heads, look
                    )

    def derive(
        self,
        steps: Sequence[Tables],
        passing: Passing,
        tables: Mapping[str, torch.Tensor],
        above: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        into: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Adds the gradients of q, k and v, and returns those of the table of a bias; `above` are
        the gradient of the output, its log-sum-exps, and delta [B, H, n_q], the sums of that
        gradient times the output less the gradients of the log-sum-exps."""
        learns = self.scores.bias is not None and any(x.requires_grad for x in tables.values())
        changes = self.scores.given(passing.kind, tables, learns)
        found = [torch.zeros_like(x, dtype=passing.kind) for x in tables.values()]
        blocks = passing.blocks(True, self.scores.bias is not None)
        with passing.place:
            for step in steps:
                sides = passing.sides(step, blocks)
                look = passing.look(step, sides[1], changes)
                run = _Back(passing, step, sides, look, blocks, above)
                share = run.of_queries(into[0])
                run.of_keys(into[1], into[2])
                if learns:
                    found[0] += share[:, : found[0].shape[1]]
        return [x.to(table.dtype) for x, table in zip(found, tables.values(), strict=True)]


@dataclass(frozen=True, eq=False)
class _Back:
    """The gradients of one step."""

    passing: Passing
    step: Tables
    sides: tuple[Side, Side]
    look: Look
    blocks: Blocks
    above: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @cached_property
    def given(self) -> list[Any]:
        """q, k, v and what is above, as kernels take them."""
        tensors = self.passing.q, self.passing.k, self.passing.v
        return [*map(rows_of, tensors), tuple(map(rows_of, self.above))]

    def of_queries(self, into: torch.Tensor) -> torch.Tensor:
        """Adds those of queries; returns that of the table of a bias [H, buckets or more]."""
        passing, lists = self.passing, _lists(self.step.rows, self.sides[0])
        heads, batch = passing.heads, len(passing.q)
        slots = _slots(heads, passing.q, self.step.rows, self.sides[0], passing.kind)
        learned = self.look.changes.learned.value
        shape = batch, heads.groups, max(1, lists.count) if learned > 1 else 0, learned
        shares = passing.q.new_empty(shape, dtype=passing.kind)
        _launch(kernels.of_queries, lists, batch, heads, self.blocks)(
            *self.given, rows_of(into), rows_of(slots), shares, self.sides, lists, heads, self.look
        )
        self._add_up(into, slots, self.step.rows, self.sides[0], heads)
        return shares[:, :, : lists.count].sum((0, 2))

    def of_keys(self, of_k: torch.Tensor, of_v: torch.Tensor) -> None:
        """Adds those of keys and values."""
        passing, columns = self.passing, self.step.columns
        lists, heads, batch = _lists(columns, self.sides[1]), passing.key_heads, len(passing.q)
        targets = of_k, of_v
        slots = [_slots(heads, x, columns, self.sides[1], passing.kind) for x in targets]
        into, held = (tuple(rows_of(x) for x in each) for each in (targets, slots))
        _launch(kernels.of_keys, lists, batch, heads, self.blocks)(
            *self.given, into, held, self.sides, lists, passing.heads, self.look
        )
        for target, found in zip(targets, slots, strict=True):
            self._add_up(target, found, columns, self.sides[1], heads)

    def _add_up(
        self, into: torch.Tensor, slots: torch.Tensor, lists: TileLists, side: Side, heads: Heads
    ) -> None:
        if lists.slots:
            spans = _spans(lists, side)
            _launch(kernels.add_up, spans, len(into), heads, self.blocks)(
                rows_of(into), rows_of(slots), side, spans, heads, self.look
            )


def _launch(kernel: Any, lists: Lists, batch: int, heads: Heads, blocks: Blocks) -> Any:
    """Runs a kernel once for every program of every group of heads."""
    count = lists.count * batch * heads.groups

    def run(*given: object) -> None:
        if count:
            kernel[(count,)](*given, **blocks.options)

    return run


def rows_of(x: torch.Tensor) -> Rows:
    """A tensor [B, heads, n, size] or [B, heads, n] as kernels take it."""
    if x.dim() == 3:
        return Rows(x, x.stride(0), x.stride(1), x.stride(2))
    size, block = x.shape[3], block_of(x.shape[3])
    return rows_of(x[..., 0])._replace(size=tl.constexpr(size), block=tl.constexpr(block))


def _side(side: TileSide, most: int, group: int) -> Side:
    heads = power(group)
    # with the heads of a group a block has as many rows as without
    block = max(min(max(1, most // heads), power(side.size)), LEAST // heads)
    constants = (tl.constexpr(x) for x in (block, block * heads, side.step == 0))
    tables = side.firsts, side.ends, side.listed
    return Side(*tables, side.step, side.size, -(-side.size // block), *constants)


def _lists(lists: TileLists, side: Side) -> Lists:
    programs = lists.programs
    samples = programs.stride(0) if programs.dim() == 3 else 0
    count = programs.shape[-2] * side.parts
    return Lists(programs, lists.tiles, lists.kinds, count, samples)


def _spans(lists: TileLists, side: Side) -> Lists:
    return Lists(lists.spans, lists.tiles, lists.kinds, len(lists.spans) * side.parts, 0)


def _slots(
    heads: Heads, like: torch.Tensor, lists: TileLists, side: Side, kind: torch.dtype
) -> torch.Tensor:
    """Room for what the programs of long lists find [B, heads, rows, size]."""
    rows = lists.slots * side.parts * side.count.value
    return like.new_empty((len(like), heads.groups, max(1, rows), like.shape[3]), dtype=kind)
