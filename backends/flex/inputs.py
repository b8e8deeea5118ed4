"""What the run-time inputs of a call leave of the tiles of a step, made on the device where they
are; nothing is asked of the device.

Tiles are those of the pairs that some inputs have, known before any call. A call evaluates the
graph in each of them but for those that every input fills, a bit for each pair and sample. Labels
that a pair must have in common take no bits: kernels compare them, and tiles without a label in
common are left out by the least and the greatest label of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.labels import Part, certain, reading_of
from attnspec.backends.common.masks import with_data
from attnspec.graphs.operators import Complement, Intersection, Union
from attnspec.graphs.relation import Relation
from attnspec.layout.axes import Axis
from attnspec.layout.steps import Banded
from attnspec.layout.tables import EMPTY_TILE, FULL_TILE
from attnspec.layout.tile_layout import StepLayout

LOOKED = 1 << 24
"""Pairs that are looked at together, about."""

Data = Mapping[str, torch.Tensor]


class Masks(NamedTuple):
    """What a call leaves of the tiles of a step: the number of the mask of each tile, whether it
    has some pair, and whether it is whole, [B, tiles]; masks as bits int32 [masks, height, words],
    the first of them empty."""

    numbers: torch.Tensor
    some: torch.Tensor
    full: torch.Tensor
    bits: torch.Tensor


class Static(NamedTuple):
    """Static pairs in the tiles that are looked into: the number of the mask of each, int64, and
    masks as bits int32 [masks, height, words]."""

    numbers: torch.Tensor
    words: torch.Tensor

    def held(self, some: slice, width: int) -> torch.Tensor:
        """Its pairs in some tiles, bool [tiles, height, width]."""
        words = self.words[self.numbers[some]]
        places = torch.arange(32, dtype=torch.int32, device=words.device)
        return ((words[..., None] >> places) & 1).flatten(2)[..., :width] != 0


class ReadTiles:
    """The tiles of a step in which a relation may have pairs, of which the inputs of a call take
    some; masks have room for tiles of `shape`, by default those of the step."""

    def __init__(
        self,
        band: Banded,
        relation: Relation,
        device: torch.device,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self.band, self.n, self.device = band, band.lengths[1], device
        self.layout = layout = self._layout_of(band.relation)
        self.shape = shape or (layout.q.size, layout.k.size)
        full = (layout.kinds == FULL_TILE) & (self._kinds_of(certain(relation)) == FULL_TILE)
        looked = np.flatnonzero(~full)
        numbers = np.zeros(len(full), np.int64)
        numbers[looked] = np.arange(len(looked)) + 1
        self.numbers = torch.from_numpy(numbers).to(device)
        self.entries = tiles_of(layout, device)
        self.tiles = [x[torch.from_numpy(looked).to(device)] for x in self.entries]
        self.places = [torch.from_numpy(rows_of(x)).to(device) for x in (layout.q, layout.k)]
        self.step = self._static(layout, layout.kinds[looked])
        found = reading_of(relation)
        if found.condition is None:
            raise ValueError("it reads no inputs")
        self.condition = found.condition
        self.parts = [
            self._static(mine, kinds_in(mine, layout)[looked])
            for mine in map(self._within, found.parts)
        ]

    def __call__(self, data: Data) -> Masks:
        """The masks of a call whose inputs are [B, n], or lengths [B, 1, 1]."""
        # beside tiles, rows and columns a number of each sample has an axis more
        given = {name: x[..., None] if x.dim() == 3 else x for name, x in data.items()}
        batch = max(len(x) for x in given.values())
        (height, width), count = (x.shape[1] for x in self.places), len(self.tiles[0])
        whole = self._packed(torch.ones(1, height, width, dtype=torch.bool, device=self.device))
        masks = whole.repeat(1 + batch * (count + 1), 1, 1)
        masks[0] = 0
        bits = torch.unflatten(masks[1:], 0, (batch, count + 1))
        full = torch.ones((batch, count + 1), dtype=torch.bool, device=self.device)
        some = torch.ones_like(full)
        step = max(1, LOOKED // (batch * height * width))
        for low in range(0, count, step):
            part = slice(low, min(low + step, count))
            into = slice(low + 1, part.stop + 1)
            held, real = self._held(part, given, batch)
            bits[:, into] = self._packed(held)
            some[:, into] = held.any(-1).any(-1)
            full[:, into] = (held | ~real).all(-1).all(-1)
        first = torch.arange(batch, device=self.device)[:, None] * (count + 1) + 1
        named = self.numbers
        return Masks(first + named, some[:, named], full[:, named], masks)

    def _packed(self, held: torch.Tensor) -> torch.Tensor:
        """bool [..., height, width] as int32 [..., height, words] with room for the shape."""
        lower, more = (x - y for x, y in zip(self.shape, held.shape[-2:], strict=True))
        return packed(functional.pad(held, (0, more, 0, lower)))

    def _held(self, part: slice, data: Data, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs of some tiles, bool [B, tiles, height, width], and which of the rows there
        are."""
        q = self.places[0][self.tiles[0][part]][:, :, None]
        k = self.places[1][self.tiles[1][part]][:, None, :]
        real = (q >= 0) & (k >= 0)
        found = self._of(self.condition, part, data, (q.clamp(min=0), k.clamp(min=0)))
        found = found & real & self.step.held(part, k.shape[2])
        return found.expand(batch, *real.shape), q >= 0

    def _of(
        self,
        relation: Relation,
        part: slice,
        data: Data,
        at: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Which pairs of some tiles a condition holds, bool, broadcastable to [B, tiles, height,
        width]."""
        match relation:
            case Part(number):
                return self.parts[number].held(part, at[1].shape[2])
            case Union(terms) | Intersection(terms):
                each = [self._of(term, part, data, at) for term in terms]
                return reduce(or_ if isinstance(relation, Union) else and_, each)
            case Complement(term):
                return ~self._of(term, part, data, at)
            case _:
                held: torch.Tensor = with_data(relation, data).holds(*at, self.n)
                return held

    # --- what is static ------------------------------------------------------------------------

    def _layout_of(self, relation: Relation) -> StepLayout:
        """The tiles of a relation in the order of the step."""
        return replace(self.band, relation=relation).layout

    def _within(self, part: Relation) -> StepLayout:
        """The tiles of a part, as far as it is in the step."""
        return self._layout_of(Intersection((self.band.relation, part)))

    def _kinds_of(self, part: Relation) -> np.ndarray:
        return kinds_in(self._within(part), self.layout)

    def _static(self, layout: StepLayout, kinds: np.ndarray) -> Static:
        """A part by what its layout says of each tile that is looked into."""
        ends = np.zeros((2, layout.q.size, layout.k.size), bool)
        ends[1] = True
        words = bits_of(np.concatenate([ends, layout.masks]), self.device)
        return Static(torch.from_numpy(kinds + 2).to(self.device), words)


def tiles_of(layout: StepLayout, device: torch.device) -> list[torch.Tensor]:
    """The query tile and the key tile of each entry of a layout, int64."""
    rows = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
    return [torch.from_numpy(x.astype(np.int64)).to(device) for x in (rows, layout.keys)]


def rows_of(side: Axis) -> np.ndarray:
    """The positions of the tiles of a side, int64 [tiles, size], -1 for none."""
    return np.asarray(side.positions.reshape(-1, side.size).astype(np.int64))


def kinds_in(layout: StepLayout, grid: StepLayout) -> np.ndarray:
    """What a layout says of the tiles of another in the same grid: FULL_TILE, the number of a mask,
    or EMPTY_TILE for a tile that it has not."""
    codes, wanted = (
        np.repeat(np.arange(x.q.count), np.diff(x.starts)) * x.k.count + x.keys
        for x in (layout, grid)
    )
    if not len(codes):
        return np.full(len(wanted), EMPTY_TILE)
    order = np.argsort(codes)
    near = order[np.minimum(np.searchsorted(codes, wanted, sorter=order), len(codes) - 1)]
    return np.where(codes[near] == wanted, layout.kinds[near], EMPTY_TILE)


# --- labels --------------------------------------------------------------------------------------


def ends_of(labels: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest labels [B, L, tiles] of tiles whose rows are int64 [tiles, size],
    -1 for none, of labels int64 [B, L, n]."""
    there, found = rows >= 0, labels[:, :, rows.clamp(min=0)]
    known = torch.iinfo(labels.dtype)
    least = torch.where(there, found, known.max).amin(-1)
    return least, torch.where(there, found, known.min).amax(-1)


def may_agree(
    q: tuple[torch.Tensor, torch.Tensor], k: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Whether tiles with these ends may have all labels in common, bool [B, …] of [B, L, …]."""
    return ((q[0] <= k[1]) & (k[0] <= q[1])).all(1)


# --- bits ----------------------------------------------------------------------------------------


def bits_of(masks: np.ndarray, device: torch.device) -> torch.Tensor:
    """Masks bool [m, height, width] as bits, int32 [m, height, words], the first key lowest; one
    empty mask where there are none."""
    count, height, width = masks.shape
    bits = np.zeros((max(1, count), height, -(-width // 32) * 32), bool)
    bits[:count, :, :width] = masks
    words = np.packbits(bits, axis=2, bitorder="little").view("<i4")
    return torch.from_numpy(words.astype(np.int32)).to(device)


def packed(held: torch.Tensor) -> torch.Tensor:
    """bool [..., keys] as int32 [..., words], the first key lowest."""
    held = functional.pad(held, (0, -held.shape[-1] % 32))
    places = torch.arange(32, device=held.device)
    found = (torch.unflatten(held, -1, (-1, 32)).long() << places).sum(-1)
    # as the bits of a number that has a sign
    return torch.where(found >> 31 > 0, found - (1 << 32), found).to(torch.int32)
