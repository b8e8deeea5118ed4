"""What the kernels of mechanisms take on the CPU, by the formulas that they declare."""

from __future__ import annotations

from dataclasses import dataclass

from attnspec.backends.factored.lag import lagged
from attnspec.ir.mechanisms.declaration import WIDE, MechanismDeclaration, Sizes
from attnspec.layout.steps import bands_of
from attnspec.limits import LIMITS
from attnspec.lower.work import Work, mechanism_of


@dataclass(frozen=True)
class Products:
    """Operations forward and backward, and numbers moved, of one head; numbers that all heads hold
    besides q, k, v and the output."""

    flops: int
    backward_flops: int
    moved: int
    held: int


def products_of(work: Work, heads: int, size: int) -> Products:
    """What the features of a mechanism take.

    Rows of a hybrid that are weighed pair by pair instead, as the numbers of a call decide, are
    left out: there are few where weights are alike.
    """
    # of each step the pairs of one head, and the keys that its blocks read
    mechanism, steps, lag = mechanism_of(work), list[tuple[int, int]](), 0
    if work.hybrid and work.waits:
        # laid out for the inputs of every call; never more than all pairs
        steps = [(work.n_q * work.n_k, work.n_k)]
    elif work.hybrid:
        lag, rest = lagged(work)
        for band in bands_of(rest, work.n_q, work.n_k) if rest is not None else ():
            pairs = round(sum(band.tiles.area))
            steps.append((pairs, pairs // max(1, band.sizes[0])))
    n = max(0, work.n_k - lag)
    at, width = Sizes(n, size, heads, work.causal), mechanism.pair_width(size)
    flops = mechanism.forward_flops(n, size, work.causal)
    backward = mechanism.backward_flops(n, size, work.causal)
    moved = 4 * at.tensor + (2 * mechanism.between(at) if n else 0)
    elements = mechanism.held(at) if n else 0
    # rows, whose features a backward pass makes again where they are many
    features = (work.n_q + work.n_k) * mechanism.row_flops(size)
    again = 2 if mechanism.feature_width(size) > WIDE * size else 1
    for count, read in steps:
        pairs = count * pair_flops(mechanism, size)
        # features and values, features of keys once more in the blocks that read them, and scores
        parts = work.n_q * width, work.n_k * width, work.n_k * (size + 1), read * width, count
        flops += pairs + features
        # the weight again, and the gradients of both
        backward += 3 * pairs + again * features
        moved += 2 * sum(parts) + 2 * count
        elements = max(elements, sum(min(LIMITS.product, heads * part) for part in parts))
    if work.hybrid:
        # sums of some heads that pairs are taken from, and what is kept of all of them
        sums = work.n_q * (size + 1)
        moved, elements = moved + 3 * sums, elements + 4 * heads * work.n_q
        if steps:
            elements += min(heads, max(2, LIMITS.product // max(1, sums))) * sums
    return Products(flops, backward, moved, elements)


def pair_flops(mechanism: MechanismDeclaration, size: int) -> int:
    """The operations of a single pair of a sum of features: its weight, and what it adds."""
    return 2 * (mechanism.pair_width(size) + size + 1)
