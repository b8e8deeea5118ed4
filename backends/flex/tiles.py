"""The tiles of a step on a device, and what the run-time inputs of a call leave of them; nothing is
asked of the device.

Tiles are those of the pairs that some inputs have, known before any call. A call evaluates the
graph in each of them, a bit for each pair and sample. Labels
that a pair must have in common take no bits: kernels compare them, and tiles without a label in
common are left out by the least and the greatest label of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.labels import Part, labels_of, reading_of
from attnspec.backends.common.masks import with_data
from attnspec.graphs.operators import Intersection
from attnspec.graphs.relation import Relation
from attnspec.layout.steps import Banded
from attnspec.layout.tables import EMPTY_TILE
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.work import Work

LOOKED = 1 << 24
"""Pairs that are examined together, about."""

EMPTY, WHOLE = 0, 1
"""The numbers of the masks without a pair and with every pair of a tile."""


class Masks(NamedTuple):
    """What holds in the tiles of a step: the number of the mask of each, whether it has some pair,
    and whether all pairs of its places are, [B or 1, tiles]; masks as bits, the first of them
    empty, int32 [masks * height * words]. Besides, a pair must have `labels` int64 [B, L, n_k] in
    common; `alike` says in which tiles all have, [B, tiles]."""

    numbers: Tensor
    some: Tensor
    full: Tensor
    bits: Tensor
    labels: Tensor | None = None
    alike: Tensor | None = None


class StepTiles:
    """The tiles of a step: the query tile and the key tile of each, int64 `entries`, and the
    positions of those, int64 [tiles, size], -1 for none. Masks have room for tiles of `shape`, by
    default those of the step."""

    def __init__(
        self, band: Banded, work: Work, device: torch.device, shape: tuple[int, int] | None = None
    ) -> None:
        self.n, self.device = band.n_k, device
        self.layout = layout = band.layout
        self.sizes = layout.q.size, layout.k.size
        self.shape = shape or self.sizes
        self.entries = [self._brought(x) for x in (layout.rows, layout.keys)]
        self.places = [self._brought(x.positions) for x in (layout.q, layout.k)]
        numbers, (tall, wide) = self._numbers(layout), self.shape
        room = (0, 0), (0, tall - layout.q.size), (0, wide + -wide % 32 - layout.k.size)
        words = np.packbits(np.pad(masks_of(layout), room), axis=2, bitorder="little").view("<i4")
        bits = self._brought(words.ravel(), np.int32)
        # a tile may have fewer keys than there is room for
        self.fills = layout.k.size == wide
        full = numbers[None] == (WHOLE if self.fills else -1)
        self.static = Masks(numbers[None], torch.ones_like(full), full, bits)
        labels = labels_of(work.relation)
        self.labels = labels or ()
        self.looks = labels is None
        if self.looks:
            reading = reading_of(work.relation)
            layouts = (
                replace(band, relation=Intersection((band.relation, part))).layout
                for part in reading.parts
            )
            # the step is one part more
            self.parts = [
                (self._numbers(each), self._brought(masks_of(each), np.bool_))
                for each in (*layouts, layout)
            ]
            condition = cast(Relation, reading.condition)
            self.condition = Intersection((Part(len(reading.parts)), condition))

    def __call__(self, data: Mapping[str, Tensor], batch: int) -> Masks:
        """The masks of a call of so many samples whose inputs are [B, n], or lengths [B, 1, 1]."""
        if self.looks:
            return self._examined(data, batch)
        if not self.labels:
            return self.static
        # the tiles in which a pair may have all labels in common
        labels = torch.stack([data[x].long().expand(batch, -1) for x in self.labels], 1)
        limits, ends = torch.iinfo(labels.dtype), []
        for places, tile in zip(self.places, self.entries, strict=True):
            there, each = places >= 0, labels[:, :, places.clamp(min=0)]
            ends.append(torch.where(there, each, limits.max).amin(-1)[:, :, tile])
            ends.append(torch.where(there, each, limits.min).amax(-1)[:, :, tile])
        q_low, q_high, k_low, k_high = ends
        some = ((q_low <= k_high) & (k_low <= q_high)).all(1)
        alike = ((q_low == q_high) & (k_low == k_high) & (q_low == k_low)).all(1)
        return self.static._replace(some=some, labels=labels, alike=alike)

    # --- inputs that a graph asks for something else -------------------------------------------

    def _examined(self, data: Mapping[str, Tensor], batch: int) -> Masks:
        # beside tiles, rows and columns a number of each sample has an axis more
        inputs = {name: x[..., None] if x.dim() == 3 else x for name, x in data.items()}
        (height, width), (tall, wide), count = self.sizes, self.shape, len(self.entries[0])
        numbers = 1 + torch.arange(batch * count, device=self.device).view(batch, count)
        some, full = (torch.zeros_like(numbers, dtype=torch.bool) for _ in range(2))
        bits = numbers.new_zeros(1 + batch * count, tall, -(-wide // 32), dtype=torch.int32)
        step = max(1, LOOKED // (batch * height * width))
        for low in range(0, count, step):
            part = slice(low, low + step)
            q = self.places[0][self.entries[0][part]][:, :, None]
            k = self.places[1][self.entries[1][part]][:, None, :]
            real = (q >= 0) & (k >= 0)
            parts = {Part(x): masks[kinds[part]] for x, (kinds, masks) in enumerate(self.parts)}
            held = with_data(self.condition, {**inputs, **parts})
            mask = real & held.holds(q.clamp(min=0), k.clamp(min=0), self.n)
            mask = mask.expand(batch, *real.shape)
            bits[numbers[:, part]] = packed(
                functional.pad(mask, (0, wide - width, 0, tall - height))
            )
            some[:, part] = mask.any(-1).any(-1)
            # where there is no row, nothing is missing
            full[:, part] = (mask | (q < 0)).all(-1).all(-1) & self.fills
        return Masks(numbers, some, full, bits.flatten())

    def _numbers(self, layout: StepLayout) -> Tensor:
        """The numbers of the masks that a layout in the same grid has in the tiles, int64 [tiles],
        EMPTY in those that it has not."""
        if layout is self.layout:
            return self._brought(layout.kinds - EMPTY_TILE)
        mine, wanted = (x.rows * x.k.count + x.keys for x in (layout, self.layout))
        kinds = np.full(len(wanted), EMPTY_TILE)
        _, at, into = np.intersect1d(mine, wanted, assume_unique=True, return_indices=True)
        kinds[into] = layout.kinds[at]
        return self._brought(kinds - EMPTY_TILE)

    def _brought(self, x: np.ndarray, kind: type[np.generic] = np.int64) -> Tensor:
        """An array on the device."""
        return torch.from_numpy(x.astype(kind)).to(self.device)


def masks_of(layout: StepLayout) -> np.ndarray:
    """The masks of a layout, those of EMPTY and WHOLE before them, bool [masks, height, width]."""
    size = layout.q.size, layout.k.size
    return np.concatenate([np.zeros((1, *size), bool), np.ones((1, *size), bool), layout.masks])


def packed(held: Tensor) -> Tensor:
    """bool [..., keys] as int32 [..., words], the first key lowest."""
    held = functional.pad(held, (0, -held.shape[-1] % 32))
    places = torch.arange(32, dtype=torch.int32, device=held.device)
    bits = torch.unflatten(held, -1, (-1, 32)).int() << places
    return bits.sum(-1, dtype=torch.int32)
