"""Which weights a call drops, by counters: any kernel, tiling and direction drops the same.

The generator is that of `attnspec.graphs.counter_rng`, Philox 4x32-10. Its key is a seed, drawn on
the device for every call, so that nothing waits for it and CUDA graphs draw anew when they are
replayed. The counter of the weight of query row i and key row j is (i, j, line, DROPOUT), where the
lines are the query heads of all samples, b H + h. With probability p the weight becomes 0, where
the upper 31 bits of the first word are below p 2^31; the others are divided by 1 - p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspec.graphs.counter_rng import DROPOUT, MASK, philox
from attnspec.lower.work import Call

BITS = 31
"""Of a word that are compared."""


def least_of(p: float) -> int:
    """The least number of `BITS` bits that is kept."""
    return min(round(p * (1 << BITS)), (1 << BITS) - 1)


def factor_of(p: float) -> float:
    """What weights that are kept are multiplied with."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def kept(call: Call, shape: torch.Size, q_rows: Tensor, k_rows: Tensor) -> Tensor | None:
    """Which weights of query rows int64 [G, h] and key rows int64 [G, w] are kept, bool
    [B, K, R, G, h, w] for B samples, K key heads and R query heads of each, each then multiplied
    with `factor_of`; None without a seed."""
    if call.seed is None:
        return None
    lines = call.line + torch.arange(shape.numel(), device=call.seed.device)
    counter = q_rows[..., None], k_rows[:, None], lines.view(*shape, 1, 1, 1), DROPOUT
    # of the products of two words int64 holds the lower 64 bits, which are all of them
    words: Tensor = philox(counter, (call.seed & MASK, call.seed >> 32 & MASK))[0]
    return words >> 32 - BITS >= least_of(call.dropout_p)
