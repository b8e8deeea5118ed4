"""Bands in orders: disjoint steps, each in the order of tokens in which its pairs are close.

A stride is a band once tokens are grouped by residue. Every step goes through torch's flash kernel
on the CPU, forward and backward, and results are merged exactly by their log-sum-exps. Graphs that
read run-time inputs are laid out anew for every sample's inputs. Under compilation, transforms and
dropout, where the flash kernel cannot go, tiles of the whole graph in natural order compute the
same, or for run-time inputs the dense definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.layout.steps import bands_of, layouts_of, reading_seconds, seconds_of
from attnspec.lower.cost_model import current, dense_seconds
from attnspec.lower.work import Kernel, Work

if TYPE_CHECKING:
    import torch

MERGED = ("softmax", "softmax1")
"""The normalisers whose results are merged by log-sum-exps."""


class BandsBackend:
    """Disjoint steps in residue orders, merged."""

    name = "bands"

    @property
    def least(self) -> float:
        return current().bands_step

    def refuses(self, work: Work, device: str) -> str | None:
        if device != "cpu":
            return f"its kernel runs on the CPU, not on {device}"
        if work.normalize not in MERGED:
            return f"results that `{work.normalize}` normalises are not merged by log-sum-exps"
        return None

    def cost(self, work: Work) -> float:
        if work.reads:
            # nothing is known before the inputs are; the kernel compares again for every sample
            return reading_seconds(work)
        return seconds_of(bands_of(work.relation, work.n_q, work.n_k), work.n_q)

    def steps(self, work: Work) -> tuple[str, ...]:
        if work.reads:
            return ("as the inputs of a call decide",)
        return tuple(str(band) for band in bands_of(work.relation, work.n_q, work.n_k))

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.bands.kernel import SteppedKernel

        if work.reads:
            from attnspec.backends.bands.per_sample import ReadingBands

            return ReadingBands(work, heads, device, dense_seconds(work))
        layouts = layouts_of(bands_of(work.relation, work.n_q, work.n_k), work.n_q, work.n_k)
        return SteppedKernel(work, heads, device, layouts)
