"""Launches: the sums of a mechanism through the kernels, forward and backward.

Torch makes the features and frames of queries and keys, but for elementwise maps, which kernels
apply to the rows that they read; it takes the gradients of features back to rows and tables, too.
Kept for the backward pass are the outputs and the sums of weights: states are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnspec.backends.common.exact import has_numbers, in_rows
from attnspec.backends.common.merging import Outputs, joined
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import least_in_frames
from attnspec.backends.factored.features.sums import Derived, Given, Weighed, opened
from attnspec.backends.triton import attention
from attnspec.backends.triton.attention import TIGHT, padding_of, rows_of, running_on
from attnspec.backends.triton.blocks import Rows
from attnspec.backends.triton.kernel import is_taken
from attnspec.backends.triton.sums import kernels
from attnspec.backends.triton.sums.blocks import Frames, Plan, States
from attnspec.backends.triton.tuning import CHUNK, MAPS, block_of

ROOM = 1 << 28
"""Numbers of the features that are made at once: a gigabyte."""

SEGMENT, WIDE, TALL = 16, 64, (128, 64)
"""Chunks of a segment, features of a block, and its values; fewer where there is less room, as for
gradients."""

PROGRAM = 4, 2
"""The warps and stages of a program."""

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


class LaunchedKernel(FeatureKernel):
    """Sums of features in Triton kernels, as many samples and heads at once as there is room for
    features; what these do not take goes block by block, and so do streams."""

    def outputs(self, given: Given) -> Outputs:
        if not _takes(given):
            return super().outputs(given)
        out, total, log = _launched(given)
        return out, self.log_divisor(total, log)

    def sums(self, given: Given) -> Weighed:
        if not _takes(given):
            return super().sums(given)
        out, total, log = _launched(given)
        divisor = self.divisor(total, log)
        return torch.cat([out * divisor[..., None], total[..., None]], -1), log


def _takes(given: Given) -> bool:
    """Whether kernels take the type of these tensors on their device."""
    return is_taken(given.q) and has_numbers(*given[:3])


def _launched(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """What sums are worth, the sums of their weights and the frames of these."""
    tensors, put = opened(given)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (sums, log), _ = put(tensors).summed()
        return given.how.divided(sums, log), sums[..., -1], log

    def outputs(*tensors: Tensor) -> tuple[Any, ...]:
        given = put(tensors)
        # gradients of queries may be small beside what is rounded in an output
        out = given.q.new_empty(*given.q.shape[:-1], given.v.shape[-1], dtype=given.kind)
        totals = torch.zeros(given.q.shape[:-1], dtype=given.kind, device=out.device)
        each = given.parts(out, totals, block=ROOM)
        every = [_Launches(part).outputs(*into) for part, *into in each]
        return (out, totals, joined(every, 0)), (out, totals), None

    def gradients(tensors: Any, saved: Any, _: Any, grads: Any) -> Sequence[Any]:
        above = (
            torch.zeros_like(x) if y is None else y for x, y in zip(saved, grads, strict=False)
        )
        # those of q, k and v are written, those of others added up
        given, into = put(tensors), [x.new_zeros(x.shape) for x in tensors]
        for part, target, *mine in given.parts(put(into), *saved, *above, block=ROOM):
            _Launches(part, back=True).gradients(target, *mine)
        return [x if x.is_floating_point() else None for x in into]

    out, total, log = Derived.apply(run, outputs, gradients, *tensors)  # type: ignore[no-untyped-call]
    return out, total, log.detach()


class _Launches:
    """The launches for some key heads, each as a sample with one."""

    def __init__(self, given: Given, back: bool = False) -> None:
        how = self.how = given.how
        self.given, self.kind = given, given.kind
        self.batch, self.repeat, rows, _ = given.q.shape
        self.length = given.k.shape[1]
        self.first, self.causal = self.length - rows, how.work.causal
        self.map = MAPS.get(getattr(how.declared, "feature", ""))
        self.logs = given.q.new_zeros(given.q.shape[:3], dtype=self.kind)
        frames = None
        if self.map is None:
            self.f, self.g, frames = self._features(back)
        else:
            self.f, self.g = in_rows(given.q), in_rows(given.k[:, None])
        v = in_rows(given.v[:, None])
        self.tensors = tuple(rows_of(x) for x in (self.f, self.g, v))
        times = frames or (self.f, self.f)
        padding = padding_of(given.padding, self.f)
        self.frames = Frames(padding, *(x.contiguous() for x in times))
        features, values = self.f.shape[-1], v.shape[-1]
        self.width = features * (values + how.divides)
        # 128 float32 values of each position of a chunk are 147 KB
        narrow = back or (
            given.q.dtype != torch.bfloat16 and attention.room_on(given.q.device) < TIGHT
        )
        wide, tall = (
            min(most, block_of(size)) for most, size in ((WIDE, features), (TALL[narrow], values))
        )
        constants = (
            *(features, values, self.width, CHUNK, wide, tall, self.causal),
            *(frames is not None, given.padding is not None, how.divides),
            *(how.framed, self.map or 0, *KINDS[given.q.dtype]),
            *(how.text[name] for name in ("ADDED", "LEAST", "FLOOR")),
            least_in_frames(self.kind),
        )
        self.plan = Plan(
            *(self.repeat, rows, self.length, self.first if self.causal else 0),
            *(triton.cdiv(features, wide), triton.cdiv(values, tall)),
            *map(tl.constexpr, constants),
        )

    def _features(self, back: bool) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The features of queries [B, H, n_q, m] and keys [B, K, n_k, m], and their frames."""
        tensors, put = opened(self.given)
        grads = [x.detach().requires_grad_(back and x.is_floating_point()) for x in tensors]
        request: Given = put(grads)
        with torch.set_grad_enabled(back):
            keys, log = request.features_of_keys()
            queries, logs = request.features_of_queries()
        # what the gradients of features are taken through
        self.made = request, (queries, keys)
        frames, times = self.given.frames(log, self.given.no_frame(), self.length), None
        if frames is not None:
            of_keys, of_rows, start, _ = frames
            if not self.causal:
                # all queries read all keys
                of_rows = of_rows[..., -1:].expand(of_rows.shape)
            times = of_keys, of_rows
            if not request.gate:
                above = (start[..., None] + of_rows[..., self.first :]).to(self.kind)
                logs = logs + above.repeat(1, 1, self.repeat).flatten(1)
        shape = self.logs.shape
        self.logs = logs.reshape(shape)
        kept = torch.bfloat16 if request.q.dtype == torch.bfloat16 else self.kind
        f = in_rows(queries.detach().reshape(*shape, -1).to(kept))
        return f, in_rows(keys.detach()[:, None].to(kept)), times

    # --- forward and backward ------------------------------------------------------------------

    def _states(self, x: Rows, w: Any, back: bool) -> States:
        """The states of chunks and segments, of keys and values, or of queries and gradients."""
        plan, width = self.plan, self.width
        rows = plan.queries if back and not self.causal else plan.keys
        count = triton.cdiv(rows, CHUNK)
        number, lines = triton.cdiv(count, SEGMENT), self.batch
        chunks = self.f.new_empty(lines * count * width if self.causal else 1, dtype=self.kind)
        segments = self.f.new_empty(lines * (number + 1) * width, dtype=self.kind)
        states = States(chunks, segments, count, number, SEGMENT)
        arguments = x, w, self.frames, states, plan, tl.constexpr(back)
        programs = lines * number * plan.wides * plan.talls
        attention.launch(kernels.along, programs, arguments, *PROGRAM)
        blocks = triton.cdiv(width, CARRIED)
        rest = self.frames, states, blocks, plan, tl.constexpr(CARRIED), tl.constexpr(back)
        attention.launch(kernels.carry, lines * blocks, rest, *PROGRAM)
        return states

    def outputs(self, out: Tensor, totals: Tensor) -> Tensor:
        """Fills the outputs [N, R, n_q, e] and the sums of weights [N, R, n_q]; returns frames."""
        into = rows_of(out), rows_of(totals), rows_of(self.logs)
        with running_on(self.f.device):
            states = self._states(self.tensors[1], self.tensors[2], False)
            arguments = *self.tensors, *into, self.frames, states, self.plan
            count = self._programs(True, self.plan.talls)
            attention.launch(kernels.outputs, count, arguments, *PROGRAM)
        return self.logs

    def gradients(self, into: Given, *saved: Tensor) -> None:
        """Fills in the gradients of what is given, by outputs, the sums of their weights, and the
        gradients of both."""
        plan, kind, above, (f, g, v) = self.plan, self.kind, self._above(*saved), self.tensors
        direct = self.map is not None
        of_f = into.q if direct else torch.empty_like(self.f, dtype=kind)
        of_g = into.k[:, None] if direct else torch.empty_like(self.g, dtype=kind)
        with running_on(self.f.device):
            before, behind = self._states(g, v, False), self._states(f, above, True)
            for back, target, states in ((False, of_f, before), (True, of_g, behind)):
                count = self._programs(not back, plan.wides)
                rows = f, g, v, above, rows_of(target), self.frames, states, plan, back
                attention.launch(kernels.of_features, count, rows, *PROGRAM)
            count = self._programs(False, plan.talls)
            rest = f, g, above, rows_of(into.v[:, None]), self.frames, behind, plan
            attention.launch(kernels.of_values, count, rest, *PROGRAM)
        if direct:
            return
        # from features to rows, tables and gates
        if into.gate:
            into.gate[0].add_((self.g * of_g).sum(-1)[:, 0])
            into.gate[1][:, self.first :].sub_((self.f * of_f).sum(-1).sum(1))
        request, features = self.made
        leaves, targets = ((x.q, x.k, *x.tables.values()) for x in (request, into))
        upper = of_f.reshape(features[0].shape), of_g.reshape(features[1].shape)
        grads = torch.autograd.grad(features, leaves, upper, allow_unused=True)
        for target, share in zip(targets, grads, strict=True):
            # a batch of padding alone has none
            if share is not None:
                target.add_(share)

    def _above(
        self, out: Tensor, totals: Tensor, grad: Tensor, of_totals: Tensor
    ) -> tuple[Rows, Rows, Rows]:
        """The gradients of outputs, of what these are divided by, and of the sums of weights."""
        grad = in_rows(grad)
        of_sums, of_weights = torch.exp(self.logs), torch.zeros_like(totals)
        if self.how.divides:
            delta = (grad.to(totals.dtype) * out).sum(-1)
            with torch.enable_grad():
                total = totals.detach().requires_grad_()
                divisor = self.how.divisor(total, self.logs)
            of_sums = 1 / divisor.detach()
            (slope,) = torch.autograd.grad(divisor, total, torch.ones_like(divisor))
            of_weights = of_totals - delta * of_sums * slope
        return rows_of(grad), rows_of(of_sums), rows_of(of_weights)

    def _programs(self, queries: bool, blocks: int) -> int:
        """How many programs take all chunks of a side."""
        plan = self.plan
        chunks: int = triton.cdiv(plan.first + plan.queries if queries else plan.keys, CHUNK)
        return self.batch * (self.repeat if queries else 1) * chunks * blocks
