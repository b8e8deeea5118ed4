"""Mechanisms in torch: a kernel of sums of features, or of a few products of matrices.

Kernels take the work, whose `mechanism` is the declaration, and find what is learned in
`call.tables`, by the names of its parts.
"""

from __future__ import annotations

import torch

from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.hybrid import hybrid_kernel
from attnspec.backends.factored.matrices import MatrixKernel
from attnspec.lower.work import Kernel, Work, mechanism_of


def kernel_of(work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
    """The kernel of a work's mechanism, with the graph beside it where it has one."""
    if not mechanism_of(work).sums:
        return MatrixKernel(work)
    kernel = FeatureKernel(work, heads)
    return hybrid_kernel(work, heads, device, kernel) if work.hybrid else kernel
