"""Whether torch traces, transforms or differentiates twice what is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def constant_in_traces(function: AnyFunction) -> AnyFunction:
    """Says that traced calls take what a function gives as it is.

    So does `torch.compiler.assume_constant_result`, but it imports all of torch.compile first,
    which takes as long as torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: AnyFunction) -> AnyFunction:
    """Says that traced calls break off where a function is called, and go on with what it gives.

    So does `torch.compiler.disable`, but it imports all of torch.compile first.
    """

    @wraps(function)
    def called(*given: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*given)
        finally:
            eval_frame.set_eval_frame(before)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(AnyFunction, called)


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0
