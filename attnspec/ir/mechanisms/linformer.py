"""Linformer: keys and values projected along the sequence.

out = softmax(Q (E K)^T / sqrt(d)) (F V), with E and F of shape [rank, max_length], drawn from
N(0, 1 / rank), learned, and cut to n columns; mean and max pool n / rank positions; conv has a
learned kernel of ceil(max_length / rank) positions, which is its stride too.
Shared: by no one, by the heads of a layer, by keys and values as well, or by all layers.
With rank = n and one projection that reorders the positions this is softmax itself; with other
orthogonal ones it is not, because softmax acts on each number.
Source: Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import KeySums, MechanismDeclaration, Part, Sizes
from attnspec.ir.parameters import argument, choice


@dataclass(frozen=True)
class Linformer(MechanismDeclaration):
    """Attention to a fixed number of projected keys."""

    rank: int = argument("integer", "rows of the projections", default=256, least=1)
    share: str = choice(
        "who has one projection in common", "none", "head", "key_value", "layer", default="layer"
    )
    projection: str = choice("how positions are projected", "linear", "mean", "max", "conv")
    max_length: int = argument(
        "integer", "longest sequence of a learned projection", default=4096, least=1
    )

    name: ClassVar = "linformer"
    why_not_causal: ClassVar = "each projected key mixes all positions"
    operations: ClassVar = "8 k d n, half of it where the projection is not a dense matrix"

    def flops(self, n: int, size: int) -> int:
        # a pool adds up, and a convolution whose stride is its width multiplies each number once
        projections = {"linear": 4 * n * self.rank * size, "conv": 4 * n * size}
        return 4 * n * self.projected(n) * size + projections.get(self.projection, 0)

    def held(self, at: Sizes) -> int:
        keys = self.projected(at.n)
        return 4 * at.heads * keys * at.size + at.weights(keys)

    def between(self, at: Sizes) -> int:
        # weights, projected keys and values, and the projections themselves
        return self.projected(at.n) * (2 * at.n + 2 * at.size)

    def projected(self, n: int) -> int:
        """How many keys it makes of n."""
        # of a convolution as many positions to each as the longest sequence has
        return -(-n // self.width) if self.projection == "conv" else self.rank

    def key_sums(self, size: int) -> KeySums | None:
        if self.projection != "linear":
            return None
        return KeySums(self.rank, False, self.share == "none", keys=size)

    @property
    def learned(self) -> bool:
        """Whether the projection is learned; pooling is not."""
        return self.projection in ("linear", "conv")

    @property
    def longest(self) -> int | None:
        return self.max_length if self.learned else None

    @property
    def apart(self) -> bool:
        """Whether keys and values have projections of their own."""
        return self.share in ("none", "head")

    @property
    def width(self) -> int:
        """Positions under the kernel of a convolution."""
        return -(-self.max_length // self.rank)

    def parts(self) -> tuple[Part, ...]:
        if not self.learned:
            return ()
        names = ("keys", "values") if self.apart else ("keys",)
        layers, heads = self.share == "layer", self.share != "none"
        shape: tuple[int, ...] = self.rank, self.max_length
        start, by = "normal", self.rank**-0.5
        if self.projection == "conv":
            shape, start, by = (self.width,), "uniform", self.width**-0.5
        return tuple(Part(name, shape, start, by, layers, heads) for name in names)
