"""From a mask as a function to what attention takes: a tensor, or blocks for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Size = tuple[int, int, int, int]


def mask_mod_of(layer: int, size: Size, device: str, x: dict[str, Tensor]) -> Callable[..., Tensor]:
    """Generated for each spec; here that of `causal`."""
    return lambda b, h, q, k: k <= q + (size[3] - size[2])


def masked(
    layer: int, size: Size, device: str, blocks: bool, x: dict[str, Tensor] | None = None
) -> Any:
    """The mask as blocks, or as a tensor that broadcasts to `size`, (B, H, n_q, n_k)."""
    with torch.inference_mode(False):
        mask_mod = mask_mod_of(layer, size, device, x or {})
        if blocks:
            return create_block_mask(mask_mod, *size, device)
        axes = [torch.arange(length, device=device) for length in size]
        at = [each.view(*[1] * axis, -1, *[1] * (3 - axis)) for axis, each in enumerate(axes)]
        return mask_mod(*at)


@lru_cache(maxsize=1)
def flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled."""
    return torch.compile(flex_attention, dynamic=False)


kept = torch.compiler.assume_constant_result(lru_cache(maxsize=8)(masked))
