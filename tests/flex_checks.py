"""What the tests of FlexAttention share: kernels as a GPU runs them, uncompiled on the CPU."""

from __future__ import annotations

import torch

from attnspec.backends.common.reading import reading_of
from attnspec.backends.flex.backend import layouts_of
from attnspec.backends.flex.kernel import FlexKernel
from attnspec.lower.work import Work


def as_on_a_gpu(work: Work, heads: tuple[int, ...]) -> FlexKernel:
    """The kernel in the steps of a GPU, with log-sum-exps; its tensors are on the CPU."""
    condition = reading_of(work.relation).condition
    kernel = FlexKernel(work, heads, torch.device("cpu"), *layouts_of(work, "cuda"), condition)
    kernel.finds_lse = True
    return kernel
