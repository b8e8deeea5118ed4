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

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Taylor(MechanismDeclaration):
    """Attention with an expansion of the exponential."""

    order: int = argument("integer", "order of the expansion", default=1, least=1, most=2)

    name: ClassVar = "taylor"
    causal: ClassVar = True
    combines: ClassVar = True
    scaled: ClassVar = True

    @classmethod
    def takes_scale(cls, arguments: Mapping[str, object]) -> bool:
        # rows of length 1 have none
        return arguments.get("order", 1) != 1
