"""The tiles that a GPU is offered, and what they take: blocks of rows that its units multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnspec.layout.orders import Boxed, Listed, Order, Side
from attnspec.layout.steps import Tuning
from attnspec.layout.tile_layout import StepLayout
from attnspec.layout.tiling import Survey
from attnspec.lower.rates import Amounts

LEAST = 16
"""Rows and columns of a block at least."""


FETCHED = 32
"""Queries of a block at which fetching a key costs as much as its products."""


@dataclass(frozen=True)
class OnGpu(Tuning):
    """Tiles that fill blocks of a power of two; short ones cost what whole ones do."""

    device: str = "cuda"
    targets: tuple[int, ...] = (64, 128)
    large: tuple[int, ...] = (256, 512, 1024, 2048, 4096)

    def size(self, length: int, side: Side, target: int) -> int:
        if isinstance(side, Boxed):
            size = side.size
            while 2 * size <= target:
                size *= 2
            return size
        step = side if isinstance(side, int) else 1
        members = len(side.positions) if isinstance(side, Listed) else -(-length // step)
        if members <= target or (isinstance(side, int) and side > 1):
            # equal tiles of a class, none above the target
            return -(-max(1, members) // -(-max(1, members) // target))
        return target

    def amounts(self, tiles: Survey, order: Order) -> Amounts:
        pairs = block_of(tiles.q.size) * block_of(tiles.k.size)
        # keys are fetched once for each block of queries, while products are made
        fetched = (1 + FETCHED / block_of(tiles.q.size)) / (1 + FETCHED / self.targets[-1])
        return {
            "triton_call": 1,
            "triton_row": tiles.q.count * (block_of(tiles.q.size) / self.targets[-1]),
            "triton_pair": tiles.tiles * pairs * fetched,
            "triton_masked": tiles.undecided * pairs,
        }

    def merging(self, n_q: int, steps: int) -> Amounts:
        # a step's programs read and write what is there of their rows
        return {"triton_row": 0.0}

    def laid_out(self, layout: StepLayout) -> Sequence[StepLayout]:
        return (layout,)


def block_of(size: int) -> int:
    """The least power of two from a size on that is a block."""
    return max(LEAST, power(size))


def power(count: int) -> int:
    """The least power of two from a count on."""
    return 1 << max(0, count - 1).bit_length()


ON_GPU = OnGpu()
"""The tiles of the kernels here."""
