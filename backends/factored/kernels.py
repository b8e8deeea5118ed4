"""Mechanisms in torch: one kernel each, one line each here.

A builder takes the work, whose `mechanism` is the declaration, the heads that share it, and the
device; the kernel finds what is learned in `call.tables`, by the names of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from attnspec.backends.factored.features.linear import linear_kernel
from attnspec.backends.factored.features.random_kernels import favor_kernel, rbf_kernel, rfa_kernel
from attnspec.backends.factored.features.taylor import taylor_kernel
from attnspec.backends.factored.hybrid.kernel import hybrid_kernel
from attnspec.backends.factored.low_rank.efficient import efficient_kernel
from attnspec.backends.factored.low_rank.linformer import linformer_kernel
from attnspec.backends.factored.low_rank.mixing import fourier_kernel, gmlp_kernel, mixer_kernel
from attnspec.backends.factored.low_rank.nystrom import nystrom_kernel
from attnspec.backends.factored.low_rank.synthesizer import synthesizer_kernel
from attnspec.lower.work import Kernel, Work, mechanism_of

Builder: TypeAlias = Callable[[Work, tuple[int, ...], torch.device], Kernel]

KERNELS: dict[str, Builder] = {
    "linear": linear_kernel,
    "favor": favor_kernel,
    "rfa": rfa_kernel,
    "taylor": taylor_kernel,
    "efficient": efficient_kernel,
    "rbf": rbf_kernel,
    "linformer": linformer_kernel,
    "nystrom": nystrom_kernel,
    "fourier": fourier_kernel,
    "synthesizer": synthesizer_kernel,
    "mixer": mixer_kernel,
    "gmlp": gmlp_kernel,
}
"""What builds the kernel of each mechanism."""


def kernel_of(work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
    """The kernel of a work's mechanism, with the graph beside it where it has one."""
    kernel = KERNELS[mechanism_of(work).name](work, heads, device)
    return hybrid_kernel(work, heads, device, kernel) if work.hybrid else kernel
