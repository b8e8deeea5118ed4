"""Choices by labels: q reads k where a label of one is a label of the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product

import torch
from torch import Tensor

from attnspec.backends.decided.choice import Choice, TileLists, look_up
from attnspec.backends.decided.lists import TILE
from attnspec.backends.decided.ranking import listed

NONE_Q, NONE_K = -(1 << 62), -(1 << 62) + 1
"""What stands for no label."""


@dataclass(frozen=True, eq=False)
class LabelChoice(Choice):
    """Labels of queries int64 [B, H or 1, n_q, i] and of keys [B, H or 1, n_k, j]."""

    q: Tensor
    k: Tensor

    def _match(self, i: int, j: int, q: Tensor, k: Tensor) -> Tensor:
        at = q - (self.k.shape[2] - self.q.shape[2])
        return look_up(self.q[..., i], at) == look_up(self.k[..., j], k)

    @property
    def _ways(self) -> list[tuple[int, int]]:
        return list(product(range(self.q.shape[3]), range(self.k.shape[3])))

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(torch.logical_or, (self._match(*way, q, k) for way in self._ways))

    def layouts(self) -> tuple[TileLists, ...]:
        """One layout for each label of a query and each of a key, sorted by them."""
        return tuple(self._layout(number) for number in range(len(self._ways)))

    def _layout(self, number: int) -> TileLists:
        i, j = self._ways[number]
        q, k = self.q[..., i], self.k[..., j]
        sides = [x.sort(dim=-1, stable=True) for x in (q, k)]
        shift = k.shape[2] - q.shape[2]
        q_order = torch.where(sides[0].values == NONE_Q, -1, sides[0].indices + shift)
        k_order = torch.where(sides[1].values == NONE_K, -1, sides[1].indices)
        lists = meeting(sides[0].values, sides[1].values, TILE)
        return TileLists(q_order, k_order, TILE, TILE, lists, partial(self._first, number))

    def _first(self, number: int, q: Tensor, k: Tensor) -> Tensor:
        pairs = self._match(*self._ways[number], q, k)
        for way in self._ways[:number]:
            pairs = pairs & ~self._match(*way, q, k)
        return pairs

    @property
    def lists(self) -> Mapping[str, Tensor]:
        one = self.q.shape[3] == 1 and self.k.shape[3] == 1
        clusters = {"queries": self.q, "keys": self.k}
        clusters = {name: x.masked_fill(x <= NONE_K, -1) for name, x in clusters.items()}
        return {name: x[..., 0] for name, x in clusters.items()} if one else clusters


def meeting(q: Tensor, k: Tensor, tile: int) -> Tensor:
    """The key tiles in which labels of each query tile may stand, for labels along their orders,
    [B, H or 1, slots] each, that within a tile need not be sorted: lists [B, H or 1, tiles, r]."""
    ends = []
    for along in (q, k):
        short = -along.shape[-1] % tile
        last = along[..., -1:].expand(*along.shape[:-1], short)
        tiles = torch.unflatten(torch.cat([along, last], -1), -1, (-1, tile))
        ends.append((tiles.amin(-1), tiles.amax(-1)))
    (low, high), (least, most) = ends
    table = (low[..., None] <= most[..., None, :]) & (least[..., None, :] <= high[..., None])
    # of few tiles all have room in every list
    return listed(table)
