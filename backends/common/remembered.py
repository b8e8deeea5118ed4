"""What was made of inputs, or brought to a device, kept while these come again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import apart, is_transformed, is_watched
from attnspec.limits import LIMITS

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """The last values, so many, that were made of tensors, none of which it keeps alive.

    Copies and pickles of it begin anew.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        # replaced as a whole: tensors may go, and other threads come, at any time
        self.kept: dict[tuple[Hashable, ...], tuple[Value, list[ref[Tensor]]]] = {}

    def get(
        self, tensors: Sequence[Tensor], build: Callable[[], Value], *settings: Hashable
    ) -> Value:
        """The value that is built of tensors and settings, or was built of them.

        Tensors on the CPU are the same where their numbers are: NumPy may write to them unseen.
        Others are where nothing was written to them; of those of inference, which count no writes,
        the value is built anew, and so it is for what a CUDA graph captures, which is played back
        for other numbers.
        """
        unknown = any(is_watched(x) or (x.is_inference() and not x.is_cpu) for x in tensors)
        if unknown or is_transformed():
            return build()
        if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
            return build()
        bases = [x if x._base is None else x._base for x in tensors]
        seen = (_known_by(x, base) for x, base in zip(tensors, bases, strict=True))
        key = (*settings, *seen)
        entry = self.kept.get(key)
        if entry is None:
            with torch.inference_mode(False), torch.no_grad():
                value = build()
            entry = value, [ref(base, self._forget) for base in bases if not base.is_cpu]
            self.kept = dict([*self.kept.items(), (key, entry)][-self.size :])
        return entry[0]

    def __reduce__(self) -> tuple[type[Remembered[Value]], tuple[int]]:
        return type(self), (self.size,)

    def _forget(self, gone: object) -> None:
        each = self.kept.items()
        self.kept = {key: entry for key, entry in each if all(x is not gone for x in entry[1])}


def _known_by(x: Tensor, base: Tensor) -> tuple[Any, ...]:
    if x.is_cpu:
        numbers = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return x.dtype, x.shape, numbers.tobytes()
    return id(base), x._version, x.dtype, x.storage_offset(), x.shape, x.stride()


# 1 and 1.0 are equal, and make tensors of two types
@lru_cache(LIMITS.layouts, typed=True)
def _brought(device: str, *values: int | float) -> Tensor:
    # it is kept, so the modes of this call must not reach it
    return apart(lambda: torch.tensor(values, device=device))


def table_of(values: tuple[int | float, ...], device: torch.device) -> Tensor:
    """Numbers [m] on a device, to which they are brought once."""
    if device.type == "cpu":
        return torch.tensor(values, device=device)
    return _brought(str(device), *values)
