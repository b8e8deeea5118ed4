"""Synthesizer: attention weights that do not compare queries with keys.

out = softmax(B) V. dense: row i of B is W_2 relu(W_1 x_i + b_1) + b_2, cut to n. random: B is
learned. factorized_dense: the product of two synthesised rows of about sqrt(max_length) numbers,
B_ij = a_i[j mod a] b_i[j // a]. factorized_random: B = R_1 R_2^T with factors of `rank` columns.
x_i is the query. With `products`, softmax((1 - g) Q K^T / sqrt(d) + g B) with a learned share g,
1 / 2 at first. Causal: the logits of later positions are left out.
Source: Tay et al. 2021, "Synthesizer: Rethinking Self-Attention for Transformer Models", section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part, Sizes
from attnspec.ir.parameters import argument, choice
from attnspec.limits import LIMITS


@dataclass(frozen=True)
class Synthesizer(MechanismDeclaration):
    """Attention with synthesised weights."""

    max_length: int = argument("integer", "longest sequence", least=1)
    kind: str = choice(
        "what the weights are made from", "dense", "random", "factorized_dense", "factorized_random"
    )
    rank: int = argument("integer", "columns of the random factors", default=8, least=1)
    products: bool = argument("boolean", "mix with the products of queries and keys", default=False)

    name: ClassVar = "synthesizer"
    one_sequence: ClassVar = "its weights are learned for the positions of one sequence"
    causal: ClassVar = True
    operations: ClassVar = "2 d n**2, and what the weights are made with"
    growth: ClassVar = (2, 0)

    def flops(self, n: int, size: int) -> int:
        values = (4 if self.products else 2) * n * n * size
        match self.kind:
            case "dense":
                return values + 2 * n * size * size + 2 * n * n * size
            case "random":
                return values
            case "factorized_random":
                return values + 2 * n * n * self.rank
            case _:
                # two factors of about sqrt(n) numbers, and their product
                factors = 4 * n * size * (size + math.isqrt(self.max_length))
                return values + factors + n * n

    def held(self, at: Sizes) -> int:
        fused = not at.causal or at.heads * at.n * at.n >= LIMITS.fused
        if fused and self.kind in ("dense", "factorized_random"):
            # rows, columns and values of one width, and what comes of them
            return 4 * at.heads * at.tensor
        return at.heads * self.between(at)

    def between(self, at: Sizes) -> int:
        # tables of all pairs: what is synthesised, what it is changed to, weights
        pairs = at.n * at.n
        elements = (4 if self.products else 2) * pairs
        match self.kind:
            case "random":
                return elements
            case "factorized_dense":
                # two factors multiplied for the longest sequence, and cut
                return elements + at.n * self.max_length
            case _:
                return elements + pairs

    @property
    def factors(self) -> tuple[int, int]:
        """The lengths a and b of the rows that `factorized_dense` multiplies, a b >= max_length."""
        short = math.isqrt(self.max_length - 1) + 1
        return short, -(-self.max_length // short)

    def parts(self) -> tuple[Part, ...]:
        mix = (Part("mix", (1,)),) if self.products else ()
        match self.kind:
            case "dense":
                return *_network((), self.max_length), *mix
            case "factorized_dense":
                return *_network((2,), sum(self.factors)), *mix
            case "random":
                return Part("logits", (self.max_length, self.max_length), "normal", 1.0), *mix
            case _:
                shape = self.max_length, self.rank
                by = self.rank**-0.5
                return Part("rows", shape, "normal", by), Part("columns", shape, "normal", by), *mix


def _network(copies: tuple[int, ...], outputs: int) -> tuple[Part, ...]:
    """Two layers that start as in the authors' code: N(0, 1 / inputs), no bias."""
    return (
        Part("hidden", (*copies, "d", "d"), "scaled", 1.0),
        Part("hidden_bias", (*copies, "d")),
        Part("weight", (outputs, "d"), "scaled", 1.0),
        Part("bias", (outputs,)),
    )
