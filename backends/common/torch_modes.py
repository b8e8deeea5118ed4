"""Whether torch traces, transforms or differentiates twice what is run."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0
