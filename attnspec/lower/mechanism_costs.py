"""What mechanisms cost by their formulas: operations of their products, for one head.

Each says in its file what it takes forward (`attnspec.ir.mechanisms`); here stands what follows of
chunks, of the way back and of single pairs.
"""

from __future__ import annotations

from attnspec.ir.mechanisms.declaration import CHUNK, MechanismDeclaration


def flops_of(declaration: MechanismDeclaration, n: int, size: int, causal: bool = False) -> int:
    """The operations of a mechanism whose arguments are known."""
    found = declaration.flops(n, size)
    if causal and declaration.sums:
        found += 2 * n * CHUNK * (declaration.feature_width(size) + size)
    return found


def backward_flops_of(
    declaration: MechanismDeclaration, n: int, size: int, causal: bool = False
) -> int:
    """The same of the backward pass: two products for each one forward, and what is computed again
    rather than kept."""
    found = declaration.backward * declaration.flops(n, size)
    if not declaration.sums:
        return found
    width = declaration.feature_width(size)
    if declaration.features_again:
        found += 2 * n * declaration.row_flops(size)
    if causal:
        # the states; of the pairs of a chunk three products of features and two of values
        found += 2 * n * width * size + 2 * n * CHUNK * (3 * width + 2 * size)
    return found


def pair_flops_of(declaration: MechanismDeclaration, size: int) -> tuple[int, int]:
    """The operations of a single pair of a sum of features, forward and backward: its weight, and
    what it adds; the weight again, and the gradients of both."""
    width = declaration.pair_width(size)
    return 2 * (width + size + 1), 2 * (3 * width + 2 * (size + 1))


def row_flops_of(declaration: MechanismDeclaration, size: int) -> tuple[int, int]:
    """The operations that make the features of one row, forward and backward."""
    found = declaration.row_flops(size)
    return found, (3 if declaration.features_again else 2) * found
