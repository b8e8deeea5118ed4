"""Triton kernels over the tile lists of every step, each in its own order, without copies.

Steps, orders and lists are those of bands, in the tiles that a GPU wants. Results of steps are
merged in the kernel by their log-sum-exps. On the CPU the kernels run under Triton's interpreter,
to be tried out, where TRITON_INTERPRET=1 says so.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnspec.backends.common.labels import labels_of
from attnspec.backends.lists.backend import ListsBackend
from attnspec.backends.lists.products import parts_of
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.layout.steps import READING, Banded, amounts_of, bands_of, whole_layouts_of
from attnspec.lower.cost_model import current
from attnspec.lower.rates import Amounts
from attnspec.lower.work import MERGED, Bias, Kernel, Work

if TYPE_CHECKING:
    import torch

INTERPRETED = "TRITON_INTERPRET"
"""The environment variable under which kernels run on the CPU."""


class TritonBackend:
    """Tile lists in Triton."""

    name = "triton"
    runs_decided = True
    on_request = ("cpu",)
    least = math.inf  # on the CPU, where it is tried out and never chosen

    def refuses(self, work: Work, device: str) -> str | None:
        if device == "cpu" and os.environ.get(INTERPRETED) != "1":
            return f"its kernels run on a GPU; with {INTERPRETED}=1 they are tried out on the CPU"
        if device not in ("cpu", "cuda"):
            return f"its kernels run on a GPU of type cuda, not on {device}"
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if work.normalize not in MERGED:
            return f"results that `{work.normalize}` normalises are not merged by log-sum-exps"
        if work.decided:
            return _refuses_decided(work)
        if sum(isinstance(change, Bias) for change in work.changes) > 1:
            return "scores have two learned tables, and the kernels read one"
        return None

    def cost(self, work: Work) -> float:
        if work.device == "cpu":
            return math.inf
        return current(work.device).seconds(self.amounts(work), work.copies)

    def amounts(self, work: Work) -> Amounts:
        """What the work takes; of run-time inputs nothing is known before they are seen."""
        parts = labels_of(work.relation)
        if work.decided or parts is None:
            return {"triton_call": 1, "triton_pair": READING * work.n_q * work.n_k}
        found = amounts_of(_bands(work), work.n_q)
        # what labels leave out is known in a call alone
        return {name: READING * x if parts[0] else x for name, x in found.items()}

    def steps(self, work: Work) -> tuple[str, ...]:
        if work.decided:
            return ListsBackend().steps(work)
        if labels_of(work.relation) is None:
            return ("as the inputs of a call decide",)
        return tuple(str(band) for band in _bands(work))

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.triton.decided import DecidedKernel
        from attnspec.backends.triton.kernel import ReadingLists, TritonKernel

        parts = parts_of(work.relation) if work.decided else None
        if parts is not None:
            return DecidedKernel(work, heads, device, parts)
        labels = labels_of(work.relation)
        if labels is None:
            return ReadingLists(work, heads, device, math.inf)
        layouts = whole_layouts_of(_bands(work), work.n_q, work.n_k)
        return TritonKernel(work, heads, device, layouts, labels[0])


def _refuses_decided(work: Work) -> str | None:
    """Why a graph that the data decide is not run, or None."""
    if work.changes:
        return (
            "the graph is decided by data and its scores are changed, which only `lists` computes"
        )
    for leaf in work.decided:
        if leaf.averages:
            return "means of queries attend"
        if leaf.weighs_pairs:
            return f"`{leaf.name}` weighs pairs, and masks of bits hold them once"
    return ListsBackend().refuses(work, "cpu")


def _bands(work: Work) -> tuple[Banded, ...]:
    """The steps of the pairs that no label leaves out."""
    parts = labels_of(work.relation)
    if parts is None:
        raise ValueError("what the inputs leave is not known")
    return bands_of(parts[1], work.n_q, work.n_k, ON_GPU)
