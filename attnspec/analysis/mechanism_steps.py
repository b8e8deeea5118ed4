"""What a group of heads with a mechanism costs besides the exact weights of a graph beside it.

The sums over all keys, from which what the kernel gives the pairs of the graph is taken: these are
products of features, which are made once more for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnspec.analysis.mechanism_costs import (
    backward_flops_of,
    flops_of,
    given_to,
    pair_flops_of,
    row_flops_of,
    width_of,
)
from attnspec.analysis.mechanism_memory import Shape, held, moved
from attnspec.banding import bands_of
from attnspec.covering import survey
from attnspec.lagging import lagged
from attnspec.target import Work, mechanism_of

PIECE = 1 << 19
"""Numbers in the largest temporary of the pairs of a graph."""


@dataclass(frozen=True)
class Products:
    """Operations forward and backward, and numbers moved, of one head; numbers that all heads hold
    besides q, k, v and the output; whether they were counted from a sample."""

    flops: int
    backward_flops: int
    moved: int
    held: int
    sampled: bool = False


def products_of(work: Work, heads: int, size: int) -> Products:
    """What the features of a mechanism take."""
    mechanism, steps, sampled = mechanism_of(work), list[tuple[int, int]](), False
    lag = 0
    if work.hybrid and work.reads:
        # laid out for the inputs of every call; never more than all pairs
        steps = [(work.n_q * work.n_k, work.n_k)]
    elif work.hybrid:
        lag, rest = lagged(work)
        for band in bands_of(rest, work.n_q, work.n_k) if rest is not None else ():
            seen = survey(band.step.relation, work.n_q, work.n_k, band.step.order, band.sizes)
            pairs = round(sum(seen.area))
            steps.append((pairs, pairs // max(1, band.sizes[0])))
            sampled |= seen.sampled
    n = max(0, work.n_k - lag)
    shape = Shape(n, size, heads, work.causal)
    found = Products(
        flops_of(mechanism, n, size, work.causal),
        backward_flops_of(mechanism, n, size, work.causal),
        moved(mechanism, shape),
        held(mechanism, shape),
        sampled,
    )
    for pairs, read in steps:
        found = _with_pairs(found, work, (pairs, read), (heads, size))
    if not work.hybrid:
        return found
    # sums of some heads, and what is kept of all of them
    sums = work.n_q * (size + 1)
    beside = min(heads, max(2, PIECE // max(1, sums))) * sums + 4 * heads * work.n_q
    return replace(found, moved=found.moved + 3 * sums, held=found.held + beside)


def _with_pairs(
    before: Products, work: Work, pairs: tuple[int, int], sizes: tuple[int, int]
) -> Products:
    """What the pairs of a step take besides; `pairs` are those of one head, and the keys that its
    blocks read."""
    (count, read), (heads, size) = pairs, sizes
    mechanism = mechanism_of(work)
    forward, backward = pair_flops_of(mechanism, size)
    rows = work.n_q + work.n_k
    features = [rows * each for each in row_flops_of(mechanism, size)]
    width = width_of(mechanism.name, size, given_to(mechanism))
    # features and values, features of keys once more in the blocks that read them, and scores
    parts = work.n_q * width, work.n_k * width, work.n_k * (size + 1), read * width, count
    return replace(
        before,
        flops=before.flops + count * forward + features[0],
        backward_flops=before.backward_flops + count * backward + features[1],
        moved=before.moved + 2 * sum(parts) + 2 * count,
        held=max(before.held, sum(min(PIECE, heads * part) for part in parts)),
    )
