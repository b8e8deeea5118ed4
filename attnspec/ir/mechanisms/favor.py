"""FAVOR+: random features of the softmax kernel.

With x = q d^(-1/4) and y = k d^(-1/4), exp(x . y) is estimated by phi(x) . phi(y), where phi(x) =
h(x) / sqrt(m) f(w_1 . x, ..., w_m . x) and the rows w are Gaussian, orthogonal in blocks of d:
positive has h = exp(-|x|^2 / 2), f = exp; hyperbolic the same with exp(u) and exp(-u) over sqrt(2);
trig has h = exp(|x|^2 / 2), f = (sin, cos); relu has h = 1, f = relu.
With `scale s`, x = q sqrt(s) and y = k sqrt(s). The sums of weights of trig and relu, which may be
negative or 0, are kept at least 1e-6 away from 0 with their sign.
out_i = phi(q_i) . sum_j phi(k_j) v_j^T / phi(q_i) . sum_j phi(k_j). Causal: sums over j <= i.
Source: Choromanski et al. 2021, "Rethinking Attention with Performers", sections 2.2 to 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.parameters import argument, choice


@dataclass(frozen=True)
class Favor(MechanismDeclaration):
    """Attention with random features whose products estimate exp(q . k / sqrt(d))."""

    features: int = argument("integer", "random features", default=256, least=1)
    kind: str = choice("the feature map", "positive", "trig", "hyperbolic", "relu")
    orthogonal: bool = argument("boolean", "orthogonal rows in blocks of d", default=True)
    redraw: int = argument(
        "integer", "training steps between new draws, 0 for never", default=0, least=0
    )
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)

    name: ClassVar = "favor"
    causal: ClassVar = True
    combines: ClassVar = True
    drawn: ClassVar = True
    scaled: ClassVar = True
    sums: ClassVar = True
    operations: ClassVar = "8 m d n, or 12 m d n where features come in pairs"

    @classmethod
    def no_logarithm(cls, arguments: Mapping[str, object]) -> str:
        return super().no_logarithm(arguments) if arguments.get("kind") == "trig" else ""

    def feature_width(self, size: int) -> int:
        return self.features * (2 if self.kind in ("trig", "hyperbolic") else 1)
