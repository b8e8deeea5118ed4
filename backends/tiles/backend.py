"""Block-sparse attention: only the tiles that hold an edge, in natural order.

The keys of some query tiles are gathered and all of their scores computed at once, so that nothing
needs merging. Work is cut into pieces of a few megabytes: a larger temporary costs more to page in
than to compute. Memory is linear in what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.layout.orders import NATURAL
from attnspec.layout.tiling import survey
from attnspec.limits import LIMITS
from attnspec.lower.cost_model import current
from attnspec.lower.ranges import as_planned
from attnspec.lower.rates import Amounts
from attnspec.lower.work import Kernel, Work, inputs_read

if TYPE_CHECKING:
    import torch

TILES = (32, 64, 128)
"""Tile sizes on offer, each with a rate of its own."""

LARGE = (512, 2048, 8192)
"""Tile sizes for graphs of which smaller ones would be more than `LIMITS.tiles`; their rate is that
of the last of `TILES`."""


class TilesBackend:
    """Gathered key tiles for each query tile."""

    name = "tiles"
    takes_standing = True

    @property
    def least(self) -> float:
        return current().tiles_call

    def refuses(self, work: Work, device: str) -> str | None:
        if work.reads:
            return f"the graph reads {inputs_read(work)}, and tiles are laid out before"
        if not self._costs(work):
            size = f"{LARGE[-1]:,} x {LARGE[-1]:,}"
            return f"in tiles of {size} there would be more than {LIMITS.tiles:,}"
        return None

    def cost(self, work: Work) -> float:
        return min(self._costs(work).values())

    def tile(self, work: Work) -> int:
        """The tile size that costs least."""
        costs = self._costs(as_planned(work))
        return min(costs, key=costs.__getitem__)

    def _costs(self, work: Work) -> dict[int, float]:
        """The seconds in tiles of every size that does not make too many of them."""
        found = {}
        for tile in (*TILES, *LARGE):
            if (
                survey(work.relation, work.n_q, work.n_k, NATURAL, (tile, tile)).tiles
                <= LIMITS.tiles
            ):
                found[tile] = current(work.device).seconds(self.amounts(work, tile), work.copies)
                if tile >= TILES[-1]:
                    break
        return found

    def amounts(self, work: Work, tile: int) -> Amounts:
        """What the work takes in tiles of a size."""
        found = survey(work.relation, work.n_q, work.n_k, NATURAL, (tile, tile))
        full, undecided = found.area
        return {
            "tiles_call": 1,
            "tiles_row": found.q.count,
            f"tiles_pair_{min(tile, TILES[-1])}": min(full + undecided, work.n_q * work.n_k),
            "tiles_masked": undecided,
        }

    def steps(self, work: Work) -> tuple[str, ...]:
        size = self.tile(work)
        return (f"natural order, tiles {size} x {size}",)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.tiles.kernel import TiledKernel
        from attnspec.layout.runs import runs_of
        from attnspec.layout.tile_layout import tile_layout

        layout = tile_layout(work.relation, work.n_q, work.n_k, self.tile(work))
        return TiledKernel(work, heads, device, runs_of(layout), layout.masks)
