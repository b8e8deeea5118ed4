"""Synthesizer: attention weights that do not compare queries with keys.

out = softmax(B) V. dense: row i of B is W_2 relu(W_1 x_i + b_1) + b_2, cut to n. random: B is
learned. factorized_dense: the product of two synthesised rows of lengths a and b with a b =
max_length, repeated and tiled. factorized_random: B = R_1 R_2^T with factors of `rank` columns.
Causal: the logits of later positions are left out.
Source: Tay et al. 2021, "Synthesizer: Rethinking Self-Attention for Transformer Models", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.mechanism import MechanismDeclaration
from attnspec.relations import argument


@dataclass(frozen=True)
class Synthesizer(MechanismDeclaration):
    """Attention with synthesised weights."""

    max_length: int = argument("integer", "longest sequence", least=1)
    kind: str = argument(
        "choice",
        "what the weights are made from",
        default="dense",
        choices=("dense", "random", "factorized_dense", "factorized_random"),
    )
    rank: int = argument("integer", "columns of the random factors", default=8, least=1)

    name: ClassVar = "synthesizer"
    causal: ClassVar = True
