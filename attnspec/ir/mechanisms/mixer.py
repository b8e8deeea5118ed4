"""MLP-Mixer's token mixing.

out = X + W_2 gelu(W_1 LayerNorm(X) + b_1) + b_2 along the positions, with W_1 of shape [hidden,
max_length], cut to n columns; the same weights for every channel. X are the values; no q, k.
Source: Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision", section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part, Sizes
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Mixer(MechanismDeclaration):
    """A two-layer network along the positions."""

    hidden: int = argument("integer", "width of the hidden layer", least=1)
    max_length: int = argument("integer", "longest sequence", least=1)

    name: ClassVar = "mixer"
    one_sequence: ClassVar = "it mixes the positions of one sequence"
    why_not_causal: ClassVar = "each hidden unit reads every position"
    operations: ClassVar = "4 h d n"

    def flops(self, n: int, size: int) -> int:
        return 4 * n * self.hidden * size

    def held(self, at: Sizes) -> int:
        return at.heads * (2 * at.tensor + 2 * self.hidden * at.size)

    def between(self, at: Sizes) -> int:
        return self.hidden * (at.size + 2 * at.n)

    def parts(self) -> tuple[Part, ...]:
        length, hidden = self.max_length, self.hidden
        return (
            Part("gain", ("d_v",), "ones", heads=True),
            Part("shift", ("d_v",), heads=True),
            Part("inner", (hidden, length), "normal", length**-0.5, heads=True),
            Part("inner_bias", (hidden,), heads=True),
            Part("outer", (length, hidden), "normal", hidden**-0.5, heads=True),
            Part("outer_bias", (length,), heads=True),
        )
