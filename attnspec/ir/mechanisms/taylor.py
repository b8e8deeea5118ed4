"""Taylor attention: the first terms of the series of exp(x) in its place.

Order 1, with q^ = q / |q| and k^ = k / |k|: out_i = sum_j w_ij v_j / sum_j w_ij, where w_ij =
1 + q^_i . k^_j. Order 2: w_ij = 1 + s + s^2 / 2 with s = q_i . k_j / sqrt(d). Sums of weights are
kept at least 1e-6 away from 0. Causal: the sums run over j <= i.
Source: Li, Su et al. 2020, "Linear Attention Mechanism: An Efficient Attention for Semantic
Segmentation", section 3, and for order 2 Arora et al. 2024, "Simple linear attention language
models balance the recall-throughput tradeoff", section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import KeySums, MechanismDeclaration
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Taylor(MechanismDeclaration):
    """Attention with an expansion of the exponential."""

    order: int = argument("integer", "order of the expansion", default=1, least=1, most=2)

    name: ClassVar = "taylor"
    causal: ClassVar = True
    combines: ClassVar = True
    scaled: ClassVar = True
    sums: ClassVar = True
    operations: ClassVar = "4 d (d + 1) n, or 2 d (d + 1) (d + 2) n of order 2"

    @classmethod
    def no_logarithm(cls, arguments: Mapping[str, object]) -> str:
        return ""

    def feature_width(self, size: int) -> int:
        # of order 2: a constant, the channels, and the products of two
        return size + 1 if self.order == 1 else (size + 1) * (size + 2) // 2

    def pair_width(self, size: int) -> int:
        # of order 2 by the formula that the features are for
        return size + 1 if self.order == 1 else size

    def key_sums(self, size: int) -> KeySums:
        return KeySums(size + 1 if self.order == 1 else products_kept(size), True, False)

    @classmethod
    def takes_scale(cls, arguments: Mapping[str, object]) -> bool:
        # rows of length 1 have none
        return arguments.get("order", 1) != 1


CHANNELS = 8
"""Channels of a block, each multiplied with all of a later block at once."""


def products_kept(size: int) -> int:
    """How many features order 2 computes: of each block of channels all its products, also those
    that are there twice."""
    blocks = ((min(CHANNELS, size - low), size - low) for low in range(0, size, CHANNELS))
    return sum(one * rest for one, rest in blocks) + size + 1
