"""What torch does with that which is run: derivatives of which order it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.autograd import forward_ad

Value = TypeVar("Value")

_composed: ContextVar[bool] = ContextVar("composed", default=False)


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on, or what is run must be composed
    of plain operations for another reason."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _composed.get()
    )


def unseen(*given: Tensor) -> bool:
    """Whether nothing differentiates or transforms what is made of tensors."""
    if torch.is_grad_enabled():
        for x in given:
            if x.requires_grad:
                return False
    return not is_transformed()


def is_watched(x: Tensor) -> bool:
    """Whether a call with x is traced, or its operators are examined one by one."""
    return _is_traced(x) or torch._C._len_torch_dispatch_stack() > 0


def is_recorded(x: Tensor | None = None) -> bool:
    """Whether what is done, with x, is written down, for numbers that come later."""
    return (_is_tracing() if x is None else _is_traced(x)) or active_fake_mode() is not None


def _is_tracing() -> bool:
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _is_traced(x: Tensor) -> bool:
    # where something else than Dynamo compiles, tensors are of a kind of their own
    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._get_tracing_state() is not None
        or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def is_mapped_over() -> bool:
    """Whether `torch.vmap` looks on, perhaps with gradients, and no forward-mode differentiation:
    what the operator has rules for."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or []
    seen = {each.key() for each in stack}
    return kinds.Vmap in seen and seen <= {kinds.Vmap, kinds.Grad} and forward_ad._current_level < 0


def values_of(x: Tensor) -> Tensor:
    """The numbers of a tensor that derivatives are taken through; of one that is mapped over those
    of all samples."""
    x = x.detach()
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_batched(*given: Tensor) -> bool:
    """Whether `torch.vmap` maps over one of some tensors, below what derivatives are taken by."""
    return any(torch._C._functorch.is_batchedtensor(values_of(x)) for x in given)


def array_of(x: Tensor) -> np.ndarray:
    """The numbers of a tensor as an array, whatever is done with what is computed besides."""
    if not torch._C._are_functorch_transforms_active():
        return x.detach().cpu().numpy()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    x = values_of(x)
    with temporarily_clear_interpreter_stack():
        return x.cpu().numpy()


def apart(build: Callable[[], Value]) -> Value:
    """What `build` returns, called outside of the modes of the caller: what outlives a call must
    not be built in them.

    Those that cannot be left (tracing, torch.func, autocast, a default device, tensors that only
    pretend) are not known to another thread, which costs more than a small build.
    """
    if not (
        # first: what traces need not look at the rest
        _is_tracing()
        or is_transformed()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
    ):
        with torch.inference_mode(False), torch.enable_grad():
            return build()
    with ThreadPoolExecutor(max_workers=1) as fresh:
        return fresh.submit(build).result()


@contextmanager
def composed() -> Iterator[None]:
    """Kernels go where every derivative and every trace can follow.

    What `torch.export` or `torch.onnx` writes down meanwhile, not strictly, holds plain operations,
    where else there is one operator: those of kernels for the length that it was given, or, where n
    is dynamic, of the definition.
    """
    token = _composed.set(True)
    try:
        yield
    finally:
        _composed.reset(token)


@contextmanager
def followed() -> Iterator[None]:
    """Autograd follows what is run, in the body of an operator too: the dispatcher has left it
    behind there."""
    keys = torch._C.DispatchKey
    autograd = torch._C.DispatchKeySet(keys.AutogradFunctionality)
    autograd |= torch._C.DispatchKeySet(keys.AutogradOther)
    seen = torch._C._dispatch_tls_local_include_set()
    passed_by = torch._C._dispatch_tls_local_exclude_set() - autograd
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(seen, passed_by):
        yield


class Function(torch.autograd.Function):
    """A function whose backward computes in the types of its tensors: autocast, in which
    `backward()` may be called, would round what is summed in float32."""

    def __init_subclass__(cls) -> None:
        cls.backward = staticmethod(_not_cast(cls.backward))  # type: ignore[method-assign]


def _not_cast(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        kinds = {x.device.type for x in grads if isinstance(x, Tensor)}
        if not kinds or not torch._C._is_any_autocast_enabled():
            return backward(ctx, *grads)
        with torch.autocast(kinds.pop(), enabled=False):
            return backward(ctx, *grads)

    return run


def derivatives(
    run: Callable[..., Sequence[Tensor | None]],
    given: Sequence[Tensor],
    asks: Sequence[bool],
    grads: Sequence[Tensor | None],
    again: bool = True,
) -> list[Tensor | None]:
    """The gradients of tensors that are asked for, from those of what a function makes of them;
    with `again` they can be differentiated again.

    Of a tensor that others are made of it is its own share alone, theirs comes by autograd's way.
    """
    apart = [x.view_as(x) for x in given]
    return gradients_of(run(*apart), apart, asks, grads, again)


def gradients_of(
    outs: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    asks: Sequence[bool],
    grads: Sequence[Tensor | None],
    again: bool = False,
) -> list[Tensor | None]:
    """The same of what was made of tensors."""
    pairs = [
        (out, grad)
        for out, grad in zip(outs, grads, strict=True)
        if out is not None and grad is not None and out.requires_grad
    ]
    wanted = [x for x, ask in zip(tensors, asks, strict=True) if ask]
    if not pairs or not wanted:
        return [None] * len(asks)
    made, above = zip(*pairs, strict=True)
    shares = iter(torch.autograd.grad(made, wanted, above, create_graph=again, allow_unused=True))
    return [next(shares) if ask else None for ask in asks]
