"""What predicates ask for: positions, and on a grid their coordinates."""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from attnspec.graphs.grid import Grid
from attnspec.graphs.relation import Relation, Tiles, covered
from attnspec.ir.intervals import Bounds
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Scalar, ScalarError, fold, symbols


class OfPredicate(Relation):
    """The pairs for which a predicate holds, on a grid of some extents behind extra tokens."""

    predicate: Scalar
    extents: tuple[int, ...]
    extra_tokens: int

    @property
    def _grid(self) -> Grid:
        return Grid(self.extents, self.extra_tokens)

    @cached_property
    def _coordinates(self) -> frozenset[str]:
        """The coordinates that the predicate asks for."""
        return frozenset(name for name in symbols(self.predicate) if name[1:2] == ".")

    @cached_property
    def _asked(self) -> frozenset[str]:
        """The sides whose coordinates it asks for."""
        return frozenset(name[0] for name in self._coordinates)

    def _asks(self, side: str) -> bool:
        return side in self._asked

    def ranges(self, q: Tiles, k: Tiles) -> dict[str, Bounds]:
        """What positions and coordinates range over in each pair of tiles."""
        ranges: dict[str, Bounds] = {"q": (q.start, q.last), "k": (k.start, k.last)}
        for side, tiles in (("q", q), ("k", k)):
            if self._asks(side):
                for axis, ends in zip(self._grid.axes, self._grid.ranges(tiles), strict=True):
                    ranges[f"{side}.{axis}"] = ends
        return ranges

    def _cover(self, truth: Bounds, q: Tiles, k: Tiles) -> np.ndarray:
        """The cover where the predicate always holds, and ever does; outside the grid nothing."""
        low, high = truth
        answer = covered(low == 1, high != 0)
        for side, tiles in (("q", q), ("k", k)):
            if self._asks(side):
                answer = np.minimum(answer, self._grid.cover(tiles))
        return np.broadcast_to(answer, np.broadcast_shapes(q.start.shape, k.start.shape))


@lru_cache(maxsize=256)
def at_length(predicate: Scalar, n: int) -> Scalar:
    """The predicate with n filled in, and what that makes constant computed."""
    try:
        return fold(predicate, {"n": n})
    except ScalarError as error:
        message = f"the condition of `where` has no value at n = {n:,}: {error}"
        raise RelationError(message) from None
