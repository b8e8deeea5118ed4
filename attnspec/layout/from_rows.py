"""Tables of the steps of a graph: query tiles that are alike are computed in one call.

Query tiles that read the same key tiles are one tall block; others that read equally many are
blocks of one batch, with one mask for all where their masks agree. The few that are like no others,
at the ends of a sequence mostly, are tall blocks with their neighbours, of the key tiles that any
of them reads: a call more would cost more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attnspec.graphs.relation import in_runs
from attnspec.layout.axes import Axis
from attnspec.layout.tables import EMPTY_TILE, FULL_TILE, Batch, Tables, Tiled, unfolded
from attnspec.layout.tile_layout import StepLayout, equal
from attnspec.limits import LIMITS

LONE = 3
"""Query tiles that read equally many key tiles, up to which they are like no others."""

WASTED = 1.3
"""How many times the tiles that they read neighbours may compute as one block."""

SHARED = 8
"""One in how many blocks, or how many in number, must have a mask for it to be kept unfolded."""

Strip = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]
"""Blocks as query tiles [blocks, tall] and key tiles [blocks, wide] with the numbers of the masks
of their tiles: [1, tall, wide] of every block or [blocks, tall, wide]; None without a mask."""


def tables_of(
    layouts: Sequence[StepLayout], n_q: int, n_k: int, most: float = LIMITS.masks
) -> Tables:
    """The tables of steps, in the order in which they are computed. FULL tiles and the others of a
    step are two where the masks of its rows would have more than `most` numbers: a row of tiles
    with one mask has it for all of its keys, which below the diagonal of a causal graph is n²."""
    steps = []
    for layout in layouts:
        strips = _strips(layout)
        numbers = sum(kinds.size for *_, kinds in strips if kinds is not None)
        if numbers * layout.q.size * layout.k.size <= most:
            steps.append((layout, strips))
            continue
        full = layout.kinds == FULL_TILE
        steps += [(part, _strips(part)) for part in (layout.chosen(full), layout.chosen(~full))]
    batches = []
    for step, (layout, strips) in enumerate(steps):
        q, k = _rows(layout.q), _rows(layout.k)
        none = np.zeros((1, layout.q.size, layout.k.size), bool)
        masks = layout.masks if len(layout.masks) else none
        for tiles, columns, kinds in strips:
            count = len(tiles)
            mask: np.ndarray | Tiled[np.ndarray] | None = None
            if kinds is not None:
                numbers = kinds.size * layout.q.size * layout.k.size
                if len(kinds) == 1 and numbers <= LIMITS.mask_shared:
                    mask = unfolded(masks, kinds)
                else:
                    mask = Tiled(np.repeat(kinds, count // len(kinds), axis=0), masks)
            rows = q[tiles].reshape(count, -1), k[columns].reshape(count, -1)
            batches.append(Batch(*rows, mask, step))
    return Tables(tuple(batches), n_q, n_k)


def _rows(side: Axis) -> np.ndarray:
    """The rows of each tile of a side, int [tiles, size], -1 for none."""
    return np.asarray(np.maximum(side.positions - side.first, -1))


def _strips(layout: StepLayout) -> list[Strip]:
    """The strips of a layout; query tiles without a key are in none."""
    lengths, tallest = np.diff(layout.starts), max(1, LIMITS.tallest // layout.q.size)
    strips: list[Strip] = []
    for rows in _neighbours(layout, lengths, tallest):
        strips.append(_tall(layout, rows))
        lengths[rows] = 0
    for wide in np.unique(lengths[lengths > 0]):
        rows = np.flatnonzero(lengths == wide)
        entry = layout.starts[rows][:, None] + np.arange(wide)
        columns, kinds = layout.keys[entry], layout.kinds[entry]
        for blocks in _blocks(columns, tallest):
            # every query tile of a block reads the same key tiles
            strips.extend(_alike(rows[blocks], columns[blocks[:, 0]], kinds[blocks]))
    return strips


def _neighbours(layout: StepLayout, lengths: np.ndarray, tallest: int) -> list[np.ndarray]:
    """Runs of query tiles, two at least, that are like no others and read nearly the same tiles."""
    lone = np.flatnonzero((lengths > 0) & (np.bincount(lengths)[lengths] <= LONE))
    groups: list[list[int]] = []
    read, tiles = np.zeros(0, np.int64), 0
    for row in lone.tolist():
        keys = layout.keys[layout.starts[row] : layout.starts[row + 1]]
        if groups and groups[-1][-1] == row - 1 and len(groups[-1]) < tallest:
            together = np.union1d(read, keys)
            area = (len(groups[-1]) + 1) * len(together)
            numbers = area * layout.q.size * layout.k.size
            if area <= WASTED * (tiles + len(keys)) and numbers <= LIMITS.mask_kept:
                groups[-1].append(row)
                read, tiles = together, tiles + len(keys)
                continue
        groups.append([row])
        read, tiles = keys, len(keys)
    return [np.array(rows) for rows in groups if len(rows) > 1]


def _tall(layout: StepLayout, rows: np.ndarray) -> Strip:
    """Query tiles as one tall block."""
    low, high = layout.starts[rows[0]], layout.starts[rows[-1] + 1]
    columns, place = np.unique(layout.keys[low:high], return_inverse=True)
    kinds = np.full((1, len(rows), len(columns)), EMPTY_TILE)
    row = np.searchsorted(layout.starts, np.arange(low, high), "right") - 1 - rows[0]
    kinds[0, row, place] = layout.kinds[low:high]
    return rows[None], columns[None], None if (kinds == FULL_TILE).all() else kinds


def _blocks(columns: np.ndarray, tallest: int) -> Iterator[np.ndarray]:
    """Tiles with equal columns [m, wide] as blocks of equal height: indices [blocks, tall]."""
    group = equal(columns.T)[1]
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    # where a tall group is cut, its parts are blocks of their own
    parts = group[order] * (len(order) + 1) + in_runs(0, sizes) // tallest
    first = np.flatnonzero(np.diff(parts, prepend=-1))
    heights = np.diff(np.append(first, len(order)))
    for tall in np.unique(heights):
        yield order[first[heights == tall][:, None] + np.arange(tall)]


def _alike(rows: np.ndarray, columns: np.ndarray, kinds: np.ndarray) -> Iterator[Strip]:
    """Blocks of one shape in strips: those with equal masks together, the others together."""
    group = equal(kinds.reshape(len(kinds), -1).T)[1]
    counts = np.bincount(group)
    # masks that few blocks share are batched with others, each block with its own
    shared = counts * SHARED >= min(len(rows), 8 * SHARED)
    for number in np.flatnonzero(shared):
        part = group == number
        table = kinds[part][:1]
        yield rows[part], columns[part], None if (table == FULL_TILE).all() else table
    part = ~shared[group]
    if part.any():
        yield rows[part], columns[part], kinds[part]
