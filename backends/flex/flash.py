"""Plain bands by flash-attention 4, which FlexAttention calls where that is installed.

What is planned of them is known without torch. It wants a mask in comparisons of positions, looks
no bits up, and gives no gradients of log-sum-exps; its lists are in blocks of 128 x 128 on one
class of GPU alone (torch 2.13, `torch/_inductor/kernel/flex/flex_flash_attention.py`).
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnspec.graphs.relation import Relation
from attnspec.lower.work import Work

if TYPE_CHECKING:
    import torch

PACKAGE = "flash_attn.cute"

COMPUTES = (9, 0)
"""The class of GPU whose blocks are ours: H100, H200."""

SIZES = (64, 128)
"""Numbers of a head."""


class Band(NamedTuple):
    """The pairs q - before <= k <= q + after."""

    before: int
    after: int


def is_installed() -> bool:
    """Whether the package flash-attn-4 is."""
    try:
        return find_spec(PACKAGE) is not None
    except ImportError:
        return False


def runs_on(device: torch.device) -> bool:
    """Whether it is installed and runs on a device."""
    import torch

    if device.type != "cuda" or not is_installed():
        return False
    return torch.cuda.get_device_capability(device) == COMPUTES


def band_of_work(work: Work) -> Band | None:
    """The band that a work is, with the plain softmax of scores, or None."""
    if work.reads or not work.plain:
        return None
    return band_of(work.relation, work.n_q, work.n_k)


@lru_cache(maxsize=256)
def band_of(relation: Relation, n_q: int, n_k: int) -> Band | None:
    """The band that the last n_q of n_k queries read, or None."""
    q = np.arange(n_k - n_q, n_k)
    closed = relation.progressions(q, n_k)
    if closed is None or not n_q or np.broadcast(*closed).shape != (n_q, 1):
        return None
    start, stop, step = (np.broadcast_to(each, (n_q, 1))[:, 0] for each in closed)
    band = Band(int((q - start).max()), int((stop - 1 - q).max()))
    low, high = np.maximum(q - band.before, 0), np.minimum(q + band.after + 1, n_k)
    if (step != 1).any() or (start != low).any() or (stop != high).any():
        return None
    return band


def said(work: Work) -> str:
    """What a plan for a GPU adds to the steps of a work that is a band, "" of others."""
    if work.device != "cuda" or band_of_work(work) is None:
        return ""
    if not is_installed():
        return ", in Triton: the package flash-attn-4 is not installed"
    return f", by flash-attention 4 on a GPU of compute capability {COMPUTES[0]}.{COMPUTES[1]}"
