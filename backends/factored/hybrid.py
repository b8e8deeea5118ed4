"""`GRAPH + MECHANISM`: exact weights on the pairs of a graph, the kernel's on all others, and one
sum of both below.

out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = exp(s_ij) on the graph and f(q_i) . g(k_j) elsewhere.
The graph is softmax attention by its own kernel. Of a causal window the kernel's sums stay behind;
beside any other graph they run over all keys, and what they gave the pairs of the graph is taken
away, in the tables of that graph. Both are merged by the logarithms of their denominators. Rows of
which more is taken away than stays would be noise: every pair of theirs is weighed by itself, as is
every pair where inputs of a call decide scores or stand beside data-dependent graphs, where these
run on a GPU, and where torch transforms the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from attnspec.backends.common.composed import ComposedStep, Piece
from attnspec.backends.common.key_cache import KeyCache, KeyStream
from attnspec.backends.common.masks import by_key_head, mask_of
from attnspec.backends.common.merging import (
    LOWEST,
    Outputs,
    Partial,
    in_one_frame,
    joined,
    wide_type,
)
from attnspec.backends.common.score_formula import Blocks, Formula, unit, widened
from attnspec.backends.common.scores import inputs_read
from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.backends.decided.choice import part_of
from attnspec.backends.decided.products import Product
from attnspec.backends.decided.tables import parts_of_call
from attnspec.backends.factored.features.kernel import FeatureKernel, by_head
from attnspec.backends.factored.features.maps import Summing
from attnspec.backends.factored.features.sums import Derived, Given, State, Weighed, lean, uncast
from attnspec.backends.factored.lag import lagged
from attnspec.backends.factored.matrices import MatrixKernel
from attnspec.backends.factored.softmax import check_no_dropout
from attnspec.backends.tables.backend import listed_parts
from attnspec.backends.tables.decided import DecidedTables
from attnspec.backends.tables.kernel import SteppedKernel, tables_of_work
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.graphs.look_back import LookBack
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Heads, Kernel, Mergeable, Work, graph_of, mechanism_of

LIKE_ONE = 64
"""Keys up to which sums of weights of either sign are as exact as if they could not cancel."""


# --- sums under one denominator ------------------------------------------------------------------


def together(weighed: Sequence[Weighed], how: Summing) -> tuple[Tensor, Tensor]:
    """What parts with disjoint pairs weigh together."""
    # sums of nothing are 0 in every frame, and must not decide in which one the others are added
    logs = [
        log.masked_fill((x == 0).all(-1) if how.signed else x[..., -1] == 0, -torch.inf)
        for x, log in weighed
    ]
    top, shares = in_one_frame(torch.stack(logs), 0)
    terms = [x * share[..., None] for (x, _), share in zip(weighed, shares, strict=True)]
    # the frame of nothing is 0
    return sum(terms[1:], terms[0]), torch.where(top > -torch.inf, top, 0.0)[0]


# --- pairs, one by one ---------------------------------------------------------------------------


def pair_by_pair(
    given: Given, samples: int, formula: Formula, blocks: Blocks, call: Call
) -> list[Weighed]:
    """What all pairs of queries and keys weigh: those of the graph, one block of so many samples,
    by their scores, the others by the features."""
    (q, k, v), how = (x.to(given.kind) for x in given[:3]), given.how
    heads = len(q) // max(1, samples)
    a, b, c = (x.view(samples, heads, *x.shape[1:]) for x in (q, k, v))
    out, lse = cast(Partial, formula.of_block(a, b, c, blocks, call))
    out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    mask = cast(Tensor, blocks.mask)[:, :, :, 0]
    mask = ~mask.expand(samples, heads, -1, -1, -1).flatten(0, 1)
    if given.padding is not None:
        mask = mask & given.padding[:, None, None]
    if how.work.causal:
        mask = mask & (blocks.symbols["q"] >= blocks.symbols["k"])
    rows = q.shape[1:3]
    if how.paired:
        products, frame = how.pairs(q.flatten(1, 2), k), lse.new_zeros(1, 1, 1, 1)
    else:
        (f, of_f), (g, of_g) = given.features_of_queries(), given.features_of_keys()
        products, frame = f @ g.mT, torch.unflatten(of_f[..., None] + of_g[:, None], 1, rows)
    top, shares = in_one_frame(frame.masked_fill(~mask, -torch.inf), -1)
    weights = torch.unflatten(products, 1, rows) * shares
    sums = torch.unflatten(weights.flatten(1, 2) @ given.values(), 1, rows)
    return [(pad(out, (0, 1), value=1.0), lse), (sums, top[..., 0])]


# --- the pairs of tables -------------------------------------------------------------------------


def taken_by_lists(
    products: Sequence[Product], given: Given, frames: Tensor, samples: int, call: Call
) -> Tensor:
    """The same of the pairs of data-dependent graphs, of so many samples."""
    lists = samples, len(given.k) // max(1, samples)
    q, n_k = torch.unflatten(given.q, 0, lists), given.k.shape[1]
    size = given.v.shape[-1] + given.how.divides + 1
    shares = q.new_zeros(*q.shape[:4], size, dtype=given.kind)
    for part in parts_of_call(q, n_k, call, products):
        some = part.samples, part.heads
        mine, its = tree_map_only(Tensor, partial(_of_lists, lists, some), (given, frames))
        mine, its = mine._replace(q=mine.q[:, part.repeats]), its[:, part.repeats]
        tables = (list(placed.batches()) for placed in part.tables(products))
        steps = [ComposedStep(each, its.numel(), its.device) for each in tables]
        share = taken(steps, mine, its, True)
        shares[part.queries] = torch.unflatten(share, 0, part.sizes[:2])
    return shares.flatten(0, 1)


def _of_lists(lists: tuple[int, int], some: tuple[slice, slice], x: Tensor) -> Tensor:
    return torch.unflatten(x, 0, lists)[some].flatten(0, 1)


def taken(
    steps: Sequence[ComposedStep], given: Given, frames: Tensor, in_line: bool = False
) -> Tensor:
    """What sums [N, R, n_q, e], in `frames` [N, R, n_q], have of the pairs of some steps, and the
    sums of the sizes of their weights as one column more; rows may be those of all lists, in
    line."""
    run = partial(_of_steps, steps, in_line)
    run = partial(lean, run) if given.is_wide else run
    (share,) = uncast(run, given, frames)
    return cast(Tensor, share)


def _of_steps(
    steps: Sequence[ComposedStep], in_line: bool, given: Given, frames: Tensor
) -> tuple[Tensor]:
    how, values = given.how, given.values()
    if how.paired:
        f, g = given.q.to(given.kind), given.k.to(given.kind)
        of_f, of_g = f.new_zeros(frames.shape), g.new_zeros(g.shape[:2])
    else:
        (f, of_f), (g, of_g) = given.features_of_queries(), given.features_of_keys()
    rows = of_f.view(frames.shape) - frames.to(given.kind)
    tensors = [f.view(*frames.shape, -1), g, values, rows[..., None], of_g[..., None]]
    if in_line:
        tensors = [x.flatten(0, -2)[(None,) * (x.dim() - 2)] for x in tensors]
    # as tables have them: of one sample
    tensors = [x[None] for x in tensors]
    share = values.new_zeros(*tensors[0].shape[:-1], values.shape[-1] + 1)
    for step in steps:
        pieces = list(step.pieces(tensors[0]))
        # what the steps before have taken may be all there is
        if pieces:
            sums = _of_pieces(partial(_of_piece, how), pieces, *tensors)
            share = share + step.ordered(sums)
    return (share.view(*frames.shape, -1),)


def _of_pieces(of_piece: Any, pieces: Sequence[Piece], *tensors: Tensor) -> Sequence[Tensor]:
    """The sums over the pairs of some pieces of tables. Each is computed again for gradients, which
    are added where its rows belong: autograd would add whole tensors for each piece."""

    def read(piece: Piece, tensors: Sequence[Tensor]) -> list[Tensor]:
        of_q, of_k = piece.of_queries, piece.of_keys
        return [of(x) for of, x in zip((of_q, of_k, of_k, of_q, of_k), tensors, strict=True)]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(of_piece(piece, *read(piece, tensors)) for piece in pieces)

    def gradients(tensors: Any, _: Any, __: Any, grads: Any) -> Sequence[Tensor | None]:
        into = [torch.zeros_like(x) for x in tensors[:3]]
        for piece, grad in zip(pieces, grads, strict=True):
            rows = read(piece, tensors)
            leaves = [x.detach().requires_grad_() for x in rows[:3]]
            with torch.enable_grad():
                out = of_piece(piece, *leaves, *rows[3:])
            found = torch.autograd.grad(out, leaves, grad)
            places = (3, piece.queries), (2, piece.keys), (2, piece.keys)
            for target, share, (axis, index) in zip(into, found, places, strict=True):
                target.index_add_(axis, index.reshape(-1), share.flatten(axis, axis + 1))
        return *into, None, None

    outs: Sequence[Tensor] = Derived.apply(  # type: ignore[no-untyped-call]
        run, lambda *x: (run(*x), (), None), gradients, *tensors
    )
    return outs


def _of_piece(
    how: Summing, piece: Piece, f: Tensor, g: Tensor, w: Tensor, *frames: Tensor
) -> Tensor:
    """The sums [1, N, R, blocks, h, e + 1] of features f [1, N, R, blocks, h, m], g and values w
    [1, N, blocks, w, ...] and the frames of both, [..., 1]; the sizes of weights last."""
    repeat, mask = f.shape[2], piece.mask
    f = f.transpose(2, 3).flatten(3, 4)
    weights = torch.unflatten(how.pairs(f, g) if how.paired else f @ g.mT, 3, (repeat, -1))
    mask = None if mask is None else ~mask.unsqueeze(1)
    if how.framed:
        # beyond 0 are frames of rows that are not there
        log = (frames[0].transpose(2, 3) + frames[1].mT[:, :, :, None]).clamp(max=0.0)
        weights = weights * torch.exp(log if mask is None else log.masked_fill(mask, -torch.inf))
    elif mask is not None:
        weights = weights.masked_fill(mask, 0.0)
    weights = weights.flatten(3, 4)
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
        device: torch.device,
        kernel: FeatureKernel,
        exact: Mergeable | None = None,
    ) -> None:
        self.work, self.device = work, device
        self.kernel, self.exact = kernel, exact
        self.graph = graph_of(work)
        # keys are of length 1 when it is asked
        self.formula = Formula(replace(self.graph, unit_keys=False), kernel.heads, device)
        self.names = (*work.changes.tables, *work.changes.pairs)
        # weights of either sign cancel in the definition, too: its noise goes with the root of n
        self.most = max(1.0, math.sqrt(work.n_k / LIKE_ONE)) if kernel.signed else 1.0
        self.products: tuple[Product, ...] = ()
        self.lag, self.rest = (0, None) if exact is None else lagged(work)
        if isinstance(exact, DecidedTables):
            self.lag, self.products, self.rest = 0, exact.parts.products, exact.parts.rest

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

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The output and the logarithms [B, H, n_q] of its denominators."""
        check_no_dropout(f"GRAPH + {self.kernel.declared.name}", call.dropout_p)
        kind = wide_type(q)
        # what is learned asks for gradients in the type in which it is read
        call = replace(call, tables={name: x.to(kind) for name, x in call.tables.items()})
        if self.work.unit_keys:
            # all that is attended scores them, the mechanism too
            k = unit(k)
        wide = q
        if q.is_cpu:
            wide, k, v = widened(q), widened(k), widened(v)
        given = self.kernel.given(wide, k, v, call)
        call = replace(call, tables={name: call.tables[name] for name in self.names})
        beside = self.products or self.rest is not None
        if self.exact is None or (beside and is_transformed()):
            every = np.arange(q.shape[2])
            return by_head(q, self.kernel.worth(self._some(given, len(q), every, call)))
        exact = cast(Partial, self.exact.partial(wide, k, v, call))
        return by_head(q, self._by_sums(given, exact, call))

    def _by_sums(self, given: Given, exact: Partial, call: Call) -> Outputs:
        """The output [N, R, n_q, d_v] and the logarithms of its denominators, of those of the graph
        and of sums."""
        shape, n_k, late = given.q.shape[:3], given.k.shape[1], given
        if self.lag:
            # queries that have earlier keys than the latest, beside keys so many positions before
            keys = max(0, n_k - self.lag)
            rows = min(shape[2], keys)
            before, behind = given.cut([shape[2] - rows, rows], [keys, n_k - keys])
            late = before._replace(q=behind.q)
        out, lse = exact[0].to(exact[1].dtype).reshape(*shape, -1), exact[1].reshape(shape)
        missing = shape[2] - late.q.shape[2]
        weighed: Weighed = pad(out, (0, 1), value=1.0), lse
        if not late.k.shape[1]:
            return self.kernel.worth(weighed)
        sums, log = self.kernel.sums(late)
        frames = pad(log, (missing, 0), value=LOWEST)
        sums, lost = pad(sums, (0, 0, missing, 0)), None
        shares = []
        if self.steps:
            shares.append(joined([taken(self.steps, *part) for part in given.parts(frames)], 0))
        if self.products:
            shares.append(taken_by_lists(self.products, given, frames, len(exact[0]), call))
        if shares:
            less = sum(shares[1:], shares[0])
            sums = sums - less[..., :-1]
            with torch.no_grad():
                _, (one, other) = in_one_frame(torch.stack([lse, frames]), 0)
                total = one + other * sums[..., -1]
                # rows of which more was taken away than stays; NaN stands for too much, too
                lost = (~(less[..., -1] * other / self.most <= total.abs())).any(1)
            sums = sums.masked_fill(lost[:, None, :, None], 0.0)
        weighed = together([weighed, (sums, frames)], self.kernel)
        if lost is not None and lost.any():
            weighed = self._again(given, len(exact[0]), call, weighed, lost)
        return self.kernel.worth(weighed)

    # --- pair by pair --------------------------------------------------------------------------

    def _again(
        self, given: Given, samples: int, call: Call, weighed: Weighed, rows: Tensor
    ) -> Weighed:
        """The same with some rows, bool [N, n_q], weighed pair by pair."""
        lines, heads, again = given.parts(block=1), len(rows) // samples, []
        for number, ((line,), at) in enumerate(zip(lines, rows.cpu().numpy(), strict=True)):
            if at.any():
                sample, head = divmod(number, heads)
                its = slice(head * line.q.shape[1], (head + 1) * line.q.shape[1])
                data = part_of(dict(call.data), slice(sample, sample + 1), its)
                some = np.flatnonzero(at)
                again.append(self._some(line, 1, some, replace(call, data=data), head))
        sums, log = (
            x.transpose(1, 2).index_put((rows,), torch.cat([y[0].movedim(1, 0) for y in each]))
            for x, each in zip(weighed, zip(*again, strict=True), strict=True)
        )
        return sums.transpose(1, 2), log.transpose(1, 2)

    def _some(
        self, given: Given, samples: int, at: np.ndarray, call: Call, first: int = 0
    ) -> Weighed:
        """What all keys weigh for the queries `at` of some samples and the key heads from the first
        on, some queries at a time."""
        (lines, ratio, n_q), n_k = given.q.shape[:3], given.k.shape[1]
        groups = lines // max(1, samples), ratio
        heads = slice(first * ratio, (first + groups[0]) * ratio)
        formula = self.formula.of_heads(range(heads.start, heads.stop))
        most, sums = max(1, LIMITS.pairs_at_once // max(1, lines * ratio * n_k)), []
        keys = torch.arange(n_k, device=self.device)[None]
        # numbers of pairs may be those of all heads
        tables = {name: x if len(x) == 1 else x[heads] for name, x in call.tables.items()}

        def weighed(given: Given, tables: Any, at: Tensor, blocks: Blocks) -> Weighed:
            mine = replace(call, tables=tables)
            read = inputs_read(self.work, mine, self.work.n_q, at, groups[0])
            blocks = replace(blocks, symbols={**blocks.symbols, **read})
            pairs = pair_by_pair(given, samples, formula, blocks, mine)
            return together(pairs, self.kernel)

        for low in range(0, max(1, len(at)), most):
            some, rows = at[low : low + most], given
            index = torch.from_numpy(some).to(self.device)
            if len(some) < n_q:
                rows = given._replace(q=given.q.index_select(2, index))
            # as one block of the graph; the kernel may give each query head keys of its own
            mask = by_key_head(mask_of(self.graph, call.data, self.device, some), groups[0])
            if given.padding is not None:
                mask = mask & given.padding.view(samples, groups[0], 1, 1, 1, n_k)
            symbols = {"q": index[:, None] + n_k - self.work.n_q, "k": keys}
            run = partial(lean, partial(weighed, at=index, blocks=Blocks(mask, symbols=symbols)))
            sums.append(uncast(run, rows, tables))
        out, log = (joined(x, 2) for x in zip(*sums, strict=True))
        return out, log.detach()

    def streamed(self, reach: LookBack) -> HybridStream:
        """What goes on with it from a state."""
        return HybridStream(self.graph, reach, self.kernel.heads, self.device, self)


class ReadingHybrid(ReadingKernel):
    """The same for a graph that reads run-time inputs, laid out for each sample."""

    reuses = ()  # log-sum-exps are another computation

    def __init__(self, work: Work, device: torch.device, kernel: FeatureKernel) -> None:
        super().__init__(work, kernel.heads, device)
        self.kernel = kernel

    def known(self, work: Work) -> Kernel:
        return hybrid_kernel(work, self.device, self.kernel)

    def unknown(self) -> HybridKernel:
        return HybridKernel(self.work, self.device, self.kernel)

    def streamed(self, reach: LookBack) -> HybridStream:
        return self.unknown().streamed(reach)


def kernel_of(work: Work, heads: Heads, device: torch.device) -> Kernel:
    """The kernel of a work's mechanism, with the graph beside it where it has one."""
    if not mechanism_of(work).sums:
        return MatrixKernel(work)
    kernel = FeatureKernel(work, heads)
    return hybrid_kernel(work, device, kernel) if work.hybrid else kernel


def hybrid_kernel(
    work: Work, device: torch.device, kernel: FeatureKernel, exact: Mergeable | None = None
) -> HybridKernel | ReadingHybrid:
    """Runs a graph beside a mechanism with its own kernel; `exact` runs a static graph alone, or
    tables where it is None."""
    if work.reads and not (work.decided or work.changes.inputs):
        return ReadingHybrid(work, device, kernel)
    parts = listed_parts(work, device.type)
    if exact is None and not work.waits:
        exact = SteppedKernel(graph_of(work), kernel.heads, device)
    elif parts is not None:
        graph = replace(graph_of(work), unit_keys=False)
        exact = DecidedTables(graph, kernel.heads, device, parts)
    return HybridKernel(work, device, kernel, exact)


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
        kernel = self.hybrid.kernel
        check_no_dropout(f"GRAPH + {kernel.declared.name}", call.dropout_p)
        given = kernel.given(q, k, v, call)
        sums, kept = cast("tuple[State, KeyCache | None]", state or (given.no_keys(), None))
        # the kernel may give each query head keys of its own
        heads = len(q), -1
        k, v = (torch.unflatten(x, 0, heads) for x in (given.k, given.v))
        cache, formula, blocks, later = self.seen(k, v, call, kept)
        every = _of_keys(given, cache)
        pairs = pair_by_pair(every, len(q), formula, blocks, call)
        outputs = kernel.worth(together([*pairs, given.on(sums)], kernel))
        left = cache.part(~later)
        if len(left.positions):
            # the keys alone
            sums = _of_keys(given._replace(q=given.q[:, :, :0]), left).summed(sums)[1]
        return by_head(q, outputs), (sums, cache.part(later))


def _of_keys(given: Given, cache: KeyCache) -> Given:
    """The same with the keys of a cache."""
    k, v, real = cache.keys.flatten(0, 1), cache.values.flatten(0, 1), cache.padding
    real = None if real is None else real.repeat_interleave(cache.keys.shape[1], 0)
    return given._replace(k=k, v=v, padding=real)
