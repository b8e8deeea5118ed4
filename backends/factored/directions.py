"""Random directions of features: the same on every machine, for each layer, head and draw.

They are drawn in float64 by the generator of `graphs.counter_rng` and rounded to the type of a
call. Seed, layer, head and the number of the draw say what they are: nothing is learned or stored.
Source of orthogonal rows: Choromanski et al. 2021, "Rethinking Attention with Performers", 2.4.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import apart
from attnspec.graphs.counter_rng import FEATURES, Stream, normals
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.lower.cache import DRAWS, Cache

KEPT = 256
"""How many sets of directions are kept."""

_kept: Cache[tuple[object, ...], Tensor] = Cache(KEPT, DRAWS)


def directions(
    declared: Favor | Rbf | Rfa, layer: int, heads: tuple[int, ...], draw: int, x: Tensor
) -> Tensor:
    """The directions [heads, count, size] of some heads for rows x, in the type of their sums."""
    orthogonal = getattr(declared, "orthogonal", isinstance(declared, Rbf))
    drawn = draw, declared.features, x.shape[-1], orthogonal
    kind = torch.promote_types(x.dtype, torch.float32)

    def build() -> Tensor:
        rows = [one_head(declared.seed, layer, head, *drawn) for head in heads]
        return torch.from_numpy(np.stack(rows)).to(x.device, kind)

    # it is kept, so the modes of this call must not reach it
    wanted = declared.seed, layer, heads, *drawn, str(kind), str(x.device)
    return _kept.get(wanted, lambda: apart(build))


def one_head(
    seed: int, layer: int, head: int, draw: int, count: int, size: int, orthogonal: bool
) -> np.ndarray:
    """Gaussian rows [count, size], in blocks of `size` orthogonal to each other if asked: then they
    have directions of their own, and the lengths of other Gaussian rows."""
    stream = Stream(seed, FEATURES + draw, layer, head)
    if not orthogonal:
        return normals(stream, np.arange(count), size)
    drawn = normals(stream, np.arange(-(-count // size) * size), 2 * size)
    found, upper = np.linalg.qr(drawn[:, :size].reshape(-1, size, size))
    # the signs that a factorisation happens to choose are not part of a uniform rotation
    signs = np.sign(np.diagonal(upper, axis1=1, axis2=2))
    rows = (found * signs[:, None]).swapaxes(1, 2).reshape(-1, size)
    return np.asarray(rows * np.linalg.norm(drawn[:, size:], axis=1)[:, None])[:count]
