"""Some samples and heads of a call: their choices, and the conditions on pairs of each product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from attnspec.backends.common.on_device import pairs_at
from attnspec.backends.decided.choice import Choice, TileLists, part_of
from attnspec.backends.decided.lists import Pairs
from attnspec.backends.lists.changes import Changes, ScoreChanges
from attnspec.backends.lists.cover import Covers
from attnspec.backends.lists.placed import Condition, Conditions, Placed
from attnspec.backends.lists.products import Product
from attnspec.limits import LIMITS
from attnspec.lower.work import Call


@dataclass(frozen=True, eq=False)
class Part:
    """Samples, key heads and of the query heads of each some, of a call of so many [B, K, R, n_q]
    and n_k keys."""

    samples: slice
    heads: slice
    repeats: slice
    shape: tuple[int, ...]
    n_k: int
    call: Call

    def of_q(self, x: torch.Tensor) -> torch.Tensor:
        """The part of x [B, K, R, …]."""
        return x[self.samples, self.heads, self.repeats]

    def of_k(self, x: torch.Tensor) -> torch.Tensor:
        """The part of x [B, K, …]."""
        return x[self.samples, self.heads]

    @property
    def query_heads(self) -> slice:
        """The query heads of the part."""
        repeat = self.shape[2]
        first, stop, _ = self.repeats.indices(repeat)
        step = 1 if stop - first == repeat else repeat
        return slice(self.heads.start * repeat + first, self.heads.stop * repeat, step)

    @cached_property
    def data(self) -> Mapping[Any, Any]:
        """What the call brings and what is decided, for the part."""
        return part_of(dict(self.call.data), self.samples, self.query_heads)

    @property
    def padding(self) -> torch.Tensor | None:
        """Which keys are real, bool [B, n_k]; None where all are."""
        padding = self.call.padding
        if padding is None or bool(padding[self.samples].all()):
            return None
        return padding[self.samples]

    def layouts(self, product: Product) -> tuple[TileLists, ...]:
        """The layouts of a product's leaf."""
        found: tuple[TileLists, ...] = self.data[product.leaf].layouts()
        return found

    def conditions(self, product: Product, covers: Covers, height: int) -> Conditions:
        """What the pairs of a product must have besides."""
        each: list[Condition] = []
        cover = None
        if product.static is not None:
            cover = covers.of(product.static, height)
            each.append(partial(pairs_at, product.static, n=self.n_k))
        each += [Pairs(relation, self.data, self.n_k).holds for relation in product.others]
        each += [_without(Pairs(relation, self.data, self.n_k)) for relation in product.earlier]
        if self.data[product.leaf].counted:
            each.append(_counts(self.data[product.leaf]))
        always = bool(product.others or product.earlier)
        return Conditions(each, cover, always, self.padding)

    def placed(
        self, products: Sequence[Product], covers: Covers, changes: ScoreChanges | None
    ) -> Iterator[Placed]:
        """The layouts of products, one after the other."""
        shape = [x.stop - x.start for x in (self.samples, self.heads, self.repeats)]
        for product in products:
            for layout in self.layouts(product):
                if not layout.lists.numel():
                    continue
                more = self.conditions(product, covers, layout.q_tile)
                placed = Placed(layout, (*shape, self.shape[3]), self.n_k, more)
                if changes is not None:
                    count = self.shape[1] * self.shape[2]
                    heads = range(count)[self.query_heads]
                    placed.changes = Changes(changes, list(heads), self.call.tables)
                yield placed

    def apart(self, products: Sequence[Product]) -> Iterator[Part]:
        """The part itself where heads that share keys share lists, else a part of each."""
        repeat = self.shape[2]
        weighed = any(self.data[each.leaf].weight is not None for each in products)
        shared = (layout.is_shared(repeat) for each in products for layout in self.layouts(each))
        mixed = weighed or any(x.others or x.earlier for x in products)
        if repeat == 1 or (not mixed and all(shared)):
            yield self
            return
        for each in range(repeat):
            yield replace(self, repeats=slice(each, each + 1))


def parts_of(q: torch.Tensor, n_k: int, call: Call, products: Sequence[Product]) -> Iterator[Part]:
    """The parts of a call with q [B, K, R, n_q, d]."""
    batch, keys, repeat, n_q, size = q.shape
    many = max(1, LIMITS.queries_together // (repeat * n_q * size))
    step, heads = max(1, many // keys), min(keys, many)
    for first in range(0, batch, step):
        for low in range(0, keys, heads):
            some = slice(first, min(first + step, batch)), slice(low, min(low + heads, keys))
            part = Part(*some, slice(0, repeat), (batch, keys, repeat, n_q), n_k, call)
            yield from part.apart(products)


def _counts(choice: Choice) -> Condition:
    return lambda q, k: choice.counts(q, k).double().log()


def _without(pairs: Pairs) -> Condition:
    return lambda q, k: ~pairs.holds(q, k)
