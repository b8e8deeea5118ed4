"""Products of a long matrix with a small one, where nothing is differentiated.

On a CPU with vectors of 512 bits, float32 products of this shape are computed as convolutions of
width 1: their library takes such vectors on every processor, that of matrix products only on some.
Only layouts are told, nothing is copied. Everything else is a matrix product.
"""

from __future__ import annotations

import torch
from torch.nn.grad import conv2d_weight

from attnspec.backends.common.torch_modes import is_transformed

ROWS = 256
"""Rows from which on a convolution is worth its call."""

WORK = 1 << 23
"""Multiplications from which on it is."""


def against(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """x by^T [..., n, m] of x [..., n, k] and by [..., m, k]."""
    if not _convolves(x, by, x.shape[-1] * by.shape[-2]):
        return x @ by.transpose(-1, -2)
    found = torch.conv2d(_image(x), by.reshape(*by.shape[-2:], 1, 1))
    return found.permute(0, 2, 3, 1).reshape(*x.shape[:-1], by.shape[-2])


def outer(f: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """f^T w [..., m, e] of f [..., n, m] and w [..., n, e]."""
    if not _convolves(f, w, f.shape[-1] * w.shape[-1]):
        return f.transpose(-1, -2) @ w
    # the gradient of the weight of a convolution from w to f
    shape = (f.shape[-1], w.shape[-1], 1, 1)
    found: torch.Tensor = conv2d_weight(_image(w), shape, _image(f))  # type: ignore[no-untyped-call]
    return found.reshape(*f.shape[:-2], f.shape[-1], w.shape[-1])


def has_wide_vectors() -> bool:
    """Whether the processor has vectors of 512 bits, for which convolutions are worth it."""
    return bool(torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def _convolves(x: torch.Tensor, other: torch.Tensor, each: int) -> bool:
    """Whether a product of one matrix, `each` multiplications for a row of x, is a convolution."""
    rows = x.shape[-2]
    return bool(
        x.dtype == other.dtype == torch.float32
        and x.device.type == "cpu"
        and rows >= ROWS
        and rows * each >= WORK
        and x.numel() == rows * x.shape[-1]
        and other.shape[:-2].numel() == 1
        and bool(torch.backends.mkldnn.enabled)
        and has_wide_vectors()
        and unseen(x, other)
    )


def unseen(*given: torch.Tensor) -> bool:
    """Whether nothing differentiates or transforms what is made of tensors."""
    if is_transformed():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def _image(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., n, k] as an image of height 1 with k channels [1, k, 1, n]."""
    return x.reshape(1, 1, *x.shape[-2:]).permute(0, 3, 1, 2)
