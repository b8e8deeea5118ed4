"""`GRAPH + MECHANISM`: exact weights on the pairs of a graph, the kernel's on all others, and one
sum of both below.

out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = exp(s_ij) on the graph and f(q_i) . g(k_j) elsewhere.
Nothing of size n x n is made. The graph is softmax attention in disjoint steps; of the kernel's
sums over all keys, what it gave the pairs of the graph is taken away, where a causal graph is not a
window, of which the sums simply stay behind; and both are merged by the logarithms of their
denominators. Rows of which more is taken away than stays are computed pair by pair instead. On the
way back the exact part, given the merged output and log-sum-exps, returns exactly its share of the
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from attnspec.backends.common.flash import in_rows, rows_of_size
from attnspec.backends.common.key_cache import Keeper
from attnspec.backends.common.merging import LOWEST, in_one_frame
from attnspec.backends.common.score_formula import Formula, scale_of
from attnspec.backends.common.torch_modes import (
    Function,
    apart,
    derivatives,
    is_transformed,
)
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Tables
from attnspec.backends.factored.features.quotients import Merged
from attnspec.backends.factored.features.spans import Given, Share, Sums, shares
from attnspec.backends.factored.features.sums import State, differentiate, summed
from attnspec.backends.factored.hybrid.formula import HybridFormula
from attnspec.backends.factored.hybrid.graph_sums import GraphSums
from attnspec.backends.factored.hybrid.lag import lagged
from attnspec.backends.factored.hybrid.merging import shared_quotient
from attnspec.backends.factored.hybrid.pair_by_pair import PairByPair
from attnspec.backends.factored.hybrid.stream import HybridStream
from attnspec.backends.factored.low_rank.softmax import check_no_dropout
from attnspec.backends.tables.attend import SteppedAttention
from attnspec.backends.tables.blocks import Step
from attnspec.backends.tables.changed_scores import ScoreChanges
from attnspec.backends.tables.kernel import tables_of_work
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.lower.work import Call, Kernel, Work, graph_of, mechanism_of

LIKE_ONE = 64
"""Keys up to which sums of weights of either sign are as exact as if they could not cancel."""

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v."""


