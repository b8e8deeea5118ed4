"""Going on with `GRAPH + MECHANISM`: sums of the kernel, and keys that the graph may read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnspec.factored.attending import check_no_dropout
from attnspec.factored.feature_kernel import FeatureKernel
from attnspec.factored.merging import (
    columns_of_kernel,
    merged,
    rows_of_kernel,
    shared_quotient,
)
from attnspec.factored.summing import State
from attnspec.keeping import Keeper, Kept
from attnspec.target import Call, Work, graph_of


@dataclass(frozen=True, eq=False)
class HybridState:
    """The sums of the kernel over all keys, and those keys that the graph may read again."""

    sums: State
    kept: Kept


class HybridStream:
    """Goes on with a graph and a kernel under one denominator."""

    def __init__(self, work: Work, kernel: FeatureKernel, keeper: Keeper) -> None:
        self.work, self.kernel, self.keeper = work, kernel, keeper
        self.quotient = shared_quotient(kernel)

    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, state: object
    ) -> tuple[torch.Tensor, object]:
        """The outputs of more positions, and the state after them."""
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        given = self.kernel.given(q, k, v, call)
        sums, kept = State(), None
        if isinstance(state, HybridState):
            sums, kept = state.sums, state.kept
        rows, after = rows_of_kernel(self.kernel, given, sums)
        seen = self.keeper.seen(graph_of(self.work), given.k, given.v, call, kept)
        columns = columns_of_kernel(self.kernel, replace(given, k=seen.keys, v=seen.values))
        one = rows.mapped(lambda x: x.unsqueeze(3))
        all_keys = columns.mapped(lambda x: x.unsqueeze(2))
        out = merged(self.work, seen.formula, self.quotient, one, all_keys, seen.blocks, call)
        out = out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
        return out, HybridState(after, seen.kept)
