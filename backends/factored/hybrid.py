"""`GRAPH + MECHANISM`: exact weights on the pairs of a graph, the kernel's on all others, and one
sum of both below.

out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = exp(s_ij) on the graph and f(q_i) . g(k_j) elsewhere.
The graph is softmax attention by its own kernel. Of a causal window the kernel's sums stay behind;
beside any other graph they run over all keys, and what they gave the pairs of the graph is taken
away, in the tables of that graph. Both are merged by the logarithms of their denominators. Rows of
which more is taken away than stays would be noise: every pair of theirs is weighed by itself, as is
every pair where the data of a call decide the graph or its scores, or where torch transforms the
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.composed import ComposedStep, Piece
from attnspec.backends.common.key_cache import KeyCache, KeyStream
from attnspec.backends.common.masks import by_key_head, mask_plan
from attnspec.backends.common.merging import LOWEST, Outputs, Partial, in_one_frame, merged
from attnspec.backends.common.score_formula import Blocks, Formula, unit, widened
from attnspec.backends.common.scores import inputs_read
from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Features, Tables
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.sums import (
    Derived,
    Given,
    State,
    Summing,
    absorbed,
    cut,
    features_of_keys,
    joined,
    lean,
    no_keys,
    room_of,
    shares,
    values_of,
)
from attnspec.backends.factored.lag import lagged
from attnspec.backends.factored.softmax import check_no_dropout, without_padding
from attnspec.backends.tables.kernel import SteppedKernel, tables_of_work
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.graphs.look_back import LookBack
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Kernel, Mergeable, Work, graph_of

LIKE_ONE = 64
"""Keys up to which sums of weights of either sign are as exact as if they could not cancel."""


# --- sums under one denominator ------------------------------------------------------------------


Weighed: TypeAlias = "tuple[Tensor, Tensor]"
"""Sums of values by their weights [..., n, e], that of the weights last, which stand for exp(log)
times as much, log [..., n]."""


def together(parts: Sequence[Weighed], quotient: Quotient) -> Weighed:
    """What parts with disjoint pairs weigh together."""
    # sums of nothing are 0 in every frame, and must not decide in which one the others are added
    logs = [
        log.masked_fill((x == 0).all(-1) if quotient.signed else x[..., -1] == 0, -torch.inf)
        for x, log in parts
    ]
    top, shares = in_one_frame(torch.stack(logs), 0)
    terms = [x * share[..., None] for (x, _), share in zip(parts, shares, strict=True)]
    # the frame of nothing is 0
    return sum(terms[1:], terms[0]), torch.where(top > -torch.inf, top, 0.0)[0]


# --- pairs, one by one ---------------------------------------------------------------------------


def pair_by_pair(
    kernel: FeatureKernel, given: Given, formula: Formula, blocks: Blocks, tables: Tables
) -> list[Weighed]:
    """What all pairs of queries [B, K, R, h, d] and keys [B, K, n, d] weigh: those of the graph,
    one block, by their scores, the others by the kernel."""
    kind, how = given.kind, kernel.how
    q, k, v = (x.to(kind) for x in (given.q, given.k, given.v))
    out, lse = cast(Partial, formula.of_block(q, k, v, blocks, Call(tables=tables)))
    mask = ~cast(Tensor, blocks.mask)[:, :, :, 0]
    if given.padding is not None:
        mask = mask & given.padding[:, None, None, None]
    if how.causal:
        mask = mask & (blocks.symbols["q"] >= blocks.symbols["k"])

    def of_heads(x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (given.q.shape[2], -1))

    q = q.flatten(2, 3)
    if how.map.paired:
        products, frame = how.map.pairs(q, k), lse.new_zeros(1, 1, 1, 1, 1)
    else:
        (f, of_f), (g, of_g) = (_in_frames(how.map(x, given.tables)) for x in (q, k))
        products, frame = f @ g.mT, of_heads(of_f[..., None] + of_g[:, :, None])
    top, shares = in_one_frame(frame.masked_fill(~mask, -torch.inf), -1)
    weights = (of_heads(products) * shares).flatten(2, 3)
    sums = of_heads(weights @ values_of(how, given))
    return [(pad(out, (0, 1), value=1.0), lse), (sums, top[..., 0])]


def _in_frames(found: Features) -> tuple[Tensor, Tensor]:
    """Features and their frames, constants, whether they have some or not."""
    values, log = found
    return values, torch.zeros_like(values[..., 0].detach()) if log is None else log.detach()


# --- the pairs of tables -------------------------------------------------------------------------


def of_pieces(
    of_piece: Callable[..., Tensor], pieces: Sequence[Piece], *tensors: Tensor
) -> Sequence[Tensor]:
    """The sums of features over the pairs of some pieces of tables: f [B, K, R, n_q, m], g
    [B, K, n_k, m] and w [B, K, n_k, e], with the frames of f and g, constants, to blocks
    [B, K, R, blocks, h, e + 1] of each piece, the sums of the sizes of weights last.

    Pieces are computed again for gradients, which are added where rows belong.
    """

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(of_piece(piece, *_read(piece, tensors)) for piece in pieces)

    def gradients(tensors: Any, _: Any, __: Any, grads: Any) -> Sequence[Tensor | None]:
        into = [torch.zeros_like(x) for x in tensors[:3]]
        for piece, grad in zip(pieces, grads, strict=True):
            parts = _read(piece, tensors)
            leaves = [x.detach().requires_grad_() for x in parts[:3]]
            with torch.enable_grad():
                out = of_piece(piece, *leaves, *parts[3:])
            found = torch.autograd.grad(out, leaves, grad)
            rows = (3, piece.queries), (2, piece.keys), (2, piece.keys)
            for target, share, (axis, index) in zip(into, found, rows, strict=True):
                target.index_add_(axis, index.reshape(-1), share.flatten(axis, axis + 1))
        return *into, None, None

    outs: Sequence[Tensor] = Derived.apply(  # type: ignore[no-untyped-call]
        run, lambda *x: (run(*x), (), None), gradients, *tensors
    )
    return outs


def _read(piece: Piece, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The rows of a piece of features and values, and of frames [..., 1]."""
    of_q, of_k = piece.of_queries, piece.of_keys
    return [read(x) for read, x in zip((of_q, of_k, of_k, of_q, of_k), tensors, strict=True)]


