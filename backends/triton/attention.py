"""Launches: every step of a graph through the kernels, one launch each, all heads together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnspec.backends.common.dropping import factor_of, least_of
from attnspec.backends.common.exact import in_rows
from attnspec.backends.common.scores import ScoreFunction, value_of
from attnspec.backends.decided.tables import Part
from attnspec.backends.triton import kernels
from attnspec.backends.triton.blocks import Lists, Look, Rows, Side
from attnspec.backends.triton.forms import TABLE, forms_of
from attnspec.backends.triton.tables import Step
from attnspec.backends.triton.tuning import LEAST, block_of, power
from attnspec.ir.scalars import Scalar, fold
from attnspec.ir.scores import Scores
from attnspec.lower.work import Heads, Work


def look_of(work: Work, heads: Heads, device: torch.device) -> dict[str, Any]:
    """The fields of `Look` that are about the scores of a work."""
    forms = forms_of(work.changes) or []
    numbers = [[cast(float, fold(each, {"head": head})) for head in heads] for _, each, _ in forms]
    buckets, given = torch.zeros(1, dtype=torch.int32), None
    for (digit, _, read), statement in zip(forms, work.changes.statements, strict=True):
        if read is not None:
            buckets = by_distance(read, heads, work.n_k).int()
        elif digit == TABLE:
            given = by_distance(cast(Scalar, Scores((statement,)).added), heads, work.n_k)
            given = given.expand(len(heads), -1).contiguous()
            buckets = torch.arange(given.shape[1], dtype=torch.int32)
    code = sum(digit * 4**place for place, (digit, *_) in enumerate(forms))
    # sums of float64 are those of the interpreter alone
    kind = torch.float64 if device.type == "cpu" else torch.float32
    tables = torch.tensor(numbers or [[0.0]], dtype=torch.float64).to(device, kind)
    table = tables if given is None else given.to(device, kind)
    return {
        **{"code": tl.constexpr(code), "changes": tl.constexpr(len(forms))},
        **{"numbers": tables, "heads": tables.shape[1]},
        **{"buckets": buckets.to(device), "farthest": len(buckets) // 2},
        **{"table": table, "stride": table.stride(0)},
    }


def by_distance(value: Scalar, heads: Heads, n: int) -> Tensor:
    """What an expression is worth at every distance q - k from -m to m, [2 m + 1], or with a row
    for each head, where what is further away is as at m."""
    host = torch.device("cpu")
    function, at = ScoreFunction(Scores((value,)), heads, n, host), torch.arange(1 - n, n)
    given, places = {"q": at, "k": at.new_zeros(1)}, torch.arange(len(heads))[:, None]
    found = value_of(function.statements[0], function.values(given, {}, places), torch.float64)
    found = found.expand(*found.shape[:-1], len(at))
    ends = torch.where(at < 0, found[..., :1], found[..., -1:])
    differs = at[(found != ends).reshape(-1, len(at)).any(0)].abs()
    most = min(n - 1, 1 + int(differs.max()) if len(differs) else 1)
    return found[..., n - 1 - most : n + most].contiguous()


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
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


@lru_cache(maxsize=256)
def blocks_for(
    size: int, dtype: torch.dtype, back: bool, gathers: bool, room: int
) -> tuple[int, int, int, int]:
    """The rows of a block of queries and of keys, and the warps and stages of a program: the
    largest blocks for heads of a size that leave room for the next keys to be fetched, and for what
    is gathered from a table for every pair.

    What programs take was read off kernels that were compiled: half types of 256 numbers 176 KB on
    compute capability 9.0, 120 on 8.6, where there are 99, and those of 128 backward 114; float32
    of 512, backward, 264.
    """
    tight, wide = room < 128 << 10, dtype.itemsize > 2
    size = block_of(size) * (2 if wide else 1) * (2 if back else 1) * (2 if gathers else 1)
    if size <= 64:
        # keys and values of 64 leave room for four warps of more registers each
        return 128, 64, 4, 3
    if size <= 128:
        return (64, 64, 4, 3) if back else (128, 64, 8, 3)
    if size <= 256:
        return (64, 32, 4, 2) if wide or tight else (64, 64, 4, 2)
    rows = 16 if size > (256 if tight else 1024) else 32
    return rows, rows, 4, 2


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether the least blocks do on the device of q: rows of queries, keys, values and gradients.
    Compiled for compute capability 8.6 they take just that, 131 KB for float32 of 512."""
    size = max(block_of(x.shape[-1]) for x in (q, v))
    return 4 * LEAST * size * q.element_size() <= room_on(q.device)


