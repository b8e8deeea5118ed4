"""Launches: the sums of a mechanism through the kernels, forward and backward.

Torch makes the features and frames of queries and keys, but for elementwise maps, which kernels
apply to the rows that they read; it takes the gradients of features back to rows and tables, too.
Kept for the backward pass are the outputs and the sums of weights: states are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnspec.backends.common.exact import in_rows
from attnspec.backends.factored.features.kernel import FeatureKernel, Way, feature_kernel
from attnspec.backends.factored.features.quotients import least_in_frames
from attnspec.backends.factored.features.sums import Frames as TorchFrames
from attnspec.backends.factored.features.sums import (
    Given,
    Summing,
    Sums,
    cut,
    features_of_keys,
    frames_of,
    given_of,
    room_of,
    shares,
)
from attnspec.backends.triton import attention
from attnspec.backends.triton.attention import TIGHT, padding_of, rows_of, running_on
from attnspec.backends.triton.blocks import Rows
from attnspec.backends.triton.kernel import is_taken
from attnspec.backends.triton.sums import kernels
from attnspec.backends.triton.sums.blocks import Frames, Plan, States
from attnspec.backends.triton.tuning import CHUNK, MAPS, block_of
from attnspec.lower.work import Work

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


def sums_kernel(work: Work, heads: tuple[int, ...]) -> FeatureKernel:
    """Runs a mechanism that is a sum of features, without a graph beside it, in the kernels here;
    what these do not take goes block by block, and so do streams."""
    return replace(feature_kernel(work, heads), way=Launched())


class Launched(Way):
    """Sums of features in Triton kernels, as many samples and heads at once as there is room for
    features."""

    whole = False

    def takes(self, how: Summing, given: Given) -> bool:
        """Whether kernels take the type of these tensors on their device."""
        return is_taken(given.q) and all(x.numel() for x in (given.q, given.k, given.v))

    def outputs(self, how: Summing, given: Given) -> tuple[Sums, None]:
        # gradients of queries may be small beside what is rounded in an output
        out = given.q.new_empty(*given.q.shape[:-1], given.v.shape[-1], dtype=given.kind)
        totals = torch.zeros(given.q.shape[:-1], dtype=given.kind, device=out.device)
        logs, framed, room = torch.zeros_like(totals), False, _room(how, given)
        into = zip(*(cut(x, room) for x in (out, totals, logs)), strict=True)
        for part, (of_out, of_totals, of_logs) in zip(shares(given, room), into, strict=True):
            run = _Launches(how, part)
            run.outputs(of_out, of_totals)
            if run.logs is not None:
                framed = True
                of_logs.copy_(run.logs.view(of_logs.shape))
        return (out, totals, logs if framed else None), None

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[Tensor, Tensor, None],
        grads: Sequence[Tensor],
    ) -> Given:
        into, room = given.gradients(), _room(how, given)
        rows = zip(*(cut(x, room) for x in (*found[:2], *grads)), strict=True)
        for part, target, mine in zip(shares(given, room), shares(into, room), rows, strict=True):
            _Launches(how, part, back=True).gradients(target, *mine)
        return into


def _room(how: Summing, given: Given) -> tuple[int, int]:
    """How many samples and heads are computed at once."""
    return room_of(replace(how, block=ROOM), given)


class _Launches:
    """The launches for some samples and key heads."""

    def __init__(self, how: Summing, given: Given, back: bool = False) -> None:
        self.how, self.given, self.kind = how, given, given.kind
        self.batch, self.heads, self.repeat, rows, _ = given.q.shape
        self.length = given.k.shape[2]
        self.first = self.length - rows
        self.map = MAPS.get(getattr(how.map.declared, "feature", ""))
        self.logs: Tensor | None = None
        frames = None
        if self.map is None:
            self.f, self.g, frames = self._features(back)
        else:
            self.f, self.g = in_rows(given.q.flatten(1, 2)), in_rows(given.k)
        self.v = in_rows(given.v)
        self.tensors = tuple(rows_of(x) for x in (self.f, self.g, self.v))
        times = (self.f, self.f) if frames is None else (frames.keys, frames.rows)
        padding = padding_of(given.padding, self.f)
        self.frames = Frames(padding, *(x.contiguous() for x in times))
        self.width = self.f.shape[-1] * (self.v.shape[-1] + how.quotient.divides)
        # 128 float32 values of each position of a chunk are 147 KB
        narrow = back or (
            given.q.dtype != torch.bfloat16 and attention.room_on(given.q.device) < TIGHT
        )
        features, values, quotient = self.f.shape[-1], self.v.shape[-1], how.quotient
        wide, tall = (
            min(most, block_of(size)) for most, size in ((WIDE, features), (TALL[narrow], values))
        )
        constants = (
            *(features, values, self.width, CHUNK, wide, tall, how.causal),
            *(frames is not None, given.padding is not None, quotient.divides),
            *(self.logs is not None, self.map or 0, *KINDS[given.q.dtype]),
            *(quotient.added, quotient.least, quotient.floor, least_in_frames(self.kind)),
        )
        self.plan = Plan(
            *(self.heads, self.repeat, rows, self.length, self.first if how.causal else 0),
            *(triton.cdiv(features, wide), triton.cdiv(values, tall)),
            *map(tl.constexpr, constants),
        )

    def _features(self, back: bool) -> tuple[Tensor, Tensor, TorchFrames | None]:
        """The features of queries [B, H, n_q, m] and keys [B, K, n_k, m], and their frames."""
        how, leaves = self.how, self.given.tensors
        if back:
            leaves = tuple(x.detach().requires_grad_() for x in leaves)
        with torch.set_grad_enabled(back):
            request = given_of(self.given.frame, leaves)
            keys, log = features_of_keys(how, request)
            queries, of_rows = how.map(request.q.to(self.kind).flatten(2, 3), request.tables)
        # what the gradients of features are taken through
        self.made = leaves, (queries, keys)
        request, log = self.given, None if log is None else log.detach()
        frames = frames_of(request, log, None, self.length)
        logs = None if of_rows is None else of_rows.detach().flatten(1)
        if frames is not None:
            rows = frames.rows[..., self.first :]
            if not how.causal:
                # all queries read all keys
                last = frames.rows[..., -1:]
                frames = replace(frames, rows=last.expand(frames.rows.shape))
                rows = last.expand(*last.shape[:-1], self.length - self.first)
            if not request.gate:
                above = (frames.start[..., None] + rows).to(self.kind).repeat(1, 1, 1, self.repeat)
                above = above.view(self.batch, -1)
                logs = above if logs is None else logs + above
        shape = self.batch, self.heads * self.repeat, self.length - self.first
        self.logs = None if logs is None else logs.reshape(shape)
        kept = torch.bfloat16 if request.q.dtype == torch.bfloat16 else self.kind
        f = in_rows(queries.detach().reshape(*shape, -1).to(kept))
        return f, in_rows(keys.detach().to(kept)), frames

    # --- forward and backward ------------------------------------------------------------------

    def _states(self, x: Rows, w: Any, back: bool) -> States:
        """The states of chunks and segments, of keys and values, or of queries and gradients."""
        plan, width = self.plan, self.width
        rows = plan.queries if back and not self.how.causal else plan.keys
        count = triton.cdiv(rows, CHUNK)
        number, lines = triton.cdiv(count, SEGMENT), self.batch * plan.heads
        chunks = self.f.new_empty(lines * count * width if self.how.causal else 1, dtype=self.kind)
        segments = self.f.new_empty(lines * (number + 1) * width, dtype=self.kind)
        states = States(chunks, segments, count, number, SEGMENT)
        arguments = x, w, self.frames, states, plan, tl.constexpr(back)
        programs = lines * number * plan.wides * plan.talls
        attention.launch(kernels.along, programs, arguments, *PROGRAM)
        blocks = triton.cdiv(width, CARRIED)
        rest = self.frames, states, blocks, plan, tl.constexpr(CARRIED), tl.constexpr(back)
        attention.launch(kernels.carry, lines * blocks, rest, *PROGRAM)
        return states

    def outputs(self, out: Tensor, totals: Tensor) -> None:
        """Fills the outputs [B, K, R, n_q, e], and the sums of weights [B, K, R, n_q]."""
        logs = rows_of(totals.flatten(1, 2) if self.logs is None else self.logs)
        into = rows_of(out.flatten(1, 2)), rows_of(totals.flatten(1, 2)), logs
        with running_on(self.f.device):
            states = self._states(self.tensors[1], self.tensors[2], False)
            arguments = *self.tensors, *into, self.frames, states, self.plan
            count = self._programs(True, self.plan.talls)
            attention.launch(kernels.outputs, count, arguments, *PROGRAM)

    def gradients(
        self,
        into: Given,
        out: Tensor,
        totals: Tensor,
        grad: Tensor,
        of_totals: Tensor,
    ) -> None:
        """Fills in the gradients of what is given, where `grad` is that of the output, `of_totals`
        that of the sums of weights."""
        plan, kind = self.plan, self.kind
        above = self._above(out, totals, grad, of_totals)
        f, g, v = self.tensors
        direct = self.map is not None
        of_f = into.q.flatten(1, 2) if direct else torch.empty_like(self.f, dtype=kind)
        of_g = into.k if direct else torch.empty_like(self.g, dtype=kind)
        with running_on(self.f.device):
            before, behind = self._states(g, v, False), self._states(f, above, True)
            for kernel, rows, target, states, queries, blocks in (
                (kernels.of_queries, (f, g, v), of_f, before, True, plan.wides),
                (kernels.of_keys, (f, g, v), of_g, behind, False, plan.wides),
                (kernels.of_values, (f, g), into.v, behind, False, plan.talls),
            ):
                arguments = *rows, above, rows_of(target), self.frames, states, plan
                attention.launch(kernel, self._programs(queries, blocks), arguments, *PROGRAM)
        if not direct:
            self._through(into, of_f, of_g)

    def _above(self, out: Tensor, *rest: Tensor) -> tuple[Rows, Rows, Rows]:
        """The gradients of outputs, what these are divided by, and the gradients of the sums of
        weights."""
        out, totals, grad, of_totals = (x.flatten(1, 2) for x in (out, *rest))
        grad = in_rows(grad)
        delta = (grad.to(totals.dtype) * out).sum(-1, keepdim=True)
        # of an output of one number that is delta, whose gradient is 1
        ones = torch.ones_like(delta)
        gradient = self.how.quotient.gradient(ones, delta, totals, self.logs, of_totals)
        return rows_of(grad), rows_of(gradient[..., 0]), rows_of(gradient[..., -1])

    def _through(self, into: Given, of_f: Tensor, of_g: Tensor) -> None:
        """Takes the gradients of features to rows, tables and gates."""
        f, g, of_f, of_g = (x.to(self.kind) for x in (self.f, self.g, of_f, of_g))
        if into.gate:
            lines = *into.gate[1].shape[:2], self.repeat, -1
            into.gate[0].add_((g * of_g).sum(-1))
            into.gate[1][:, :, self.first :].sub_((f * of_f).sum(-1).view(lines).sum(2))
        leaves, features = self.made
        above = of_f.reshape(features[0].shape), of_g
        grads = torch.autograd.grad(features, leaves, above, allow_unused=True)
        for number, (target, share) in enumerate(zip(into.tensors, grads, strict=True)):
            # kernels fill the gradients of values, and a batch of padding alone has none of others
            if number < 2:
                target.zero_()
            if share is not None:
                target.add_(share)

    def _programs(self, queries: bool, blocks: int) -> int:
        """How many programs take all chunks of a side."""
        plan = self.plan
        chunks: int = triton.cdiv(plan.first + plan.queries if queries else plan.keys, CHUNK)
        return self.batch * self.heads * (self.repeat if queries else 1) * chunks * blocks
