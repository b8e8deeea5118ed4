"""FNet: the discrete Fourier transform mixes the tokens.

out = Re(F_n X F_D), with the unnormalised transforms along positions and channels; no q, k, v.
Source: Lee-Thorp et al. 2022, "FNet: Mixing Tokens with Fourier Transforms", section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Sizes


@dataclass(frozen=True)
class Fourier(MechanismDeclaration):
    """Mixing without parameters."""

    name: ClassVar = "fourier"
    one_sequence: ClassVar = "it mixes the positions of one sequence"
    why_not_causal: ClassVar = "a Fourier transform reads every position"
    operations: ClassVar = "5 d n (log2(n) + log2(d))"
    growth: ClassVar = (1, 1)
    # linear in its input: one transform back
    backward: ClassVar = 1

    def flops(self, n: int, size: int) -> int:
        return round(5 * n * size * (math.log2(max(n, 1)) + math.log2(max(size, 1))))

    def between(self, at: Sizes) -> int:
        return 2 * at.tensor
