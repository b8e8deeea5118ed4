"""`GRAPH + MECHANISM` on a GPU: the graph in the kernels of tile lists, with its log-sum-exps,
beside sums of features in their own kernels, merged as on every device."""

from __future__ import annotations

import torch

from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.hybrid import HybridKernel, ReadingHybrid, hybrid_kernel
from attnspec.backends.triton.kernel import TritonKernel
from attnspec.lower.work import Work, graph_of


def beside_kernel(
    work: Work, heads: tuple[int, ...], device: torch.device, kernel: FeatureKernel
) -> HybridKernel | ReadingHybrid:
    """Runs a static graph beside sums of features."""
    graph = graph_of(work)
    exact = TritonKernel(graph, heads, device)
    return hybrid_kernel(work, heads, device, kernel, exact)
