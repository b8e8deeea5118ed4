"""`GRAPH + MECHANISM` on a GPU: the graph in the kernels of tile lists, with its log-sum-exps.

Of a causal window the sums of features stay behind, in their own kernels, and both are merged by
their denominators; on the way back both go on from what was merged, and return exactly their
shares. Beside any other graph the mechanism's pairs are summed in tensor products, in tiles that
the graph leaves whole and pair by pair in others, so that nothing is taken away again. Of a graph
that the inputs or the data of a call decide these others are all tiles in which it may have pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from attnspec.backends.common.exact import has_numbers
from attnspec.backends.common.flash import in_rows
from attnspec.backends.common.merging import LOWEST, in_one_frame
from attnspec.backends.common.score_formula import scale_of
from attnspec.backends.decided.products import parts_of
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.quotients import Merged, Quotient
from attnspec.backends.factored.hybrid.kernel import Beside, Parts, late_of, shared_by
from attnspec.backends.factored.hybrid.lag import lagged
from attnspec.backends.factored.hybrid.merging import shared_quotient
from attnspec.backends.factored.low_rank.softmax import check_no_dropout
from attnspec.backends.triton.attention import fits
from attnspec.backends.triton.decided import DecidedKernel
from attnspec.backends.triton.kernel import TritonKernel, is_taken, tile_kernel
from attnspec.backends.triton.sums.way import Launched
from attnspec.backends.triton.tuning import steps_of
from attnspec.lower.work import Bias, Call, Work, graph_of


class GraphBeside(Beside):
    """A graph beside a mechanism whose pairs are summed in tensor products."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], kernel: FeatureKernel, device: torch.device
    ) -> None:
        super().__init__(work, heads, kernel, device)
        self.exact = _exact_kernel(graph_of(work), heads, device)
        self.names = tuple(x.table for x in work.changes if isinstance(x, Bias))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        if not (is_taken(q) and fits(q, v) and has_numbers(q, k, v)):
            return self.formula(q, k, v, call)
        return self._run(q, k, v, call)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        out, lse = self.exact.partial(q, k, v, self._of_graph(call))
        if lse is None:
            raise ValueError("a softmax without log-sum-exps")
        return self.formula.beside(q, k, v, call, (out, lse))[0]

    def _of_graph(self, call: Call) -> Call:
        """The call as the graph's own kernel takes it."""
        return replace(call, tables={name: call.tables[name] for name in self.names})


def _exact_kernel(
    graph: Work, heads: tuple[int, ...], device: torch.device
) -> TritonKernel | DecidedKernel:
    """The kernel of the graph alone."""
    parts = parts_of(graph.relation) if graph.decided else None
    if parts is not None:
        return DecidedKernel(graph, heads, device, parts)
    return tile_kernel(graph, heads, device, steps_of(graph))


class WindowBeside(GraphBeside):
    """A causal window of so many positions beside sums of features. Kept besides the output are the
    sums of all weights [B, K, R, n_q] and their frames, infinity for a row without a weight."""

    exact: TritonKernel

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        kernel: FeatureKernel,
        device: torch.device,
        lag: int,
    ) -> None:
        super().__init__(work, heads, kernel, device)
        self.lag, self.quotient = lag, shared_quotient(kernel)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        out = self.merged((q, k, v), call)
        return out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[Sequence[torch.Tensor], None]:
        scale = scale_of(self.work, q.shape[-1])
        exact = self.exact.of_heads(q, k, v, self._of_graph(call), scale)
        given = self.kernel.given(q, k, v, call)
        shape, kind = given.q.shape[:-1], exact[1].dtype
        out, lse = exact[0].to(kind).view(*shape, -1), exact[1].view(shape)
        late = late_of(given, self.lag)
        sums = out.new_zeros(out.shape)
        total, frames = torch.zeros_like(lse), torch.full_like(lse, LOWEST)
        rows = late.q.shape[3]
        if late.k.shape[2]:
            at = (..., slice(shape[-1] - rows, None))
            found = late.q.new_empty(*late.q.shape[:-1], v.shape[-1], dtype=kind)
            how = replace(self.kernel.how, quotient=Quotient())
            total[at], logs = Launched().fill(how, late, found)
            frames[at] = 0.0 if logs is None else logs
            divided = how.quotient.divisor(total[at], logs)
            sums[:, :, :, shape[-1] - rows :] = found * divided[..., None]
        largest, (exact_share, share) = in_one_frame(torch.stack([lse, frames]), 0)
        frame = largest[0]
        total = exact_share + share * total
        divisor = self.quotient.divisor(total, frame)[..., None]
        out = (out * exact_share[..., None] + sums * share[..., None]) / divisor
        return (out, total, frame.masked_fill(frame <= LOWEST, torch.inf)), None

    def backward(
        self,
        grad: torch.Tensor,
        parts: Parts,
        found: Sequence[torch.Tensor],
        rest: None,
        call: Call,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        q, k, v = parts
        given = self.kernel.given(q, k, v, call)
        out, total, frame = found
        empty = frame == torch.inf
        divisor = self.quotient.divisor(total, frame).masked_fill(empty, 1.0)
        lse = frame + torch.log(divisor.abs())
        # sums may be negative, or so near to 0 that a constant stands for them
        grad = in_rows((grad * torch.sign(divisor)[..., None]).to(q.dtype))
        out = out * (empty | (divisor == total))[..., None]
        saved = [x.flatten(1, 2) for x in (out, lse)]
        scale = scale_of(self.work, q.shape[-1])
        its = self._of_graph(call)
        upper = grad.flatten(1, 2)
        grads = [*self.exact.derivatives_of_heads((*parts, *saved), upper, None, its, scale)]
        of_tables = {name: torch.zeros_like(x) for name, x in call.tables.items()}
        of_tables.update(zip(self.names, grads[3:], strict=True))
        late = late_of(given, self.lag)
        rows, keys = late.q.shape[3], late.k.shape[2]
        if keys:
            how = replace(self.kernel.how, quotient=Merged())
            mine = [x[:, :, :, out.shape[3] - rows :] for x in (out, lse, grad)]
            into = Launched().gradients(how, late, (mine[0], mine[1], None), mine[2])
            grads[0] = grads[0] + pad(into.q, (0, 0, out.shape[3] - rows, 0)).reshape(q.shape)
            for at, (x, like) in enumerate(((into.k, k), (into.v, v)), 1):
                mine_too = shared_by(x, like.shape[1])
                grads[at] = grads[at] + pad(mine_too, (0, 0, 0, like.shape[2] - keys))
            for name in of_tables.keys() & into.tables.keys():
                of_tables[name] = of_tables[name] + into.tables[name].to(of_tables[name].dtype)
        return grads[:3], of_tables


def beside_kernel(
    work: Work, heads: tuple[int, ...], device: torch.device, kernel: FeatureKernel
) -> GraphBeside:
    """Runs a graph beside sums of features."""
    lag, rest = (0, None) if work.reads or work.decided else lagged(work)
    if lag and rest is None:
        return WindowBeside(work, heads, kernel, device, lag)
    return GraphBeside(work, heads, kernel, device)
