"""Scattered edges: sampled products of queries and keys, row softmax, weighted sums of values.

For graphs of low degree whose edges no order brings together. Time and memory go with the edges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.layout.edge_count import edges_of
from attnspec.limits import LIMITS
from attnspec.lower.costs import Amounts, Weighed, work_amounts
from attnspec.lower.work import Heads, Kernel, Work, inputs_read

if TYPE_CHECKING:
    import torch

DENSE = 1 / 8
"""The share of all pairs from which on the edges are not scattered but fill tiles."""


class EdgesBackend(Weighed):
    """Every edge by itself."""

    name = "edges"
    takes_scores = "static"

    def refuses(self, work: Work, device: str) -> str | None:
        if work.reads:
            return f"it lists all pairs before a call, and the graph reads {inputs_read(work)}"
        edges = edges_of(work.relation, work.n_q, work.n_k)
        if edges > LIMITS.pairs_listed:
            most = f"at most {LIMITS.pairs_listed:,} edges are listed one by one"
            return f"{most}, and there are about {edges:,.0f}"
        if edges > max(LIMITS.edges_few, DENSE * work.n_q * work.n_k):
            mean = edges / work.n_q
            return f"edges are listed one by one, and a query reads about {mean:,.0f} keys"
        return None

    def amounts(self, work: Work) -> Amounts:
        edges = edges_of(work.relation, work.n_q, work.n_k)
        gathered = edges * (not work.plain or work.device != "cpu")
        return work_amounts("edges", work, start=1, degree=work.n_q, edge=edges, gathered=gathered)

    def steps(self, work: Work) -> tuple[str, ...]:
        edges = edges_of(work.relation, work.n_q, work.n_k)
        return (f"about {edges:,.0f} edges, {edges / max(1, work.n_q):,.1f} to a query",)

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        from attnspec.backends.edges.kernel import EdgesKernel
        from attnspec.layout.edge_list import edge_tables

        tables = edge_tables(work.relation, work.n_q, work.n_k)
        return EdgesKernel(work, heads, device, tables)
