"""Mechanisms in torch: one kernel each, one line each here.

A builder takes the work, whose `mechanism` is the declaration, the heads that share it, and the
device; the kernel finds what is learned in `call.tables`, by the names of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from attnspec.backends.factored.features.kernel import feature_kernel
from attnspec.backends.factored.hybrid import hybrid_kernel
from attnspec.backends.factored.matrices import MIXINGS, MatrixKernel
from attnspec.lower.work import Kernel, Work, mechanism_of

Builder: TypeAlias = Callable[[Work, tuple[int, ...], torch.device], Kernel]

KERNELS: dict[str, Builder] = {
    **dict.fromkeys(("linear", "favor", "rfa", "taylor", "rbf"), feature_kernel),
    **dict.fromkeys(MIXINGS, MatrixKernel),
}
"""What builds the kernel of each mechanism."""


def kernel_of(work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
    """The kernel of a work's mechanism, with the graph beside it where it has one."""
    kernel = KERNELS[mechanism_of(work).name](work, heads, device)
    return hybrid_kernel(work, heads, device, kernel) if work.hybrid else kernel
