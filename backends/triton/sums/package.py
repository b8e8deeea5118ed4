"""Causal linear attention by the package flash-linear-attention, where that is installed and was
measured to take less time.

What is planned of it is known without torch. Its signature and layout are those of fla-core 0.6
(`fla/ops/linear_attn/chunk.py`).
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from attnspec.backends.triton.tuning import MAPS
from attnspec.lower.mechanism_costs import flops_of
from attnspec.lower.rates import Amounts
from attnspec.lower.work import Work, mechanism_of

DISTRIBUTION = "fla-core"

NAME = "flash-linear-attention"

OLDEST = (0, 6)
"""The first version whose tensors are [B, n, H, d] without being asked."""

SIZE = 64
"""The size of the heads that estimates are about."""


@cache
def is_installed() -> bool:
    """Whether a version of the package is whose functions are known."""
    try:
        parts = version(DISTRIBUTION).split(".")
        return tuple(int(part) for part in parts[:2]) >= OLDEST
    except (PackageNotFoundError, ValueError):
        return False


def computes(work: Work) -> bool:
    """Whether it has what a work is: causal sums of elementwise features, whatever else is not
    installed. Those of `exp` have frames, which it does not know."""
    if work.mechanism is None or work.hybrid or not work.causal:
        return False
    return work.n_q == work.n_k and getattr(work.mechanism, "feature", None) in MAPS


def amounts_of(work: Work) -> Amounts:
    """What it takes, in the units of kernels of sums."""
    operations = flops_of(mechanism_of(work), work.n_k, SIZE, True)
    return {"package_call": 1.0, "package_pair": operations / (4 * SIZE)}