def taken(how: Summing, steps: Sequence[ComposedStep], given: Given, frames: Tensor) -> Tensor:
    """What a kernel's sums [B, K, R, n_q, e], in `frames` [B, K, R, n_q], have of the pairs of some
    steps, and the sums of the sizes of their weights as one column more."""
    room = room_of(how, given)
    outs = [
        lean(how.wide(part), part, partial(_of_share, how, steps, its))[0]
        for part, its in zip(shares(given, room), cut(frames, room), strict=True)
    ]
    return joined(outs, given.k.shape[1])


def _of_share(
    how: Summing, steps: Sequence[ComposedStep], frames: Tensor, given: Given
) -> tuple[Tensor]:
    """The same of some samples and heads."""
    q, shape = given.q.to(given.kind), given.q.shape[:-1]
    values = without_padding(values_of(how, given), given.padding)
    f: Features = q, None
    g: Features = given.k.to(given.kind), None
    if not how.map.paired:
        f, g = how.map(q.flatten(2, 3), given.tables), features_of_keys(how, given)
    of_piece = partial(_of_piece, how, g[1] is not None)
    (f_values, f_log), (g_values, g_log) = _in_frames(f), _in_frames(g)
    rows = f_log.view(shape) - frames.to(q.dtype)
    tensors = f_values.view(*shape, -1), g_values, values, rows[..., None], g_log[..., None]
    share = values.new_zeros(*shape, values.shape[-1] + 1)
    for step in steps:
        pieces = list(step.pieces(g_log.shape[:2].numel(), shape[2], g_values.shape[-1]))
        # what the steps before have taken may be all there is
        if pieces:
            share = share + step.ordered(of_pieces(of_piece, pieces, *tensors))
    return (share,)


