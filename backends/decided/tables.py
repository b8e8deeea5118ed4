"""Tables made of a choice: tiles of queries, the key tiles that each reads, and their masks.

They are of some samples and heads: B samples and K key heads with R query heads each, which share
orders and lists and so are rows of one query tile: there are N = B K lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.exact import EVERY, some_together
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.decided.choice import Holds, TileLists, look_up, part_of
from attnspec.backends.decided.lists import Pairs
from attnspec.backends.decided.products import Product
from attnspec.graphs.relation import FULL, Relation, Tiles
from attnspec.layout.tables import Batch
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call

_covers: Cache[tuple[Relation, int, int, str], Tensor] = Cache(LIMITS.layouts_few)


def cover_of(relation: Relation, n: int, size: int, device: torch.device) -> Tensor:
    """For blocks of `size` of n positions, how many key blocks before each do not have every pair
    of a relation with a block of queries: int32 [blocks, blocks + 1]."""

    def build() -> Tensor:
        starts = np.arange(0, n, size)
        stops = np.minimum(starts + size, n)
        count = len(starts)
        before = np.zeros((count, count + 1), np.int32)
        rows = max(1, (1 << 20) // max(1, count))
        for low in range(0, count, rows):
            part = slice(low, low + rows)
            q = Tiles(starts[part, None], stops[part, None])
            kinds = relation.cover(q, Tiles(starts[None], stops[None]), n)
            kinds = np.broadcast_to(kinds, (len(starts[part]), count))
            np.cumsum(kinds != FULL, axis=1, out=before[part, 1:])
        return torch.from_numpy(before).to(device)

    # it is kept, so the modes of this call must not reach it
    return _covers.get((relation, n, size, str(device)), lambda: apart(build))


class Side:
    """The tiles of one side: `places`, positions int64 [B or 1, heads or 1, T, size], -1 for none;
    of the last `count` of `n` where there is no order.

    They are tiles of a tensor of `count` rows for each of the `lists`, B K, and each of the
    `repeat` heads that share one; these rows of a tile follow one another, head after head.
    """

    def __init__(
        self, order: Tensor | None, size: int, n: int, lists: Tensor, repeat: int, count: int
    ) -> None:
        self.size, self.n, self.natural, device = size, n, order is None, lists.device
        self.lists, self.repeat, self.count = lists.shape[:2], repeat, count
        if order is None:
            order = torch.arange(n - count, n, device=device)[None, None]
        if order.shape[2] % size:
            order = functional.pad(order, (0, -order.shape[2] % size), value=-1)
        self.places: Tensor = order.reshape(*order.shape[:2], -1, size)
        # whether all places are positions
        self.full = (self.natural and count % size == 0) or bool((self.places >= 0).all())

    def rows(self, part: slice = slice(None)) -> np.ndarray:
        """The rows of some tiles of all lists, int64 [N T, R size], below 0 for none: -1 less one
        of the same list."""
        places = self.places[:, :, part, None]
        base = torch.arange(self.lists.numel() * self.repeat, device=places.device) * self.count
        base = base.view(*self.lists, 1, self.repeat, 1)
        at = places - (self.n - self.count)
        rows = torch.where(at < 0, -1 - base, base + at)
        return np.asarray(rows.flatten(3).flatten(0, 2))

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest position of every tile, [.., T]; n and -1 of an empty one."""
        places = self.places
        return places.masked_fill(places < 0, self.n).amin(-1), places.amax(-1)

    @cached_property
    def compact(self) -> Tensor | None:
        """The tiles whose places are positions that follow one another; None where all are."""
        if self.full and self.natural:
            return None
        return (self.places.diff() == 1).all(-1) & (self.places[..., 0] >= 0)


