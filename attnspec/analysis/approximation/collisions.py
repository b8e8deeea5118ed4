"""How likely locality-sensitive hashing brings two vectors together, and how full its buckets get.

The hash of Reformer is h(x) = argmax([x R; -x R]) with R Gaussian of shape [d, M], b = 2 M buckets.
Two vectors at an angle t project on each axis as Gaussians X, Y of correlation r = cos t, so that

    Pr(h(x) = h(y)) = 2 M int int over u, v > 0 of phi_r(u, v) P(|X| <= u, |Y| <= v)^(M - 1),

which is evaluated by quadrature. The asymptotic form M^(-tan(t/2)^2) of Andoni et al. 2015 is far
off at sizes in use: 0.83 in place of 0.50 for b = 64 and r = 0.9.
Source: Kitaev et al. 2020, "Reformer", section 2; Andoni et al. 2015, "Practical and Optimal LSH
for Angular Distance", theorem 1.

    >>> round(collision(0.0, 64), 6), round(collision(0.9, 64), 3), collision(1.0, 64)
    (0.015625, 0.503, 1.0)
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import acos, pi, sqrt

import numpy as np
from scipy.special import bdtrc, owens_t

POINTS = 160
"""Of the quadrature, in either direction."""

FAR = 8.5
"""Standard deviations beyond which there is nothing."""


@lru_cache(maxsize=1024)
def collision(cosine: float, buckets: int) -> float:
    """The probability that two vectors at an angle of this cosine get one of an even number of
    buckets in one round, to about 1e-6."""
    axes = buckets // 2
    if axes == 1:
        return 1 - acos(cosine) / pi
    if abs(cosine) == 1:
        return float(cosine > 0)
    beside = sqrt((1 - cosine) * (1 + cosine))
    nodes, weights = _quadrature()
    # u > 0, and v = r u + sqrt(1 - r^2) w > 0 with w as the second variable: no peak is narrow
    u = (nodes + 1) / 2 * FAR
    u_weight = weights * FAR / 2
    low = np.maximum(-FAR, -cosine * u / beside)[:, None]
    w = low + (nodes + 1) / 2 * (FAR - low)
    w_weight = weights * (FAR - low) / 2
    v = cosine * u[:, None] + beside * w
    square = u[:, None] ** 2 + w**2
    near = square < FAR**2
    wide = np.broadcast_to(u[:, None], w.shape)
    found = np.zeros(w.shape)
    found[near] = _within(wide[near], np.maximum(v[near], 1e-300), cosine) ** (axes - 1)
    found *= np.exp(-square / 2) / (2 * pi)
    total = (found * w_weight).sum(axis=1) @ u_weight
    return float(min(1.0, max(0.0, 2 * axes * total)))


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Places in -1..1 and their weights, both [POINTS]."""
    return np.polynomial.legendre.leggauss(POINTS)


def overflow(n: int, buckets: int, limit: float) -> float:
    """At most this probability that a bucket gets more than `limit` of n vectors whose hashes are
    uniform and independent, by the union bound."""
    # of a binomial's tail `scipy.stats` has the same, and takes half a second to load
    return float(min(1.0, buckets * bdtrc(min(int(limit), n), n, 1 / buckets)))


def largest_bucket(n: int, buckets: int) -> float:
    """At most this many of n such vectors are expected in the fullest bucket: the sum over all
    sizes of the probability that one gets more, by the union bound."""
    return float(np.minimum(1.0, buckets * bdtrc(np.arange(n), n, 1 / buckets)).sum())


def _within(u: np.ndarray, v: np.ndarray, r: float) -> np.ndarray:
    """P(|X| <= u, |Y| <= v) for standard Gaussians of correlation r and u, v > 0."""
    beside = sqrt((1 - r) * (1 + r))
    # the four corners of the rectangle by Owen 1956; what they have in common cancels
    outside = sum(
        owens_t(u, (v / u + side) / beside) + owens_t(v, (u / v + side) / beside)
        for side in (-r, r)
    )
    return np.asarray(np.clip(1 - 2 * outside, 0, 1))
