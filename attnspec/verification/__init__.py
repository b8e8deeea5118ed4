"""Translation validation: what a compiled attention computes is held against what the spec means.

Four readings of one computation. Positions are sent through the very gathers and masks that a
kernel executes, and the pairs that come out must be those of the definition, each once. With the
unit vectors as values the output is the weights themselves, so every pair is seen, and seen once.
The gradient of one query's output reaches exactly the keys that it reads. And outputs and gradients
are compared with the definition in float64: a backend may err twice as much as the definition does
in the same type.

The first reading alone takes a fraction of the time, so that every compile does it at a second
length, at which bands have several tiles. Every pair of a short sequence is looked at; of a long
one, queries are sampled.
"""

from __future__ import annotations

from attnspec.verification.alone import Alone, beyond, mask_alone, verify_alone
from attnspec.verification.numbers import error_bound
from attnspec.verification.report import Check, Verification
from attnspec.verification.trial import sample_inputs
from attnspec.verification.verify import verify, verify_each

__all__ = [
    "Alone",
    "Check",
    "Verification",
    "beyond",
    "error_bound",
    "mask_alone",
    "sample_inputs",
    "verify",
    "verify_alone",
    "verify_each",
]
