"""Hashes of vectors: near ones fall into one bucket more often than others."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from attnspec.backends.common.torch_modes import apart
from attnspec.backends.decided.ranking import first_greatest, first_least
from attnspec.graphs.counter_rng import HASHES, Stream, normals
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.lower.cache import Cache

KEPT = 8
"""How many sets of rotations are kept."""

MOST = 1 << 20
"""Numbers of one product that are looked at together: what stays in the cache."""

Wanted: TypeAlias = "tuple[int, int, tuple[int, ...], int, int, int]"
"""Seed, layer, heads, round, size of a head, columns."""

_kept: Cache[tuple[Wanted, str], torch.Tensor] = Cache(KEPT)


def rotations(wanted: Wanted, device: torch.device) -> torch.Tensor:
    """Gaussian numbers float32 [heads, size, columns]: row i of round r is row r * size + i of the
    stream of its layer and head."""

    def build() -> torch.Tensor:
        seed, layer, heads, turn, size, columns = wanted
        rows = turn * size + np.arange(size)
        drawn = [normals(Stream(seed, HASHES, layer, head), rows, columns) for head in heads]
        return torch.from_numpy(np.stack(drawn)).to(device, torch.float32)

    return _kept.get((wanted, str(device)), lambda: apart(build))


def buckets_of(leaf: Lsh, x: torch.Tensor, heads: tuple[int, ...], count: int) -> torch.Tensor:
    """The bucket of every vector of x [B, H, n, d] in every round, int64 [B, H, rounds, n]; ties go
    to the lower bucket."""
    found = []
    planes = leaf.hash == "hyperplanes"
    columns = count.bit_length() - 1 if planes else count // 2
    together = max(1, MOST // max(1, x.shape[0] * x.shape[1] * 2 * columns))
    for turn in range(leaf.rounds):
        drawn = rotations((leaf.seed, leaf.layer, heads, turn, x.shape[3], columns), x.device)
        parts = []
        for low in range(0, x.shape[2], together):
            y = x[:, :, low : low + together].float() @ drawn
            if planes:
                bits = 2 ** torch.arange(columns, device=x.device)
                parts.append(((y > 0) * bits).sum(-1))
            else:
                parts.append(_farthest(y))
        found.append(torch.cat(parts, 2))
    return torch.stack(found, 2)


def _farthest(y: torch.Tensor) -> torch.Tensor:
    """argmax([y; -y]) of each row [..., c], the first of several."""
    most, least = first_greatest(y), first_least(y)
    top, bottom = (y.gather(-1, x[..., None])[..., 0] for x in (most, least))
    return torch.where(top >= -bottom, most, least + y.shape[-1])