class Placed:
    """The tables of a layout of a product for a part of a call, of tensors [B, K, R, n_q, …]."""

    def __init__(self, part: Part, product: Product, layout: TileLists) -> None:
        self.batch, self.heads, self.repeat, self.n_q = part.sizes
        self.n_k = part.n_k
        if self.repeat > 1:
            layout = part_of(layout, EVERY, slice(None, None, self.repeat))
        self.layout = layout
        self.lists = lists = layout.lists.expand(self.batch, self.heads, -1, -1)
        self.q = Side(layout.q_order, layout.q_tile, self.n_k, lists, self.repeat, self.n_q)
        self.k = Side(layout.k_order, layout.k_tile, self.n_k, lists, 1, self.n_k)
        # pairs in tiles that these cover need not be examined, unless there are others
        self.static, self.padding = product.static, part.padding
        self.always = bool(product.others) or not layout.whole
        self.conditions: list[Holds] = [] if layout.whole else [layout.holds]
        if self.padding is not None:
            real = self.padding[:, None]
            self.conditions.append(lambda q, k: look_up(real, k))
        self.conditions += part.conditions(product)

    @cached_property
    def numbered(self) -> Tensor:
        """The lists [N, T, r] by the numbers of key tiles among those of all lists."""
        count = self.k.places.shape[2]
        base = torch.arange(self.batch * self.heads, device=self.lists.device) * count
        base = base.view(self.batch, -1, 1, 1)
        return torch.where(self.lists >= 0, self.lists + base, -1).flatten(0, 1)

    @cached_property
    def masked(self) -> Tensor | None:
        """The entries whose pairs need to be examined, bool [N, T, r]; None for none."""
        there = self.lists >= 0
        if self.always:
            return there.flatten(0, 1)
        tiles = self.lists.clamp(min=0)
        wholes = [] if self.k.compact is None else [of_tiles(self.k.compact, tiles)]
        if self.padding is not None:
            real = look_up(self.padding[:, None], self.k.places.clamp(min=0))
            wholes.append(of_tiles(real.all(-1), tiles))
        if self.static is not None:
            wholes.append(self._covered(self.static, tiles))
        if not wholes:
            return None
        return (there & ~reduce(torch.logical_and, wholes)).flatten(0, 1)

    def _covered(self, static: Relation, tiles: Tensor) -> Tensor:
        """Of which entries [B, K, T, r] the blocks of positions hold every pair, bool."""
        size = max(LIMITS.tile, self.layout.q_tile, -(-self.n_k // LIMITS.blocks_covered))
        before = cover_of(static, self.n_k, size, tiles.device)
        first, last = (x.clamp(0, self.n_k - 1) // size for x in self.k.ends)
        full = (before[:, last + 1] == before[:, first]).movedim(0, -2)
        count, full = full.shape[3], full.flatten(2)
        ends = [x.clamp(0, self.n_k - 1) // size * count for x in self.q.ends]
        if bool((ends[0] == ends[1]).all()):
            ends = ends[:1]
        return reduce(torch.logical_and, [of_tiles(full, tiles + x[..., None]) for x in ends])

    def batches(self) -> Iterator[Batch]:
        """The pairs as tables whose rows are those of all lists, one after the other; of choices
        that count no pair twice."""
        (count, tiles, width), rows = self.numbered.shape, self.k.rows()
        height = self.q.size * self.repeat
        step = max(1, LIMITS.product // max(1, count * width * height * self.k.size))
        for low in range(0, tiles, step):
            high = min(low + step, tiles)
            lists, slots = self.numbered[:, low:high].sort(descending=True)
            most = int((lists >= 0).sum(2).max())
            lists = lists[..., :most]
            pairs = self.held(low, high, slots[..., :most])
            pairs = pairs & (lists >= 0)[:, :, None, :, None]
            keys = np.where((lists >= 0)[..., None], rows[lists.numpy()], -1)
            yield Batch(
                self.q.rows(slice(low, high)),
                keys.reshape(-1, most * self.k.size),
                pairs.reshape(-1, height, most * self.k.size).numpy(),
            )

    def held(self, low: int, high: int, slots: Tensor) -> Tensor:
        """The masks of some entries `slots` int64 [N, high - low, s] of query tiles
        low <= t < high: bool, or what is added to the scores, [N, high - low, h, s, w]."""
        slots = slots.view(self.batch, self.heads, high - low, -1)
        tiles = self.lists[:, :, low:high].gather(3, slots).clamp_(min=0)
        q = self.q.places[:, :, low:high, :, None, None].clamp(min=self.n_k - self.n_q)
        k = of_tiles(self.k.places, tiles)[:, :, :, None]
        mask, k, bias = k >= 0, k.clamp(min=0), None
        for condition in self.conditions:
            pairs = condition(q, k)
            if pairs.dtype == torch.bool:
                mask = mask & pairs
            else:
                bias = pairs if bias is None else bias + pairs
        if bias is not None:
            mask = torch.where(mask, bias, -math.inf)
        size = high - low, self.repeat, self.q.size, slots.shape[3], self.k.size
        mask = mask.unsqueeze(3).expand(self.batch, self.heads, *size)
        return mask.flatten(3, 4).flatten(0, 1)


def of_tiles(x: Tensor, tiles: Tensor) -> Tensor:
    """x [B or 1, heads or 1, T, …] of tiles [B, heads, …]."""
    if x.shape[:2] == (1, 1):
        rows = x[0, 0].index_select(0, tiles.flatten())
        return rows.view(*tiles.shape, *x.shape[3:])
    at = (
        torch.arange(count, device=tiles.device).view(-1, *(1,) * (tiles.dim() - 1 - axis))
        for axis, count in enumerate(x.shape[:2])
    )
    return x[(*at, tiles)]


@dataclass(frozen=True, eq=False)
class Part:
    """Samples, key heads and of the query heads of each some, of a call of so many [B, K, R, n_q]
    and n_k keys. Its layouts are those of choices, `fitted` to it if asked for."""

    samples: slice
    heads: slice
    repeats: slice
    shape: Sequence[int]
    n_k: int
    call: Call
    fitted: Callable[[TileLists, Part], TileLists] = lambda layout, part: layout

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """The part of tensors [B, K, R, …]."""
        return self.samples, self.heads, self.repeats

    def of_q(self, x: Tensor) -> Tensor:
        """The part of x [B, K, R, …]."""
        return x[self.queries]

    def of_k(self, x: Tensor) -> Tensor:
        """The part of x [B, K, …]."""
        return x[self.samples, self.heads]

    @property
    def query_heads(self) -> slice:
        """The query heads of the part."""
        keys, repeat = self.shape[1:3]
        (low, high, _), (first, stop, _) = self.heads.indices(keys), self.repeats.indices(repeat)
        step = 1 if stop - first == repeat else repeat
        return slice(low * repeat + first, high * repeat, step)

    @cached_property
    def data(self) -> Mapping[Any, Any]:
        """The inputs and choices of the call for the part."""
        return part_of(dict(self.call.data), self.samples, self.query_heads)

    def layouts(self, product: Product) -> tuple[TileLists, ...]:
        """The layouts of a product's leaf."""
        return tuple(self.fitted(each, self) for each in self.data[product.leaf].layouts())

    @property
    def sizes(self) -> list[int]:
        """How many samples, key heads and query heads of each it has, and queries."""
        every = zip(self.shape, (*self.queries, EVERY), strict=True)
        return [len(range(size)[some]) for size, some in every]

    @cached_property
    def padding(self) -> Tensor | None:
        """Which keys are real, bool [B, n_k]; None where all are."""
        padding = None if self.call.padding is None else self.call.padding[self.samples]
        return None if padding is None or bool(padding.all()) else padding

    def conditions(self, product: Product) -> list[Holds]:
        """What a product asks of pairs besides, and how often its choice weighs them."""
        others = product.others if product.static is None else (product.static, *product.others)
        choice = self.data[product.leaf]
        counts = [lambda q, k: choice.counts(q, k).double().log()] if choice.counted else []
        return [*(Pairs(x, self.data, self.n_k).holds for x in others), *counts]

    def tables(self, products: Sequence[Product]) -> Iterator[Placed]:
        """The tables of products, one layout after the other."""
        for product in products:
            for layout in self.layouts(product):
                if layout.lists.numel():
                    yield Placed(self, product, layout)

    def apart(self, products: Sequence[Product]) -> Iterator[Part]:
        """The part itself where heads that share keys share lists, else a part of each."""
        repeat = self.shape[2]
        mixed = any(x.others or self.data[x.leaf].weight is not None for x in products)
        shared = (layout.is_shared(repeat) for each in products for layout in self.layouts(each))
        if repeat == 1 or (not mixed and all(shared)):
            yield self
            return
        for each in range(repeat):
            yield replace(self, repeats=slice(each, each + 1))


def parts_of_call(q: Tensor, n_k: int, call: Call, products: Sequence[Product]) -> Iterator[Part]:
    """The parts of a call with q [B, K, R, n_q, d]."""
    batch, keys = q.shape[:2]
    many = LIMITS.queries_together // q.shape[2:].numel()
    for some in some_together(slice(0, batch), keys, many):
        yield from Part(*some, EVERY, q.shape[:4], n_k, call).apart(products)
