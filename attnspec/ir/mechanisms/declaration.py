"""What the compiler knows of every mechanism before it runs.

A mechanism's meaning is a formula rather than a set of pairs. Its file declares the arguments, as
fields of a frozen dataclass, and states the formula; q_i, k_j, v_j are rows of queries, keys and
values, d is the width of a head, phi a feature map applied to rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.limits import LIMITS

LANES = 16
"""Keys from which on it may be: with fewer than a vector has lanes torch's kernel makes zeros of
scores that are not numbers."""


@dataclass(frozen=True)
class Sizes:
    """n positions of `heads` heads of `size`; `causal` sums are computed by chunks."""

    n: int
    size: int
    heads: int
    causal: bool

    @property
    def tensor(self) -> int:
        """Numbers of one of q, k, v of one head."""
        return self.n * self.size

    def weights(self, keys: int) -> int:
        """Scores and weights of all positions with these keys; fused attention keeps none."""
        return 2 * self.heads * self.n * keys if keys < LANES else 0


@dataclass(frozen=True)
class Part:
    """Something that a mechanism learns: a tensor [layers or 1, heads or 1, *shape].

    An entry "d" of the shape is the size of a head, "d_v" that of a head of values. `start` is
    `zeros`, `ones`, or with the number `by`: `normal` of that deviation, `scaled`, the same divided
    by the root of the last extent, `uniform` within that bound, `constant` of that value, `drawn`,
    Gaussian rows by that seed, the layer and the head. `layers` and `heads` say that all layers, or
    all heads of a layer, share one. What is `kept` is not a parameter, but a buffer that calls in
    training move.
    """

    name: str
    shape: tuple[int | str, ...]
    start: str = "zeros"
    by: float = 0.0
    layers: bool = False
    heads: bool = False
    kept: bool = False


@dataclass(frozen=True)
class KeySums:
    """What a sum over keys is: `features` rows of values, behind which the sum of the weights
    stands where it `divides`, and of `keys` numbers of keys; for each key head, or `by_head` for
    each query head."""

    features: int
    divides: bool
    by_head: bool
    keys: int = 0


WIDE = 2
"""How many times as many features as channels a backward pass computes again rather than keeps."""


class MechanismDeclaration:
    """The base of all mechanisms: name, arguments (the fields), what it can be part of, and what it
    costs.

    Costs are operations of the products of its formula, for one head, forward, with n positions of
    size d: a product of a x b by b x c matrices counts 2 a b c. Elementwise work is left out.
    Memory and traffic are numbers, as `backends.factored.hybrid` computes the formula on the CPU.
    """

    name: ClassVar[str] = ""

    causal: ClassVar[bool] = False
    """Whether there is a causal form."""

    why_not_causal: ClassVar[str] = ""
    """Why there is none, to stand behind "`NAME` has no causal form: "."""

    one_sequence: ClassVar[str] = ""
    """Why it has no form between two sequences, "" where it has one, to stand behind "`NAME` has no
    form between two sequences: "."""

    combines: ClassVar[bool] = False
    """Whether it has weights of single pairs, so that `GRAPH + MECHANISM` has a meaning."""

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        """Why, with these arguments, it cannot be added to a graph, "" where it can."""
        return "" if cls.combines else "does not weigh each pair by features of q and k"

    @classmethod
    def only_causal(cls, arguments: Mapping[str, object]) -> str:
        """Why, with these arguments, it has a causal form alone, "" where it has both."""
        return ""

    @classmethod
    def takes_scale(cls, arguments: Mapping[str, object]) -> bool:
        """Whether, with these arguments, the scale of scores is a part of its formula."""
        return cls.scaled

    @classmethod
    def no_logarithm(cls, arguments: Mapping[str, object]) -> str:
        """Why, with these arguments, what divides a row has no logarithm, "" where that is a sum of
        weights that are never negative; what is to be read after its name."""
        return "whose weights may be negative" if cls.sums else "which returns no sum over the keys"

    drawn: ClassVar[bool] = False
    """Whether it draws random numbers, which differ by layer and head."""

    scaled: ClassVar[bool] = False
    """Whether the scale of scores is a part of its formula."""

    sums: ClassVar[bool] = False
    """Whether its weights are products of features, so that it adds up what keys give."""

    operations: ClassVar[str]
    """How many operations it takes, in words of its formula."""

    growth: ClassVar[tuple[int, int]] = (1, 0)
    """The powers of n and of log(n) in them, its sizes being constants."""

    backward: ClassVar[int] = 2
    """The products of a backward pass for each one forward, but those of features."""

    def flops(self, n: int, size: int) -> int:
        """Its operations; here those of sums of features: keys by values, and queries by these."""
        return 4 * n * self.feature_width(size) * size + 2 * n * self.row_flops(size)

    def forward_flops(self, n: int, size: int, causal: bool = False) -> int:
        """Its operations, with those of the pairs of a chunk where sums are causal."""
        operations = self.flops(n, size)
        if causal and self.sums:
            operations += 2 * n * LIMITS.feature_chunk * (self.feature_width(size) + size)
        return operations

    def backward_flops(self, n: int, size: int, causal: bool = False) -> int:
        """Those of the backward pass: two products for each forward, and what is computed again."""
        if not self.sums:
            return self.backward * self.flops(n, size)
        again, once = self.feature_width(size) > WIDE * size, self.forward_flops(n, size, causal)
        if again and not causal:
            # features alone are made again
            return 2 * once
        # what rows are multiplied with for their features asks for no gradient
        return (3 if again else 2) * once - 2 * n * self.row_flops(size)

    def held(self, at: Sizes) -> int:
        """The most numbers that all heads hold at one time beside q, k, v and the output; here
        those of sums of features, or two tensors."""
        if not self.sums:
            return 2 * at.heads * at.tensor
        width, size = self.feature_width(at.size), at.size
        rows = min(at.heads * at.n, max(1, LIMITS.piece // max(width, size)))
        together = min(at.heads, max(1, -(-rows // max(1, at.n))))
        # features of queries and keys, one after the other where sums are over all; values with a 1
        # behind, sums, and what maps are made of
        features = 2 * width if at.causal else width
        elements = rows * (features + 3 * size) + 2 * together * width * (size + 1)
        if at.causal:
            chunk = LIMITS.feature_chunk
            elements += rows * (3 * chunk // 2 + 2 * width * (size + 1) // chunk)
        return elements

    def between(self, at: Sizes) -> int:
        """The intermediate numbers of one head, each of which is written once and read once."""
        width, n = self.feature_width(at.size), at.n
        elements = 2 * n * width + width * (at.size + 1)
        if at.causal:
            chunk = LIMITS.feature_chunk
            elements += n * chunk + -(-n // chunk) * width * (at.size + 1)
        return elements

    def row_flops(self, size: int) -> int:
        """Operations for the features of one row: the products with as many rows as are drawn."""
        return 2 * getattr(self, "features", 0) * size

    def feature_width(self, size: int) -> int:
        """How many features the rows of a sum of features have."""
        return size

    def pair_width(self, size: int) -> int:
        """How many numbers of each row the weight of a single pair is made of."""
        return self.feature_width(size)

    def key_sums(self, size: int) -> KeySums | None:
        """What is kept of keys whose sums can be merged with those of others; None for what is
        neither a sum of features nor one of positions."""
        if not self.sums:
            return None
        divides = getattr(self, "normalize", "sum") != "none"
        return KeySums(self.feature_width(size), divides, self.drawn)

    def parts(self) -> tuple[Part, ...]:
        """What it learns, in the order of its formula."""
        return ()

    @property
    def longest(self) -> int | None:
        """The longest sequence that what it learns is for, None where that knows no length."""
        return getattr(self, "max_length", None)
