"""The tiles that a GPU is offered, and what they take: blocks of rows that its units multiply."""

from __future__ import annotations

from attnspec.layout.orders import Boxed, Order
from attnspec.layout.steps import Means, equal, fixed
from attnspec.layout.tiling import Survey

LEAST = 16
"""Rows and columns of a block at least."""

WHOLE = 128
"""Rows of the largest block."""

FETCHED = 32
"""Queries of a block at which fetching a key costs as much as its products."""


def _units(tiles: Survey, order: Order) -> dict[str, float]:
    # short tiles cost what whole blocks do
    height = block_of(tiles.q.size)
    pairs = height * block_of(tiles.k.size)
    # keys are fetched once for each block of queries, while products are made
    fetched = (1 + FETCHED / height) / (1 + FETCHED / WHOLE)
    return {
        "call": 1,
        "row": tiles.q.count * height / WHOLE,
        "pair": tiles.tiles * pairs * fetched,
        "masked": tiles.undecided * pairs,
    }


LARGE = (256, 512, 1024, 2048, 4096)
"""Tile sizes for graphs of which smaller ones would be too many."""

ON_GPU = Means(
    *("triton", "cuda", (64, WHOLE), LARGE, _units),
    # as for bands, but that boxes are as many as a tile holds
    lambda length, side, target: (fixed if isinstance(side, Boxed) else equal)(
        length, side, target
    ),
)
"""The tiles of the kernels here."""


CHUNK = 64
"""Positions of a chunk of sums of features."""

MAPS = {"identity": 0, "elu1": 1, "relu": 2, "squared_relu": 3}
"""The elementwise feature maps that they apply to rows themselves, as they are told of them."""


def block_of(size: int) -> int:
    """The least power of two from a size on that is a block."""
    return max(LEAST, power(size))


def power(count: int) -> int:
    """The least power of two from a count on."""
    return 1 << max(0, count - 1).bit_length()
