"""Whether torch traces, transforms or differentiates twice what is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_traces(function: Function) -> Function:
    """Have dynamo call a function, not trace it, as `torch.compiler.assume_constant_result` does;
    that one loads dynamo, which takes as long as all of torch."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0
