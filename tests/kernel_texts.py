"""Mechanisms that are sums of features, as they are written, and whether under `causal`."""

from __future__ import annotations

BOTH = (
    "linear()",
    "linear(feature = relu)",
    "linear(feature = squared_relu)",
    "linear(feature = exp)",
    "linear(feature = identity)",
    "linear(feature = exp, normalize = none)",
    "favor(features = 24)",
    "favor(features = 24, kind = trig)",
    "favor(features = 24, kind = hyperbolic)",
    "favor(features = 24, kind = relu)",
    "favor(features = 5, orthogonal = false)",
    "rfa(features = 12)",
    "taylor()",
    "taylor(order = 2)",
    "rbf(features = 24, sigma = 2.5)",
)
FULL = ("efficient()", "efficient(normalize = scaling)")
CAUSAL = ("rfa(features = 12, gated = true)",)
CASES = [
    *((text, causal) for text in BOTH for causal in (False, True)),
    *((text, False) for text in FULL),
    *((text, True) for text in CAUSAL),
]
