"""Nystroem approximation through landmarks.

q~, k~ are the means of `landmarks` segments of consecutive rows. With s = 1 / sqrt(d):
out = softmax(s Q K~^T) Z softmax(s Q~ K^T) V, where Z is the pseudo-inverse of softmax(s Q~ K~^T)
by that many iterations Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, 0 for the exact one;
`conv` adds a convolution of each head's V along the positions, of that odd width, 0 for none.
Exact softmax with as many landmarks as positions.
Source: Xiong et al. 2021, "Nystroemformer", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part, Sizes
from attnspec.ir.parameters import RelationError, argument


@dataclass(frozen=True)
class Nystrom(MechanismDeclaration):
    """Attention through the means of segments."""

    landmarks: int = argument("integer", "segments whose means are landmarks", default=64, least=1)
    iterations: int = argument(
        "integer", "steps of the pseudo-inverse, 0 for exact", default=6, least=0
    )
    conv: int = argument("integer", "width of the convolution, 0 for none", default=0, least=0)

    name: ClassVar = "nystrom"
    one_sequence: ClassVar = "its landmarks are means over segments of one sequence"
    why_not_causal: ClassVar = "landmarks are means over positions on both sides of a query"
    operations: ClassVar = "8 m d n + 8 m**3 for each iteration"

    def flops(self, n: int, size: int) -> int:
        m = self.landmarks
        kernels = 4 * n * m * size + 2 * m * m * size
        # without iterations, the singular value decomposition (Golub, Van Loan, section 8.6.4)
        inverse = 8 * m**3 * self.iterations or 26 * m**3
        products = 4 * n * m * size + 2 * m * m * size
        return kernels + inverse + products + 2 * n * size * self.conv

    def held(self, at: Sizes) -> int:
        m = min(self.landmarks, max(1, at.n))
        local = 2 * at.heads * at.tensor if self.conv else 0
        return at.heads * (4 * m * at.size + 6 * m * m) + local + at.weights(m)

    def between(self, at: Sizes) -> int:
        m = self.landmarks
        return 2 * m * (at.n + at.size) + m**2 * (4 * self.iterations or 4)

    def __post_init__(self) -> None:
        if self.conv and self.conv % 2 == 0:
            raise RelationError(f"`conv` must be odd, or 0 for none, got {self.conv}")

    def parts(self) -> tuple[Part, ...]:
        if not self.conv:
            return ()
        return (Part("kernel", (self.conv,), "uniform", self.conv**-0.5),)
