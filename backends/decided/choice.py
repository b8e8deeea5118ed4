"""What is decided once tensors are there: which pairs a graph has, for masks and for tiles.

Positions are those of the whole sequence, 0 <= position < n_k; queries are the last n_q of them.
Position tensors of fewer than four axes hold for every sample and head; of more, the first two axes
are [B or 1, H or 1]. Answers have the shape [B or 1, H or 1, *broadcast of the rest].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.torch_modes import array_of
from attnspec.graphs.relation import Relation
from attnspec.lower.work import Call, Heads, Work

TILE = 64
"""Positions that a tile has at least, where rows and blocks are smaller."""

Part = TypeVar("Part")

Holds = Callable[[Tensor, Tensor], Tensor]
"""Whether q reads k, bool, or what is added to the score: of positions that broadcast, int64."""


@dataclass(frozen=True, eq=False)
class Given:
    """q [B, H, n_q, d] and k [B, H_kv, n_k, d] of some heads, with their numbers, how many heads of
    the layer share keys, which of them share scores, and the factors of these; H_kv divides H.

    `data` has the inputs as a call has them, of those about heads the part of these heads, and the
    choices of graphs that are arguments; `tables` what is learned or kept, [H or 1, *shape].
    `keys` is None where queries are positions of the keys; else they are another sequence, which
    stands behind so many keys, and none of them is padding.
    """

    q: Tensor
    k: Tensor
    heads: Heads
    ratio: int
    share: str
    scales: tuple[float, ...]
    padding: Tensor | None
    data: Mapping[Any, Any]
    tables: Mapping[str, Tensor]
    keys: int | None

    @property
    def keys_by_head(self) -> Tensor:
        """The keys that each head reads, [B, H, n_k, d]."""
        ratio = self.q.shape[1] // self.k.shape[1]
        return self.k if ratio == 1 else self.k.repeat_interleave(ratio, 1)

    @property
    def n_q(self) -> int:
        return self.q.shape[2]

    @property
    def n_k(self) -> int:
        return self.k.shape[2]

    @property
    def first_query(self) -> int:
        """The position of the first query."""
        return self.n_k - self.n_q

    @property
    def real(self) -> Tensor:
        """Which keys are real, bool [B, n_k]."""
        if self.padding is not None:
            return self.padding
        return torch.ones(len(self.q), self.n_k, dtype=torch.bool, device=self.q.device)


@dataclass(frozen=True, eq=False)
class TileLists:
    """Tiles of queries, and for each the tiles of keys in which its pairs lie.

    An order is int64 [B or 1, H or 1, slots], the position in each slot, -1 for none; None where
    slot s has the s-th query or key. Tile t has the slots t * tile <= s < (t + 1) *
    tile, the last one perhaps fewer. `lists` is int64 [B or 1, H or 1, query tiles, r], numbers of
    key tiles, -1 for none, in any order, none twice. `holds` are the pairs that are computed here:
    of several layouts of one choice each pair is in one alone, and it may have pairs nowhere else
    than in its tiles; `whole` says that it has all that are in its tiles.
    """

    q_order: Tensor | None
    k_order: Tensor | None
    q_tile: int
    k_tile: int
    lists: Tensor
    holds: Holds
    whole: bool = False

    def is_shared(self, repeat: int) -> bool:
        """Whether so many heads that follow one another are known to have one order and lists."""
        every = self.q_order, self.k_order, self.lists
        each = (x for x in every if x is not None and x.shape[1] > 1)
        groups = (torch.unflatten(x, 1, (-1, repeat)) for x in each)
        return self.whole and all(bool((x == x[:, :, :1]).all()) for x in groups)


class Choice:
    """The pairs of one graph for the tensors of a call; padding of keys is cut elsewhere.

    Tensors among the fields of a choice are [B or 1, H or 1, ...]. One that is not computed by
    means has `layouts()`: tiles that hold all pairs, at least one layout.
    """

    holds: Holds

    @property
    def lists(self) -> Mapping[str, Tensor]:
        """What was decided, in the words of the language."""
        raise NotImplementedError

    # --- what some graphs change beside the pairs ----------------------------------------------

    counted: bool = False
    """Whether some pairs are weighed several times: `counts` says how often, int, 0 for none."""

    weight: Tensor | None = None
    """Numbers [B, H, …] that are 1, and have a gradient: keys and values of some pairs are
    multiplied with them."""

    def attending(self, q: Tensor) -> Tensor:
        """What attends in place of the queries [B, H, n_q, d]."""
        return q

    def rounds(self) -> tuple[Choice, ...]:
        """The choices whose outputs are averaged, where that is asked for."""
        return ()


def rounds_of(work: Work, call: Call) -> list[Call]:
    """The calls whose outputs are averaged, if any are."""
    return [
        replace(call, data={**call.data, leaf: choice})
        for leaf in work.decided
        for choice in call.data[leaf].rounds()
    ]


def mean_of(outs: Sequence[Tensor], some: Sequence[Tensor]) -> Tensor:
    """The mean outputs [..., n_q, d] of rounds where queries have keys, bool [..., n_q], or 0."""
    total = reduce(torch.add, map(widened, outs))
    count = torch.stack(list(some)).sum(0)[..., None]
    return (total / count.clamp_min(1)).to(outs[0].dtype)


def part_of(value: Part, samples: slice, heads: Tensor | slice) -> Part:
    """A choice, or what there is in one, for some of the samples and heads."""
    if isinstance(value, Tensor):
        found = value if len(value) == 1 else value[samples]
        return found if found.shape[1] == 1 else found[:, heads]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return type(value)(part_of(part, samples, heads) for part in value)
    if isinstance(value, Mapping):
        return {key: part_of(part, samples, heads) for key, part in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, Relation | type):
        parts = {x.name: part_of(getattr(value, x.name), samples, heads) for x in fields(value)}
        return replace(value, **parts)
    return value


def look_up(table: Tensor, position: Tensor) -> Tensor:
    """table[b, h, position[b, h, ...]] of a table [B, H, n]: [B, H, ...]."""
    position = position.view(*(1,) * (4 - position.dim()), *position.shape)
    # without the check of signs that take_along_dim makes
    lead = [max(x) for x in zip(table.shape[:2], position.shape[:2], strict=True)]
    found = table.expand(*lead, -1).gather(2, position.flatten(2).expand(*lead, -1))
    return torch.unflatten(found, 2, position.shape[2:])


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
        most = look + max(int(x.max()) for x in (q, k))
        for kind in (torch.int16, torch.int32, torch.int64):
            far = (torch.iinfo(kind).max + 1) // 2
            if most < far - 2:
                break
        alike = q.is_set_to(k)
        q, k = (torch.where(x < 0, none, x).to(kind) for x, none in ((q, -far), (k, 1 - far)))
        order = rising_places(k)
        orders = order if alike else rising_places(q), order
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


def rising_places(numbers: Tensor) -> Tensor:
    """The places of numbers int [..., c] from the least one up, of equal ones the lower first."""
    if not numbers.is_cpu:
        return numbers.argsort(dim=-1, stable=True)
    # short integers are counted, in a tenth of the time that sorting takes
    low, high = (int(x) for x in numbers.aminmax()) if numbers.numel() else (0, 0)
    if -(1 << 15) <= low <= high < 1 << 15:
        numbers = numbers.to(torch.int16)
    return torch.from_numpy(array_of(numbers).argsort(axis=-1, kind="stable"))


def reaches(x: Tensor, y: Tensor, most: int) -> Tensor:
    """0 <= x - y <= most, for integers that broadcast and differ by less than their range."""
    back = x - y
    if x.is_cpu:
        # one comparison without sign, several times as fast
        return torch.from_numpy(array_of(back).view(f"u{back.element_size()}") <= most)
    return (back >= 0) & (back <= most)
