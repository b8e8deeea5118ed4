"""What mechanisms cost by their formulas: operations of their products, for one head.

With n positions, size d and m features or landmarks; a product of a x b by b x c matrices counts
2 a b c. Elementwise work is left out. Sources: the papers named in `attnspec.ir.mechanisms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.program import Mechanism

SUMS = frozenset("linear taylor favor rbf rfa".split())
"""Sums of features, which causal specs compute by chunks."""

DRAWN = frozenset("favor rbf rfa".split())
"""Those of them whose features are products with what is drawn."""

CHUNK = 64
"""Positions of a chunk, whose pairs are computed one by one."""


def flops_of(declaration: MechanismDeclaration, n: int, size: int, causal: bool = False) -> int:
    """The operations of a mechanism whose arguments are known."""
    return _forward(declaration.name, given_to(declaration), n, size, causal)


def given_to(declaration: MechanismDeclaration) -> dict[str, Any]:
    """The arguments of a mechanism by name."""
    return {
        entry.name: getattr(declaration, entry.name)
        for entry in fields(declaration)  # type: ignore[arg-type]
    }


def _forward(name: str, given: dict[str, Any], n: int, size: int, causal: bool) -> int:
    found = int(_FLOPS[name](n, size, given))
    if causal and name in SUMS:
        found += 2 * n * CHUNK * (width_of(name, size, given) + size)
    return found


def backward_flops_of(
    declaration: MechanismDeclaration, n: int, size: int, causal: bool = False
) -> int:
    """The same of the backward pass: two products for each one forward, and what is computed again
    rather than kept."""
    name, given = declaration.name, given_to(declaration)
    forward = _forward(name, given, n, size, False)
    if name == "fourier":
        # linear in its input: one transform back
        return forward
    if name not in SUMS:
        return 2 * forward
    width = width_of(name, size, given)
    sums = 4 * n * width * size
    found = 2 * forward
    if name == "rfa":
        # the products that its features are made of, once more for their derivative
        found += forward - sums
    if causal:
        # the states; of the pairs of a chunk three products of features and two of values
        found += sums // 2 + 2 * n * CHUNK * (3 * width + 2 * size)
    return found


def pair_flops_of(declaration: MechanismDeclaration, size: int) -> tuple[int, int]:
    """The operations of a single pair of a sum of features, forward and backward: its weight, and
    what it adds; the weight again, and the gradients of both."""
    width = pair_width_of(declaration, size)
    return 2 * (width + size + 1), 2 * (3 * width + 2 * (size + 1))


def pair_width_of(declaration: MechanismDeclaration, size: int) -> int:
    """How many numbers of each row the weight of a single pair is made of."""
    given = given_to(declaration)
    if declaration.name == "taylor" and given["order"] == 2:
        # by the formula that the features are for
        return size
    return width_of(declaration.name, size, given)


def row_flops_of(declaration: MechanismDeclaration, size: int) -> tuple[int, int]:
    """The operations that make the features of one row, forward and backward."""
    if declaration.name not in DRAWN:
        return 0, 0
    found = 2 * int(given_to(declaration)["features"]) * size
    return found, (3 if declaration.name == "rfa" else 2) * found


def width_of(name: str, size: int, given: dict[str, Any]) -> int:
    """How many features the rows of a sum of features have."""
    match name:
        case "taylor":
            # of order 2: a constant, the channels, and the products of two
            return size + 1 if given["order"] == 1 else (size + 1) * (size + 2) // 2
        case "favor":
            return int(given["features"]) * (2 if given["kind"] in ("trig", "hyperbolic") else 1)
        case "rfa":
            return 2 * int(given["features"])
        case "rbf":
            return int(given["features"])
        case _:
            return size


@dataclass(frozen=True)
class KeySums:
    """What a sum over keys is: `features` rows of values, behind which the sum of the weights
    stands where it `divides`, and of `keys` numbers of keys; for each key head, or `by_head` for
    each query head."""

    features: int
    divides: bool
    by_head: bool
    keys: int = 0


def key_sums_of(declaration: MechanismDeclaration, size: int) -> KeySums | None:
    """What is kept of keys whose sums can be merged with those of others; None for what is neither
    a sum of features nor one of positions."""
    name, given = declaration.name, given_to(declaration)
    if name == "linformer" and given["projection"] == "linear":
        return KeySums(int(given["rank"]), False, given["share"] == "none", keys=size)
    if name not in SUMS:
        return None
    features = width_of(name, size, given)
    if name == "taylor" and given["order"] == 2:
        features = products_kept(size)
    return KeySums(features, given.get("normalize") != "none", name in DRAWN)


CHANNELS = 8
"""Channels of a block, each multiplied with all of a later block at once."""


def products_kept(size: int) -> int:
    """How many features `taylor` of order 2 computes: of each block of channels all its products,
    also those that are there twice."""
    blocks = ((min(CHANNELS, size - low), size - low) for low in range(0, size, CHANNELS))
    return sum(one * rest for one, rest in blocks) + size + 1


def factors(mechanism: Mechanism) -> str:
    """What stands before n in the formula, in words of the formula."""
    return _FACTORS[mechanism.name]


def _summed(name: str, drawn: bool) -> Callable[[int, int, dict[str, Any]], int]:
    """The sums of keys and values, and their products with queries; before these the products with
    what is drawn, which features are made of."""

    def of(n: int, size: int, given: dict[str, Any]) -> int:
        maps = 4 * n * int(given["features"]) * size if drawn else 0
        return maps + 4 * n * width_of(name, size, given) * size

    return of


def projected_keys(n: int, given: dict[str, Any]) -> int:
    """How many keys `linformer` makes of n."""
    if given["projection"] != "conv":
        return int(given["rank"])
    # as many positions to each as the longest sequence has
    return -(-n // -(-int(given["max_length"]) // int(given["rank"])))


def _linformer(n: int, size: int, given: dict[str, Any]) -> int:
    attention = 4 * n * projected_keys(n, given) * size
    # a pool adds up, and a convolution whose stride is its width multiplies each number once
    projections = {"linear": 4 * n * given["rank"] * size, "conv": 4 * n * size}
    return int(attention + projections.get(given["projection"], 0))


def _nystrom(n: int, size: int, given: dict[str, Any]) -> int:
    m, iterations, width = (int(given[name]) for name in ("landmarks", "iterations", "conv"))
    kernels = 4 * n * m * size + 2 * m * m * size
    # without iterations, the singular value decomposition (Golub, Van Loan, section 8.6.4)
    inverse = 8 * m**3 * iterations or 26 * m**3
    products = 4 * n * m * size + 2 * m * m * size
    return kernels + inverse + products + 2 * n * size * width


def _synthesizer(n: int, size: int, given: dict[str, Any]) -> int:
    values = (4 if given["products"] else 2) * n * n * size
    match given["kind"]:
        case "dense":
            return values + 2 * n * size * size + 2 * n * n * size
        case "random":
            return values
        case "factorized_random":
            return values + 2 * n * n * int(given["rank"])
        case _:
            # two factors of about sqrt(n) numbers, and their product
            factors = 4 * n * size * (size + math.isqrt(given["max_length"]))
            return values + factors + n * n


_FLOPS: dict[str, Callable[[int, int, dict[str, Any]], int]] = {
    **{name: _summed(name, name in DRAWN) for name in SUMS},
    "efficient": lambda n, d, given: 4 * n * d * d,
    "linformer": _linformer,
    "nystrom": _nystrom,
    "fourier": lambda n, d, given: round(5 * n * d * (math.log2(max(n, 1)) + math.log2(max(d, 1)))),
    "synthesizer": _synthesizer,
    "mixer": lambda n, d, given: 4 * n * given["hidden"] * d,
    "gmlp": lambda n, d, given: 2 * n * n * d,
}

_FACTORS = {
    "linear": "4 d**2 n",
    "efficient": "4 d**2 n",
    "taylor": "4 d (d + 1) n, or 2 d (d + 1) (d + 2) n of order 2",
    "favor": "8 m d n, or 12 m d n where features come in pairs",
    "rbf": "8 m d n",
    "rfa": "12 m d n",
    "linformer": "8 k d n, half of it where the projection is no dense matrix",
    "nystrom": "8 m d n + 8 m**3 for each iteration",
    "fourier": "5 d n (log2(n) + log2(d))",
    "synthesizer": "2 d n**2, and what the weights are made with",
    "mixer": "4 h d n",
    "gmlp": "2 d n**2",
}
