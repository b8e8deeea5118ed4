"""Launches: the sums of a mechanism through the kernels, forward and backward.

Torch makes the features and frames of queries and keys, but for elementwise maps, which kernels
apply to the rows that they read; it takes the gradients of features back to rows and tables, too.
Kept for the way back are the outputs and the sums of weights: states are computed again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from attnspec.backends.common.flash import in_rows
from attnspec.backends.factored.features.chunks import Frames as TorchFrames
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Elementwise
from attnspec.backends.factored.features.quotients import least_in_frames
from attnspec.backends.factored.features.spans import Given, Span, Summing, Sums, shares
from attnspec.backends.factored.features.sums import Gradients
from attnspec.backends.factored.kernels import KERNELS
from attnspec.backends.triton import attention
from attnspec.backends.triton.attention import TIGHT, rows_of
from attnspec.backends.triton.blocks import Rows
from attnspec.backends.triton.kernel import is_taken
from attnspec.backends.triton.sums import kernels
from attnspec.backends.triton.sums.blocks import Frames, Plan, Quotient, States
from attnspec.backends.triton.tuning import MAPS, SUMMED, block_of
from attnspec.lower.work import Work, mechanism_of

WHOLE = 1 << 62
"""More positions than there are: everything in one span."""

ROOM = 1 << 28
"""Numbers of the features that are made at once: a gigabyte."""

CARRIED = 1024
"""Numbers of a state that one program takes from segment to segment."""

KINDS = {
    torch.bfloat16: (tl.bfloat16, "tf32", tl.float32),
    # as many digits as float16 has, and the range of float32: sums of features are large
    torch.float16: (tl.float32, "tf32", tl.float32),
    torch.float32: (tl.float32, "ieee", tl.float32),
    torch.float64: (tl.float64, "ieee", tl.float64),
}
"""For each type of queries the type and the precision of what is multiplied, and that of sums."""


def sums_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs a mechanism that is a sum of features, without a graph beside it, in the kernels here;
    what these do not take goes block by block, and so do streams."""
    kernel = KERNELS[mechanism_of(work).name](work, heads, device)
    if not isinstance(kernel, FeatureKernel):
        raise ValueError(f"`{mechanism_of(work).name}` is no sum of features")
    return replace(kernel, way=Launched())


