"""Efficient attention: queries and keys are normalised apart.

out = r_q(Q) (r_k(K)^T V). softmax: r_q over the channels of each query, r_k over the positions of
each channel. scaling: both divide by sqrt(n), which is dot-product attention without a softmax.
Source: Shen et al. 2021, "Efficient Attention: Attention with Linear Complexities", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Sizes
from attnspec.ir.parameters import choice


@dataclass(frozen=True)
class Efficient(MechanismDeclaration):
    """Attention whose keys form global context vectors first."""

    normalize: str = choice("how queries and keys are normalised", "softmax", "scaling")

    name: ClassVar = "efficient"
    why_not_causal: ClassVar = "keys are normalised over all positions"
    operations: ClassVar = "4 d**2 n"

    def flops(self, n: int, size: int) -> int:
        return 4 * n * size * size

    def between(self, at: Sizes) -> int:
        return 2 * at.tensor + at.size * at.size