def _of_piece(how: Summing, framed: bool, piece: Piece, *parts: Tensor) -> Tensor:
    """The sums of a piece [B, K, R, blocks, h, e + 1], the sizes of their weights last."""
    f, g, w, rows, columns = parts
    repeat, mask = f.shape[2], piece.mask
    f = f.transpose(2, 3).flatten(3, 4)
    products = how.map.pairs(f, g) if how.map.paired else f @ g.mT
    products = torch.unflatten(products, 3, (repeat, -1))
    if mask is not None:
        mask = mask.unsqueeze(1)
    if framed:
        # beyond 0 are frames of rows that are not there
        log = (rows.transpose(2, 3) + columns.mT[:, :, :, None]).clamp(max=0.0)
        log = log if mask is None else log.masked_fill(~mask, -torch.inf)
        products = products * torch.exp(log)
    elif mask is not None:
        products = products.masked_fill(~mask, 0.0)
    weights = products.flatten(3, 4)
    sizes = torch.zeros_like(weights[..., :1])
    if not torch.is_grad_enabled():
        sizes = weights.abs() @ w[..., -1:]
    sums = torch.cat([weights @ w, sizes], -1)
    return torch.unflatten(sums, 3, (repeat, -1)).transpose(2, 3)


# --- the kernel ----------------------------------------------------------------------------------