class Launched:
    """Sums of features in Triton kernels, as many samples and heads at once as there is room for
    features."""

    def takes(self, given: Given) -> bool:
        """Whether kernels take the type of these tensors on their device."""
        return is_taken(given.q) and all(x.numel() for x in (given.q, given.k, given.v))

    def outputs(self, how: Summing, given: Given) -> tuple[torch.Tensor, torch.Tensor, None]:
        # gradients of queries may be small beside what is rounded in an output
        kind = torch.promote_types(given.q.dtype, torch.float32)
        out = given.q.new_empty(*given.q.shape[:-1], given.v.shape[-1], dtype=kind)
        return out, self.fill(how, given, out)[0], None

    def fill(
        self, how: Summing, given: Given, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fills the outputs; the sums of weights [B, K, R, n_q], and their frames if there are
        any."""
        kind = torch.promote_types(given.q.dtype, torch.float32)
        totals = torch.zeros(given.q.shape[:-1], dtype=kind, device=out.device)
        logs = torch.zeros_like(totals)
        framed = False
        for share in shares(replace(how, block=ROOM), given):
            run = _Launches(how, given.part(share))
            run.outputs(out[share], totals[share])
            if run.logs is not None:
                framed = True
                logs[share] = run.logs.view(totals[share].shape)
        return totals, logs if framed else None

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[torch.Tensor, torch.Tensor, None],
        grad: torch.Tensor,
    ) -> Given:
        into, (out, totals, _) = given.gradients(), found
        for share in shares(replace(how, block=ROOM), given):
            run = _Launches(how, given.part(share), back=True)
            run.gradients(into.part(share), out[share], totals[share], grad[share])
        return into


class _Launches:
    """The launches for some samples and key heads."""

    def __init__(self, how: Summing, given: Given, back: bool = False) -> None:
        self.how, self.given = how, given
        self.sums = Sums(how, given, WHOLE)
        n, first = self.sums.length, self.sums.first
        self.spans = Span(first, n, n - first), Span(0, n, n)
        name = how.map.feature if isinstance(how.map, Elementwise) else None
        self.map = MAPS.get(name) if name is not None else None
        self.logs: torch.Tensor | None = None
        self.frames: TorchFrames | None = None
        if self.map is None:
            self._features()
        else:
            self.f, self.g = in_rows(given.q.flatten(1, 2)), in_rows(given.k)
        self.v, self.padding = in_rows(given.v), given.padding
        # 128 float32 values of each position of a chunk are 147 KB
        narrow = back or (
            given.q.dtype != torch.bfloat16 and attention.room_on(given.q.device) < TIGHT
        )
        self.plan = self._plan(SUMMED.back if narrow else SUMMED.values)

    def _features(self) -> None:
        """The features of queries [B, H, n_q, m] and keys [B, K, n_k, m], and their frames."""
        how, sums, tables = self.how, self.sums, self.given.tables
        of_queries, of_keys = self.spans
        keys = sums.masked(how.map.keys(sums.keys(of_keys), tables), of_keys)
        framed = sums.frames(keys, None, of_keys)
        frames, mine = framed.local, None
        queries = how.map.queries(sums.queries(of_queries), tables)
        if frames is not None:
            rows = frames.rows[..., sums.first :]
            if not how.causal:
                # all queries read all keys
                last = frames.rows[..., -1:]
                frames = TorchFrames(frames.keys, last.expand(frames.rows.shape))
                rows = last.expand(*last.shape[:2], of_queries.chunk)
            mine = TorchFrames(frames.keys, rows)
        logs = sums.logs(queries, mine, framed.start, of_queries)
        shape = sums.batch, sums.heads * sums.repeat, of_queries.chunk
        self.logs = None if logs is None else logs.reshape(shape)
        kept = torch.bfloat16 if self.given.q.dtype == torch.bfloat16 else sums.kind
        self.f = in_rows(queries.values.reshape(*shape, -1).to(kept))
        self.g = in_rows(keys.values.to(kept))
        self.frames = frames

    @property
    def width(self) -> int:
        """The numbers in a line of states."""
        return self.f.shape[-1] * (self.v.shape[-1] + self.how.quotient.divides)

    def _plan(self, tall: int) -> Plan:
        given, sums = self.given, self.sums
        features, values = self.f.shape[-1], self.v.shape[-1]
        wide, tall = min(SUMMED.features, block_of(features)), min(tall, block_of(values))
        kind, precision, total = KINDS[given.q.dtype]
        constants = (
            *(features, values, self.width, SUMMED.chunk, wide, tall, self.how.causal),
            *(self.frames is not None, given.padding is not None, self.how.quotient.divides),
            *(self.logs is not None, self.map or 0, kind, precision, total),
        )
        return Plan(
            sums.heads,
            sums.repeat,
            sums.length - sums.first,
            sums.length,
            sums.first if self.how.causal else 0,
            triton.cdiv(features, wide),
            triton.cdiv(values, tall),
            *map(tl.constexpr, constants),
        )

    # --- what kernels are handed ---------------------------------------------------------------

    @property
    def place(self) -> AbstractContextManager[Any]:
        """Where kernels are launched."""
        return torch.cuda.device(self.f.device) if self.f.is_cuda else nullcontext()

    def _frames(self) -> Frames:
        if self.frames is None:
            return Frames(self.f, self.f)
        return Frames(*(x.contiguous() for x in (self.frames.keys, self.frames.rows)))

    def _padding(self) -> Rows:
        if self.padding is None:
            return Rows(self.f, 0, 0, 0)
        bits = self.padding.view(torch.uint8)
        return Rows(bits, bits.stride(0), 0, bits.stride(1))

    def _states(self, x: Rows, w: Any, back: bool) -> States:
        """The states of chunks and segments, of keys and values, or of queries and gradients."""
        plan, kind, samples = self.plan, self.sums.kind, self.sums.batch
        rows = plan.queries if back and not self.how.causal else plan.keys
        count = triton.cdiv(rows, SUMMED.chunk)
        number = triton.cdiv(count, SUMMED.segment)
        lines, width = samples * plan.heads, self.width
        chunks = self.f.new_empty(lines * count * width if self.how.causal else 1, dtype=kind)
        segments = self.f.new_empty(lines * (number + 1) * width, dtype=kind)
        states = States(chunks, segments, count, number, SUMMED.segment)
        frames, back_too = self._frames(), tl.constexpr(back)
        _launch(kernels.along, lines * number * plan.wides * plan.talls)(
            x, w, self._padding(), frames, states, plan, back_too
        )
        blocks = triton.cdiv(width, CARRIED)
        _launch(kernels.carry, lines * blocks)(
            frames, states, blocks, plan, tl.constexpr(CARRIED), back_too
        )
        return states

    # --- forward and backward ------------------------------------------------------------------

    def outputs(self, out: torch.Tensor, totals: torch.Tensor) -> None:
        """Fills the outputs [B, K, R, n_q, e], and the sums of weights [B, K, R, n_q]."""
        quotient = self.how.quotient
        tiny = least_in_frames(self.sums.kind)
        numbers = quotient.added, quotient.least, quotient.floor, tiny
        f, g, v = (rows_of(x) for x in (self.f, self.g, self.v))
        logs = rows_of(totals.flatten(1, 2) if self.logs is None else self.logs)
        plan = self.plan
        with self.place:
            states = self._states(g, v, False)
            _launch(kernels.outputs, self._programs(plan.queries, True, plan.talls))(
                *(f, g, v, rows_of(out.flatten(1, 2)), rows_of(totals[..., None].flatten(1, 2))),
                *(logs, self._padding(), self._frames(), states),
                *(Quotient(*map(tl.constexpr, numbers)), plan),
            )

    def gradients(
        self, into: Given, out: torch.Tensor, totals: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """Fills in the gradients of what is given, where `grad` is that of the output."""
        plan, kind = self.plan, self.sums.kind
        above = self._above(out, totals, grad)
        f, g, v = (rows_of(x) for x in (self.f, self.g, self.v))
        direct = self.map is not None
        of_f = into.q.flatten(1, 2) if direct else torch.empty_like(self.f, dtype=kind)
        of_g = into.k if direct else torch.empty_like(self.g, dtype=kind)
        with self.place:
            before, behind = self._states(g, v, False), self._states(f, above, True)
            rest = self._padding(), self._frames()
            _launch(kernels.of_queries, self._programs(plan.queries, True, plan.wides))(
                f, g, v, above, rows_of(of_f), *rest, before, plan
            )
            _launch(kernels.of_keys, self._programs(plan.keys, False, plan.wides))(
                f, g, v, above, rows_of(of_g), *rest, behind, plan
            )
            _launch(kernels.of_values, self._programs(plan.keys, False, plan.talls))(
                f, g, above, rows_of(into.v), *rest, behind, plan
            )
        if not direct:
            self._through(into, of_f, of_g)

    def _above(
        self, out: torch.Tensor, totals: torch.Tensor, grad: torch.Tensor
    ) -> tuple[Rows, Rows, Rows]:
        """The gradients of outputs, what these are divided by, and the gradients of the sums of
        weights."""
        grad = in_rows(grad.flatten(1, 2))
        logs, totals = self.logs, totals.flatten(1, 2)
        delta = (grad.to(totals.dtype) * out.flatten(1, 2)).sum(-1, keepdim=True)
        # of an output of one number that is delta, whose gradient is 1
        found = self.how.quotient.gradient(torch.ones_like(delta), delta, totals, logs)
        return rows_of(grad), rows_of(found[..., 0]), rows_of(found[..., -1])

    def _through(self, into: Given, of_f: torch.Tensor, of_g: torch.Tensor) -> None:
        """Takes the gradients of features to rows, tables and gates."""
        found, kind = Gradients(self.sums, into), self.sums.kind
        queries, keys = self.spans
        lines = self.sums.batch * self.sums.heads
        f, of_f, g, of_g = (
            x.to(kind).reshape(lines, 1, -1, x.shape[-1]) for x in (self.f, of_f, self.g, of_g)
        )
        found.of_queries(queries, f, of_f)
        found.of_keys(keys, g, of_g)

    def _programs(self, rows: int, queries: bool, blocks: int) -> int:
        """How many programs take all chunks of a side."""
        plan = self.plan
        chunks: int = triton.cdiv(plan.first + rows if queries else rows, SUMMED.chunk)
        heads = self.sums.heads * (self.sums.repeat if queries else 1)
        return self.sums.batch * heads * chunks * blocks


def _launch(kernel: Any, count: int) -> Any:
    """Runs so many programs of a kernel."""
    return lambda *given: attention.launch(kernel, count, given, SUMMED.warps, SUMMED.stages)
