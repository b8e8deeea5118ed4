"""What a kernel of features gives the pairs of a graph: sums over them, and their gradients.

The pairs lie in the tiles of disjoint steps, each in its own order. Some blocks of them at a time
are products of features, of which masks leave out what is no pair. Features are computed for these
blocks, in the gradient once more, so that memory does not go with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from attnspec.backends.factored.features.maps import Features, Tables
from attnspec.backends.factored.features.spans import Given, Summing
from attnspec.backends.factored.features.sums import through
from attnspec.backends.tables.attend import as_read, bias_of, put_back
from attnspec.backends.tables.blocks import Patch, Step
from attnspec.backends.tables.sides import scratch, side_by_side


@dataclass(frozen=True, eq=False)
class GraphSums:
    """The sums over the pairs of some steps of what `how` sums over all."""

    steps: Sequence[Step]
    how: Summing

    def subtract(self, given: Given, sums: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Takes the pairs of the graph out of sums [B, K, R, n_q, e] in `frames` [B, K, R, n_q];
        with padding B is 1. Returns the sums [B, K, R, n_q] of the sizes of what was taken."""
        taken = torch.zeros_like(sums[..., :1])
        flat, sizes = sums.flatten(0, 2), taken.flatten(0, 2)
        for step in self.steps:
            into = as_read(step.q_order, flat, "result")
            beside = as_read(step.q_order, sizes, "sizes")
            for part in _parts(self.how, given, step, frames):
                weights = part.weights()
                part.add_rows(into, (weights @ part.values).neg_())
                part.add_rows(beside, weights.abs_().sum(-1, keepdim=True))
            put_back(step.q_order, flat, into)
            put_back(step.q_order, sizes, beside)
        return taken[..., 0]

    def differentiate(
        self, given: Given, into: Given, grad: torch.Tensor, frames: torch.Tensor
    ) -> None:
        """Adds what goes through the pairs of the graph to the gradients `into`, where `grad`
        [B, K, R, n_q, e] is that of the sums without them."""
        targets = into.k.flatten(0, 1), into.v.flatten(0, 1)
        of_queries = into.q.flatten(0, 2)
        for step in self.steps:
            upper = as_read(step.q_order, grad.flatten(0, 2), "grad rows", blank=True)
            into_q = as_read(step.q_order, of_queries, "query gradients")
            sums = targets
            order = step.k_order
            if order is not None:
                shapes = [(len(x), len(order), x.shape[2]) for x in targets]
                sums = (
                    scratch("key gradients", shapes[0], grad.dtype).zero_(),
                    scratch("value gradients", shapes[1], grad.dtype).zero_(),
                )
            for part in _parts(self.how, given, step, frames):
                above = part.rows(upper, "grad", blank=True).neg()
                of_values = (part.weights().mT @ above)[..., : given.v.shape[-1]]
                part.add_keys(sums[1], part.joined(of_values))
                of_products = part.weighed(above @ part.values.mT)
                of_q, of_k = part.gradients(of_products, into.tables)
                part.add_rows(into_q, of_q)
                part.add_keys(sums[0], of_k)
            put_back(step.q_order, of_queries, into_q)
            if order is not None:
                for target, found in zip(targets, sums, strict=True):
                    order.add(target, found)


def _parts(how: Summing, given: Given, step: Step, frames: torch.Tensor) -> Iterator[_Part]:
    """The pairs of a step, part by part."""
    sides = _Sides(
        as_read(step.q_order, given.q.flatten(0, 2), "queries"),
        as_read(step.k_order, given.k.flatten(0, 1), "keys"),
        as_read(step.k_order, given.v.flatten(0, 1), "values"),
        as_read(step.q_order, frames.flatten(0, 2), "sums"),
        bias_of(None if given.padding is None else given.padding[0], given.q.dtype),
    )
    size = given.q.shape[-1]
    wide = how.map.width(size) if how.paired is None else size
    lead = given.q.shape[:3].numel()
    for piece in step.pieces(lead, max(wide, given.v.shape[-1]), True, True):
        for patch in piece.patches:
            yield _Part(how, given, sides, patch)


