"""Bands in orders: disjoint steps, each in the order of tokens in which its pairs are close together.

A stride is a band once tokens are grouped by residue. Every step goes through torch's flash kernel on
the CPU, forward and backward, and results are merged exactly by their log-sum-exps. Where that kernel
cannot go (another device is refused; transforms, dropout and compilation are not), the tiles of the
whole graph in natural order stand in, with the same meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.banding import bands_of, layouts_of, seconds_of
from attnspec.target import Kernel, Work

if TYPE_CHECKING:
    import torch


class BandsBackend:
    """Disjoint steps in residue orders, merged."""

    name = "bands"

    def refuses(self, work: Work, device: str) -> str | None:
        if device != "cpu":
            return f"its kernel runs on the CPU, not on {device}"
        if work.reads:
            names = ", ".join(f"`{name}`" for name in work.reads)
            return f"the graph reads the run-time input {names}, and bands are laid out before"
        if not work.plain:
            return "the scores are changed, or not normalised by softmax"
        return None

    def cost(self, work: Work) -> float:
        return seconds_of(bands_of(work.relation, work.n_q, work.n_k), work.n_q)

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.stepped_kernel import SteppedKernel

        layouts = layouts_of(bands_of(work.relation, work.n_q, work.n_k), work.n_q, work.n_k)
        return SteppedKernel(work, heads, device, layouts)
