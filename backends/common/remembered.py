"""What was made of tensors, kept while the same ones come again with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from attnspec.backends.common.torch_modes import is_transformed, is_watched

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """The last value that was made of tensors on a device, which it does not keep alive.

    Copies and pickles of it begin anew.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Sequence[ref[torch.Tensor]], Value] | None = None

    def get(
        self, tensors: Sequence[torch.Tensor], build: Callable[[], Value], *settings: object
    ) -> Value:
        """The value that is built of tensors and settings, or was built of them.

        Of tensors on the CPU it is built anew: NumPy may have written to them unseen. So it is of
        tensors of inference, which count no writes, and for what a CUDA graph captures, which is
        played back for other numbers.
        """
        unknown = any(x.is_cpu or x.is_inference() or is_watched(x) for x in tensors)
        if unknown or is_transformed():
            return build()
        if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
            return build()
        bases = [x if x._base is None else x._base for x in tensors]
        seen = [(x._version, x.dtype, x.storage_offset(), x.shape, x.stride()) for x in tensors]
        key = (*settings, *seen)
        last = self._last
        if last is not None and last[0] == key:
            if all(each() is base for each, base in zip(last[1], bases, strict=True)):
                return last[2]
        with torch.inference_mode(False), torch.no_grad():
            value = build()
        self._last = key, [ref(x, self._forget) for x in bases], value
        return value

    def __reduce__(self) -> tuple[type[Remembered[Value]], tuple[()]]:
        return type(self), ()

    def _forget(self, _: object) -> None:
        self._last = None
