"""What was made of inputs, kept while these come again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar
from weakref import ref

import torch

from attnspec.backends.common.torch_modes import is_transformed, is_watched

Value = TypeVar("Value")


class Version:
    """A tensor of a device as it is: equal to itself alone, until it is written to or is gone."""

    def __init__(self, x: torch.Tensor, gone: Callable[[object], None]) -> None:
        base = x if x._base is None else x._base
        self.base = ref(base, gone)
        place = x.storage_offset(), x.shape, x.stride()
        self.state = id(base), x._version, x.dtype, *place

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Version) and self.state == other.state
        return same and self.base() is not None and self.base() is other.base()

    def __hash__(self) -> int:
        return hash(self.state)


class Remembered(Generic[Value]):
    """The last values, so many, that were made of tensors, none of which it keeps alive.

    Copies and pickles of it begin anew.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        # replaced as a whole: tensors may go, and other threads come, at any time
        self.kept: dict[tuple[Hashable, ...], Value] = {}

    def get(
        self, tensors: Sequence[torch.Tensor], build: Callable[[], Value], *settings: Hashable
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
        key = (*settings, *(_numbers(x) if x.is_cpu else Version(x, self._forget) for x in tensors))
        kept = self.kept
        if key in kept:
            return kept[key]
        with torch.inference_mode(False), torch.no_grad():
            value = build()
        self.kept = dict([*self.kept.items(), (key, value)][-self.size :])
        return value

    def __reduce__(self) -> tuple[type[Remembered[Value]], tuple[int]]:
        return type(self), (self.size,)

    def _forget(self, _: object) -> None:
        versions = {key: [x for x in key if isinstance(x, Version)] for key in self.kept}
        live = [key for key, each in versions.items() if all(x.base() is not None for x in each)]
        self.kept = {key: self.kept[key] for key in live}


def _numbers(x: torch.Tensor) -> Hashable:
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return x.dtype, x.shape, flat.numpy().tobytes()
