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

from attnspec.layout.steps import bands_of, layouts_of
from attnspec.lower.cost_model import current
from attnspec.lower.work import MERGED, Bias, Kernel, Work

if TYPE_CHECKING:
    import torch

INTERPRETED = "TRITON_INTERPRET"
"""The environment variable under which kernels run on the CPU."""


class TritonBackend:
    """Tile lists in Triton."""

    name = "triton"
    least = 4e-5

    def refuses(self, work: Work, device: str) -> str | None:
        if device == "cpu" and os.environ.get(INTERPRETED) != "1":
            return f"its kernels run on a GPU; with {INTERPRETED}=1 they are tried out on the CPU"
        if device not in ("cpu", "cuda"):
            return f"its kernels run on a GPU of type cuda, not on {device}"
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if work.reads:
            inputs = ", ".join(f"`{name}`" for name in work.reads)
            return f"the graph reads {inputs}, and its lists are made before"
        if work.normalize not in MERGED:
            return f"results that `{work.normalize}` normalises are not merged by log-sum-exps"
        if sum(isinstance(change, Bias) for change in work.changes) > 1:
            return "scores have two learned tables, and the kernels read one"
        return None

    def cost(self, work: Work) -> float:
        return math.inf

    def steps(self, work: Work) -> tuple[str, ...]:
        return tuple(str(band) for band in bands_of(work.relation, work.n_q, work.n_k))

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.backends.triton.kernel import TritonKernel

        layouts = layouts_of(bands_of(work.relation, work.n_q, work.n_k), work.n_q, work.n_k)
        return TritonKernel(work, heads, device, layouts)
