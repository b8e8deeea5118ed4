"""Some rows of `GRAPH + MECHANISM`, every pair of which is weighed by itself.

It costs all keys for each row. Rows are asked for where the graph takes more of the kernel's sums
than is left, and that is seldom: where weights are alike, a row whose graph has more than half of
its keys, at most twice what the graph costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Tables
from attnspec.backends.factored.features.spans import Given
from attnspec.backends.factored.hybrid.merging import (
    columns_of_kernel,
    exact_part,
    joined,
    kernel_part,
    rows_of_kernel,
    shared_quotient,
)
from attnspec.graphs.relation import evaluate_pairs
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work, graph_of


class PairByPair:
    """Rows of a work by its definition, in float32 at least, and their gradients."""

    def __init__(self, work: Work, kernel: FeatureKernel) -> None:
        self.work, self.kernel = work, kernel
        self.quotient = shared_quotient(kernel)

    def forward(
        self, given: Given, at: torch.Tensor, formula: Formula, tables: Tables
    ) -> torch.Tensor:
        """The outputs [B, K, R, rows, d_v] of the queries `at`; `formula` changes the scores of the
        heads that are given, with their `tables`."""
        parts = [self._some(given, some, formula, tables) for some in self._split(given, at)]
        return torch.cat(parts, 3)

    def differentiate(
        self,
        given: Given,
        into: Given,
        at: torch.Tensor,
        grad: torch.Tensor,
        formula: Formula,
        tables: Tables,
    ) -> Tables:
        """Adds what goes through the queries `at` to the gradients `into`, where `grad` is that of
        all outputs; returns that of `tables`."""
        found = {name: torch.zeros_like(table) for name, table in tables.items()}
        for some in self._split(given, at):
            learned = {
                name: x.detach().requires_grad_(x.requires_grad) for name, x in given.tables.items()
            }
            bent = {name: x.detach().requires_grad_() for name, x in tables.items()}
            q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
            leaves = [q, k, v, *(x for x in learned.values() if x.requires_grad), *bent.values()]
            targets = [into.q, into.k, into.v]
            targets += [into.tables[name] for name, x in learned.items() if x.requires_grad]
            targets += found.values()
            with torch.enable_grad():
                here = replace(given, q=q, k=k, v=v, tables=learned)
                out = self._some(here, some, formula, bent)
            upper = grad.index_select(3, some).to(out.dtype)
            shares = torch.autograd.grad(out, leaves, upper, allow_unused=True)
            for target, share in zip(targets, shares, strict=True):
                if share is not None:
                    target.add_(share)
        return found

    def _split(self, given: Given, at: torch.Tensor) -> Iterator[torch.Tensor]:
        """As many queries as are weighed at once."""
        each = given.q.shape[:3].numel() * given.k.shape[2]
        yield from torch.split(at, max(1, LIMITS.pairs_at_once // each))

    def _some(
        self, given: Given, at: torch.Tensor, formula: Formula, tables: Tables
    ) -> torch.Tensor:
        """The outputs of a few queries."""
        n_k = given.k.shape[2]
        q_at, k_at = at.numpy()[:, None] + (n_k - given.q.shape[3]), np.arange(n_k)[None]
        held = evaluate_pairs(graph_of(self.work).relation, q_at, k_at, n_k)
        mask = torch.from_numpy(np.broadcast_to(held, (len(at), n_k)).copy())
        others = ~mask
        distance = torch.from_numpy(q_at - k_at)
        if self.work.causal:
            others &= distance >= 0
        if given.padding is not None:
            real = given.padding[:, None, None, None, None]
            mask, others = mask & real, others & real
        rows = rows_of_kernel(self.kernel, replace(given, q=given.q.index_select(3, at)))
        columns = columns_of_kernel(self.kernel, given).mapped(lambda x: x.unsqueeze(2))
        rows = rows.mapped(lambda x: x.unsqueeze(3))
        blocks, call = Blocks(distance[None], mask), Call(tables=tables)
        exact = exact_part(self.work, formula, rows, columns, blocks, call)
        by_kernel = kernel_part(self.kernel, rows, columns, others)
        return joined(self.quotient, [exact, by_kernel])[0].squeeze(3)
