"""Mechanisms: attention as a product of factors, or as a mixing, instead of weights of pairs.

Each mechanism has a kernel of its own in `backends.factored.hybrid`. Time and memory go with its
factors:
linear in n for kernels and low ranks. With a graph beside it, the kernel's sums run over all keys,
what it gave the pairs of the graph is taken away, and their exact weights, computed in tables as
those of a graph alone, share its denominator. Graphs that read run-time inputs are laid out for
every sample's inputs, and the lists of data-dependent ones for every call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnspec.backends.factored.costs import pair_flops
from attnspec.backends.factored.lag import lagged
from attnspec.backends.tables.backend import TablesBackend, listed_parts
from attnspec.layout.steps import bands_of, reading_seconds, seconds_of, work_bands
from attnspec.lower.costs import seconds_for, weighed, work_seconds
from attnspec.lower.work import Heads, Kernel, Work, graph_of, mechanism_of

if TYPE_CHECKING:
    import torch

SIZE = 64
"""The size of the heads that estimates are about."""


class FactoredBackend:
    """Each mechanism by its own formula, a graph beside it in tables."""

    name = "factored"
    runs_decided = True
    runs_mechanisms = True
    takes_scores = "all"

    def refuses(self, work: Work, device: str) -> str | None:
        mechanism = work.mechanism
        if mechanism is None:
            return "it runs mechanisms, and this is a graph"
        if work.scale is not None:
            if not (mechanism.scaled or work.hybrid):
                return f"the formula of `{mechanism.name}` takes no `scale`"
            if mechanism.scaled and work.scale <= 0:
                root = f"`{mechanism.name}` takes the square root of `scale`, which must be above 0"
                return f"{root}, got {work.scale:g} at n = {work.n_k:,}"
        gated = getattr(mechanism, "gated", False)
        if not work.hybrid:
            forgets = "its gate forgets earlier keys: add the statement `causal`"
            return forgets if gated and not work.causal else None
        # without a sum of weights in common
        if work.normalize != "softmax":
            return f"its graph has the weights of a softmax, not of `normalize {work.normalize}`"
        if gated:
            return "`gated = true` weighs a key by the gates of later ones too"
        if getattr(mechanism, "normalize", "sum") == "none":
            return "`normalize = none` does not divide by a sum of weights"
        if not work.waits and not math.isfinite(seconds_of(work_bands(work))):
            return f"its graph at n = {work.n_k:,} needs too many tiles"
        return None

    def cost(self, work: Work) -> float:
        operations, seconds, on_cpu = float(_operations(work)), 0.0, work.device == "cpu"
        features = 0 if on_cpu else features_of(work)
        beside = work.hybrid and not on_cpu
        if beside and work.waits:
            # in plain tensor operations
            seconds = work_seconds("dense", work, pair=work.n_q * work.n_k)
        elif beside or listed_parts(work, "cpu"):
            seconds = TablesBackend().cost(graph_of(work))
        elif work.hybrid and work.waits:
            seconds = reading_seconds(work)
        elif work.hybrid:
            seconds = seconds_of(work_bands(work))
            _, rest = lagged(work)
            if rest is not None:
                pairs = sum(band.pairs for band in bands_of(rest, work.n_q, work.n_k))
                operations += pairs * pair_flops(mechanism_of(work), SIZE)
        # a pair takes 4 operations for every channel
        units = {"call": 1, "pair": operations / (4 * SIZE) + features}
        return seconds + seconds_for(weighed("dense", units, work.device), work.device)

    def steps(self, work: Work) -> tuple[str, ...]:
        form = "causal form" if work.causal else "all positions"
        text = f"{form}, about {_operations(work):,} operations for a head of size {SIZE}"
        if not work.hybrid:
            return (text,)
        if listed_parts(work, work.device):
            lines = TablesBackend().steps(graph_of(work))
            return (text, *(f"the graph instead in {line}" for line in lines))
        if work.waits:
            return (text, "the graph instead as the data of a call decide")
        if work.device != "cpu":
            return (text, "the graph instead in tiles, in plain tensor operations")
        return (text, *(f"the graph instead in {band}" for band in work_bands(work)))

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        from attnspec.backends.factored.hybrid import kernel_of

        return kernel_of(work, heads, device)


def features_of(work: Work) -> int:
    """The features of queries and keys, each of which is written and read about as often as a
    score is: on a GPU that takes longer than the operations."""
    mechanism = mechanism_of(work)
    if not mechanism.sums:
        return 0
    return (work.n_q + work.n_k) * mechanism.feature_width(SIZE)


def _operations(work: Work) -> int:
    return mechanism_of(work).flops(work.n_k, SIZE)
