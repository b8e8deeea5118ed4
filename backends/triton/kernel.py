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
from attnspec.backends.tables.kernel import ByTables
from attnspec.backends.tables.per_sample import ReadingTables
from attnspec.backends.triton.attention import Passing, TileAttention, drops_of, fits
from attnspec.backends.triton.labelled import LabelledTables
from attnspec.backends.triton.reading import ReadingStep
from attnspec.backends.triton.tables import StepTables, Tables
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.layout.steps import Banded, bands_of, whole_layouts_of
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.work import Call, Work


class TritonKernel(ByTables):
    """Attention over disjoint steps on the GPU; under the interpreter, on the CPU.

    Transforms and derivatives of derivatives go by tiles in natural order, and so do float64 on a
    GPU, for which there is no room, heads whose least blocks a GPU has no room for, and bfloat16
    under the interpreter, which has no such numbers.
    """

    one_size = False
    reuses = ("cpu", "cuda")

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        layouts: Sequence[StepLayout],
        labels: tuple[str, ...] = (),
    ) -> None:
        super().__init__(work, heads, device)
        self.labels = labels
        self.steps = [StepTables(layout, device) for layout in layouts]
        self.attention = TileAttention(work, heads, device)
        self.last: Remembered[tuple[Sequence[Tables], torch.Tensor | None]] = Remembered()

    def goes_fast(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
        return is_taken(q) and fits(q, v) and has_numbers(q, k, v)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        steps, labels = self.tables_of(call.data, len(q))
        passing = self._passing((q, k, v), call, scale, labels)
        # what is merged is kept in wide numbers meanwhile
        once = len(steps) < 2 and not any(step.rows.slots for step in steps)
        shape, kind = passing.q.shape[:3], passing.kind
        out = q.new_zeros((*shape, v.shape[-1]), dtype=q.dtype if once else kind)
        lse = q.new_full(shape, empty_of(self.work), dtype=kind)
        self.attention.attend(steps, passing, call.tables, (out, lse))
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
        above = grad, lse, delta_of(grad, out, lse, of_lse)
        rows = [x.flatten(1, 2) for x in above]
        steps, labels = self.tables_of(call.data, len(q))
        passing = self._passing((q, k, v), call, scale, labels)
        given = passing.q, k, v
        once = len(steps) < 2
        grads = [x.new_zeros(x.shape, dtype=x.dtype if once else passing.kind) for x in given]
        upper = rows[0], rows[1], rows[2]
        tables = self.attention.derive(steps, passing, call.tables, upper, grads)
        found = [x.to(y.dtype) for x, y in zip(grads, given, strict=True)]
        return found[0].view(q.shape), *found[1:], *tables

    def _passing(
        self,
        parts: Sequence[torch.Tensor],
        call: Call,
        scale: float,
        labels: torch.Tensor | None,
    ) -> Passing:
        """A call with q [B, K, R, n_q, d], k and v [B, K, n_k, …]."""
        q, k, v = parts
        drops = drops_of(call, q.shape[1] * q.shape[2], q.shape[3], k.shape[2])
        return Passing((q.flatten(1, 2), k, v), call.padding, scale, drops=drops, labels=labels)

    def tables_of(
        self, data: Mapping[str, torch.Tensor], batch: int
    ) -> tuple[Sequence[Tables], torch.Tensor | None]:
        """The tables of a call with these inputs, and the labels int64 [B, L, n_k] that its pairs
        must have in common."""
        if not self.labels:
            return self.steps, None
        given = [data[name] for name in self.labels]
        return self.last.get(given, lambda: self._labelled(data, batch), batch)

    def _labelled(
        self, data: Mapping[str, torch.Tensor], batch: int
    ) -> tuple[Sequence[Tables], torch.Tensor | None]:
        labels = torch.stack([data[name].long().expand(batch, -1) for name in self.labels], 1)
        first = self.work.n_k - self.work.n_q
        return [LabelledTables(step, labels, first) for step in self.steps], labels


def is_taken(q: torch.Tensor) -> bool:
    """Whether kernels take the type of a tensor on its device."""
    return q.dtype != (torch.float64 if q.is_cuda else torch.bfloat16)


def empty_of(work: Work) -> float:
    """The log-sum-exps before any key: `softmax1` has one of score and value 0."""
    return 0.0 if work.normalize == "softmax1" else -math.inf


def delta_of(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, of_lse: torch.Tensor | None
) -> torch.Tensor:
    """What is taken off the gradient of every weight of a row, by the gradients of the output and
    of the log-sum-exps."""
    delta = (grad.to(lse.dtype) * out).sum(-1)
    return delta if of_lse is None else delta - of_lse.masked_fill(lse == -math.inf, 0.0)


class InputKernel(TritonKernel):
    """The same for a graph that reads run-time inputs, over steps of the pairs that it may have:
    which of them it has is made out on the device, for all samples at once."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        bands: Sequence[Banded],
    ) -> None:
        super().__init__(work, heads, device, ())
        lengths = work.n_q, work.n_k
        self.reading = [ReadingStep(band, work.relation, lengths, device) for band in bands]

    def tables_of(
        self, data: Mapping[str, torch.Tensor], batch: int
    ) -> tuple[Sequence[Tables], torch.Tensor | None]:
        read = {name: data[name] for name in self.work.reads}
        return self.last.get([*read.values()], lambda: self._read(read), batch)

    def _read(self, read: Mapping[str, torch.Tensor]) -> tuple[Sequence[Tables], None]:
        with torch.no_grad():
            return [step(read) for step in self.reading], None


def tile_kernel(
    work: Work, heads: tuple[int, ...], device: torch.device, bands: tuple[Banded, ...]
) -> TritonKernel:
    """The kernel of a graph over these steps, whatever it reads."""
    labels = labels_of(work.relation)
    if labels is None:
        return InputKernel(work, heads, device, bands)
    layouts = whole_layouts_of(bands, work.n_q, work.n_k)
    return TritonKernel(work, heads, device, layouts, labels[0])


class ReadingLists(ReadingTables):
    """Lists for graphs that read run-time inputs, made for each sample when these are seen."""

    reuses = TritonKernel.reuses
    drops = True

    def known(self, work: Work) -> TritonKernel:
        bands = bands_of(work.relation, work.n_q, work.n_k, ON_GPU)
        layouts = whole_layouts_of(bands, work.n_q, work.n_k)
        return TritonKernel(work, self.heads, self.device, layouts)
