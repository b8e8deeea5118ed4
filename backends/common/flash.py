"""Torch's flash kernel on the CPU, which takes any strides of rows in one piece.

It is a private name of torch. Without keys it ends the process; a row whose bias is all -inf has
the log-sum-exp 0; q, k and v need one head size.
"""

from __future__ import annotations

import torch
from torch.nn import functional

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout_p, is_causal, *, attn_mask, scale) -> output and log-sum-exps, for q
[b, heads, n_q, d] and as many key heads or fewer."""

flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask, scale) -> gradients of q, k, v."""


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with every row in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of_size(x: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of a size, with zeros behind, each in one piece: padding keeps the order of strides."""
    return in_rows(functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x)
