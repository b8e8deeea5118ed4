"""`cluster`: tokens find the nearest of some centroids, or centroids their nearest tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnspec.backends.common.score_formula import unit
from attnspec.backends.decided.choice import Choice, look_up
from attnspec.backends.decided.given import Given
from attnspec.backends.decided.kmeans import MOST, Points, kmeans, nearest
from attnspec.backends.decided.labels import NONE_K, NONE_Q, LabelChoice
from attnspec.backends.decided.lists import listed, marked
from attnspec.backends.decided.ranking import best
from attnspec.graphs.patterns.cluster import Cluster

KEPT = 0.999
"""How much of a centroid stays in each call of training."""


@dataclass(frozen=True, eq=False)
class QueryClusters(Choice):
    """Clusters of queries: `labels` int64 [B, H, n_q], -1 for padding, of `count`."""

    labels: torch.Tensor
    count: int
    n_k: int

    def holds(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        at = q - (self.n_k - self.labels.shape[2])
        return (look_up(self.labels, at) >= 0) & (k == k)

    def attending(self, q: torch.Tensor) -> torch.Tensor:
        """The mean of the queries of each query's cluster, [B, H, n_q, d]."""
        label = (self.labels + 1)[..., None].expand_as(q)
        kept = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros(*q.shape[:2], self.count + 1, q.shape[3], dtype=kept)
        total = total.scatter_add(2, label, q.to(kept))
        one = torch.ones_like(label[..., :1]).to(kept)
        many = torch.zeros_like(total[..., :1]).scatter_add(2, label[..., :1], one)
        return (total / many.clamp_min(1)).to(q.dtype).gather(2, label)

    @property
    def lists(self) -> Mapping[str, torch.Tensor]:
        return {"queries": self.labels}


@torch.no_grad()
def decide(leaf: Cluster, given: Given) -> Choice:
    """The clusters of all queries and keys."""
    if leaf.labels is not None:
        labels = given.data[leaf.labels.name].to(torch.int64)[..., None]  # type: ignore[attr-defined]
        return LabelChoice(labels[:, :, given.first_query :], labels)
    q_real = given.real[:, given.first_query :]
    count = min(leaf.count or max(1, math.isqrt(given.n_k)), given.n_k)
    if leaf.of == "q":
        labels = kmeans(Points.of(given.q, q_real), count, leaf.seed, leaf.layer, given.heads)
        return QueryClusters(labels.masked_fill(~q_real[:, None], -1), count, given.n_k)
    if leaf.assign == "balanced":
        return _balanced(leaf, given, q_real)
    both = Points.of(torch.cat([given.q, keys_by_head(given)], 2), _both_real(given))
    labels = kmeans(both, count, leaf.seed, leaf.layer, given.heads)
    q, k = torch.split(labels, [given.n_q, given.n_k], 2)
    return LabelChoice(
        q.masked_fill(~q_real[:, None], NONE_Q)[..., None],
        k.masked_fill(~given.real[:, None], NONE_K)[..., None],
    )


def keys_by_head(given: Given) -> torch.Tensor:
    """The keys that each head reads, [B, H, n_k, d]."""
    return given.k.repeat_interleave(given.q.shape[1] // given.k.shape[1], 1)


def _both_real(given: Given) -> torch.Tensor:
    return torch.cat([given.real[:, given.first_query :], given.real], 1)


def _balanced(leaf: Cluster, given: Given, q_real: torch.Tensor) -> Choice:
    """Each centroid takes its nearest queries and its nearest keys, as many of each."""
    centroids = unit(given.tables["centroids"].float())
    width = -(-given.n_k // centroids.shape[1])
    q = _taken(Points.of(given.q, q_real), centroids, width)
    k = _taken(Points.of(keys_by_head(given), given.real), centroids, width)
    return LabelChoice(torch.where(q < 0, NONE_Q, q), torch.where(k < 0, NONE_K, k))


def _taken(points: Points, centroids: torch.Tensor, width: int) -> torch.Tensor:
    """The centroids that take each point, lists int64 [B, H, N, r]; ties go to earlier points."""
    batch, heads, count, _ = points.at.shape
    together = max(1, MOST // max(1, batch * heads * count))
    tables = []
    for low in range(0, centroids.shape[1], together):
        near = centroids[:, low : low + together] @ points.at.transpose(-1, -2)
        near = near.masked_fill(~points.real[:, None, None], -torch.inf)
        tables.append(marked(best(near, None, width), count))
    lists = listed(torch.cat(tables, 2).transpose(2, 3))
    # someone has to have a label for there to be labels
    return lists if lists.shape[3] else lists.new_full((*lists.shape[:3], 1), -1)


@torch.no_grad()
def moved_centroids(given: Given) -> torch.Tensor:
    """The centroids [H or 1, count, d] after a call of training: each a little towards the
    direction of the queries and keys that it is nearest to, those of all samples."""
    kept = given.tables["centroids"]
    centroids = unit(kept.float())
    points = Points.of(torch.cat([given.q, keys_by_head(given)], 2), _both_real(given))
    spread = centroids[None].expand(len(given.q), given.q.shape[1], -1, -1)
    exists = torch.ones(1, 1, centroids.shape[1], dtype=torch.bool, device=kept.device)
    labels = nearest(points, spread, exists)
    at = points.at * points.real[:, None, :, None]
    place = labels[..., None].expand_as(at)
    total = torch.zeros_like(spread).scatter_add(2, place, at).sum(0)
    if kept.shape[0] == 1:
        total = total.sum(0, keepdim=True)
    some = (total != 0).any(-1, keepdim=True)
    return torch.where(some, KEPT * centroids + (1 - KEPT) * unit(total), centroids).to(kept.dtype)
