"""Mechanisms: attention as a product of factors, or as a mixing, instead of weights of pairs.

Each mechanism has a kernel of its own in `attnspec.factored`. Time and memory go with its factors:
linear in n for kernels and low ranks. With a graph beside it, the kernel's sums run over all keys,
and on the tiles of the graph what it gave their pairs is replaced by their exact weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attnspec.analysis.mechanism_costs import flops_of
from attnspec.covering import survey
from attnspec.mechanism import MechanismDeclaration
from attnspec.rates import current
from attnspec.steps import NATURAL
from attnspec.target import Kernel, Work, mechanism_of

if TYPE_CHECKING:
    import torch

SIZE = 64
"""The size of the heads that estimates are about, and that of tiles."""

MOST = 1 << 20
"""Tiles that a layout lists at most."""


class FactoredBackend:
    """Each mechanism by its own formula, a graph beside it in tiles."""

    name = "factored"

    runs_mechanisms: ClassVar[bool] = True

    @property
    def least(self) -> float:
        return current().dense_call

    def refuses(self, work: Work, device: str) -> str | None:
        mechanism = work.mechanism
        if mechanism is None:
            return "it runs formulas, and this is a graph"
        if work.scale is not None:
            if not (mechanism.scaled or work.hybrid):
                return f"the formula of `{mechanism.name}` takes no `scale`"
            if mechanism.scaled and work.scale <= 0:
                return f"`{mechanism.name}` takes the root of `scale`, which is {work.scale:g}"
        if work.hybrid:
            return _apart(work, mechanism)
        if getattr(mechanism, "gated", False) and not work.causal:
            return "a gate forgets earlier keys, which the causal form alone has: write `causal`"
        return None

    def cost(self, work: Work) -> float:
        rates = current()
        # a pair takes 4 operations for every channel
        seconds = rates.dense_call + rates.dense_pair / (4 * SIZE) * _operations(work)
        if work.hybrid:
            seconds += rates.tiles_call + rates.tiles_pair_64 * _tiles(work) * SIZE**2
        return seconds

    def steps(self, work: Work) -> tuple[str, ...]:
        form = "causal form" if work.causal else "all positions"
        found = f"{form}, about {_operations(work):,} operations for a head of size {SIZE}"
        if not work.hybrid:
            return (found,)
        count = _tiles(work)
        tiles = f"{count:,} tile{'s' * (count != 1)} {SIZE} x {SIZE}"
        return (found, f"the graph instead in natural order, {tiles}")

    def build(self, work: Work, heads: tuple[int, ...], device: torch.device) -> Kernel:
        from attnspec.factored import KERNELS

        return KERNELS["+" if work.hybrid else mechanism_of(work).name](work, heads, device)


def _apart(work: Work, mechanism: MechanismDeclaration) -> str | None:
    """Why a graph and a mechanism have no sum of weights in common, or None."""
    if work.normalize != "softmax":
        return f"exact weights are those of a softmax, not of `normalize {work.normalize}`"
    if getattr(mechanism, "gated", False):
        return "a gate forgets, so that the kernel gives a pair no weight of its own"
    if getattr(mechanism, "normalize", "sum") == "none":
        return "`normalize = none` has no denominator to share"
    if work.reads:
        names = ", ".join(f"`{name}`" for name in work.reads)
        return f"the graph reads the run-time input {names}, and tiles are laid out before"
    if _tiles(work) > MOST:
        return f"in tiles of {SIZE} x {SIZE} there would be more than {MOST:,}"
    return None


def _operations(work: Work) -> int:
    return flops_of(mechanism_of(work), work.n_k, SIZE)


def _tiles(work: Work) -> int:
    """The tiles that hold a pair of the graph."""
    return int(survey(work.relation, work.n_q, work.n_k, NATURAL, (SIZE, SIZE)).tiles)
