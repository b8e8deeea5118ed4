"""Tiles in batches: query tiles that are alike are computed in one go.

A `Run` is a batch of independent blocks, each of `height` queries and `width` keys. Query tiles
that read the same key tiles are one tall block; others that read equally many are blocks of one
run. A mask that all blocks of a run have in common is kept once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnspec.layout.batches import unfolded
from attnspec.layout.tile_layout import FULL_TILE, TileLayout
from attnspec.limits import LIMITS


@dataclass(frozen=True, eq=False)
class Run:
    """A batch of blocks.

    `queries` are rows of q, int64 [blocks, height]; `tiles` key tiles of `tile` keys, int64
    [blocks, wide], of which a block reads the first `width` keys. `shared` is the mask of every
    block, bool [height, width], or None where `kinds` is set or every pair is an edge. `kinds`
    numbers the masks of the blocks' tiles, int64 [blocks, tall, wide]; FULL_TILE stands for no
    mask.
    """

    queries: np.ndarray
    tiles: np.ndarray
    tile: int
    width: int
    shared: np.ndarray | None
    kinds: np.ndarray | None

    @property
    def blocks(self) -> int:
        return len(self.queries)

    @property
    def height(self) -> int:
        return int(self.queries.shape[1])

    @property
    def keys(self) -> np.ndarray:
        """Rows of k, int64 [blocks, width]."""
        at = self.tiles[..., None] * self.tile + np.arange(self.tile)
        return at.reshape(self.blocks, -1)[:, : self.width]


def runs_of(layout: TileLayout) -> list[Run]:
    """The runs of a layout; query tiles without a key are in none."""
    found: list[Run] = []
    singles: dict[tuple[int, bool, bool, bytes], list[int]] = {}
    for rows in _same_keys(layout):
        if len(rows) > 1:
            found.append(_tall(layout, rows))
            continue
        row = rows[0]
        _, kinds = _entries(layout, row)
        shape = (len(kinds), _is_ragged_query(layout, row), _is_ragged_key(layout, row))
        singles.setdefault((*shape, kinds.tobytes()), []).append(row)
    # rows that share no mask with another are batched by their shape alone
    lonely: dict[tuple[int, bool, bool], list[int]] = {}
    for (count, query, key, _), rows in singles.items():
        if len(rows) == 1:
            lonely.setdefault((count, query, key), []).append(rows[0])
        else:
            found.append(_batch(layout, rows, shared=True))
    found.extend(_batch(layout, rows, shared=len(rows) == 1) for rows in lonely.values())
    return found


def _entries(layout: TileLayout, row: int) -> tuple[np.ndarray, np.ndarray]:
    part = np.s_[layout.starts[row] : layout.starts[row + 1]]
    return layout.keys[part], layout.kinds[part]


def _same_keys(layout: TileLayout) -> Iterator[list[int]]:
    """Query tiles grouped by the key tiles they read."""
    groups: dict[bytes, list[int]] = {}
    for row in range(layout.rows):
        keys, _ = _entries(layout, row)
        if len(keys):
            groups.setdefault(keys.tobytes(), []).append(row)
    yield from groups.values()


def _is_ragged_query(layout: TileLayout, row: int) -> bool:
    return (row + 1) * layout.tile > layout.n_q


def _is_ragged_key(layout: TileLayout, row: int) -> bool:
    return bool((_entries(layout, row)[0][-1] + 1) * layout.tile > layout.n_k)


def _positions(tiles: np.ndarray, tile: int, length: int) -> np.ndarray:
    """The positions of tiles [..., c], as [..., positions], without those beyond the end.

    Only the last tile of a row may reach beyond the end, and then in every row.
    """
    at = (tiles[..., None] * tile + np.arange(tile)).reshape(*tiles.shape[:-1], -1)
    real = int((at[0] < length).sum())
    return np.ascontiguousarray(at[..., :real])


def _width(tiles: np.ndarray, tile: int, length: int) -> int:
    """The keys of tiles [blocks, wide] of which only the last may reach beyond the end, and then in
    every block."""
    return int(np.minimum((tiles[0] + 1) * tile, length).sum() - (tiles[0] * tile).sum())


def _tall(layout: TileLayout, rows: list[int]) -> Run:
    tiles = _entries(layout, rows[0])[0][None]
    kinds = np.stack([_entries(layout, row)[1] for row in rows])
    return Run(
        queries=_positions(np.array([rows]), layout.tile, layout.n_q),
        tiles=tiles,
        tile=layout.tile,
        width=_width(tiles, layout.tile, layout.n_k),
        shared=None,
        kinds=None if (kinds == FULL_TILE).all() else kinds[None],
    )


def _batch(layout: TileLayout, rows: list[int], shared: bool) -> Run:
    entries = [_entries(layout, row) for row in rows]
    kinds = np.stack([entry[1] for entry in entries])
    queries = _positions(np.array(rows)[:, None], layout.tile, layout.n_q)
    tiles = np.stack([entry[0] for entry in entries])
    width = _width(tiles, layout.tile, layout.n_k)
    if (kinds == FULL_TILE).all():
        return Run(queries, tiles, layout.tile, width, None, None)
    if shared and kinds.shape[1] * layout.tile**2 <= LIMITS.mask_shared:
        mask = unfolded(layout.masks, kinds[:1, None])[0]
        return Run(queries, tiles, layout.tile, width, mask[: queries.shape[1], :width], None)
    return Run(queries, tiles, layout.tile, width, None, kinds[:, None])
