"""The kernel of tile lists as a kernel of softmax attention: a fast way on the GPU, and tiles in
plain operations where it cannot go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from attnspec.backends.common.exact import has_numbers
from attnspec.backends.common.labels import labels_of
from attnspec.backends.common.merging import Partial
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.flex.inputs import ReadTiles
from attnspec.backends.tables.kernel import ByTables
from attnspec.backends.tables.per_sample import ReadingKernel
from attnspec.backends.triton.attention import Launches, Scores, fits
from attnspec.backends.triton.tables import Step, labelled_step, read_step, static_step
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.layout.steps import Banded, bands_of, whole_layouts_of
from attnspec.lower.work import Call, Work

Called = tuple[Sequence[Step], torch.Tensor | None]
"""The steps of a call, and the labels int64 [B, L, n_k] that its pairs must have in common."""


class TritonKernel(ByTables):
    """Attention over disjoint steps on the GPU; under the interpreter, on the CPU. What run-time
    inputs leave of them is made out on the device, for all samples at once.

    Transforms and derivatives of derivatives go by tiles in natural order, and so do float64 on a
    GPU, for which there is no room, heads whose least blocks a GPU has no room for, and bfloat16
    under the interpreter, which has no such numbers.
    """

    one_size = False
    reuses = ("cpu", "cuda")

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, bands: Sequence[Banded]
    ) -> None:
        super().__init__(work, heads, device)
        labels = labels_of(work.relation)
        self.labels = () if labels is None else labels[0]
        self.read = [ReadTiles(x, work.relation, device) for x in bands if labels is None]
        layouts = whole_layouts_of(tuple(bands), work.n_q, work.n_k)
        self.steps = [static_step(layout, device, bool(work.reads)) for layout in layouts]
        self.scores = Scores(work, heads, device)
        self.last: Remembered[Called] = Remembered()

    def goes_fast(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
        return is_taken(q) and fits(q, v) and has_numbers(q, k, v)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        steps, launches = self._launches((q, k, v), call, scale, False)
        # what is merged is kept in wide numbers meanwhile
        once = len(steps) < 2 and not any(step.rows.slots for step in steps)
        shape, kind = launches.q.shape[:3], launches.kind
        out = q.new_zeros((*shape, v.shape[-1]), dtype=q.dtype if once else kind)
        # `softmax1` has a key of score and value 0
        empty = 0.0 if self.work.normalize == "softmax1" else -math.inf
        lse = q.new_full(shape, empty, dtype=kind)
        launches.attend(steps, out, lse)
        return out.to(q.dtype).view(*q.shape[:-1], -1), lse.view(q.shape[:-1])

    def derivatives(
        self,
        saved: Sequence[torch.Tensor],
        grad: torch.Tensor,
        of_lse: torch.Tensor | None,
        call: Call,
        scale: float,
    ) -> Sequence[torch.Tensor]:
        q, k, v, out, lse = saved
        above = [x.flatten(1, 2) for x in (grad, lse, delta_of(grad, out, lse, of_lse))]
        steps, launches = self._launches((q, k, v), call, scale, True)
        kind = q.dtype if len(steps) < 2 else launches.kind
        given = launches.q, k, v
        grads = [x.new_zeros(x.shape, dtype=kind) for x in given]
        tables = launches.derive(steps, above, grads)
        found = [x.to(y.dtype) for x, y in zip(grads, given, strict=True)]
        return found[0].view(q.shape), *found[1:], *tables

    def _launches(
        self, parts: Sequence[torch.Tensor], call: Call, scale: float, back: bool
    ) -> tuple[Sequence[Step], Launches]:
        """The steps of a call with q [B, K, R, n_q, d], k and v [B, K, n_k, …]."""
        q, k, v = parts
        steps, labels = self.tables_of(call.data, len(q))
        tensors, sizes = (q.flatten(1, 2), k, v), (q.shape[1] * q.shape[2], q.shape[3], k.shape[2])
        return steps, Launches(self.scores, tensors, call, scale, back, sizes, labels=labels)

    def tables_of(self, data: Mapping[str, torch.Tensor], batch: int) -> Called:
        """The steps of a call with these inputs."""
        if not self.work.reads:
            return self.steps, None
        read = {name: data[name] for name in self.work.reads}
        return self.last.get([*read.values()], lambda: self._called(read, batch), batch)

    def _called(self, data: Mapping[str, torch.Tensor], batch: int) -> Called:
        if self.read:
            with torch.no_grad():
                pairs = zip(self.steps, self.read, strict=True)
                return [read_step(step, read(data)) for step, read in pairs], None
        labels = torch.stack([data[name].long().expand(batch, -1) for name in self.labels], 1)
        first = self.work.n_k - self.work.n_q
        return [labelled_step(step, labels, first) for step in self.steps], labels


class ReadingLists(ReadingKernel):
    """Lists for graphs that read run-time inputs, made for each sample when these are seen."""

    reuses = TritonKernel.reuses
    drops = True

    def known(self, work: Work) -> TritonKernel:
        bands = bands_of(work.relation, work.n_q, work.n_k, ON_GPU)
        return TritonKernel(work, self.heads, self.device, bands)


def is_taken(q: torch.Tensor) -> bool:
    """Whether kernels take the type of a tensor on its device."""
    return q.dtype != (torch.float64 if q.is_cuda else torch.bfloat16)


def delta_of(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, of_lse: torch.Tensor | None
) -> torch.Tensor:
    """What is taken off the gradient of every weight of a row, by the gradients of the output and
    of the log-sum-exps."""
    delta = (grad.to(lse.dtype) * out).sum(-1)
    return delta if of_lse is None else delta - of_lse.masked_fill(lse == -math.inf, 0.0)
