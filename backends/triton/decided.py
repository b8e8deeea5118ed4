"""The kernel of graphs that the data decide: their lists, and the static rest of the graph, in the
same kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.nn import functional

from attnspec.backends.common.exact import Partial, has_numbers
from attnspec.backends.common.merging import with_zero
from attnspec.backends.decided.choice import TileLists
from attnspec.backends.decided.lists import TILE
from attnspec.backends.decided.products import Parts, Product
from attnspec.backends.decided.ranking import listed, marked
from attnspec.backends.decided.tables import Part
from attnspec.backends.tables.decided import DecidedTables, Rest
from attnspec.backends.triton.attention import Passing, TileAttention, drops_of, fits
from attnspec.backends.triton.kernel import TritonKernel, delta_of, is_taken, tile_kernel
from attnspec.backends.triton.placed import PlacedTables
from attnspec.backends.triton.tuning import LEAST, ON_GPU, steps_of
from attnspec.layout.steps import bands_of, whole_layouts_of
from attnspec.lower.work import Call, Work


@dataclass(frozen=True, eq=False)
class TallPart(Part):
    """A part whose tiles fill blocks, query tiles with the rows of all heads that share them."""

    def layouts(self, product: Product) -> tuple[TileLists, ...]:
        heads = self.repeats.stop - self.repeats.start
        return tuple(filled(each, heads, self.n_k) for each in super().layouts(product))


def filled(layout: TileLists, heads: int, n_k: int) -> TileLists:
    """Tiles of a layout that follow one another as one, where they would leave most of a block
    empty: one that reads what any of them reads."""
    rows = 1 if heads * layout.q_tile >= LEAST else -(-TILE // layout.q_tile)
    keys = 1 if layout.k_tile >= LEAST else -(-TILE // layout.k_tile)
    if rows == keys == 1 or not layout.lists.numel():
        return layout
    short = -layout.lists.shape[2] % rows
    named = functional.pad(layout.lists, (0, 0, 0, short), value=-1)
    named = named.div(keys, rounding_mode="floor")
    named = named.reshape(*named.shape[:2], -1, rows * named.shape[3])
    slots = n_k if layout.k_order is None else layout.k_order.shape[2]
    count = -(-slots // (keys * layout.k_tile))
    sizes = rows * layout.q_tile, keys * layout.k_tile
    lists = listed(marked(named, count))
    return replace(layout, lists=lists, q_tile=sizes[0], k_tile=sizes[1], whole=False)


class ListedRest(Rest):
    """What stands beside decided graphs."""

    def known(self, work: Work) -> TritonKernel:
        bands = bands_of(work.relation, work.n_q, work.n_k, ON_GPU)
        layouts = whole_layouts_of(bands, work.n_q, work.n_k)
        return TritonKernel(work, self.heads, self.device, layouts)


class DecidedKernel(DecidedTables):
    """Attention over the lists of a call's choices, and over the rest of the graph.

    The query heads of a key head that share their lists are rows of one tile. Where kernels cannot
    go, the dense definition computes the same.
    """

    one_size = False
    reuses = ("cpu", "cuda")

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, parts: Parts
    ) -> None:
        super().__init__(work, heads, device, parts)
        self.rest = None if parts.rest is None else ListedRest(work, heads, device, parts.rest)
        self.beside: TritonKernel | None = None
        if self.rest is not None and self.rest.work.reads:
            bands = steps_of(self.rest.work)
            self.beside = tile_kernel(self.rest.work, heads, device, bands) if bands else None
        self.attention = TileAttention(work, heads, device)

    def rests(self, call: Call) -> Iterator[tuple[slice, TritonKernel, Call]]:
        if self.beside is None:
            yield from cast(Any, super().rests(call))
        else:
            data = {name: call.data[name][:, 0] for name in self.beside.work.reads}
            yield slice(None), self.beside, replace(call, data=data)

    def goes_fast(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
        return is_taken(q) and fits(q, v) and has_numbers(q, k, v)

    def parts_of(self, q: torch.Tensor, call: Call) -> Iterator[Part]:
        batch, keys, repeat, n_q = q.shape[:4]
        sides = slice(0, batch), slice(0, keys), slice(0, repeat)
        whole = TallPart(*sides, (batch, keys, repeat, n_q), self.work.n_k, call)
        return whole.apart(self.parts.products)

    def _tables(self, part: Part) -> list[PlacedTables]:
        return [PlacedTables(placed) for placed in self.placed(part)]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> Partial:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for of, kernel, its in self.rests(call):
            out[of], lse[of] = kernel.forward(q[of], k[of], v[of], its, scale)
        if self.work.normalize == "softmax1":
            out, lse = with_zero((out, lse), in_place=True)
        for part in self.parts_of(q, call):
            passing = _passing(part, q, k, v, scale)
            into = [_in_line(part.of_q(x)).contiguous() for x in (out, lse)]
            self.attention.attend(self._tables(part), passing, {}, (into[0], into[1]))
            for x, found in zip((out, lse), into, strict=True):
                mine = part.of_q(x)
                # what lay in line already is written
                if found.data_ptr() != mine.data_ptr():
                    mine.copy_(_in_place(found, mine))
        return out.to(q.dtype), lse

    def derivatives(
        self,
        saved: Sequence[torch.Tensor],
        grad: torch.Tensor,
        of_lse: torch.Tensor | None,
        call: Call,
        scale: float,
    ) -> Sequence[torch.Tensor]:
        q, k, v, out, lse = saved
        given = q, k, v
        grads = [x.new_zeros(x.shape, dtype=lse.dtype) for x in given]
        for of, kernel, its in self.rests(call):
            mine = None if of_lse is None else of_lse[of]
            found = kernel.derivatives([x[of] for x in saved], grad[of], mine, its, scale)
            for total, share in zip(grads, found, strict=True):
                total[of] += share
        delta = delta_of(grad, out, lse, of_lse)
        for part in self.parts_of(q, call):
            passing = _passing(part, q, k, v, scale)
            rows = [_in_line(part.of_q(x)) for x in (grad, lse, delta)]
            keys = [x.view(1, 1, -1, x.shape[-1]) for x in grads[1:]]
            into = [torch.zeros_like(passing.q, dtype=lse.dtype), *keys]
            above = rows[0], rows[1], rows[2]
            self.attention.derive(self._tables(part), passing, {}, above, into)
            mine = part.of_q(grads[0])
            mine += _in_place(into[0], mine)
        return [x.to(y.dtype) for x, y in zip(grads, given, strict=True)]


def _passing(
    part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> Passing:
    """A part of a call as one sequence of all samples and key heads."""
    keys = [part.of_k(x).reshape(1, 1, -1, x.shape[-1]) for x in (k, v)]
    rows, repeat = _in_line(part.of_q(q)), q.shape[2]
    call = replace(part.call, line=part.call.line + part.repeats.indices(repeat)[0])
    drops = drops_of(call, repeat, q.shape[3], k.shape[2])
    return Passing((rows, *keys), None, scale, rows.shape[1], drops)


def _in_line(x: torch.Tensor) -> torch.Tensor:
    """[B, K, R, n, …] as [1, R, B K n, …]."""
    return x.movedim(2, 0).flatten(1, 3)[None]


def _in_place(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[1, R, B K n, …] as [B, K, R, n, …]."""
    batch, keys, _, rows = like.shape[:4]
    return torch.unflatten(x[0], 1, (batch, keys, rows)).movedim(0, 2)
