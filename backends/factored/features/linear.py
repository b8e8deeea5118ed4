"""Linear attention: an elementwise feature map in place of the exponential.

Source: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3.
"""

from __future__ import annotations

from typing import cast

import torch

from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Elementwise
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.spans import Summing
from attnspec.ir.mechanisms.linear import Linear
from attnspec.lower.work import Work

SMALL = 1e-6
"""What is added to sums of weights."""


def linear_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs `linear`."""
    declared = cast(Linear, work.mechanism)
    return FeatureKernel(
        "linear", Summing(Elementwise(declared.feature), work.causal, quotient_of(declared))
    )


def quotient_of(declared: Linear) -> Quotient:
    """What its sums are divided by: weights of the identity may add up to 0 or below."""
    if declared.normalize == "none":
        return Quotient(divides=False)
    if declared.feature == "identity":
        return Quotient(least=SMALL, signed=True)
    return Quotient(added=SMALL)
