"""Spherical k-means: unit vectors, each in the cluster of its nearest centroid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attnspec.backends.common.score_formula import unit
from attnspec.backends.decided.ranking import first_greatest
from attnspec.graphs.counter_rng import CENTROIDS, Stream, distinct

ROUNDS = 10

MOST = 1 << 22
"""Numbers of one product that are looked at together."""


@dataclass(frozen=True, eq=False)
class Points:
    """Unit vectors float32 [B, H, N, d], of length 0 where `real`, bool [B, N], says there is
    none."""

    at: torch.Tensor
    real: torch.Tensor

    @staticmethod
    def of(vectors: torch.Tensor, real: torch.Tensor) -> Points:
        vectors = vectors.float().masked_fill(~real[:, None, :, None], 0.0)
        return Points(unit(vectors), real)

    @cached_property
    def zero(self) -> torch.Tensor:
        """Which points are vectors of length 0, bool [B, H, N]."""
        return self.at.abs().amax(-1) == 0


def drawn(
    points: Points, count: int, seed: int, layer: int, heads: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first centroids [B, H, count, d], as many of the points, and bool [B, 1, count], which
    there are: fewer where there are fewer points. Number i of the draw is the i-th real point."""
    batch = len(points.at)
    population = points.real.sum(-1).cpu().numpy()
    row = np.zeros(batch, np.int64)
    found = np.stack(
        [distinct(Stream(seed, CENTROIDS, layer, head), row, population, count) for head in heads],
        1,
    )
    number = torch.from_numpy(np.sort(found, axis=-1)).to(points.at.device, torch.int64)
    # the numbers that are missing stand first: let them stand last
    number = torch.where(number < 0, points.real.shape[1], number).sort(-1).values
    exists = (number < points.real.sum(-1)[:, None, None])[:, :1]
    place = points.real.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    at = place[:, None].expand(-1, len(heads), -1).gather(2, number.clamp_max(place.shape[1] - 1))
    return points.at.gather(2, at[..., None].expand(-1, -1, -1, points.at.shape[3])), exists


def nearest(points: Points, centroids: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """The nearest centroid of every point, int64 [B, H, N]; ties go to the lower one, vectors of
    length 0 to the first."""
    batch, heads, count, _ = points.at.shape
    together = max(1, MOST // max(1, batch * heads * centroids.shape[2]))
    parts, every = [], bool(exists.all())
    for low in range(0, count, together):
        near = points.at[:, :, low : low + together] @ centroids.transpose(-1, -2)
        if not every:
            near.masked_fill_(~exists[:, :, None], -torch.inf)
        parts.append(first_greatest(near))
    return torch.cat(parts, 2).masked_fill_(points.zero, 0)


def moved(points: Points, labels: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The directions of the sums of clusters [B, H, count, d]; one without a sum stays."""
    lead, (count, size) = labels.shape[:2].numel(), centroids.shape[2:]
    first = torch.arange(lead, device=labels.device).view(*labels.shape[:2], 1) * count
    total = centroids.new_zeros(lead * count, size)
    total.index_add_(0, (labels + first).flatten(), points.at.reshape(-1, size))
    total = total.view(centroids.shape)
    some = (total != 0).any(-1, keepdim=True)
    return torch.where(some, unit(total), centroids)


def kmeans(
    points: Points, count: int, seed: int, layer: int, heads: tuple[int, ...]
) -> torch.Tensor:
    """The cluster of every point, int64 [B, H, N]."""
    centroids, exists = drawn(points, count, seed, layer, heads)
    for _ in range(ROUNDS):
        centroids = moved(points, nearest(points, centroids, exists), centroids)
    return nearest(points, centroids, exists)
