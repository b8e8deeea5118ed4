"""Whether torch traces, transforms or differentiates twice what is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def constant_in_traces(function: AnyFunction) -> AnyFunction:
    """Says that traced calls take what a function gives as it is.

    So does `torch.compiler.assume_constant_result`, but it imports all of torch.compile first,
    which takes as long as torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0
