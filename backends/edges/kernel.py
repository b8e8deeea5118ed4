"""Attention edge by edge in torch: no score is computed but those of the edges.

Three means, one meaning. On the CPU, plain softmax of which no derivative is asked for runs head by
head in a workspace of one number for each edge. Everything else on the CPU takes the same products
of `backends.edges.products` as differentiable operations. Elsewhere, under compilation and
transforms, the edges are tables, in which each query is a block.
"""

from __future__ import annotations

from functools import cached_property

import torch

from attnspec.backends.common.composed import ComposedTables, Piece
from attnspec.backends.common.exact import ByKeyHead
from attnspec.backends.common.merging import Outputs, with_zero
from attnspec.backends.common.score_formula import HALF, scale_of, widened
from attnspec.backends.common.torch_modes import apart, is_transformed, unseen
from attnspec.backends.edges.products import EdgeProducts, product
from attnspec.layout.edge_list import EdgeLayout
from attnspec.lower.work import Call, Work


class EdgesKernel(ByKeyHead):
    """Attention over the edges of a layout."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, layout: EdgeLayout
    ) -> None:
        self.work, self.heads, self.device, self.layout = work, heads, device, layout
        self.products = EdgeProducts(layout) if device.type == "cpu" else None

    @cached_property
    def tables(self) -> ComposedTables:
        """The same attention over the tables of the layout."""
        return apart(lambda: ComposedTables(self.work, self.heads, self.device, self.layout.tables))

    @cached_property
    def groups(self) -> list[tuple[slice, Piece, torch.Tensor | None]]:
        """Where the places of queries of equal width stand, these queries, each a block, and which
        places are not edges, bool [queries, width], None for none."""
        batches = [batch for step in self.tables.steps for batch in step.batches]
        return [
            (
                self.layout.slice_of(rows),
                Piece(batch, 0, batch.blocks, 0, 1),
                None if batch.masks.real is None else ~batch.masks.real,
            )
            for rows, batch in zip(self.layout.rows, batches, strict=True)
        ]

    def traced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        products = self._products(q, v)
        if products is None or not self.work.plain or call.dropout_p:
            return self.composed(q, k, v, call)[0]
        if unseen(q, k, v):
            return self.by_head(q, k, v, call.padding, products)
        return self.on_edges(q, k, v, call, products, True)[0]

    def composed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Outputs:
        products = self._products(q, v)
        if products is None:
            return self.tables.composed(q, k, v, call)
        return self.on_edges(q, k, v, call, products, False)

    def _products(self, q: torch.Tensor, v: torch.Tensor) -> EdgeProducts | None:
        """The products on edges where they can be taken."""
        some = 0 not in (len(q), q.shape[-1], v.shape[-1]) and self.layout.rows
        return self.products if some and not is_transformed() else None

    def by_head(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        products: EdgeProducts,
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, e] of plain softmax, without derivatives."""
        wide = torch.float32 if q.dtype in HALF else q.dtype
        scale = scale_of(self.work, q.shape[-1])
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        into = products.workspace(wide)
        weights = torch.empty_like(into.values())
        for sample in range(q.shape[0]):
            groups = self.groups
            if padding is not None:
                real = padding[sample]
                groups = [(at, x, _dropped(real[x.keys], drop)) for at, x, drop in groups]
            for head in range(q.shape[1]):
                keys, values = (_flat(x[sample, head], wide) for x in (k, v))
                for index in range(q.shape[2]):
                    at = sample, head, index
                    scores = products.scores(_flat(q[at], wide), keys, scale, into)
                    for places, piece, drop in groups:
                        shape = piece.high, piece.batch.width
                        part, share = (x[places].view(shape) for x in (scores, weights))
                        if drop is not None:
                            part.masked_fill_(drop, -torch.inf)
                        torch.softmax(part, -1, out=share)
                        if drop is not None:
                            # rows whose keys are all padded have become NaN
                            share.masked_fill_(drop, 0.0)
                    out[at] = products.to_queries(weights, values)
        return out

    # --- in differentiable operations ----------------------------------------------------------

    def on_edges(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        products: EdgeProducts,
        softmax: bool,
    ) -> Outputs:
        """The output [B, K, R, n_q, e] from scores of all heads and edges, and its log-sum-exps
        [B, K, R, n_q], if there are any; with `softmax` weights are torch's, without these."""
        kept = q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        scores = product(products, None, q * scale_of(self.work, q.shape[-1]), k)
        weights, sums = [], []
        sizes = [places.stop - places.start for places, _, _ in self.groups]
        parts = torch.split(scores, sizes, -1)
        for (_, piece, drop), part in zip(self.groups, parts, strict=True):
            part = torch.unflatten(part, -1, (piece.high, piece.batch.width))
            if softmax:
                if call.padding is not None:
                    drop = _dropped(call.padding[:, None, None, piece.keys], drop)
                mine = _softmax(part, drop)
            else:
                blocks = self.tables.blocks(piece, call)
                mine, lse = self.tables.formula.weights(part.unsqueeze(-2), blocks, call)
                if lse is not None:
                    sums.append(lse[..., None])
            weights.append(mine.flatten(3))
        joined = weights[0] if len(weights) == 1 else torch.cat(weights, -1)
        out, lse = product(products, joined, None, v), None
        if sums:
            lse = self.tables.steps[0].ordered(sums, -torch.inf)[..., 0]
            if self.work.normalize == "softmax1":
                out, lse = with_zero((out, lse))
        return out.to(kept), lse


def _dropped(real: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
    """The places of keys that are real or not, [..., queries, width], that are not edges."""
    return ~real if dropped is None else dropped | ~real


def _softmax(scores: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
    """The weights of scores [..., width] without places that are dropped; 0 in rows of none."""
    if dropped is None:
        return torch.softmax(scores, -1)
    # rows whose keys are all dropped become NaN, as do gradients, which the masks make 0
    weights = torch.softmax(scores.masked_fill(dropped, -torch.inf), -1)
    return weights.masked_fill(dropped, 0.0)


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous()
