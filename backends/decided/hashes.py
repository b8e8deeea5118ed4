"""Hashes of vectors: near ones fall into one bucket more often than others."""

from __future__ import annotations

from itertools import product
from typing import TypeAlias

import numpy as np
import torch

from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.graphs.counter_rng import HASHES, Stream, normals
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.limits import LIMITS
from attnspec.lower.cache import DRAWS, Cache

Wanted: TypeAlias = "tuple[int, int, tuple[int, ...], int, int, int]"
"""Seed, layer, heads, rounds, size of a head, columns."""

_kept: Cache[tuple[Wanted, str], torch.Tensor] = Cache(LIMITS.draws, DRAWS)


def rotations(wanted: Wanted, device: torch.device) -> torch.Tensor:
    """Gaussian numbers float32 [heads, rounds, columns, size]: place i of the vectors of round r is
    row r * size + i of the stream of its layer and head."""

    def build() -> torch.Tensor:
        seed, layer, heads, rounds, size, columns = wanted
        rows = np.arange(rounds * size)
        drawn = [normals(Stream(seed, HASHES, layer, head), rows, columns) for head in heads]
        found = np.stack(drawn).reshape(len(heads), rounds, size, columns)
        return torch.from_numpy(found).transpose(2, 3).to(device, torch.float32).contiguous()

    return _kept.get((wanted, str(device)), lambda: apart(build))


def buckets_of(leaf: Lsh, x: torch.Tensor, heads: tuple[int, ...], count: int) -> torch.Tensor:
    """The bucket of every vector of x [B, H, n, d] in every round, int64 [B, H, rounds, n]; ties go
    to the lower bucket."""
    batch, _, n, size = x.shape
    columns = count.bit_length() - 1 if leaf.hash == "hyperplanes" else count // 2
    drawn = rotations((leaf.seed, leaf.layer, heads, leaf.rounds, size, columns), x.device)
    turns = min(leaf.rounds, max(1, LIMITS.columns // max(1, columns)))
    together = max(1, LIMITS.product // max(1, turns * columns))
    found = x.new_empty(batch, len(heads), leaf.rounds, n, dtype=torch.int64)
    room = x.new_empty(min(n, together) * turns * columns, dtype=torch.float32)
    parts = product(range(batch), range(len(heads)), range(0, leaf.rounds, turns))
    for sample, head, first in parts:
        some = drawn[head, first : first + turns]
        sides = some.flatten(0, 1)
        for low in range(0, n, together):
            rows = x[sample, head, low : low + together].float()
            y = room[: len(rows) * len(sides)].view(-1, len(rows))
            # forward mode takes no `out`
            y = torch.mm(sides, rows.T, out=None if is_transformed() else y)
            y = y.view(*some.shape[:2], -1)
            mine = _side(y) if leaf.hash == "hyperplanes" else farthest(y)
            found[sample, head, first : first + turns, low : low + together] = mine
    return found


def _side(y: torch.Tensor) -> torch.Tensor:
    """Of which sides of planes the columns of y [rounds, c, m] are, as the bits of one number."""
    return ((y > 0) * 2 ** torch.arange(y.shape[1], device=y.device)[:, None]).sum(1)


def farthest(y: torch.Tensor) -> torch.Tensor:
    """argmax([y; -y]) of each column of y [rounds, c, m], the first of several, 0 where a number is
    none; y is written over."""
    top, most = _first_greatest(y)
    bottom, least = _first_greatest(y.neg_())
    found = torch.where(top >= bottom, most, least + y.shape[1])
    return found.masked_fill_(top.isnan(), 0)


def _first_greatest(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest number of each column of y [rounds, c, m], and where it first stands."""
    if not y.is_cpu:
        return y.max(1)
    # pooling over channels that lie together is torch's one search for a place in vectors: a
    # seventh of the time
    images = y[:, :, None].permute(0, 3, 1, 2)
    found = torch.ops.aten.max_pool2d_with_indices(images, [y.shape[1], 1])
    top, most = (x.flatten(1) for x in found)
    return top, most
