"""Linear attention: a feature map in place of the exponential.

out_i = phi(q_i) . sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j) + 1e-6), on q and k without the
factor 1 / sqrt(d). Causal: the sums run over j <= i.
Feature maps, elementwise: elu1 = elu(x) + 1, relu, squared_relu = relu(x)**2, exp, identity. Sums
of weights that may be negative, of the identity, are kept at least 1e-6 away from 0 with their sign
instead. With normalize = none nothing is divided.
Source: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.parameters import choice


@dataclass(frozen=True)
class Linear(MechanismDeclaration):
    """Attention with an elementwise feature map, linear in n."""

    feature: str = choice(
        "the feature map of queries and keys", "elu1", "relu", "squared_relu", "exp", "identity"
    )
    normalize: str = choice(
        "what the sums of values are divided by: the sum of the weights, or nothing", "sum", "none"
    )

    name: ClassVar = "linear"
    causal: ClassVar = True
    combines: ClassVar = True
    sums: ClassVar = True
    operations: ClassVar = "4 d**2 n"

    @classmethod
    def no_logarithm(cls, arguments: Mapping[str, object]) -> str:
        if arguments.get("normalize") == "none":
            return "which with `normalize = none` divides by no sum"
        return super().no_logarithm(arguments) if arguments.get("feature") == "identity" else ""

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        none = arguments.get("normalize") == "none"
        return "with `normalize = none` does not divide by a sum of weights" if none else ""
