"""The kernel of tile lists as a kernel of softmax attention: a fast way on the GPU, and tiles in
plain operations where it cannot go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.common.exact import EVERY, SoftmaxKernel, has_numbers
from attnspec.backends.common.masks import of_sample
from attnspec.backends.common.merging import Partial, wide_type
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.decided.tables import Part
from attnspec.backends.flex.steps import steps_of
from attnspec.backends.flex.tiles import StepTiles
from attnspec.backends.tables.kernel import ByTables
from attnspec.backends.triton.attention import Launches, fits, look_of
from attnspec.backends.triton.tables import Step, step_of
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Heads, Work


class Launching(SoftmaxKernel):
    """Attention by launches of the kernels.

    Transforms and derivatives of derivatives go the composed way, and so do float64 on a GPU, for
    which there is no room, heads whose least blocks a GPU has no room for, and bfloat16 under the
    interpreter, which has no such numbers.
    """

    one_size = False
    reuses = ("cpu", "cuda")
    heads: Heads
    device: torch.device

    @cached_property
    def look(self) -> Mapping[str, Any]:
        """What kernels are told of scores."""
        # it is kept, so the modes of this call must not reach it
        return apart(lambda: look_of(self.work, self.heads, self.device))

    launches: Callable[[Sequence[Tensor], Call, float, bool], Iterable[Launches]]
    """(tensors, call, scale, back) -> the launches of a call with q [B, K, R, n_q, d], k and v
    [B, K, n_k, …]; `back` says that it is for gradients. Data-dependent choices are made one after
    the other."""

    def goes_fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
        return is_taken(q) and fits(q, v) and has_numbers(q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        launches = self.launches((q, k, v), call, scale, False)
        # what is merged is kept in wide numbers meanwhile
        wide = wide_type(q)
        kind = q.dtype if self._writes_once(launches) else wide
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=kind)
        # `softmax1` has a key of score and value 0
        empty = 0.0 if self.work.normalize == "softmax1" else -math.inf
        lse = q.new_full(q.shape[:-1], empty, dtype=wide)
        for each in launches:
            each.attend(out, lse)
        return out.to(q.dtype), lse

    attended = forward  # which weighs the logit 0 of `softmax1`

    def _writes_once(self, launches: Iterable[Launches]) -> bool:
        """Whether every row is written once; those of slots are, from wide numbers."""
        return not self.work.decided and all(len(each.steps) < 2 for each in launches)

    def derivatives(
        self, saved: Sequence[Tensor], grad: Tensor, of_lse: Tensor | None, call: Call, scale: float
    ) -> Sequence[Tensor]:
        *tensors, out, lse = saved
        launches = self.launches(tensors, call, scale, True)
        once = self._writes_once(launches)
        # what is taken off the gradient of every weight of a row
        delta = (grad.to(lse.dtype) * out).sum(-1)
        if of_lse is not None:
            delta = delta - of_lse.masked_fill(lse == -math.inf, 0.0)
        tables = call.tables.values()
        grads = [x.new_zeros(x.shape, dtype=x.dtype if once else lse.dtype) for x in tensors]
        grads += [torch.zeros_like(x, dtype=lse.dtype) for x in tables]
        for each in launches:
            each.derive((grad, lse, delta), grads)
        return [x.to(y.dtype) for x, y in zip(grads, (*tensors, *tables), strict=True)]


class TritonKernel(Launching, ByTables):
    """Attention over disjoint steps on the GPU; under the interpreter, on the CPU. What run-time
    inputs leave of them is made out on the device, for all samples at once; where it would take too
    much, or the host must look, each sample is laid out by itself."""

    def __init__(self, work: Work, heads: Heads, device: torch.device) -> None:
        super().__init__(work, heads, device)
        # lists of static steps are made on the host
        place = device if work.reads else torch.device("cpu")
        tiles = [StepTiles(band, work, place) for band in steps_of(work, ON_GPU)]
        self.tiles = [each for each in tiles if len(each.layout.keys)]
        self.steps = [step_of(tiles, device) for tiles in self.tiles]
        self.last: Remembered[list[Step]] = Remembered()
        self.samples: Remembered[list[Step]] = Remembered(LIMITS.layouts_few)

    def launches(
        self, tensors: Sequence[Tensor], call: Call, scale: float, back: bool
    ) -> list[Launches]:
        shape, launches = tensors[0].shape[:4], []
        every = slice(0, shape[0])
        read, laid_out = [call.data[name] for name in self.work.reads], [(every, self.steps)]
        if read and self.tiles:

            def together() -> list[Step]:
                pairs = zip(self.steps, self.tiles, strict=True)
                return [replace(step, masks=tiles(call.data, shape[0])) for step, tiles in pairs]

            laid_out = [(every, self.last.get(read, together, shape[0]))]
        elif read:
            samples = ([x[at] for x in read] for at in range(shape[0]))
            laid_out = [(slice(at, at + 1), self._of_sample(x)) for at, x in enumerate(samples)]
        for of, steps in laid_out:
            its = call.of_samples(of, len(self.heads))
            part = Part(of, EVERY, EVERY, shape, self.work.n_k, its)
            launches.append(Launches(self.look, steps, part, tensors, scale, back))
        return launches

    def _of_sample(self, read: Sequence[Tensor]) -> list[Step]:
        """The steps of one sample, kept for the last few inputs."""

        def build() -> list[Step]:
            return TritonKernel(of_sample(self.work, read), self.heads, self.device).steps

        return self.samples.get(read, lambda: apart(build))


def is_taken(q: Tensor) -> bool:
    """Whether kernels take the type of a tensor on its device."""
    return q.dtype != (torch.float64 if q.is_cuda else torch.bfloat16)