class Launches:
    """Steps through the kernels for a part of a call with q [B, K, R, n_q, d], k [B, K, n_k, d] and
    v [B, K, n_k, e]; `back` says that it is for gradients.

    With `by_list` every key head of a sample, with lists of its own, is a sample, whose query heads
    are together in each program.
    """

    def __init__(
        self,
        look: Mapping[str, Any],
        steps: Sequence[Step],
        part: Part,
        tensors: Sequence[Tensor],
        scale: float,
        back: bool,
        by_list: bool = False,
    ) -> None:
        self.steps, self.part, self.by_list, call = steps, part, by_list, part.call
        _, keys, repeat, n_q = part.shape
        self.q = q = in_rows(self._of_q(tensors[0]))
        k, v = (in_rows(self._of_k(x)) for x in tensors[1:])
        self.tensors, self.batch = [rows_of(x) for x in (q, k, v)], len(q)
        self.kind = torch.promote_types(q.dtype, torch.float32)
        group = q.shape[1] if by_list else 1
        groups = q.shape[1] // group
        fields, self.learned = {**dict.fromkeys(Look._fields), **look}, 1
        for table in call.tables.values():
            rows = in_rows(table)
            self.learned = block_of(rows.shape[1]) if back and table.requires_grad else 1
            fields |= {"table": rows, "stride": rows.stride(0)}
        size, gathers = max(q.shape[3], v.shape[3]), fields["farthest"] > 0
        self.blocks = blocks_for(size, q.dtype, back, gathers, room_on(q.device))
        padding, labels = padding_of(call.padding, q), steps[0].masks.labels if steps else None
        if call.seed is not None:
            p, line = call.dropout_p, call.line + part.repeats.indices(repeat)[0]
            fields |= {
                **{"seed": call.seed, "least": least_of(p), "factor": factor_of(p), "line": line},
                "lines": repeat if by_list else keys * repeat,
            }
        fields |= {
            "kind": tl.constexpr(tl.float64 if self.kind == torch.float64 else tl.float32),
            **{"groups": groups, "ratio": groups // k.shape[1], "group": group},
            **{"first": part.n_k - n_q, "scale": scale, "learned": tl.constexpr(self.learned)},
            **{"padding": padding, "padded": tl.constexpr(call.padding is not None)},
            "labels": padding if labels is None else rows_of(labels),
            "alike": tl.constexpr(0 if labels is None else labels.shape[1]),
        }
        self.look = Look(**fields)

    def attend(self, out: Tensor, lse: Tensor) -> None:
        """Merges what the steps give into outputs [B, K, R, n_q, e] and their log-sum-exps
        [B, K, R, n_q]."""
        into = self._of_q(out), self._of_q(lse)
        with running_on(self.q.device):
            for step in self.steps:
                self._run(kernels.attend, step, 0, into)

    def derive(self, above: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Adds the gradients of q, k and v, and of the table of a bias; `above` are the gradient of
        the output, its log-sum-exps, and delta [B, K, R, n_q], the sums of that gradient times the
        output less the gradients of the log-sum-exps."""
        upper = tuple(rows_of(self._of_q(x)) for x in above)
        queries, keys, tables = [self._of_q(into[0])], [self._of_k(x) for x in into[1:3]], into[3:]
        with running_on(self.q.device):
            for step in self.steps:
                # the shares of programs in the gradient of a table
                shares = self.q
                if self.learned > 1:
                    programs = step.rows[0].count * self._sides(step)[0].parts
                    shape = self.batch, self.look.groups, programs, self.learned
                    shares = self.q.new_empty(shape, dtype=self.kind)
                self._run(kernels.of_queries, step, 0, queries, upper, shares)
                self._run(kernels.of_keys, step, 1, keys, upper)
                for table in tables if self.learned > 1 else ():
                    table += shares.sum((0, 2))[:, : table.shape[1]]

    def _run(
        self, kernel: Any, step: Step, side: int, into: Sequence[Tensor], *more: object
    ) -> None:
        """Runs a kernel for the tiles of a side. What the programs of long lists find goes to
        slots, and from there to its place."""
        programs, spans, slots = step.columns if side else step.rows
        sides = q, k = self._sides(step)
        masks = {"words": step.masks.bits, "height": q.size, "width": -(-k.size // 32)}
        whole = tl.constexpr(k.size == k.parts * k.block.value)
        this, look = sides[side], self.look._replace(**masks, whole=whole)
        # a program of keys takes all query heads that share a key head
        groups = {"groups": look.groups // look.ratio, "group": 1} if side else {}
        of_side = look._replace(**groups)
        targets = rooms = tuple(map(rows_of, into))
        if slots:
            rows = slots * this.parts * this.count.value
            shapes = ((self.batch, of_side.groups, rows, *x.shape[3:]) for x in into)
            rooms = tuple(rows_of(self.q.new_empty(x, dtype=self.kind)) for x in shapes)
        heads = self.batch * of_side.groups * this.parts

        def run(kernel: Any, lists: Lists, *arguments: object) -> None:
            if count := lists.count * heads:
                launch(kernel, count, arguments, *self.blocks[2:])

        run(kernel, programs, *self.tensors, *more, targets, rooms, sides, programs, look)
        if slots and kernel is kernels.attend:
            run(kernels.merge, spans, targets, rooms, this, spans, of_side)
        elif slots:
            for pair in zip(targets, rooms, strict=True):
                run(kernels.add_up, spans, *pair, this, spans, of_side)

    # --- what kernels are handed ---------------------------------------------------------------

    def _of_q(self, x: Tensor) -> Tensor:
        """What belongs to queries, [B, K, R, n_q, …], as [samples, heads, n_q, …], a view of what
        is in one piece."""
        return self.part.of_q(x).flatten(*((0, 1) if self.by_list else (1, 2)))

    def _of_k(self, x: Tensor) -> Tensor:
        """What belongs to keys, [B, K, n_k, …], likewise."""
        x = self.part.of_k(x)
        return x.flatten(0, 1)[:, None] if self.by_list else x

    def _sides(self, step: Step) -> tuple[Side, Side]:
        """Both sides of a step in blocks."""
        q, k, _, _ = self.blocks
        return _in_blocks(step.q, q, self.look.group), _in_blocks(step.k, k, 1)


def launch(kernel: Any, count: int, arguments: Sequence[object], warps: int, stages: int) -> None:
    """Runs so many programs of a kernel."""
    kernel[(count,)](*arguments, num_warps=warps, num_stages=stages)


def running_on(device: torch.device) -> AbstractContextManager[Any]:
    """Where kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def padding_of(padding: Tensor | None, like: Tensor) -> Rows:
    """Which keys there are, bool [B, n_k], as kernels take it; of none anything."""
    if padding is None:
        return Rows(like, 0, 0, 0)
    bits = padding.view(torch.uint8)
    return Rows(bits, bits.stride(0), 0, bits.stride(1))


def rows_of(x: Tensor) -> Rows:
    """A tensor [B, heads, n, size] or [B, heads, n] as kernels take it."""
    sizes = (x.shape[3], block_of(x.shape[3])) if x.dim() == 4 else ()
    return Rows(x, *x.stride()[:3], *map(tl.constexpr, sizes))


def _in_blocks(side: Side, most: int, group: int) -> Side:
    heads = power(group)
    # with the heads of a group a block has as many rows as without
    block = max(min(max(1, most // heads), power(side.size)), LEAST // heads)
    return Side(*side[:3], -(-side.size // block), *map(tl.constexpr, (block, block * heads)))
