"""gMLP's spatial gate.

With Z split in two halves of channels: out = Z_1 * (W LayerNorm(Z_2) + b), W of shape [max_length,
max_length] near 0 and b = 1 at the start; no q, k, v. Causal: W is lower triangular.
Source: Liu et al. 2021, "Pay Attention to MLPs", section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.mechanism import MechanismDeclaration
from attnspec.relations import argument


@dataclass(frozen=True)
class Gmlp(MechanismDeclaration):
    """A gate by a learned linear map along the positions."""

    max_length: int = argument("integer", "longest sequence", least=1)

    name: ClassVar = "gmlp"
    causal: ClassVar = True
