"""How likely choices find what they look for: by hashes at an angle, by means of blocks.

A block of b keys with one planted key, whose score is above that of others by a gap, is told from
blocks without by the mean of its scores. For unit vectors of size d the means differ by gap / b and
each has the variance 1 / (d b), so that

    SNR = gap sqrt(d / (2 b)),

and it is among the r best of N where fewer than r others have a greater mean.
Source: Xiao et al. 2025, "Optimizing Mixture of Block Attention", section 3.

    >>> round(planted(1.0, 64, 64, 1, 2), 4), round(planted(0.0, 64, 64, 3, 12), 4)
    (0.7602, 0.25)
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from scipy.special import bdtr, ndtr

from attnspec.analysis.approximation.collisions import collision, overflow
from attnspec.graphs.relation import DataDependent

COSINES = (0.95, 0.9, 0.7, 0.5, 0.0)
GAPS = (1.0, 0.5, 0.25)
POINTS = 64
"""Of the quadrature over a Gaussian."""


def planted(gap: float, d: int, size: int, taken: int, blocks: int) -> float:
    """The probability that a block with a planted key is among the best `taken` of `blocks`, for
    unit vectors of size d."""
    if taken >= blocks:
        return 1.0
    nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS)
    # in standard deviations of one mean, whose difference has the root of two of them
    beaten = ndtr(-(nodes + gap * sqrt(d / size)))
    found = bdtr(taken - 1, blocks - 1, beaten)
    return float((weights * found).sum() / weights.sum())


def finds(leaf: DataDependent, n: int, d: int) -> str:
    """How likely a choice finds what it looks for at n positions, in words; "" where no formula is
    known."""
    hashing, ranking = leaf.hashing(n), leaf.ranking(n)
    if hashing is not None and hashing.angular:
        chances = (collision(cosine, hashing.buckets) for cosine in COSINES)
        return "a key in one bucket with its query, before chunks: " + ", ".join(
            f"cos {cosine:g} {_percent(1 - (1 - chance) ** hashing.rounds)}"
            for cosine, chance in zip(COSINES, chances, strict=True)
        )
    if ranking is None:
        return ""
    size, taken = ranking.size, ranking.taken
    shares = (planted(gap, d, size, taken, ranking.count) if taken else 0.0 for gap in GAPS)
    return (
        f"a planted key, SNR = gap * {sqrt(d / (2 * size)):.3g}, unit vectors, the last query: "
    ) + ", ".join(f"gap {gap:g} {_percent(share)}" for gap, share in zip(GAPS, shares, strict=True))


def overflows(leaf: DataDependent, n: int) -> str:
    """How likely a bucket holds more than a query reads of it, in words; "" where that is no
    question."""
    hashing = leaf.hashing(n)
    if hashing is None or hashing.reach is None:
        return ""
    chance = overflow(n, hashing.buckets, hashing.reach)
    return (
        f"some of {hashing.buckets:,} buckets above {hashing.reach:,}: at most {_percent(chance)}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
