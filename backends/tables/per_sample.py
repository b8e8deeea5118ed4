"""Bands for graphs that read run-time inputs: laid out for each sample when its inputs are seen.

Packed documents cost what their blocks cost. Layouts of the last few inputs are kept, so the layers
of a model that share them lay out once. Where a layout cannot help (transforms, dropout) and where
it would cost more, the dense definition computes the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.common.masks import of_sample
from attnspec.backends.common.merging import Outputs, joined
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.backends.one_block.backend import definition_of
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.layout.steps import seconds_of, work_bands
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Heads, Kernel, Work


class ReadingKernel:
    """Computes every sample of a call by the graph that its inputs make: in tables, or by the
    definition where that takes less than the tables do, of which the estimate is `dense_seconds`,
    infinity where it is not asked for."""

    reuses: tuple[str, ...] = ("cpu",)  # as the kernels of samples do

    def __init__(
        self, work: Work, heads: Heads, device: torch.device, dense_seconds: float = math.inf
    ) -> None:
        self.work, self.heads, self.device = work, heads, device
        self.dense_seconds = dense_seconds
        self._kernels: Remembered[Kernel | None] = Remembered(LIMITS.layouts_few)

    def known(self, work: Work) -> Kernel | None:
        """What runs the work with inputs in place; None for the definition."""
        if seconds_of(work_bands(work), work.copies) > self.dense_seconds:
            return None
        return SteppedKernel(work, self.heads, self.device)

    def unknown(self) -> Kernel:
        """The definition, which takes the inputs of any call."""
        definition = definition_of(self.work, self.device.type)
        return definition.build(self.work, self.heads, self.device)

    @cached_property
    def dense(self) -> Kernel:
        """The definition; its mask is built when it is first needed."""
        # it is kept, so the modes of this call must not reach it
        return apart(self.unknown)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        outs = [kernel(*parts, one) for kernel, parts, one in self._samples(q, k, v, call)]
        return joined(outs, 0)

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The output and its log-sum-exps [B, H, n_q]; None where a kernel has none."""
        each = self._samples(q, k, v, call)
        outs, sums = zip(*(kernel.partial(*parts, one) for kernel, parts, one in each), strict=True)
        return joined(outs, 0), None if sums[0] is None else joined(sums, 0)

    def _samples(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call
    ) -> list[tuple[Any, tuple[Tensor, Tensor, Tensor], Call]]:
        """What runs which part of a call: sample by sample, or everything at once."""
        watched = is_transformed() or call.dropout_p
        each = [] if watched else list(self.samples(call, len(q), q.shape[1]))
        if all(kernel is None for _, kernel, _ in each):
            return [(self.dense, (q, k, v), call)]
        return [
            (kernel or self.dense, (q[some], k[some], v[some]), mine) for some, kernel, mine in each
        ]

    def samples(
        self, call: Call, batch: int, heads: int
    ) -> Iterator[tuple[slice, Kernel | None, Call]]:
        """Each sample of a call, what runs its inputs, None for the definition, and its call; all
        together where no inputs are read."""
        if not self.work.reads:
            yield slice(None), self.kernel_of({}, 0), call
            return
        for sample in range(batch):
            some = slice(sample, sample + 1)
            yield some, self.kernel_of(call.data, sample), call.of_samples(some, heads)

    def kernel_of(self, data: Mapping[str, Tensor], sample: int) -> Kernel | None:
        """What runs one sample's inputs; None for the definition."""
        read = [data[name][sample] for name in self.work.reads]
        build = partial(apart, lambda: self.known(of_sample(self.work, read)))
        return self._kernels.get(read, build)
