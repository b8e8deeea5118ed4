"""Bands in orders as FlexAttention: each step a compiled call in its own order of tokens, in blocks
of 128 x 128, and partial results merged by their log-sum-exps.

The steps are those of `tables`, chosen by the rates of a GPU. On the CPU, where it compiles for the
forward alone and without log-sum-exps, it runs where it is asked for by name: a graph of several
steps as one in natural order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnspec.backends.flex.steps import BLOCK, LARGEST, MASKED, flex_steps
from attnspec.layout.steps import READING, amounts_of, seconds_of
from attnspec.lower.costs import Amounts, work_seconds
from attnspec.lower.work import MERGED, Heads, Kernel, Work
from attnspec.version import is_installed

if TYPE_CHECKING:
    import torch

LISTED = 20
"""Bytes for each pair of blocks: four lists, and which mask it has."""

TORCH = (2, 13)
"""The first version that compiles it for the CPU."""


class FlexBackend:
    """Disjoint steps in orders, each a call of FlexAttention."""

    name = "flex"
    takes_scores = "all"
    on_request = ("cpu",)

    def refuses(self, work: Work, device: str) -> str | None:
        if device not in ("cpu", "cuda"):
            return f"FlexAttention is compiled for CUDA and the CPU, not for {device}"
        if device == "cpu" and not is_installed("torch", TORCH):
            return f"on the CPU it needs torch {TORCH[0]}.{TORCH[1]}, which is not installed"
        if work.normalize not in MERGED:
            return f"it computes softmax weights, and the spec says `normalize {work.normalize}`"
        if len(work.changes.tables) + len(work.changes.pairs) > 1:
            return "it trains one `score bias` or input of kind `pairs`, and the spec has several"
        if device == "cpu" and work.normalize != "softmax":
            return f"on the CPU it gives no log-sum-exps, which `{work.normalize}` needs"
        bands = flex_steps(work, device)
        if any(band.endless for band in bands):
            return f"the graph has too many blocks of {BLOCK} x {BLOCK} to list"
        if not bands:
            return (
                "the pairs that inputs select are looked up on the host, or need masks of more"
                f" than {MASKED:,} bytes a sample; `triton` lays pairs out for each sample"
            )
        taken = sum(LISTED * band.tiles.q.count * band.tiles.k.count for band in bands)
        if taken > LARGEST:
            return f"its lists of blocks would take {taken:,} bytes, and the limit is {LARGEST:,}"
        return None

    def cost(self, work: Work) -> float:
        if work.device == "cpu":
            return math.inf
        bands = flex_steps(work, work.device)
        changed = len(work.changes.statements) * sum(band.pairs for band in bands)
        seconds = seconds_of(bands, work.copies) + work_seconds("flex", work, masked=changed)
        # what inputs leave out is known in a call alone
        return (READING if work.reads else 1.0) * seconds

    def amounts(self, work: Work) -> Amounts:
        """What all steps and merging them take."""
        return amounts_of(flex_steps(work, work.device), work.copies)

    def steps(self, work: Work) -> tuple[str, ...]:
        return tuple(str(band) for band in flex_steps(work, work.device))

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        from attnspec.backends.flex.kernel import FlexKernel

        return FlexKernel(work, heads, device, flex_steps(work, device.type))
