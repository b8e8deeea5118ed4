"""The tables of a step whose pairs run-time inputs decide, made on the device where these are.

Tiles are those of the pairs that some inputs have, known before any call. A call looks into each of
them but for those that every input fills: what it holds is bits of a mask of its own, and its lists
name whole tiles first, then those that hold some pairs, and end there. Nothing is asked of the
device. It takes a bit for each pair of these tiles and each sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_, or_

import numpy as np
import torch

from attnspec.backends.common.labels import certain
from attnspec.backends.common.masks import with_data
from attnspec.backends.common.reading import Part, reading_of
from attnspec.backends.triton.tables import (
    TileLists,
    TileSide,
    bits_of,
    lists_of,
    packed,
    side_of,
    turned,
)
from attnspec.graphs.operators import Complement, Intersection, Union
from attnspec.graphs.relation import Relation
from attnspec.layout.steps import Banded, whole_layouts_of
from attnspec.layout.tables import EMPTY_TILE, FULL_TILE
from attnspec.layout.tile_layout import StepLayout

LOOKED = 1 << 24
"""Pairs that are looked at together, about."""


@dataclass(frozen=True, eq=False)
class Static:
    """A static part in the tiles that are looked into: the number of the mask of each, int64, and
    masks as bits int32 [masks, height, words]."""

    numbers: torch.Tensor
    words: torch.Tensor

    def held(self, some: slice, width: int) -> torch.Tensor:
        """Its pairs in some tiles, bool [tiles, height, width]."""
        words = self.words[self.numbers[some]]
        places = torch.arange(32, dtype=torch.int32, device=words.device)
        return ((words[..., None] >> places) & 1).flatten(2)[..., :width] != 0


class ReadingStep:
    """A step of the pairs that a relation may have, of which the inputs of a call take some."""

    def __init__(
        self, band: Banded, relation: Relation, lengths: tuple[int, int], device: torch.device
    ) -> None:
        self.band, self.lengths, self.n, self.device = band, lengths, lengths[1], device
        layout = self._layout_of(band.relation)
        self.q, self.k = side_of(layout.q, device), side_of(layout.k, device)
        full = (layout.kinds == FULL_TILE) & (self._kinds(certain(relation), layout) == FULL_TILE)
        looked = np.flatnonzero(~full)
        numbers = np.zeros(len(full), np.int64)
        numbers[looked] = np.arange(len(looked)) + 1
        self.rows = ListsByMask(lists_of(layout.starts, layout.keys, numbers, device))
        starts, tiles, order = turned(layout)
        self.columns = ListsByMask(lists_of(starts, tiles, numbers[order], device))
        row = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
        self.tiles = tuple(
            torch.from_numpy(x[looked]).to(device) for x in (row, layout.keys.astype(np.int64))
        )
        self.places = tuple(
            torch.from_numpy(side.positions.reshape(-1, side.size).astype(np.int64)).to(device)
            for side in (layout.q, layout.k)
        )
        self.step = self._static(layout, layout.kinds[looked])
        found = reading_of(relation)
        if found.condition is None:
            raise ValueError("it reads no inputs")
        self.condition = found.condition
        self.parts = [
            self._static(mine, _kinds_in(mine, layout)[looked])
            for mine in map(self._within, found.parts)
        ]

    def __call__(self, data: Mapping[str, torch.Tensor]) -> ReadTables:
        """The tables of a call whose inputs are [B, n], or lengths [B, 1, 1]."""
        # beside tiles, rows and columns a number of each sample has an axis more
        given = {name: x[..., None] if x.dim() == 3 else x for name, x in data.items()}
        batch = max(len(x) for x in given.values())
        (height, width), count = (x.shape[1] for x in self.places), len(self.tiles[0])
        words = -(-width // 32)
        bits = torch.full(
            (batch, count + 1, height, words), -1, dtype=torch.int32, device=self.device
        )
        full = torch.ones((batch, count + 1), dtype=torch.bool, device=self.device)
        some = torch.ones_like(full)
        step = max(1, LOOKED // (batch * height * width))
        for low in range(0, count, step):
            part = slice(low, min(low + step, count))
            into = slice(low + 1, part.stop + 1)
            held, real = self._held(part, given, batch)
            bits[:, into] = packed(held, words)
            some[:, into] = held.any(-1).any(-1)
            full[:, into] = (held | ~real).all(-1).all(-1)
        return ReadTables(self, bits, full, some)

    def _held(
        self, part: slice, data: Mapping[str, torch.Tensor], batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        data: Mapping[str, torch.Tensor],
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
        return whole_layouts_of((replace(self.band, relation=relation),), *self.lengths)[0]

    def _within(self, part: Relation) -> StepLayout:
        """The tiles of a part, as far as it is in the step."""
        return self._layout_of(Intersection((self.band.relation, part)))

    def _kinds(self, part: Relation, layout: StepLayout) -> np.ndarray:
        return _kinds_in(self._within(part), layout)

    def _static(self, layout: StepLayout, kinds: np.ndarray) -> Static:
        """A part by what its layout says of each tile that is looked into."""
        ends = np.zeros((2, layout.q.size, layout.k.size), bool)
        ends[1] = True
        words = bits_of(np.concatenate([ends, layout.masks]), self.device)
        return Static(torch.from_numpy(kinds + 2).to(self.device), words)


class ListsByMask:
    """Lists whose entries name masks, for masks of which some turn out whole and some empty."""

    def __init__(self, lists: TileLists) -> None:
        self.lists = lists
        low = lists.programs[:, 1].long()
        order = torch.argsort(low, stable=True)
        entries = torch.arange(len(lists.tiles), device=low.device)
        # programs have their entries one behind the other
        self.owner = torch.searchsorted(low[order], entries, right=True) - 1

    def of(self, full: torch.Tensor, some: torch.Tensor) -> TileLists:
        """The lists of each sample, where masks bool [B, masks] are whole or hold some pair: whole
        entries first, then those with masks; the others lie behind the ends."""
        batch, count = full.shape
        tile, low, _, high, slot = self.lists.programs.long().unbind(-1)
        named = self.lists.kinds.long()
        kind = 2 - some[:, named].long() - (full & some)[:, named].long()
        order = torch.argsort(3 * self.owner + kind, dim=1, stable=True)
        sample = torch.arange(batch, device=low.device)[:, None]
        ends = []
        for most in (1, 2):
            before = torch.nn.functional.pad((kind < most).cumsum(1), (1, 0))
            ends.append(low + before[:, high] - before[:, low])
        each = [low.expand(batch, -1), *ends]
        each = [x + sample * len(named) for x in each]
        programs = torch.stack([tile.expand(batch, -1), *each, slot.expand(batch, -1)], 2)
        if batch == 1:
            # all samples do the same
            programs = programs[0]
        tiles, numbers = self.lists.tiles[order], named[order] + sample * count
        found = [x.to(torch.int32) for x in (programs, tiles.flatten(), numbers.flatten())]
        return replace(self.lists, programs=found[0], tiles=found[1], kinds=found[2])


class ReadTables:
    """The tables of a step in a call, from masks as bits int32 [B, masks, height, words]."""

    def __init__(
        self, step: ReadingStep, bits: torch.Tensor, full: torch.Tensor, some: torch.Tensor
    ) -> None:
        self.step, self.full, self.some = step, full, some
        self.words = bits.flatten(0, 1)

    @property
    def q(self) -> TileSide:
        """The tiles of queries."""
        return self.step.q

    @property
    def k(self) -> TileSide:
        """The tiles of keys."""
        return self.step.k

    @cached_property
    def rows(self) -> TileLists:
        """The lists of query tiles."""
        return self.step.rows.of(self.full, self.some)

    @cached_property
    def columns(self) -> TileLists:
        """The lists of key tiles."""
        return self.step.columns.of(self.full, self.some)


def _kinds_in(layout: StepLayout, grid: StepLayout) -> np.ndarray:
    """What a layout says of the tiles of another in the same grid: FULL_TILE, the number of a mask,
    or EMPTY_TILE for a tile that it has not."""
    codes, wanted = (
        np.repeat(np.arange(x.q.count), np.diff(x.starts)) * x.k.count + x.keys
        for x in (layout, grid)
    )
    order = np.argsort(codes)
    found = np.searchsorted(codes, wanted, sorter=order)
    near = order[np.minimum(found, len(codes) - 1)] if len(codes) else np.zeros(len(wanted), int)
    if not len(codes):
        return np.full(len(wanted), EMPTY_TILE)
    return np.where(codes[near] == wanted, layout.kinds[near], EMPTY_TILE)
