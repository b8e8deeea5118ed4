"""MLP-Mixer's token mixing.

out = X + W_2 gelu(W_1 LayerNorm(X)) along the positions, with W_1 of shape [hidden, max_length];
the same weights for every channel; no q, k, v.
Source: Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision", section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.mechanism import MechanismDeclaration
from attnspec.relations import argument


@dataclass(frozen=True)
class Mixer(MechanismDeclaration):
    """A two-layer network along the positions."""

    hidden: int = argument("integer", "width of the hidden layer", least=1)
    max_length: int = argument("integer", "longest sequence", least=1)

    name: ClassVar = "mixer"
    why_not_causal: ClassVar = "each hidden unit reads every position"
