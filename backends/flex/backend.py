"""Bands in orders as FlexAttention: each step a compiled call in its own order of tokens, in blocks
of 128 x 128, and partial results merged by their log-sum-exps.

The steps are those of `tables`, chosen by the rates of a GPU. On the CPU, where it compiles for the
forward alone and without log-sum-exps, it runs where it is asked for by name: a graph of several
steps as one in natural order.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from attnspec.backends.common.reading import GatheredError, reading_of
from attnspec.graphs.relation import Relation
from attnspec.layout.axes import axis
from attnspec.layout.orders import NATURAL, Order
from attnspec.layout.steps import (
    READING,
    Banded,
    Means,
    amounts_of,
    banded,
    bands_of,
    fixed,
    seconds_of,
    whole_layouts_of,
)
from attnspec.layout.tile_layout import StepLayout
from attnspec.layout.tiling import Survey
from attnspec.lower.costs import Amounts, seconds_for, weighed
from attnspec.lower.work import MERGED, Bias, Kernel, Work
from attnspec.version import is_older

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Queries and keys of a block."""

LARGEST = 1 << 30
"""Bytes of block lists of all steps that are kept at most."""

LISTED = 20
"""Bytes for each pair of blocks: four lists, and which mask it has."""

TORCH = (2, 13)
"""The first version that compiles it for the CPU."""


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
"""FlexAttention on a GPU."""


class FlexBackend:
    """Disjoint steps in orders, each a call of FlexAttention."""

    name = "flex"

    on_request = ("cpu",)

    def refuses(self, work: Work, device: str) -> str | None:
        if device not in ("cpu", "cuda"):
            return f"FlexAttention is compiled for CUDA and the CPU, not for {device}"
        if device == "cpu" and not _is_new_enough():
            return f"on the CPU it needs torch {TORCH[0]}.{TORCH[1]}, which is not installed"
        if work.normalize not in MERGED:
            return f"results that `{work.normalize}` normalises are not merged by log-sum-exps"
        if sum(isinstance(change, Bias) for change in work.changes) > 1:
            return "scores have two learned tables, and it differentiates by one"
        if device == "cpu" and work.normalize != "softmax":
            return f"on the CPU it gives no log-sum-exps, which `{work.normalize}` is made of"
        try:
            bands = _bands(work, device)
        except GatheredError as error:
            return str(error)
        if any(band.endless for band in bands):
            return f"in blocks of {BLOCK} x {BLOCK} the graph is too many to list"
        taken = sum(_bytes(band, work) for band in bands)
        if taken > LARGEST:
            return f"its block lists are {taken:,} bytes, and at most {LARGEST:,} are kept"
        return None

    def cost(self, work: Work) -> float:
        if work.device == "cpu":
            return math.inf
        bands = _steps(work, work.device)
        changed = len(work.changes) * sum(band.pairs for band in bands)
        changes = weighed("flex", {"masked": changed}, work.device)
        seconds = seconds_of(bands, work.n_q, work.copies) + seconds_for(changes, work.device)
        # what inputs leave out is known in a call alone
        return (READING if work.reads else 1.0) * seconds

    def amounts(self, work: Work) -> Amounts:
        """What all steps and merging them take."""
        return amounts_of(_steps(work, work.device), work.n_q, work.copies)

    def steps(self, work: Work) -> tuple[str, ...]:
        return tuple(str(band) for band in _steps(work, work.device))

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.flex.kernel import FlexKernel

        condition = reading_of(work.relation).condition
        return FlexKernel(work, heads, device, *layouts_of(work, device.type), condition)


def layouts_of(work: Work, device: str) -> tuple[list[StepLayout], list[StepLayout]]:
    """The tiles of the steps of a work on a type of device, and of the parts of its condition."""
    steps, parts = (
        whole_layouts_of(bands, work.n_q, work.n_k)
        for bands in (_steps(work, device), _parts(work))
    )
    return steps, parts


def _bands(work: Work, device: str) -> tuple[Banded, ...]:
    """All that is laid out."""
    return *_steps(work, device), *_parts(work)


def _steps(work: Work, device: str) -> tuple[Banded, ...]:
    """The steps of the static pairs of a work; one alone in natural order where their results
    cannot be merged, and where a condition looks up pairs of its parts by the same blocks."""
    found = reading_of(work.relation)
    if found.parts:
        return (_natural(found.static, work),)
    bands = bands_of(found.static, work.n_q, work.n_k, FLEX)
    return bands if device != "cpu" or len(bands) == 1 else (_natural(found.static, work),)


def _parts(work: Work) -> tuple[Banded, ...]:
    """The static parts of the condition of a work."""
    return tuple(_natural(part, work) for part in reading_of(work.relation).parts)


def _natural(relation: Relation, work: Work) -> Banded:
    """One step in natural order."""
    return banded(relation, work.n_q, work.n_k, NATURAL, BLOCK, FLEX)


def _bytes(band: Banded, work: Work) -> int:
    """What the lists of a step take."""
    order, (q_size, k_size) = band.order, band.sizes
    q = axis(work.n_k - work.n_q, work.n_k, order.q, q_size).count
    k = axis(0, work.n_k, order.k, k_size).count
    return LISTED * q * k


@lru_cache(maxsize=1)
def _is_new_enough() -> bool:
    try:
        return not is_older(version("torch"), TORCH)
    except PackageNotFoundError:
        return True  # a torch that no package manager knows speaks for itself
