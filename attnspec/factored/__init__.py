"""Mechanisms in torch: one kernel each, one line each here.

A builder takes the work, whose `mechanism` is the declaration, the heads that share it, and the
device; the kernel finds what is learned in `call.tables`, by the names of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from attnspec.factored.efficient import efficient_kernel
from attnspec.factored.hybrid import hybrid_kernel
from attnspec.factored.linear import linear_kernel
from attnspec.factored.linformer import linformer_kernel
from attnspec.factored.mixing import fourier_kernel, gmlp_kernel, mixer_kernel
from attnspec.factored.nystrom import nystrom_kernel
from attnspec.factored.random_kernels import favor_kernel, rbf_kernel, rfa_kernel
from attnspec.factored.synthesizer import synthesizer_kernel
from attnspec.factored.taylor import taylor_kernel
from attnspec.target import Kernel, Work

Builder: TypeAlias = Callable[[Work, tuple[int, ...], torch.device], Kernel]

KERNELS: dict[str, Builder] = {
    "+": hybrid_kernel,
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
"""What builds the kernel of each mechanism, and "+" that of a graph with one."""
