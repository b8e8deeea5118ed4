"""First-order Taylor attention: 1 + x in place of exp(x).

With q^ = q / |q| and k^ = k / |k|: out_i = sum_j (1 + q^_i . k^_j) v_j / sum_j (1 + q^_i . k^_j).
Causal: the sums run over j <= i.
Source: Li, Su et al. 2020, "Linear Attention Mechanism: An Efficient Attention for Semantic
Segmentation", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.mechanism import MechanismDeclaration
from attnspec.relations import argument


@dataclass(frozen=True)
class Taylor(MechanismDeclaration):
    """Attention with the first-order expansion of the exponential."""

    order: int = argument("integer", "order of the expansion", default=1, least=1, most=1)

    name: ClassVar = "taylor"
    causal: ClassVar = True
    combines: ClassVar = True
