"""Block-sparse attention: only the tiles that hold an edge, in natural order.

The keys of some query tiles are gathered and all of their scores computed at once, so that nothing
needs merging. Work is cut into pieces of a few megabytes: a larger temporary costs more to page in
than to compute. Memory is linear in what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.layout import classify
from attnspec.target import Kernel, Work

if TYPE_CHECKING:
    import torch

PAIR = {32: 3.6e-9, 64: 2.9e-9, 128: 2.5e-9}
"""Tile sizes on offer, with the seconds per pair of a tile: one head of size 64."""

ROW = 4e-6
"""Seconds per query tile: its share of calls, gathers and copies."""

START = 2e-4
"""Seconds per call."""

MASKED = 0.5e-9
"""Seconds more per pair of a tile that needs a mask of its own."""


class TilesBackend:
    """Gathered key tiles for each query tile."""

    name = "tiles"
    least = START

    def refuses(self, work: Work, device: str) -> str | None:
        if work.reads:
            names = ", ".join(f"`{name}`" for name in work.reads)
            return f"the graph reads the run-time input {names}, and tiles are laid out before"
        return None

    def cost(self, work: Work) -> float:
        return min(self._costs(work).values())

    def tile(self, work: Work) -> int:
        """The tile size that costs least."""
        costs = self._costs(work)
        return min(costs, key=costs.__getitem__)

    def _costs(self, work: Work) -> dict[int, float]:
        costs = {}
        for tile, pair in PAIR.items():
            found = classify(work.relation, work.n_q, work.n_k, tile)
            undecided = len(found.undecided[0])
            pairs = (found.full_count + undecided) * tile * tile
            costs[tile] = (
                START
                + ROW * found.rows
                + pair * min(pairs, work.n_q * work.n_k)
                + MASKED * undecided * tile * tile
            )
        return costs

    def steps(self, work: Work) -> tuple[str, ...]:
        costs = self._costs(work)
        size = min(costs, key=costs.__getitem__)
        return (f"natural order, tiles {size} x {size}",)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.layout import tile_layout
        from attnspec.runs import runs_of
        from attnspec.tiled import TiledKernel

        layout = tile_layout(work.relation, work.n_q, work.n_k, self.tile(work))
        return TiledKernel(work, heads, device, runs_of(layout), layout.masks)