class HybridKernel:
    """A graph and the features of a kernel under one denominator; `exact` runs the graph alone; it
    is None where every pair is weighed by itself."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        kernel: FeatureKernel,
        exact: Mergeable | None,
    ) -> None:
        self.work, self.device = work, device
        self.kernel, self.exact, self.quotient = kernel, exact, kernel.how.quotient
        self.graph = graph_of(work)
        # keys are of length 1 when it is asked
        self.formula = Formula(replace(self.graph, unit_keys=False), heads, device)
        self.names = (*work.changes.tables, *work.changes.pairs)
        # weights of either sign cancel in the definition, too: its noise goes with the root of n
        self.most = max(1.0, math.sqrt(work.n_k / LIKE_ONE)) if self.quotient.signed else 1.0
        self.lag, self.rest = (0, None) if exact is None else lagged(work)

    @cached_property
    def steps(self) -> list[ComposedStep]:
        """The tables of the pairs that are taken away."""
        rest = self.rest
        if rest is None:
            return []

        def built() -> list[ComposedStep]:
            tables = tables_of_work(replace(self.graph, relation=rest))
            return [ComposedStep(step, tables.n_q, self.device) for step in tables.steps]

        # they are kept, so the modes of this call must not reach them
        return apart(built)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """The output and the logarithms [B, H, n_q] of its denominators."""
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        kept, kind = q.dtype, torch.promote_types(q.dtype, torch.float32)
        # what is learned asks for gradients in the type in which it is read
        call = replace(call, tables={name: x.to(kind) for name, x in call.tables.items()})
        if self.work.unit_keys:
            # all that is attended scores them, the mechanism too
            k = unit(k)
        if q.is_cpu:
            q, k, v = widened(q), widened(k), widened(v)
        request = self.kernel.given(q, k, v, call)
        if self.exact is None or (self.rest is not None and is_transformed()):
            out, lse = self.worth(self._some(request, np.arange(q.shape[2]), 0, call))
        else:
            tables = {name: call.tables[name] for name in self.names}
            partial = self.exact.partial(q, k, v, replace(call, tables=tables))
            out, lse = self._by_sums(request, cast(Partial, partial), call)
        return out.to(kept).flatten(1, 2), None if lse is None else lse.flatten(1, 2)

    def worth(self, found: Weighed) -> tuple[Tensor, Tensor | None]:
        """What sums are worth, and the logarithms of what divides them, if it is positive."""
        (sums, log), quotient = found, self.quotient
        lse = quotient.log_divisor(sums[..., -1], log) if quotient.positive else None
        return quotient.of(sums, log), lse

    def _by_sums(self, given: Given, exact: Partial, call: Call) -> tuple[Tensor, Tensor | None]:
        """The output [B, K, R, n_q, d_v] and the logarithms of its denominators, of those of the
        graph and of sums."""
        shape, late = given.q.shape[:-1], late_of(given, self.lag)
        out, lse = exact[0].to(exact[1].dtype).view(*shape, -1), exact[1].view(shape)
        missing = shape[3] - late.q.shape[3]
        if self.rest is None and self.quotient.positive:
            if not late.k.shape[2]:
                return out, lse
            (other, total, log), _ = self.kernel.results(self.kernel.how, late, None)
            behind = pad(self.quotient.log_divisor(total, log), (missing, 0), value=-math.inf)
            return merged((out, lse), (pad(other, (0, 0, missing, 0)), behind))
        weighed = pad(out, (0, 1), value=1.0), lse
        if not late.k.shape[2]:
            return self.worth(weighed)
        sums, frames = self.kernel.sums(late)
        if missing:
            sums, frames = pad(sums, (0, 0, missing, 0)), pad(frames, (missing, 0), value=LOWEST)
        if not self.steps:
            return self.worth(together([weighed, (sums, frames)], self.quotient))
        less = taken(self.kernel.how, self.steps, given, frames)
        sums = sums - less[..., :-1]
        lost = self._lost(lse, (sums, frames), less[..., -1])
        again = bool(lost.any())
        if again:
            sums = sums.masked_fill(lost[:, :, None, :, None], 0.0)
        joined = together([weighed, (sums, frames)], self.quotient)
        return self.worth(self._again(given, call, joined, lost) if again else joined)

    def _lost(self, lse: Tensor, others: Weighed, sizes: Tensor) -> Tensor:
        """The rows of which more was taken away than stays, bool [B, K, n_q]."""
        with torch.no_grad():
            _, (one, other) = in_one_frame(torch.stack([lse, others[1]]), 0)
            total = one + other * others[0][..., -1]
            # NaN stands for too much, too
            lost: Tensor = ~(sizes * other / self.most <= total.abs())
            return lost.any(2)

    # --- pair by pair --------------------------------------------------------------------------

    def _again(self, given: Given, call: Call, found: Weighed, rows: Tensor) -> Weighed:
        """The same with some rows, bool [B, K, n_q], weighed pair by pair."""
        lines = enumerate(zip(shares(given, (1, 1)), rows.flatten(0, 1).cpu().numpy(), strict=True))
        parts = [
            self._some(part, np.flatnonzero(at), number % given.k.shape[1], call)
            for number, (part, at) in lines
            if at.any()
        ]
        again = (
            torch.cat([x[0, 0].movedim(1, 0) for x in each]) for each in zip(*parts, strict=True)
        )
        sums, log = (
            x.transpose(2, 3).index_put((rows,), rows_of).transpose(2, 3)
            for x, rows_of in zip(found, again, strict=True)
        )
        return sums, log

    def _some(self, given: Given, at: np.ndarray, first: int, call: Call) -> Weighed:
        """What all keys weigh for the queries `at` of the key heads from the first on, some queries
        at a time."""
        heads, repeat, n_k = given.k.shape[1], given.q.shape[2], given.k.shape[2]
        places = list(range(first * repeat, (first + heads) * repeat))
        most = max(1, LIMITS.pairs_at_once // max(1, given.q.shape[:3].numel() * n_k))
        formula, parts = self.formula.of_heads(places), []

        def weighed(at: np.ndarray, blocks: Blocks, given: Given, *tables: Tensor) -> Weighed:
            learned = dict(zip(self.names, tables, strict=True))
            mine, rows = replace(call, tables=learned), torch.from_numpy(at).to(self.device)
            read = inputs_read(self.work, mine, self.work.n_q, rows, given.q.shape[1:3])
            blocks = replace(blocks, symbols={**blocks.symbols, **read})
            pairs = pair_by_pair(self.kernel, given, formula, blocks, learned)
            return together(pairs, self.quotient)

        for low in range(0, max(1, len(at)), most):
            some, rows = at[low : low + most], given
            if len(some) < given.q.shape[3]:
                index = torch.from_numpy(some).to(self.device)
                rows = replace(given, q=given.q.index_select(3, index))
            each = (call.tables[name] for name in self.names)
            # numbers of pairs may be those of all heads
            tables = (x if len(x) == 1 else x[places] for x in each)
            run = partial(weighed, some, self._blocks(given, some, call))
            parts.append(lean(True, rows, run, *tables))
        sums, log = (torch.cat(x, 3) for x in zip(*parts, strict=True))
        return sums, log.detach()

    def _blocks(self, given: Given, at: np.ndarray, call: Call) -> Blocks:
        """Some queries beside all keys, as one block of the graph."""
        n_k = self.work.n_k
        q, k = at[:, None] + n_k - self.work.n_q, np.arange(n_k)[None]
        mask = mask_plan(self.work.relation, q, k, n_k, self.device)(call.data)
        # inputs of graphs that are not data-dependent have no axis of heads
        mask = mask[:, None] if mask.dim() == 3 else mask
        # the kernel may give each query head keys of its own
        mask = by_key_head(mask, given.k.shape[1])
        if given.padding is not None:
            mask = mask & given.padding[:, None, None, None, None]
        symbols = {name: torch.from_numpy(x).to(self.device) for name, x in (("q", q), ("k", k))}
        return Blocks(mask, symbols=symbols)

    def streamed(self, reach: LookBack, heads: tuple[int, ...]) -> HybridStream:
        """What goes on with it from a state."""
        return HybridStream(self.graph, reach, heads, self.device, self)


class ReadingHybrid(ReadingKernel):
    """The same where the graph reads run-time inputs: laid out for each sample when they are
    seen."""

    reuses = ()  # log-sum-exps are another computation

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, kernel: FeatureKernel
    ) -> None:
        super().__init__(work, heads, device)
        self.kernel = kernel

    def known(self, work: Work) -> Kernel:
        return hybrid_kernel(work, self.heads, self.device, self.kernel)

    def unknown(self) -> HybridKernel:
        return HybridKernel(self.work, self.heads, self.device, self.kernel, None)

    def streamed(self, reach: LookBack, heads: tuple[int, ...]) -> HybridStream:
        """What goes on with it from a state, inputs coming with their positions."""
        return self.unknown().streamed(reach, heads)


def hybrid_kernel(
    work: Work,
    heads: tuple[int, ...],
    device: torch.device,
    kernel: FeatureKernel,
    exact: Mergeable | None = None,
) -> HybridKernel | ReadingHybrid:
    """Runs a graph beside a mechanism with its own kernel; `exact` runs a static graph alone, or
    tables where it is None."""
    if work.reads and not (work.decided or work.changes.inputs):
        return ReadingHybrid(work, heads, device, kernel)
    if exact is None and not work.waits:
        exact = SteppedKernel(graph_of(work), heads, device)
    return HybridKernel(work, heads, device, kernel, exact)


def late_of(given: Given, lag: int) -> Given:
    """What is given to causal sums that leave the `lag` latest keys of every query out: queries
    that have earlier ones, beside keys so many positions before them."""
    if not lag:
        return given
    keys = max(0, given.k.shape[2] - lag)
    rows = slice(given.q.shape[3] - min(given.q.shape[3], keys), None)
    return replace(given.keys([keys, given.k.shape[2] - keys])[0], q=given.q[:, :, :, rows])


# --- generation ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HybridStream(KeyStream):
    """Goes on with a graph and a kernel under one denominator, from the sums of the kernel over the
    keys that the graph reads no more, and all others.

    A key that the graph may still read is weighed pair by pair; it enters the sums when no later
    position has it in the graph, so that they hold nothing that would have to be taken away.
    """

    hybrid: HybridKernel

    def advanced(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: object, with_lse: bool
    ) -> tuple[Outputs, object]:
        hybrid, kernel = self.hybrid, self.hybrid.kernel
        check_no_dropout(f"a graph with `{kernel.name}`", call.dropout_p)
        request = kernel.given(q, k, v, call)
        sums, kept = cast(
            "tuple[State, KeyCache | None]", state or (no_keys(kernel.how, request), None)
        )
        cache, formula, blocks, later = self.seen(request.k, request.v, call, kept)
        every = replace(request, k=cache.keys, v=cache.values, padding=cache.padding)
        parts = pair_by_pair(kernel, every, formula, blocks, call.tables)
        out, lse = hybrid.worth(
            together([*parts, _of_state(kernel, request, sums)], hybrid.quotient)
        )
        out = out.to(q.dtype).flatten(1, 2)
        left = cache.part(~later)
        if len(left.positions):
            some = replace(request, k=left.keys, v=left.values, padding=left.padding)
            sums = absorbed(kernel.how, some, sums)
        return (out, None if lse is None else lse.flatten(1, 2)), (sums, cache.part(later))


def _of_state(kernel: FeatureKernel, given: Given, state: State) -> Weighed:
    """What keys weigh together whose sums are given."""
    f, log = _in_frames(kernel.how.map(given.q.to(given.kind).flatten(2, 3), given.tables))
    if state.base is not None:
        log = log + state.base[..., None].to(log.dtype)
    sums = torch.unflatten(f @ state.sums, 2, given.q.shape[2:4])
    return sums, log.view(given.q.shape[:-1])
