"""gMLP's spatial gate.

With Z split in two halves of channels: out = Z_1 * (W LayerNorm(Z_2) + b), W of shape [max_length,
max_length] near 0 and b = 1 at the start, both cut to n. Z_1 stands in the place of q, Z_2 in that
of v; no k. Causal: W is lower triangular.
Source: Liu et al. 2021, "Pay Attention to MLPs", section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part, Sizes
from attnspec.ir.parameters import argument

NEAR_ZERO = 1e-3
"""How far from 0 a row of W may be in sum at the start."""


@dataclass(frozen=True)
class Gmlp(MechanismDeclaration):
    """A gate by a learned linear map along the positions."""

    max_length: int = argument("integer", "longest sequence", least=1)

    name: ClassVar = "gmlp"
    one_sequence: ClassVar = "it mixes the positions of one sequence"
    causal: ClassVar = True
    operations: ClassVar = "2 d n**2"
    growth: ClassVar = (2, 0)

    def flops(self, n: int, size: int) -> int:
        return 2 * n * n * size

    def between(self, at: Sizes) -> int:
        return at.tensor + at.n * at.n

    def parts(self) -> tuple[Part, ...]:
        length = self.max_length
        return (
            Part("gain", ("d_v",), "ones", heads=True),
            Part("shift", ("d_v",), heads=True),
            Part("weight", (length, length), "uniform", NEAR_ZERO / length, heads=True),
            Part("bias", (length,), "ones", heads=True),
        )
