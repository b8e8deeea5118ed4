"""`cluster`: tokens find the nearest of some centroids, or centroids their nearest tokens.

Clusters are those of spherical k-means: unit vectors, each in the cluster of its nearest centroid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.score_formula import unit
from attnspec.backends.common.torch_modes import apart, array_of
from attnspec.backends.decided.choice import Choice, CodeChoice, Given, look_up
from attnspec.backends.decided.ranking import best, listed, marked
from attnspec.graphs.counter_rng import CENTROIDS, Stream, distinct
from attnspec.graphs.patterns.cluster import Cluster
from attnspec.limits import LIMITS
from attnspec.lower.cache import DRAWS, Cache

KEPT = 0.999
"""How much of a centroid stays in each call of training."""

ROUNDS = 10

_kept: Cache[tuple[object, ...], Tensor] = Cache(LIMITS.draws, DRAWS)
"""The numbers drawn [m, heads, count] for seed, layer, heads, count, device and m sizes."""


class Points:
    """Unit vectors float32 [B, H, N, d], of length 0 where `real`, bool [B, N], says there is
    none."""

    def __init__(self, vectors: Tensor, real: Tensor) -> None:
        self.at, self.real = unit(vectors.float().masked_fill(~real[:, None, :, None], 0.0)), real

    @staticmethod
    def of_both(given: Given) -> Points:
        """The queries of a call, and behind them its keys as each head reads them."""
        real = torch.cat([given.real[:, given.first_query :], given.real], 1)
        return Points(torch.cat([given.q, given.keys_by_head], 2), real)

    @cached_property
    def zero(self) -> Tensor:
        """Which points are vectors of length 0, bool [B, H, N]."""
        return self.at.abs().amax(-1) == 0


def drawn(
    points: Points, count: int, leaf: Cluster, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The first centroids [B, H, count, d], as many of the points, and bool [B, 1, count], which
    there are: fewer where there are fewer points. Number i of the draw is the i-th real point."""
    device, sizes = points.at.device, points.real.sum(-1)
    each, which = np.unique(array_of(sizes), return_inverse=True)

    def build() -> Tensor:
        streams = [Stream(leaf.seed, CENTROIDS, leaf.layer, head) for head in heads]
        row = np.zeros(len(each), np.int64)
        rows = np.stack([distinct(stream, row, each, count) for stream in streams], 1)
        # those that are missing stand last
        rows = np.sort(np.where(rows < 0, each[:, None, None], rows), axis=-1)
        return torch.from_numpy(rows).to(device, torch.int64)

    key = leaf.seed, leaf.layer, heads, count, str(device), tuple(each.tolist())
    number = _kept.get(key, partial(apart, build))[torch.from_numpy(which).to(device)]
    exists = (number < sizes[:, None, None])[:, :1]
    place = points.real.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    at = place[:, None].expand(-1, len(heads), -1).gather(2, number.clamp_max(place.shape[1] - 1))
    return points.at.gather(2, at[..., None].expand(-1, -1, -1, points.at.shape[3])), exists


