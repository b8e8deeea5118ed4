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
from torch.nn import functional

from attnspec.backends.common.score_formula import unit, widened
from attnspec.backends.common.torch_modes import apart, array_of
from attnspec.backends.decided.choice import Choice, CodeChoice, Given, look_up
from attnspec.backends.decided.ranking import best, listed, marked
from attnspec.graphs.counter_rng import CENTROIDS, Stream, distinct
from attnspec.graphs.patterns.cluster import Cluster
from attnspec.limits import LIMITS
from attnspec.lower.cache import DRAWS, Cache
from attnspec.lower.work import Heads

KEPT = 0.999
"""How much of a centroid stays in each call of training."""

ROUNDS = 10

_kept: Cache[tuple[object, ...], Tensor] = Cache(LIMITS.draws, DRAWS)
"""The numbers drawn [m, heads, count] for seed, layer, heads, count, device and m sizes."""


class Points:
    """Unit vectors float32 [B, H, N, d], of length 0 where `real`, bool [B, N], is False."""

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


def drawn(points: Points, count: int, leaf: Cluster, heads: Heads) -> tuple[Tensor, Tensor]:
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
    at = place[:, None].take_along_dim(number.clamp_max(place.shape[1] - 1), 2)
    return points.at.take_along_dim(at[..., None], 2), exists


def nearest(points: Points, centroids: Tensor, exists: Tensor | None = None) -> Tensor:
    """The nearest centroid of every point, int64 [B, H, N]; ties go to the lower one, vectors of
    length 0 to the first."""
    together = LIMITS.pairs_at_once // max(1, centroids.shape[:3].numel())
    parts = []
    exists = None if exists is None or bool(exists.all()) else exists
    for some in torch.split(points.at, max(1, together), 2):
        near = some @ centroids.mT
        if exists is not None:
            near.masked_fill_(~exists[:, :, None], -torch.inf)
        # the same, several times as fast
        first = torch.from_numpy(array_of(near).argmax(-1)) if near.is_cpu else near.argmax(-1)
        parts.append(first)
    return torch.cat(parts, 2).masked_fill_(points.zero, 0)


def sums_of(vectors: Tensor, labels: Tensor, count: int) -> Tensor:
    """The sums of the vectors [B, H, N, d] of so many clusters, [B, H, count, d]."""
    lead, size = labels.shape[:2].numel(), vectors.shape[3]
    first = torch.arange(lead, device=labels.device).view(*labels.shape[:2], 1) * count
    total = vectors.new_zeros(lead * count, size)
    total = total.index_add(0, (labels + first).flatten(), vectors.reshape(-1, size))
    return total.view(*labels.shape[:2], count, size)


def kmeans(points: Points, count: int, leaf: Cluster, heads: Heads) -> Tensor:
    """The cluster of every point, int64 [B, H, N], -1 of none: centroids move to the directions of
    the sums of their clusters, and one without a sum stays."""
    centroids, exists = drawn(points, count, leaf, heads)
    for _ in range(ROUNDS):
        labels = nearest(points, centroids, exists)
        total = sums_of(points.at, labels, centroids.shape[2])
        centroids = torch.where((total != 0).any(-1, keepdim=True), unit(total), centroids)
    return nearest(points, centroids, exists).masked_fill_(~points.real[:, None], -1)


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
        # how many they are is the sum of a column of ones
        rows = functional.pad(widened(q), (0, 1), value=1.0)
        total = sums_of(rows, self.labels + 1, self.count + 1)[:, :, 1:]
        return (total[..., :-1] / total[..., -1:].clamp_min(1)).to(q.dtype)

    def spread(self, x: Tensor, none: float) -> Tensor:
        """x [B, H, count, e] of clusters for their queries [B, H, n_q, e]; `none` for padding."""
        label = self.labels[..., None]
        return x.take_along_dim(label.clamp_min(0), 2).masked_fill(label < 0, none)

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
        return QueryClusters(labels, count, given.n_k)
    if leaf.assign == "balanced":
        # each centroid takes its nearest queries and its nearest keys, as many of each
        centroids = unit(given.tables["centroids"].float())
        width = -(-given.n_k // centroids.shape[1])
        q = _taken(Points(given.q, q_real), centroids, width)
        k = _taken(Points(given.keys_by_head, given.real), centroids, width)
        return _by_labels(q.transpose(2, 3), k.transpose(2, 3))
    labels = kmeans(Points.of_both(given), count, leaf, given.heads)[:, :, None]
    return _by_labels(labels[..., : given.n_q], labels[..., given.n_q :])


def _by_labels(q: Tensor, k: Tensor) -> CodeChoice:
    """Queries with labels [B, H or 1, i, n_q] read keys [B, H or 1, j, n_k] with one of them."""
    ways = tuple(product(range(q.shape[2]), range(k.shape[2])))
    named = {"queries": q.transpose(2, 3), "keys": k.transpose(2, 3)}
    if len(ways) == 1:
        named = {name: x[..., 0] for name, x in named.items()}
    return CodeChoice.of(q, k, ways, named)


def _taken(points: Points, centroids: Tensor, width: int) -> Tensor:
    """The centroids that take each point, lists int64 [B, H, N, r]; ties go to earlier points."""
    together = LIMITS.pairs_at_once // max(1, points.at.shape[:3].numel())
    tables = []
    for some in torch.split(centroids, max(1, together), 1):
        near = some @ points.at.mT
        near = near.masked_fill(~points.real[:, None, None], -torch.inf)
        tables.append(marked(best(near, None, width), near.shape[3]))
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
    total = sums_of(points.at, labels, centroids.shape[1]).sum(0)
    if kept.shape[0] == 1:
        total = total.sum(0, keepdim=True)
    some = (total != 0).any(-1, keepdim=True)
    return torch.where(some, KEPT * centroids + (1 - KEPT) * unit(total), centroids).to(kept.dtype)
