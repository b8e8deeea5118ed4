"""Going on with `GRAPH + MECHANISM`: keys that the graph may read, and sums of all others.

A key that the graph may still read is weighed pair by pair; it enters the sums when no later
position has it in the graph, so that they hold nothing that would have to be taken away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnspec.backends.common.key_cache import Keeper, KeyCache, Seen
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.spans import Given, Sums
from attnspec.backends.factored.features.sums import State, absorbed
from attnspec.backends.factored.hybrid.merging import (
    Weighed,
    columns_of_kernel,
    exact_part,
    joined,
    kernel_part,
    part_of_sums,
    rows_of_kernel,
    shared_quotient,
)
from attnspec.backends.factored.low_rank.softmax import check_no_dropout
from attnspec.lower.work import Call, Work, graph_of


@dataclass(frozen=True, eq=False)
class HybridState:
    """The keys that the graph may read again, and the sums of the kernel over all others."""

    sums: State
    kept: KeyCache


class HybridStream:
    """Goes on with a graph and a kernel under one denominator."""

    def __init__(self, work: Work, kernel: FeatureKernel, keeper: Keeper) -> None:
        self.work, self.kernel, self.keeper = work, kernel, keeper
        self.quotient = shared_quotient(kernel)

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], object]:
        """The outputs of more positions with the logarithms of denominators, and the state after
        them."""
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        given = self.kernel.given(q, k, v, call)
        sums, kept = State(), None
        if isinstance(state, HybridState):
            sums, kept = state.sums, state.kept
        seen = self.keeper.seen(graph_of(self.work), given.k, given.v, call, kept)
        parts = self._of_seen(given, seen, call)
        if sums.sums is not None:
            parts.append(part_of_sums(self.kernel, given, sums))
        out, lse = joined(self.quotient, parts)
        out = out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
        after = HybridState(self._after(given, seen.left, sums), seen.kept)
        return (out, None if lse is None else lse.reshape(q.shape[:3])), after

    def _of_seen(self, given: Given, seen: Seen, call: Call) -> list[Weighed]:
        """What pairs with keys weigh that are new or kept."""
        rows = rows_of_kernel(self.kernel, given).mapped(lambda x: x.unsqueeze(3))
        every = replace(given, k=seen.every.keys, v=seen.every.values)
        columns = columns_of_kernel(self.kernel, every).mapped(lambda x: x.unsqueeze(2))
        at = torch.from_numpy(seen.every.positions).to(given.k.device)
        others = at <= torch.arange(seen.every.count, device=at.device)[-given.k.shape[2] :, None]
        if seen.every.padding is not None:
            others = others & seen.every.padding[:, None, None, None, None]
        if seen.blocks.mask is not None:
            others = others & ~seen.blocks.mask
        exact = exact_part(self.work, seen.formula, rows, columns, seen.blocks, call)
        by_kernel = kernel_part(self.kernel, rows, columns, others)
        return [part.mapped(lambda x: x.squeeze(3)) for part in (exact, by_kernel)]

    def _after(self, given: Given, left: KeyCache, state: State) -> State:
        """The sums with keys in them that no later position reads."""
        if not len(left.positions):
            return state
        some = replace(
            given, q=given.q[:, :, :, :0], k=left.keys, v=left.values, padding=left.padding
        )
        return absorbed(Sums(self.kernel.how, some), state)
