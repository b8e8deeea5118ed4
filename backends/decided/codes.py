"""Choices by codes: q reads k where a code of q is one of k, or greater by no more than some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor

from attnspec.backends.decided.choice import Choice, TileLists, look_up
from attnspec.backends.decided.lists import TILE
from attnspec.backends.decided.ranking import reaches, rising_places


@dataclass(frozen=True, eq=False)
class CodeChoice(Choice):
    """Codes of queries [B, H or 1, i, n_q] and of keys [B, H or 1, j, n_k], below 0 for none: in
    each of the `ways` (i, j) queries read keys of their code, or of one that is at most `look`
    less. `named` is what was decided.

    `alone` is bool [B, H or 1, n_q]: the queries that read themselves, having no other key; None
    where queries read themselves like any other key. Each way has an order of its own, in tiles of
    a size; `spans` are codes that rise with those of q and k and match wherever these do, in fewer
    tiles. With `averaged` a way is a round, whose outputs are averaged.
    """

    q: Tensor
    k: Tensor
    orders: tuple[Tensor, Tensor]
    ways: tuple[tuple[int, int], ...]
    named: Mapping[str, Tensor]
    look: int = 0
    tile: int = TILE
    alone: Tensor | None = None
    counted: bool = False
    averaged: bool = False
    spans: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        ways: tuple[tuple[int, int], ...],
        named: Mapping[str, Tensor],
        look: int = 0,
        **more: object,
    ) -> CodeChoice:
        """The choice with codes in as few bytes as they take; where there is none, that of the
        query is far below all of keys, and that of the key one above it."""
        most = look + max(int(x.max()) if x.numel() else 0 for x in (q, k))
        for kind in (torch.int16, torch.int32, torch.int64):
            far = (torch.iinfo(kind).max + 1) // 2
            if most < far - 2:
                break
        q, k = (torch.where(x < 0, none, x).to(kind) for x, none in ((q, -far), (k, 1 - far)))
        orders = rising_places(q), rising_places(k)
        return CodeChoice(q, k, orders, ways, named, look, **more)  # type: ignore[arg-type]

    @property
    def lists(self) -> Mapping[str, Tensor]:
        return self.named

    def _match(self, way: tuple[int, int], q: Tensor, k: Tensor) -> Tensor:
        """Which pairs there are in one way, without the rule of pairs with oneself."""
        at = q - (self.k.shape[3] - self.q.shape[3])
        codes = look_up(self.q[:, :, way[0]], at), look_up(self.k[:, :, way[1]], k)
        return reaches(*codes, self.look)

    def _each(self, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        return (self._match(way, q, k) for way in self.ways)

    def _may_read(self, pairs: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Those of pairs that are of two positions, or of one that reads itself."""
        if self.alone is None:
            return pairs
        # one comparison of pairs: a query that reads itself is not a key's position
        at = look_up(self.alone, q - (self.k.shape[3] - self.q.shape[3]))
        return pairs * (torch.where(at, -1, q).int() != k.int())

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        return self._may_read(reduce(torch.logical_or, self._each(q, k)), q, k)

    def counts(self, q: Tensor, k: Tensor) -> Tensor:
        none = torch.zeros((), dtype=torch.int64, device=k.device)
        return self._may_read(reduce(torch.add, self._each(q, k), none), q, k)

    def rounds(self) -> tuple[Choice, ...]:
        return tuple(replace(self, ways=(way,)) for way in self.ways) if self.averaged else ()

    def layouts(self) -> tuple[TileLists, ...]:
        return tuple(self._layout(number) for number in range(len(self.ways)))

    def _layout(self, number: int) -> TileLists:
        """Tiles of both sides in the order of one way's codes; those that a query tile reads follow
        one another."""
        i, j = self.ways[number]
        orders, ends = [], []
        each = zip(self.orders, self.spans or (self.q, self.k), (i, j), strict=True)
        for order, codes, turn in each:
            order = order[:, :, turn]
            codes = codes[:, :, turn].gather(-1, order)
            order = order + (self.k.shape[3] - codes.shape[-1])
            orders.append(torch.where(codes < 0, -1, order))
            short = codes[..., -1:].expand(*codes.shape[:-1], -codes.shape[-1] % self.tile)
            tiles = torch.unflatten(torch.cat([codes, short], -1), -1, (-1, self.tile))
            ends.append((tiles[..., 0], tiles[..., -1]))
        (low, high), (least, most) = ends
        lead = [max(x) for x in zip(low.shape[:2], least.shape[:2], strict=True)]
        low, high, least, most = (
            x.expand(*lead, -1).contiguous() for x in (low.clamp_min(0), high, least, most)
        )
        begin = torch.searchsorted(most, low - self.look)
        end = torch.searchsorted(least, high, right=True)
        width = int((end - begin).max().clamp_min(0)) if begin.numel() else 0
        lists = begin[..., None] + torch.arange(width, device=begin.device)
        lists = torch.where(lists < end[..., None], lists, -1)
        sides = orders[0], orders[1], self.tile, self.tile
        return TileLists(*sides, lists, partial(self._first, number))

    def _first(self, number: int, q: Tensor, k: Tensor) -> Tensor:
        """The pairs of a way and of none before it: of those with oneself, which are in every way,
        only the first one need be asked."""
        pairs = self._match(self.ways[number], q, k)
        if not number:
            pairs = self._may_read(pairs, q, k)
        for way in self.ways[:number]:
            # here and not there, in one step
            pairs = pairs > self._match(way, q, k)
        return pairs
