"""Triton kernels over the tile lists of every step, each in its own order, without copies, and
over the chunks of mechanisms that are sums of features.

Steps, orders and lists are those of bands, in the tiles that a GPU wants. Results of steps are
merged in the kernel by their log-sum-exps. On the CPU the kernels run under Triton's interpreter,
to be tried out, where TRITON_INTERPRET=1 says so.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING

from attnspec.backends.common.labels import labels_of
from attnspec.backends.decided.products import parts_of
from attnspec.backends.factored.backend import SIZE, FactoredBackend, features_of
from attnspec.backends.factored.lag import lagged
from attnspec.backends.flex.steps import steps_of
from attnspec.backends.tables.backend import TablesBackend, refuses_decided
from attnspec.backends.triton.forms import refuses_scores
from attnspec.backends.triton.tuning import CHUNK, MAPS, ON_GPU
from attnspec.layout.steps import READING, amounts_of
from attnspec.lower.costs import Amounts, seconds_for, together, work_amounts
from attnspec.lower.work import MERGED, Heads, Kernel, Work, graph_of, mechanism_of
from attnspec.version import is_installed

if TYPE_CHECKING:
    import torch

INTERPRETED = "TRITON_INTERPRET"
"""The environment variable under which kernels run on the CPU."""


TRITON, NUMPY = (3, 7), (2, 4)
"""From this numpy on, older interpreters than this Triton's run no kernels."""


class TritonBackend:
    """Tile lists and sums of features in Triton."""

    name = "triton"
    runs_decided = True
    runs_mechanisms = True
    takes_scores = "static"
    on_request = ("cpu",)

    def refuses(self, work: Work, device: str) -> str | None:
        if device == "cpu" and os.environ.get(INTERPRETED) != "1":
            return f"its kernels run on a GPU; with {INTERPRETED}=1 they are tried out on the CPU"
        if device not in ("cpu", "cuda"):
            return f"its kernels run on a GPU of type cuda, not on {device}"
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if device == "cpu" and is_installed("numpy", NUMPY) and not is_installed("triton", TRITON):
            return "the interpreter of Triton before 3.7 needs a numpy before 2.4"
        if work.hybrid and work.waits:
            return "it adds no mechanism to pairs or scores that depend on the tensors of a call"
        if work.mechanism is not None:
            return refuses_scores(work.changes) or FactoredBackend().refuses(work, device)
        if work.normalize not in MERGED:
            return f"it computes softmax weights, and the spec says `normalize {work.normalize}`"
        if not work.decided:
            return refuses_scores(work.changes)
        if work.changes:
            return "it has no kernel for `score` where each call chooses its pairs"
        for leaf in work.decided:
            if leaf.averages:
                return f"it has no kernel for `{leaf.name}` with `of = q`"
            if leaf.weighs_pairs:
                return (
                    f"`{leaf.name}` may count a pair several times, and the kernel's masks hold"
                    " each pair once"
                )
        return refuses_decided(work, "cpu")

    def cost(self, work: Work) -> float:
        if work.device == "cpu" or not _launches(work):
            # what torch's products compute alone is for `factored` to be chosen for
            return math.inf
        return seconds_for(self.amounts(work), work.device)

    def amounts(self, work: Work) -> Amounts:
        """What the work takes; what run-time inputs leave of it is known in a call alone."""
        if work.hybrid:
            graph, sums = graph_of(work), _of_sums(work)
            if lagged(work)[1] is not None:
                # beside no window, it is what the tables of the graph take away from them
                pairs = sum(band.tiles.tiles * prod(band.sizes) for band in steps_of(graph, ON_GPU))
                sums = work_amounts("dense", work, call=1, pair=pairs + features_of(work))
            return together(sums, self.amounts(graph))
        if work.mechanism is not None:
            return _of_sums(work)
        bands = () if work.decided else steps_of(work, ON_GPU)
        if not bands:
            return work_amounts("triton", work, host=1, call=1, pair=READING * work.n_q * work.n_k)
        amounts = amounts_of(bands, work.copies)
        return {name: READING * x if work.reads else x for name, x in amounts.items()}

    def steps(self, work: Work) -> tuple[str, ...]:
        if not _launches(work):
            return (f"products of whole matrices by torch, {_operations(work):,} operations",)
        if work.mechanism is not None:
            form = f"chunks of {CHUNK}" if work.causal else "all positions"
            if work.hybrid and lagged(work)[1] is not None:
                form = "tables of the graph, in tensor products"
            text = f"sums of features in {form}, {_operations(work):,} operations"
            graph = self.steps(graph_of(work)) if work.hybrid else ()
            return (text, *(f"the graph instead in {line}" for line in graph))
        if work.decided:
            return TablesBackend().steps(work)
        lines = tuple(str(band) for band in steps_of(work, ON_GPU))
        if not lines:
            return ("as the inputs of a call decide, laid out for each sample",)
        if labels_of(work.relation) is None:
            return tuple(f"{line}, masks as the inputs of a call decide" for line in lines)
        return lines

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        from attnspec.backends.factored.hybrid import hybrid_kernel, kernel_of
        from attnspec.backends.triton.decided import DecidedKernel
        from attnspec.backends.triton.kernel import TritonKernel
        from attnspec.backends.triton.sums.way import LaunchedKernel

        if not _launches(work):
            return kernel_of(work, heads, device)
        if work.mechanism is not None:
            sums = LaunchedKernel(work, heads)
            if not work.hybrid:
                return sums
            exact = TritonKernel(graph_of(work), heads, device)
            return hybrid_kernel(work, device, sums, exact)
        parts = parts_of(work.relation) if work.decided else None
        if parts is not None:
            return DecidedKernel(work, heads, device, parts)
        return TritonKernel(work, heads, device)


def _launches(work: Work) -> bool:
    """Whether kernels of this backend run a work: mechanisms of low rank, and mixings, are a few
    products of whole matrices, for which torch has kernels on every device."""
    return work.mechanism is None or work.mechanism.sums


def _operations(work: Work) -> int:
    """Those of the kernels, for one head."""
    mechanism = mechanism_of(work)
    operations = mechanism.forward_flops(work.n_k, SIZE, work.causal)
    # features of both sides are made before
    return operations - 2 * work.n_k * mechanism.row_flops(SIZE)


def _of_sums(work: Work) -> Amounts:
    """What sums of features take: a pair is 4 operations for every channel."""
    amounts = work_amounts("sums", work, call=1, pair=_operations(work) / (4 * SIZE))
    if getattr(mechanism_of(work), "feature", None) in MAPS:
        return amounts
    # torch makes the features
    return together(amounts, work_amounts("dense", work, call=1, pair=features_of(work)))
