"""Hashes of vectors: near ones fall into one bucket more often than others."""

from __future__ import annotations

from itertools import product
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

MOST = 1 << 18
"""Numbers of one product that are looked at together: what stays in the cache."""

WIDE = 1 << 10
"""Columns of one product, about: those of some rounds, or of one that has more. Of more columns
too few rows would be looked at together."""

Wanted: TypeAlias = "tuple[int, int, tuple[int, ...], int, int, int]"
"""Seed, layer, heads, rounds, size of a head, columns."""

_kept: Cache[tuple[Wanted, str], torch.Tensor] = Cache(KEPT)


def rotations(wanted: Wanted, device: torch.device) -> torch.Tensor:
    """Gaussian numbers float32 [heads, size, rounds, columns]: row i of round r is row r * size + i
    of the stream of its layer and head."""

    def build() -> torch.Tensor:
        seed, layer, heads, rounds, size, columns = wanted
        rows = np.arange(rounds * size)
        drawn = [normals(Stream(seed, HASHES, layer, head), rows, columns) for head in heads]
        found = np.stack(drawn).reshape(len(heads), rounds, size, columns)
        return torch.from_numpy(found).transpose(1, 2).to(device, torch.float32).contiguous()

    return _kept.get((wanted, str(device)), lambda: apart(build))


def buckets_of(leaf: Lsh, x: torch.Tensor, heads: tuple[int, ...], count: int) -> torch.Tensor:
    """The bucket of every vector of x [B, H, n, d] in every round, int64 [B, H, rounds, n]; ties go
    to the lower bucket."""
    batch, _, n, size = x.shape
    columns = count.bit_length() - 1 if leaf.hash == "hyperplanes" else count // 2
    drawn = rotations((leaf.seed, leaf.layer, heads, leaf.rounds, size, columns), x.device)
    turns = min(leaf.rounds, max(1, WIDE // max(1, columns)))
    together = max(1, MOST // max(1, turns * columns))
    found = x.new_empty(batch, len(heads), leaf.rounds, n, dtype=torch.int64)
    room = x.new_empty(min(n, together) * turns * columns, dtype=torch.float32)
    parts = product(range(batch), range(len(heads)), range(0, leaf.rounds, turns))
    for sample, head, first in parts:
        some = drawn[head, :, first : first + turns]
        sides = some.flatten(1)
        for low in range(0, n, together):
            rows = x[sample, head, low : low + together].float()
            y = room[: len(rows) * sides.shape[1]].view(len(rows), -1)
            y = torch.mm(rows, sides, out=y).view(-1, *some.shape[1:])
            mine = _side(y) if leaf.hash == "hyperplanes" else _farthest(y)
            found[sample, head, first : first + turns, low : low + together] = mine.T
    return found


def _side(y: torch.Tensor) -> torch.Tensor:
    """Of which sides of planes the rows [..., c] are, as the bits of one number."""
    return ((y > 0) * 2 ** torch.arange(y.shape[-1], device=y.device)).sum(-1)


def _farthest(y: torch.Tensor) -> torch.Tensor:
    """argmax([y; -y]) of each row [..., c], the first of several."""
    most, least = first_greatest(y), first_least(y)
    top, bottom = (y.gather(-1, x[..., None])[..., 0] for x in (most, least))
    return torch.where(top >= -bottom, most, least + y.shape[-1])
