"""Gaussian kernel attention by random features.

The weight of a pair is exp(-|q_i - k_j|^2 / (2 sigma^2)), estimated by positive random features of
q / sigma and k / sigma, and divided by the row's sum. Causal: the sums run over j <= i.
Source: Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines"; Choromanski et al.
2021, "Rethinking Attention with Performers", lemma 1, for the positive features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.parameters import RelationError, argument


@dataclass(frozen=True)
class Rbf(MechanismDeclaration):
    """Attention whose weights fall with the distance of query and key."""

    sigma: float = argument("real", "width of the kernel", default=1.0, above=0)
    features: int = argument("integer", "random features", default=256, least=1)
    seed: int = argument("integer", "the random seed", default=0, least=0, most=2**62)

    name: ClassVar = "rbf"
    causal: ClassVar = True
    combines: ClassVar = True
    drawn: ClassVar = True
    sums: ClassVar = True
    operations: ClassVar = "8 m d n"

    @classmethod
    def no_logarithm(cls, arguments: Mapping[str, object]) -> str:
        return ""

    def feature_width(self, size: int) -> int:
        return self.features

    def __post_init__(self) -> None:
        if self.sigma < 2.0**-62:
            raise RelationError(
                f"`sigma` must be at least 2**-62, got {self.sigma:g}: float32 does not hold 1 /"
                " sigma**2"
            )
