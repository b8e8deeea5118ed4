"""How far random features are from the kernels that they estimate: published formulas, float64.

For m features and a pair x = q sqrt(s), y = k sqrt(s) with the scale s, SM = exp(x . y); for the
Gaussian kernel x = q / sigma, y = k / sigma, K = exp(-|x - y|^2 / 2).

    mean square error              softmax kernel                            Gaussian kernel
    positive      e^(|x+y|^2) SM^2 (1 - e^(-|x+y|^2)) / m        the same times e^(-|x|^2 - |y|^2)
    hyperbolic    (1 - e^(-|x+y|^2)) / 2 times that of positive
    trig          e^(|x+y|^2) SM^-2 (1 - e^(-|x-y|^2))^2 / 2m

Orthogonal rows, for m <= d, take at least 2 (m-1) / (m (d+2)) (SM - e^(-(|x|^2 + |y|^2) / 2))^2 off
the error of positive features.
Source: Choromanski et al. 2021, "Rethinking Attention with Performers", lemmas 2 and 4, theorems 2
to 4; Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines", claim 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, log, sqrt

import numpy as np

KINDS = ("positive", "hyperbolic", "trig")
"""Feature maps with a formula."""


@dataclass(frozen=True, eq=False)
class PairErrors:
    """Of all pairs of some queries and keys, float64 [n, m] each: the logarithm of the kernel and
    that of the mean square error of its estimate, -inf for none.

    Logarithms, because exp(|x + y|^2) is soon more than a float holds.
    """

    log_kernel: np.ndarray
    log_square: np.ndarray

    @property
    def relative(self) -> np.ndarray:
        """The root of the mean square error as a part of the kernel; inf where it is too large."""
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(self.log_square / 2 - self.log_kernel))

    def less(self, gain: np.ndarray) -> PairErrors:
        """The same with so much off the mean square errors, which stay at least 0."""
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            part = np.minimum(1.0, np.nan_to_num(gain * np.exp(-self.log_square)))
            return PairErrors(self.log_kernel, self.log_square + np.log1p(-part))


def softmax_errors(
    q: np.ndarray, k: np.ndarray, features: int, kind: str = "positive", scale: float | None = None
) -> PairErrors:
    """The errors of FAVOR+ with independent features, for queries [n, d] and keys [m, d]."""
    root = sqrt(1 / sqrt(max(1, q.shape[1])) if scale is None else scale)
    x, y = q * root, k * root
    log_kernel = x @ y.T
    plus, minus = _squares(x, y)
    with np.errstate(divide="ignore"):
        if kind == "trig":
            beyond = plus - 2 * log_kernel + 2 * np.log(-np.expm1(-minus)) - log(2)
        else:
            beyond = plus + 2 * log_kernel + np.log(-np.expm1(-plus))
            if kind == "hyperbolic":
                beyond += np.log(-np.expm1(-plus)) - log(2)
    return PairErrors(log_kernel, beyond - log(features))


def gaussian_errors(q: np.ndarray, k: np.ndarray, features: int, sigma: float) -> PairErrors:
    """The errors of an estimate of exp(-|q - k|^2 / (2 sigma^2)) with independent positive
    features."""
    x, y = q / sigma, k / sigma
    plus, minus = _squares(x, y)
    norms = (x**2).sum(1)[:, None] + (y**2).sum(1)
    with np.errstate(divide="ignore"):
        square = plus + 2 * (x @ y.T) + np.log(-np.expm1(-plus)) - norms
    return PairErrors(-minus / 2, square - log(features))


def orthogonal_gain(
    q: np.ndarray, k: np.ndarray, features: int, scale: float | None = None
) -> np.ndarray:
    """What orthogonal rows take off the mean square error of positive features at least, [n, m],
    for no more features than the size of a head."""
    d = q.shape[1]
    root = sqrt(1 / sqrt(max(1, d)) if scale is None else scale)
    x, y = q * root, k * root
    norms = (x**2).sum(1)[:, None] + (y**2).sum(1)
    part = 2 * (features - 1) / (features * (d + 2))
    return np.asarray(part * (np.exp(x @ y.T) - np.exp(-norms / 2)) ** 2)


def uniform_features(size: int, radius: float, error: float) -> int:
    """About how many orthogonal trigonometric features bring every weight exp(q . k / sqrt(d))
    within `error`, for queries and keys no longer than `radius` and heads of `size` d.

    Theorem 4 is an order of growth: its constant is taken for 1 here.
    """
    # l = R d^(-1/4), h = exp(l^2 / 2), delta = error / h^2
    delta = error / exp(radius**2 / sqrt(size))
    return ceil(size / delta**2 * max(1.0, log(4 * size**0.75 * radius / delta)))


@dataclass(frozen=True)
class UniformBound:
    """Rahimi's and Recht's bound of the probability that the largest error of all pairs is at least
    `error`; it says nothing (`vacuous`) from 1 on. `required` features would bring it to a half."""

    error: float
    probability: float
    required: int

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing."""
        return self.probability >= 1


def rahimi_recht(
    size: int, diameter: float, features: int, error: float, sigma: float = 1.0
) -> UniformBound:
    """2^8 (d diameter^2 / (sigma error)^2) exp(-features error^2 / (4 (d + 2))): the bound for
    trigonometric features of the Gaussian kernel, over points no further apart than `diameter`.

    A feature here is a frequency with its cosine and sine.
    """
    start = 2**8 * size * (diameter / (sigma * error)) ** 2
    decay = error**2 / (4 * (size + 2))
    probability = min(1.0, start * exp(-features * decay))
    required = ceil(max(0.0, log(2 * start)) / decay) if start else 1
    return UniformBound(error, probability, max(1, required))


def _squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|x + y|^2 and |x - y|^2 of all pairs."""
    norms = (x**2).sum(1)[:, None] + (y**2).sum(1)
    twice = 2 * (x @ y.T)
    # rounding may leave a little below 0
    return np.maximum(norms + twice, 0), np.maximum(norms - twice, 0)