@dataclass(frozen=True, eq=False)
class _Sides:
    """Rows of queries and keys in the order of a step, frames of sums, and what padding adds."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    frames: torch.Tensor
    padding: torch.Tensor | None


class _Part:
    """Some blocks of pairs: rows of queries [N, blocks, h, …] and of keys [N, blocks, w, …] for N
    samples and key heads; the queries of all heads of a key head are more rows."""

    def __init__(self, how: Summing, given: Given, sides: _Sides, patch: Patch) -> None:
        self.how, self.tables, self.patch = how, given.tables, patch
        self.lead, self.repeat = given.q.shape[:2], given.q.shape[2]
        self.q = self.rows(sides.queries, "q")
        self.k = self._each(sides.keys, "k")
        values = functional.pad(self._each(sides.values, "v"), (0, 1), value=1.0)
        self.values = self._spread(values, "v of blocks")
        f, g = Features(self.q), Features(self.k)
        if self.how.paired is None:
            f = self._features(how.map.queries, self.q)
            g = self._features(how.map.keys, self.k)
        self.f, self.features_of_k = f.values, g.values
        self.g = self._spread(g.values, "g of blocks")
        self.factor = patch.bias(sides.padding)
        if self.factor is not None:
            self.factor = self.factor.to(self.q.dtype).repeat(1, self.repeat, 1)
        if f.log is not None and g.log is not None:
            rows = f.log - self.rows(sides.frames[..., None], "frames")[..., 0]
            below = rows[..., None] + self._spread(g.log[..., None], "frames of blocks").mT
            self.factor = below if self.factor is None else below.add_(self.factor)
        if self.factor is not None:
            self.factor = self.factor.exp_()

    def weights(self) -> torch.Tensor:
        """What the kernel gives the pairs [N, blocks, h, w], 0 for what is no pair."""
        return self.weighed(self._products(self.f, self.g))

    def weighed(self, products: torch.Tensor) -> torch.Tensor:
        """Products of features, or their gradients, of pairs."""
        return products if self.factor is None else products.mul_(self.factor)

    def gradients(self, of_products: torch.Tensor, into: Tables) -> Sequence[torch.Tensor]:
        """The gradients of the rows of queries and keys; what is learned has its share added to
        `into`."""
        if self.how.paired is not None:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (self.f, self.g)]
                products = self._products(*leaves)
            of_q, of_g = torch.autograd.grad(products, leaves, of_products)
            return of_q, self.joined(of_g)
        of_f, of_g = of_products @ self.g, self.joined(of_products.mT @ self.f)
        return (
            self._through(self.how.map.queries, self.q, (self.f, of_f), into),
            self._through(self.how.map.keys, self.k, (self.features_of_k, of_g), into),
        )

    def _products(self, f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return f @ g.mT if self.how.paired is None else self.how.paired.pairs(f, g)

    # --- features ------------------------------------------------------------------------------

    def _features(self, features: Callable[..., Features], x: torch.Tensor) -> Features:
        """The features of rows [N, blocks, h, d], and their frames [N, blocks, h]."""
        found = features(self._flat(x), self.tables)
        log = None if found.log is None else found.log.view(x.shape[:-1])
        return Features(found.values.view(*x.shape[:-1], -1), log)

    def _through(
        self,
        features: Callable[..., Features],
        x: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor],
        into: Tables,
    ) -> torch.Tensor:
        """The gradient of rows, whose features and their gradients are found."""
        values, grad = found
        rows = self._flat(x)
        return through(self.how.map, features, rows, values, grad, self.tables, into).view(x.shape)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """[N, blocks, h, d] as rows of heads [B, K, n, d]."""
        return x.reshape(*self.lead, -1, x.shape[-1])

    # --- rows of queries -----------------------------------------------------------------------

    def rows(self, x: torch.Tensor, use: str, blank: bool = False) -> torch.Tensor:
        """The queries of [N R, places, e] in blocks [N, blocks, R h, e]."""
        blocks = self.patch.q
        found = blocks.read(x, side_by_side(blocks), use, blank)
        return torch.unflatten(found, 1, (-1, self.repeat)).transpose(0, 1).flatten(2, 3)

    def add_rows(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Adds [N, blocks, R h, e] to the queries of [N R, places, e]."""
        blocks = self.patch.q
        found = torch.unflatten(found, 2, (self.repeat, -1)).transpose(0, 1).flatten(1, 2)
        blocks.add(into, found, side_by_side(blocks))

    # --- rows of keys --------------------------------------------------------------------------

    def _each(self, x: torch.Tensor, use: str) -> torch.Tensor:
        """The keys of [N, places, e], each tile that is read once [N, tiles, size, e]."""
        blocks = self.patch.keys
        return blocks.read(x, side_by_side(blocks), use).transpose(0, 1)

    def _spread(self, x: torch.Tensor, use: str) -> torch.Tensor:
        """Tiles [N, tiles, size, e] in the blocks that read them [N, blocks, w, e]."""
        blocks = self.patch.places
        return blocks.read(x.flatten(1, 2), side_by_side(blocks), use).transpose(0, 1)

    def joined(self, found: torch.Tensor) -> torch.Tensor:
        """The sums over blocks [N, blocks, w, e] for each tile [N, tiles, size, e]."""
        places, tiles = self.patch.places, self.patch.keys
        into = found.new_zeros(len(found), tiles.count * tiles.height, found.shape[-1])
        places.add_overlapping(into, found.transpose(0, 1), side_by_side(places))
        return into.view(len(found), tiles.count, tiles.height, -1)

    def add_keys(self, into: torch.Tensor, found: torch.Tensor) -> None:
        """Adds tiles [N, tiles, size, e] to the keys of [N, places, e]."""
        blocks = self.patch.keys
        blocks.add(into, found.transpose(0, 1), side_by_side(blocks))
