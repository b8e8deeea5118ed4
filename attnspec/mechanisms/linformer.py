"""Linformer: keys and values projected along the sequence.

out = softmax(Q (E K)^T / sqrt(d)) (F V), with E and F of shape [rank, n], drawn from N(0, 1 / rank)
and learned; mean and max pool n / rank positions, conv is a convolution of that width and stride.
Shared: by no one, by the heads of a layer, by keys and values as well, or by all layers.
Source: Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.mechanism import MechanismDeclaration
from attnspec.relations import argument


@dataclass(frozen=True)
class Linformer(MechanismDeclaration):
    """Attention to a fixed number of projected keys."""

    rank: int = argument("integer", "rows of the projections", default=256, least=1)
    share: str = argument(
        "choice",
        "who has one projection in common",
        default="layer",
        choices=("none", "head", "key_value", "layer"),
    )
    projection: str = argument(
        "choice",
        "how positions are projected",
        default="linear",
        choices=("linear", "mean", "max", "conv"),
    )

    name: ClassVar = "linformer"
    why_not_causal: ClassVar = "each projected key mixes all positions"
