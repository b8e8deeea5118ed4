"""Which steps a graph is computed in on a GPU, in blocks of 128 x 128; known without torch."""

from __future__ import annotations

from math import prod

from attnspec.backends.common.labels import labels_of, possible, reading_of
from attnspec.graphs.relation import takes_tensors
from attnspec.layout.orders import NATURAL, Order
from attnspec.layout.steps import Banded, Means, banded, bands_of, fixed
from attnspec.layout.tiling import Survey
from attnspec.lower.work import Work

BLOCK = 128
"""Queries and keys of a block."""

LARGEST = 1 << 30
"""Bytes of block lists of all steps that are kept at most."""

MASKED = 1 << 29
"""Bytes of the masks of a sample at most, a bit for each pair that inputs may have."""


def _units(tiles: Survey, order: Order) -> dict[str, float]:
    area = BLOCK * BLOCK
    moved = 0 if order == NATURAL else tiles.q.count + tiles.k.count
    return {
        "call": 1,
        "row": tiles.q.count,
        "pair": area * tiles.tiles,
        "masked": area * tiles.undecided,
        "reorder": BLOCK * moved,
    }


FLEX = Means("flex", "cuda", (BLOCK,), (), _units, fixed)


def steps_of(work: Work, means: Means) -> tuple[Banded, ...]:
    """The steps of the pairs that no label, and no other input, leaves out; none where masks of
    inputs would take too much, or are not made of tensors of positions."""
    labelled = labels_of(work.relation) is not None
    condition = None if labelled else reading_of(work.relation).condition
    if condition is not None and not takes_tensors(condition):
        return ()
    bands = bands_of(possible(work.relation), work.n_q, work.n_k, means)
    if labelled:
        return bands
    taken = sum(band.tiles.tiles * prod(band.sizes) / 8 for band in bands)
    return bands if taken <= MASKED and not any(band.endless for band in bands) else ()


def flex_steps(work: Work, device: str) -> tuple[Banded, ...]:
    """The same on a type of device; one alone where their results cannot be merged."""
    bands = steps_of(work, FLEX)
    if device != "cpu" or len(bands) < 2:
        return bands
    relation = possible(work.relation)
    return (banded(relation, work.n_q, work.n_k, NATURAL, BLOCK, FLEX),)