def nearest(points: Points, centroids: Tensor, exists: Tensor | None = None) -> Tensor:
    """The nearest centroid of every point, int64 [B, H, N]; ties go to the lower one, vectors of
    length 0 to the first."""
    batch, heads, count, _ = points.at.shape
    together = max(1, LIMITS.pairs_at_once // max(1, batch * heads * centroids.shape[2]))
    parts = []
    exists = None if exists is None or bool(exists.all()) else exists
    for low in range(0, count, together):
        near = points.at[:, :, low : low + together] @ centroids.transpose(-1, -2)
        if exists is not None:
            near.masked_fill_(~exists[:, :, None], -torch.inf)
        # the same, several times as fast
        first = torch.from_numpy(array_of(near).argmax(-1)) if near.is_cpu else near.argmax(-1)
        parts.append(first)
    return torch.cat(parts, 2).masked_fill_(points.zero, 0)


def sums_of(points: Points, labels: Tensor, count: int) -> Tensor:
    """The sums of the vectors of so many clusters, [B, H, count, d]."""
    lead, size = labels.shape[:2].numel(), points.at.shape[3]
    first = torch.arange(lead, device=labels.device).view(*labels.shape[:2], 1) * count
    total = points.at.new_zeros(lead * count, size)
    total.index_add_(0, (labels + first).flatten(), points.at.reshape(-1, size))
    return total.view(*labels.shape[:2], count, size)


def kmeans(points: Points, count: int, leaf: Cluster, heads: tuple[int, ...]) -> Tensor:
    """The cluster of every point, int64 [B, H, N]: centroids move to the directions of the sums of
    their clusters, and one without a sum stays."""
    centroids, exists = drawn(points, count, leaf, heads)
    for _ in range(ROUNDS):
        labels = nearest(points, centroids, exists)
        total = sums_of(points, labels, centroids.shape[2])
        centroids = torch.where((total != 0).any(-1, keepdim=True), unit(total), centroids)
    return nearest(points, centroids, exists)


@dataclass(frozen=True, eq=False)
class QueryClusters(Choice):
    """Clusters of queries: `labels` int64 [B, H, n_q], -1 for padding, of `count`."""

    labels: Tensor
    count: int
    n_k: int

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        at = q - (self.n_k - self.labels.shape[2])
        return (look_up(self.labels, at) >= 0) & (k == k)

    def attending(self, q: Tensor) -> Tensor:
        """The mean of the queries of each query's cluster, [B, H, n_q, d]."""
        return self.spread(self.means(q), 0.0)

    def means(self, q: Tensor) -> Tensor:
        """The mean of the queries of each cluster, [B, H, count, d]."""
        label = (self.labels + 1)[..., None].expand_as(q)
        kept = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros(*q.shape[:2], self.count + 1, q.shape[3], dtype=kept)
        total = total.scatter_add(2, label, q.to(kept))
        one = torch.ones_like(label[..., :1]).to(kept)
        many = torch.zeros_like(total[..., :1]).scatter_add(2, label[..., :1], one)
        return (total / many.clamp_min(1)).to(q.dtype)[:, :, 1:]

    def spread(self, x: Tensor, none: float) -> Tensor:
        """x [B, H, count, e] of clusters for their queries [B, H, n_q, e]; `none` for padding."""
        label = self.labels[..., None]
        taken = x.gather(2, label.clamp_min(0).expand(-1, -1, -1, x.shape[3]))
        return taken.masked_fill(label < 0, none)

    @property
    def lists(self) -> Mapping[str, Tensor]:
        return {"queries": self.labels}


@torch.no_grad()
def decide(leaf: Cluster, given: Given) -> Choice:
    """The clusters of all queries and keys."""
    if leaf.labels is not None:
        labels = given.data[leaf.labels.name].to(torch.int64)[:, :, None]  # type: ignore[attr-defined]
        named = {"queries": labels[:, :, 0, given.first_query :], "keys": labels[:, :, 0]}
        # numbers below 0 are labels, too
        codes = labels.unique(return_inverse=True)[1]
        return replace(_by_labels(codes[..., given.first_query :], codes), named=named)
    q_real = given.real[:, given.first_query :]
    count = min(leaf.count or max(1, math.isqrt(given.n_k)), given.n_k)
    if leaf.of == "q":
        labels = kmeans(Points(given.q, q_real), count, leaf, given.heads)
        return QueryClusters(labels.masked_fill(~q_real[:, None], -1), count, given.n_k)
    if leaf.assign == "balanced":
        return _balanced(given, q_real)
    labels = kmeans(Points.of_both(given), count, leaf, given.heads)
    q, k = torch.split(labels, [given.n_q, given.n_k], 2)
    q, k = q.masked_fill(~q_real[:, None], -1), k.masked_fill(~given.real[:, None], -1)
    return _by_labels(q[:, :, None], k[:, :, None])


def _by_labels(q: Tensor, k: Tensor) -> CodeChoice:
    """Queries with labels [B, H or 1, i, n_q] read keys [B, H or 1, j, n_k] that have one of
    them."""
    ways = tuple(product(range(q.shape[2]), range(k.shape[2])))
    named = {"queries": q.transpose(2, 3), "keys": k.transpose(2, 3)}
    if len(ways) == 1:
        named = {name: x[..., 0] for name, x in named.items()}
    return CodeChoice.of(q, k, ways, named)


def _balanced(given: Given, q_real: Tensor) -> Choice:
    """Each centroid takes its nearest queries and its nearest keys, as many of each."""
    centroids = unit(given.tables["centroids"].float())
    width = -(-given.n_k // centroids.shape[1])
    q = _taken(Points(given.q, q_real), centroids, width)
    k = _taken(Points(given.keys_by_head, given.real), centroids, width)
    return _by_labels(q.transpose(2, 3), k.transpose(2, 3))


def _taken(points: Points, centroids: Tensor, width: int) -> Tensor:
    """The centroids that take each point, lists int64 [B, H, N, r]; ties go to earlier points."""
    batch, heads, count, _ = points.at.shape
    together = max(1, LIMITS.pairs_at_once // max(1, batch * heads * count))
    tables = []
    for low in range(0, centroids.shape[1], together):
        near = centroids[:, low : low + together] @ points.at.transpose(-1, -2)
        near = near.masked_fill(~points.real[:, None, None], -torch.inf)
        tables.append(marked(best(near, None, width), count))
    lists = listed(torch.cat(tables, 2).transpose(2, 3))
    # someone has to have a label for there to be labels
    return lists if lists.shape[3] else lists.new_full((*lists.shape[:3], 1), -1)


@torch.no_grad()
def moved_centroids(given: Given) -> Tensor:
    """The centroids [H or 1, count, d] after a call of training: each a little towards the
    direction of the queries and keys that it is nearest to, those of all samples."""
    kept = given.tables["centroids"]
    centroids = unit(kept.float())
    points = Points.of_both(given)
    spread = centroids[None].expand(len(given.q), given.q.shape[1], -1, -1)
    labels = nearest(points, spread)
    # points that are none are 0
    total = sums_of(points, labels, centroids.shape[1]).sum(0)
    if kept.shape[0] == 1:
        total = total.sum(0, keepdim=True)
    some = (total != 0).any(-1, keepdim=True)
    return torch.where(some, KEPT * centroids + (1 - KEPT) * unit(total), centroids).to(kept.dtype)
