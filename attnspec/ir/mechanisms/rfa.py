"""Random feature attention: trigonometric features of unit-norm queries and keys.

phi(x) = [sin(W x); cos(W x)] / sqrt(m), with rows of W Gaussian times a learned scale per head.
out_i = phi(q_i) . sum_j phi(k_j) v_j^T / phi(q_i) . sum_j phi(k_j), the denominator kept at least
1e-6 away from 0 with its sign. Causal: sums over j <= i. Gated, in causal form, the sums are the
states S_i = g_i S_(i-1) + (1 - g_i) phi(k_i) v_i^T, with a learned gate g_i = sigmoid(w . k_i + b).
Estimates of weights may be negative, and a model learns little where denominators change their
sign: with a floor above 0 no denominator is less, as in the authors' code, whose floor is 1. At the
scale 1 no single key weighs less than exp(-2).
Source: Peng et al. 2021, "Random Feature Attention", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Rfa(MechanismDeclaration):
    """Attention with random Fourier features of the Gaussian kernel."""

    features: int = argument("integer", "random features", default=64, least=1)
    gated: bool = argument("boolean", "forget earlier keys by a learned gate", default=False)
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)
    floor: float = argument("real", "the least denominator, 0 for none", default=0.0, least=0)

    name: ClassVar = "rfa"
    causal: ClassVar = True
    combines: ClassVar = True
    drawn: ClassVar = True
    sums: ClassVar = True
    operations: ClassVar = "12 m d n"

    def feature_width(self, size: int) -> int:
        return 2 * self.features

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        gated = arguments.get("gated") is True
        return "with `gated = true` weighs a key by the gates of later ones too" if gated else ""

    @classmethod
    def only_causal(cls, arguments: Mapping[str, object]) -> str:
        gated = arguments.get("gated") is True
        return "the gate of `gated = true` forgets earlier keys" if gated else ""

    def parts(self) -> tuple[Part, ...]:
        spread = Part("spread", ("d",), "ones")
        if not self.gated:
            return (spread,)
        return spread, Part("gate", ("d",), "scaled", 1.0), Part("gate_bias", ())