class Beside:
    """A graph and the features of a kernel under one denominator.

    One that merges both where nothing else looks on has a `forward` of q [B, H, n_q, d], k
    [B, K, n_k, d], v [B, K, n_k, d_v] and a call, which returns the output [B, K, R, n_q, d_v] with
    other tensors and whatever else is kept, and a `backward` from the gradient of that output, q, k
    and v, those tensors, what else was kept, and the call to the gradients of q, k and v, and of
    tables by their names.
    """

    def __init__(
        self, work: Work, heads: tuple[int, ...], kernel: FeatureKernel, device: torch.device
    ) -> None:
        self.work, self.heads, self.kernel, self.device = work, heads, kernel, device

    @cached_property
    def formula(self) -> HybridFormula:
        """The same in differentiable operations."""
        # it is kept, so the modes of this call must not reach it
        return apart(lambda: HybridFormula(self.work, self.heads, self.kernel, self.device))

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the logarithms [B, H, n_q] of its denominators."""
        return self.formula.partial(q, k, v, call)

    def merged(self, parts: Parts, call: Call) -> torch.Tensor:
        """The output [B, K, R, n_q, d_v] by `forward` and `backward`, with the formula for
        derivatives of derivatives."""
        # what is learned asks for gradients in the type in which it is read
        kind = torch.promote_types(parts[0].dtype, torch.float32)
        tables = {name: x.to(kind) for name, x in call.tables.items()}
        given = *parts, *tables.values()
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            bare = replace(call, tables={})
            out: torch.Tensor = _Merging.apply(self, bare, tuple(tables), *given)  # type: ignore[no-untyped-call]
            return out
        found, _ = self.forward(*parts, replace(call, tables=tables))
        return found[0]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[Sequence[torch.Tensor], Any]:
        raise NotImplementedError

    def backward(
        self,
        grad: torch.Tensor,
        parts: Parts,
        found: Sequence[torch.Tensor],
        rest: Any,
        call: Call,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        raise NotImplementedError

    def streamed(self, keeper: Keeper) -> HybridStream:
        """What goes on with it from a state."""
        return HybridStream(self.work, self.kernel, keeper)


Kept: TypeAlias = "list[tuple[list[State], torch.Tensor]]"
"""Of each share the states before its spans and the rows that were computed pair by pair."""


class HybridKernel(Beside):
    """Runs both on the CPU. Kept besides the output are the sums of all weights [B, K, R, n_q],
    their frames, and the frames of the kernel's sums."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], kernel: FeatureKernel, device: torch.device
    ) -> None:
        super().__init__(work, heads, kernel, device)
        self.quotient = shared_quotient(kernel)
        graph = graph_of(work)
        self.changes = ScoreChanges(graph, heads) if graph.changes else None
        self.attention = SteppedAttention(tables_of_work(graph), self.changes)
        self.lag, rest = lagged(work)
        steps = self.attention.steps
        if self.lag:
            steps = [] if rest is None else _steps(replace(graph, relation=rest))
        self.pairs = GraphSums(steps, kernel.how)
        self.by_pair = PairByPair(work, kernel)
        # weights of either sign cancel in the definition, too: its noise goes with the root of n
        self.most = max(1.0, math.sqrt(work.n_k / LIKE_ONE)) if self.quotient.signed else 1.0
        self.plain = Formula(graph, heads, device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        if not (q.is_cpu and q.shape[-1] and v.shape[-1]) or is_transformed():
            return self.formula(q, k, v, call)
        kind = torch.promote_types(q.dtype, torch.float32)
        out = self.merged((q.to(kind), k.to(kind), v.to(kind)), call)
        return out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])

    # --- forward -------------------------------------------------------------------------------

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[Sequence[torch.Tensor], Kept]:
        given = self.kernel.given(q, k, v, call)
        shape, size = given.q.shape[:-1], v.shape[-1]
        exact, tables = self._exact(q, k, v), self._tables(call)
        scale = scale_of(self.work, q.shape[-1])
        wide, lse = self.attention.forward(*exact, call.padding, scale, tables)
        out, top = wide.view(*shape, -1)[..., :size], lse.view(shape)
        total = torch.empty_like(top)
        frames = torch.zeros_like(top)

        def part(share: Share) -> tuple[list[State], torch.Tensor]:
            found, mine = [x[share] for x in (out, top, total, frames)], given.part(share)
            states, lost = self._merge(mine, found)
            at = torch.nonzero(lost.flatten(0, 2).any(0))[:, 0]
            if len(at):
                formula, changed = self._changes(given, share, call)
                found[0][:, :, :, at] = self.by_pair.forward(mine, at, formula, changed)
                found[1][:, :, :, at] = math.inf
            return states, at

        return (out, total, top, frames), [part(share) for share in self._shares(given)]

    def _merge(
        self, given: Given, found: Sequence[torch.Tensor]
    ) -> tuple[list[State], torch.Tensor]:
        """Merges the sums of the kernel into the exact part of a share, its output and
        log-sum-exps; fills in what else is kept. A row without a weight has the frame infinity.
        Returns the states, and which rows have lost digits, bool [B, K, R, n_q]."""
        out, top, total, frames = found
        states, late = [], late_of(given, self.lag)
        skipped = given.q.shape[3] - late.q.shape[3]
        all_keys = out.new_empty(*out.shape[:-1], out.shape[-1] + 1)
        all_keys[:, :, :, :skipped], frames[:, :, :, :skipped] = 0.0, LOWEST
        sums = Sums(self.kernel.how, late)
        for some in summed(sums, State()) if late.k.shape[2] else ():
            rows = slice(*(at - sums.first + skipped for at in (some.span.low, some.span.high)))
            all_keys[:, :, :, rows] = sums.unchunked(some.sums, some.span)
            if some.logs is not None:
                frames[:, :, :, rows] = sums.unchunked(some.logs[..., None], some.span)[..., 0]
            states.append(some.state)
        taken = self.pairs.subtract(given, all_keys, frames)
        largest, (exact, other) = in_one_frame(torch.stack([top, frames]), 0)
        frame = largest[0]
        torch.addcmul(exact, other, all_keys[..., -1], out=total)
        divisor = self.quotient.divisor(total, frame)
        out.mul_((exact / divisor)[..., None])
        out.addcmul_(all_keys[..., :-1], (other / divisor)[..., None])
        top.copy_(frame.masked_fill_(frame <= LOWEST, math.inf))
        # NaN stands for too much, too
        return states, ~(taken.mul_(other / self.most) <= total.abs())

    def _changes(
        self, given: Given, share: Share, call: Call
    ) -> tuple[Formula, dict[str, torch.Tensor]]:
        """What changes the scores of a share, and its learned tables."""
        if self.changes is None:
            return self.plain, {}
        found = self.changes.of(_query_heads(given, share), self._tables(call))
        return found.formula, dict(found.tables)

    def _exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Parts:
        """q [B, K, R, n_q, e], k and v for the flash kernel: it knows one head size, and takes rows
        in one piece."""
        q = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
        wide = max(q.shape[-1], v.shape[-1])
        return rows_of_size(q, wide), rows_of_size(k, wide), rows_of_size(v, wide)

    def _tables(self, call: Call) -> dict[str, torch.Tensor]:
        """The tables that change scores."""
        names = () if self.changes is None else self.changes.tables
        return {name: call.tables[name] for name in names}

    def _shares(self, given: Given) -> list[Share]:
        """What is computed at once; with padding one sample, whose masks are its own."""
        found = shares(self.kernel.how, given)
        if given.padding is None:
            return found
        batch = range(len(given.q))
        return [(slice(at, at + 1), heads) for samples, heads in found for at in batch[samples]]

    # --- backward ------------------------------------------------------------------------------

    def backward(
        self,
        grad: torch.Tensor,
        parts: Parts,
        found: Sequence[torch.Tensor],
        rest: Kept,
        call: Call,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        given, (out, total, top, frames) = self.kernel.given(*parts, call), found
        # rows pair by pair, and those of no weight, have no share of what goes through the sums
        left_out = top == math.inf
        divisor = self.quotient.divisor(total, top).masked_fill(left_out, 1.0)
        lse = top + torch.log(divisor.abs())
        every, grad = grad, in_rows(grad.masked_fill(left_out[..., None], 0.0))
        free = left_out | (divisor == total)
        if not bool((free & (divisor > 0)).all()):
            # some sums are negative, or so near to 0 that a constant stands for them
            grad, out = grad * torch.sign(divisor)[..., None], out * free[..., None]
        into, shares_of = given.gradients(), self._shares(given)

        def part(number: int) -> tuple[Tables, Tables]:
            share, (states, at) = shares_of[number], rest[number]
            its = [x[share] for x in (out, lse, grad, frames)]
            mine, target = given.part(share), into.part(share)
            target = replace(target, tables=_zeros(target.tables))
            self._differentiate(mine, target, its, states)
            if not len(at):
                return target.tables, {}
            formula, changed = self._changes(given, share, call)
            of_changes = self.by_pair.differentiate(
                mine, target, at, every[share], formula, changed
            )
            return target.tables, of_changes

        of_changes = _zeros(self._tables(call))
        for share, learned in zip(shares_of, map(part, range(len(shares_of))), strict=True):
            for name, table in into.part(share).tables.items():
                table.add_(learned[0][name])
            for name, changed in learned[1].items():
                of_changes[name][list(_query_heads(given, share))] += changed
        grads, of_tables = self._with_exact((grad, out, lse), parts, into, call)
        for name, changed in of_changes.items():
            of_tables[name] = of_tables[name] + changed
        return grads, of_tables

    def _differentiate(
        self, given: Given, into: Given, found: Sequence[torch.Tensor], states: list[State]
    ) -> None:
        """Fills in the gradients of a share that go through the sums of the kernel, and adds those
        of tables."""
        out, lse, grad, frames = found
        how = replace(self.kernel.how, quotient=Merged())
        late, into_late = late_of(given, self.lag), late_of(into, self.lag)
        skipped, keys = given.q.shape[3] - late.q.shape[3], late.k.shape[2]
        into.q[:, :, :, :skipped], into.k[:, :, keys:], into.v[:, :, keys:] = 0.0, 0.0, 0.0
        if keys:
            rows = [x[:, :, :, skipped:] for x in (out, lse, grad)]
            differentiate(Sums(how, late), into_late, rows[0], rows[1], rows[2], states)
        of_sums = how.quotient.gradient(grad, out, lse, frames)
        self.pairs.differentiate(given, into, of_sums, frames)

    def _with_exact(
        self,
        found: Sequence[torch.Tensor],
        parts: Parts,
        into: Given,
        call: Call,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The gradients, with those of the exact part added to what there is."""
        exact = self._exact(*parts)
        wide = exact[0].shape[-1]
        grad, out = (rows_of_size(x.reshape(*exact[0].shape[:-1], -1), wide) for x in found[:2])
        lse = found[2].view(exact[0].shape[:-1])
        # key heads that query heads share were repeated for them
        keys = [shared_by(x, parts[1].shape[1]) for x in (into.k, into.v)]
        targets = [rows_of_size(x, wide) for x in (into.q.view(*exact[0].shape[:-1], -1), *keys)]
        tables = self._tables(call)
        scale = scale_of(self.work, parts[0].shape[-1])
        saved = (*exact, out, lse)
        of_tables = self.attention.backward(grad, saved, call.padding, scale, tables, targets)
        grads = [
            x[..., : y.shape[-1]].reshape(y.shape) for x, y in zip(targets, parts, strict=True)
        ]
        return grads, {**into.tables, **dict(zip(tables, of_tables[3:], strict=True))}


class _Merging(Function):
    """The merged computation, and its formula for derivatives of the derivative."""

    @staticmethod
    def forward(ctx, kernel, call, names, *parts):  # type: ignore[no-untyped-def]
        q, k, v, *tables = parts
        whole = replace(call, tables=dict(zip(names, tables, strict=True)))
        found, ctx.rest = kernel.forward(q, k, v, whole)
        ctx.kernel, ctx.call, ctx.names = kernel, call, names
        ctx.save_for_backward(*parts, *found)
        return found[0]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        count = 3 + len(ctx.names)
        # to be asked for once: a checkpoint computes them anew
        saved = ctx.saved_tensors
        parts, found = saved[:count], saved[count:]
        call = replace(ctx.call, tables=dict(zip(ctx.names, parts[3:], strict=True)))
        if not torch.is_grad_enabled():
            grads, of_tables = ctx.kernel.backward(grad, parts[:3], found, ctx.rest, call)
            return None, None, None, *grads, *(of_tables[name] for name in ctx.names)

        def formula(q, k, v, *tables):  # type: ignore[no-untyped-def]
            whole = replace(ctx.call, tables=dict(zip(ctx.names, tables, strict=True)))
            return [ctx.kernel.formula(q, k, v, whole).view(grad.shape)]

        asks = [x.requires_grad for x in parts]
        return None, None, None, *derivatives(formula, parts, asks, [grad])


class ReadingHybrid(ReadingKernel):
    """The same where the graph reads run-time inputs: laid out for each sample when they are
    seen."""

    reuses = ()  # log-sum-exps are another computation

    def __init__(
        self, work: Work, heads: tuple[int, ...], kernel: FeatureKernel, device: torch.device
    ) -> None:
        super().__init__(work, heads, device)
        self.kernel = kernel

    def known(self, work: Work) -> Kernel:
        return HybridKernel(work, self.heads, self.kernel, self.device)

    def unknown(self) -> Kernel:
        return HybridFormula(self.work, self.heads, self.kernel, self.device)

    def streamed(self, keeper: Keeper) -> HybridStream:
        """What goes on with it from a state, inputs coming with their positions."""
        return HybridStream(self.work, self.kernel, keeper)


def hybrid_kernel(
    work: Work, heads: tuple[int, ...], device: torch.device, kernel: Kernel
) -> HybridKernel | ReadingHybrid | HybridFormula:
    """Runs a graph beside a mechanism whose own kernel, one of features, is given."""
    if not isinstance(kernel, FeatureKernel):
        raise ValueError(f"`{mechanism_of(work).name}` gives no weights to single pairs")
    if work.decided:
        return HybridFormula(work, heads, kernel, device)
    return (ReadingHybrid if work.reads else HybridKernel)(work, heads, kernel, device)


def _steps(work: Work) -> list[Step]:
    """The steps of a graph."""
    return [Step(each, work.n_q, work.positions) for each in tables_of_work(work).steps]


def late_of(given: Given, lag: int) -> Given:
    """What is given to causal sums that leave the `lag` latest keys of every query out: queries
    that have earlier ones, beside keys so many positions before them."""
    keys = max(0, given.k.shape[2] - lag)
    rows = slice(given.q.shape[3] - min(given.q.shape[3], keys), None)
    return replace(
        given,
        q=given.q[:, :, :, rows],
        k=given.k[:, :, :keys],
        v=given.v[:, :, :keys],
        padding=None if given.padding is None else given.padding[:, :keys],
    )


def _zeros(tables: Tables) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(table) for name, table in tables.items()}


def _query_heads(given: Given, share: Share) -> tuple[int, ...]:
    """The query heads of the key heads of a share."""
    low, high, _ = share[1].indices(given.q.shape[1])
    return tuple(range(low * given.q.shape[2], high * given.q.shape[2]))


def shared_by(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The sums of [B, H, n, d] over the heads that share one of so many key heads."""
    return x if x.shape[1] == heads else torch.unflatten(x, 1, (heads, -1)).sum(2)
