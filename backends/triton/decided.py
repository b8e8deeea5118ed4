"""The kernel of data-dependent graphs: their lists, and the static rest of the graph, in the
same kernels.

Every key head of a sample, which has lists of its own, is a sample. What of an entry is to be
examined is bits of a mask of its own, made where the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.exact import EVERY
from attnspec.backends.decided import choice
from attnspec.backends.decided.choice import TILE
from attnspec.backends.decided.ranking import listed, marked
from attnspec.backends.decided.tables import Part, Placed
from attnspec.backends.decided.tables import Side as PlacedSide
from attnspec.backends.flex.tiles import LOOKED, Masks, packed
from attnspec.backends.tables.decided import DecidedTables
from attnspec.backends.triton.attention import Launches
from attnspec.backends.triton.blocks import Side
from attnspec.backends.triton.kernel import Launching, TritonKernel
from attnspec.backends.triton.tables import Step, side_of
from attnspec.backends.triton.tuning import LEAST
from attnspec.lower.work import Call


def filled(layout: choice.TileLists, part: Part) -> choice.TileLists:
    """Tiles of a layout that follow one another as one, where they would leave most of a block
    empty, also with the rows of all heads that share them: one that reads what any of them
    reads."""
    rows = 1 if part.sizes[2] * layout.q_tile >= LEAST else -(-TILE // layout.q_tile)
    keys = 1 if layout.k_tile >= LEAST else -(-TILE // layout.k_tile)
    if rows == keys == 1 or not layout.lists.numel():
        return layout
    short = -layout.lists.shape[2] % rows
    named = functional.pad(layout.lists, (0, 0, 0, short), value=-1) // keys
    named = named.reshape(*named.shape[:2], -1, rows * named.shape[3])
    slots = part.n_k if layout.k_order is None else layout.k_order.shape[2]
    count = -(-slots // (keys * layout.k_tile))
    lists = listed(marked(named, count))
    return replace(
        layout, lists=lists, q_tile=rows * layout.q_tile, k_tile=keys * layout.k_tile, whole=False
    )


class DecidedKernel(Launching, DecidedTables):
    """Attention over the lists of a call's choices, and over the rest of the graph.

    The query heads of a key head that share their lists are rows of one tile. Where kernels cannot
    go, the dense definition computes the same.
    """

    of_rest = TritonKernel

    def parts_of(self, q: Tensor, call: Call) -> Iterator[Part]:
        whole = Part(EVERY, EVERY, EVERY, q.shape[:4], self.work.n_k, call, filled)
        return whole.apart(self.parts.products)

    def launches(
        self, tensors: Sequence[Tensor], call: Call, scale: float, back: bool
    ) -> Iterator[Launches]:
        if self.rest is not None:
            # its inputs are [B, n_k]
            data = {name: call.data[name][:, 0] for name in self.rest.work.reads}
            yield from self.rest.launches(tensors, replace(call, data=data), scale, back)
        for part in self.parts_of(tensors[0], call):
            steps = [placed_step(placed) for placed in part.tables(self.parts.products)]
            # padding is in the masks
            bare = replace(part, call=replace(part.call, padding=None, tables={}))
            yield Launches(self.look, steps, bare, tensors, scale, back, by_list=True)


# --- the steps of lists --------------------------------------------------------------------------


def placed_step(placed: Placed) -> Step:
    """The step of a layout for tensors [B K, R, n_q, …] and [B K, 1, n_k, …]."""
    lists = placed.lists.flatten(0, 1)
    count, rows, width = lists.shape
    queries = torch.arange(rows, device=lists.device).repeat_interleave(width)
    masked = lists < -1 if placed.masked is None else placed.masked
    most = int(masked.sum(2).max()) if masked.numel() else 0
    height, columns = placed.q.size, placed.k.size
    shape = count, rows, max(1, most), height, -(-columns // 32)
    bits = torch.zeros(shape, dtype=torch.int32, device=masked.device)
    slots = torch.sort((~masked).to(torch.int8), dim=2, stable=True)[1][:, :, :most]
    step = max(1, LOOKED // max(1, count * most * height * columns))
    for first in range(0, rows if most else 0, step):
        last = min(first + step, rows)
        # heads of a group hold the same pairs
        mask = placed.held(first, last, slots[:, first:last])
        bits[:, first:last] = packed(mask[:, :, :height].transpose(2, 3))
    base = torch.arange(count * rows, device=masked.device).view(count, rows, 1) * max(1, most)
    numbers = (masked.cumsum(2) - 1).clamp(min=0) + base
    some, full = (lists >= 0).flatten(1), (~masked).flatten(1)
    masks = Masks(numbers.flatten(1), some, full, bits.flatten())
    tiles = queries[None], lists.clamp(min=0).flatten(1)
    return Step(
        _side(placed, placed.q), _side(placed, placed.k), tiles, masks, (width, rows * width)
    )


def _side(placed: Placed, side: PlacedSide) -> Side:
    """The tiles of one side, for each list unless all have the same."""
    places = side.places
    alike = places.shape[:2] == (1, 1)
    places = places if alike else places.expand(placed.batch, placed.heads, -1, -1)
    return side_of(places.flatten(0, 1), side.n - side.count, places.device)
