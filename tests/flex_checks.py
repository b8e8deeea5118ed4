"""What the tests of FlexAttention share: kernels as a GPU runs them, uncompiled on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torchs

from attnspec.backends.common.reading import reading_of
from attnspec.backends.flex import attention
from attnspec.backends.flex.backend import layouts_of
from attnspec.backends.flex.kernel import FlexKernel
from attnspec.lower.work import Work


def as_on_a_gpu(work: Work, heads: tuple[int, ...]) -> FlexKernel:
    """The kernel in the steps of a GPU, with log-sum-exps; its tensors are on the CPU."""
    condition = reading_of(work.relation).condition
    kernel = FlexKernel(work, heads, torch.device("cpu"), *layouts_of(work, "cuda"), condition)
    kernel.finds_lse = True
    return kernel


def run_plainly(patch: pytest.MonkeyPatch) -> None:
    """FlexAttention forward by torch's own plain operations, with log-sum-exps as a GPU gives them:
    neither compiled nor traced first, which takes most of the time."""
    patch.setattr(attention, "_compiled", attention.call_of)
    patch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
