"""Scattered edges: sampled products of queries and keys, row softmax, weighted sums of values.

For graphs of low degree whose edges no order brings together. Time and memory go with the edges.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from attnspec.relations import Relation
from attnspec.target import Kernel, Work

if TYPE_CHECKING:
    import torch

EDGE = 7e-9
"""Seconds per edge: its score, its softmax and its value; one head of size 64."""

ROW = 2e-8
"""Seconds per query."""

START = 1e-4
"""Seconds per call."""

MOST = 1 << 27
"""Edges above which listing them one by one is out of the question: some gigabytes."""

FEW = 1 << 22
"""Edges below which their density does not matter."""

DENSE = 1 / 8
"""The share of all pairs from which on the edges are not scattered but fill tiles."""

SAMPLE = 64
"""Queries whose keys are counted where a relation does not know its number of edges."""


class ScatteredBackend:
    """Every edge by itself."""

    name = "scattered"
    least = START

    def refuses(self, work: Work, device: str) -> str | None:
        if work.reads:
            names = ", ".join(f"`{name}`" for name in work.reads)
            return f"the graph reads the run-time input {names}, and edges are listed before"
        edges = edges_of(work.relation, work.n_q, work.n_k)
        if edges > MOST:
            return f"at most {MOST:,} edges are listed one by one, and there are about {edges:,.0f}"
        if edges > max(FEW, DENSE * work.n_q * work.n_k):
            mean = edges / work.n_q
            return f"edges are listed one by one, and a query reads about {mean:,.0f} keys"
        return None

    def cost(self, work: Work) -> float:
        return START + ROW * work.n_q + EDGE * edges_of(work.relation, work.n_q, work.n_k)

    def steps(self, work: Work) -> tuple[str, ...]:
        edges = edges_of(work.relation, work.n_q, work.n_k)
        return (f"about {edges:,.0f} edges, {edges / max(1, work.n_q):,.1f} to a query",)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.edge_layout import edge_layout
        from attnspec.scattered_kernel import ScatteredKernel

        layout = edge_layout(work.relation, work.n_q, work.n_k)
        return ScatteredKernel(work, heads, device, layout)


@lru_cache(maxsize=256)
def edges_of(relation: Relation, n_q: int, n_k: int) -> float:
    """The edges of the last n_q of n_k positions: exact where the relation knows it without listing
    them and for few queries, else an estimate from a sample."""
    if n_q == n_k and type(relation).edges is not Relation.edges:
        return relation.edges(n_k)
    count = min(n_q, SAMPLE)
    # the middles of equal ranges: the ends of a sequence are seldom typical
    sample = n_k - n_q + (2 * np.arange(count) + 1) * n_q // (2 * max(1, count))
    found = sum(len(relation.row_keys(int(q), int(q) + 1, n_k)) for q in sample)
    return found * n_q / max(1, count)
