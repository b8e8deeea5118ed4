"""Attention edge by edge in torch: no score is computed but those of the edges.

Three means, one meaning. On the CPU, plain softmax of which no derivative is asked for runs head by
head in a workspace of one number for each edge. Everything else on the CPU takes the same products
of `backends.edges.products` as differentiable operations. Elsewhere, under compilation and
transforms, the edges are tables, in which each query is a block.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from attnspec.backends.common.composed import ComposedTables, Piece
from attnspec.backends.common.exact import ByKeyHead
from attnspec.backends.common.merging import Outputs, joined, wide_type, with_zero
from attnspec.backends.common.score_formula import scale_of, widened
from attnspec.backends.common.torch_modes import apart, is_transformed, unseen
from attnspec.backends.edges.products import EdgeProducts, product
from attnspec.layout.tables import Tables
from attnspec.lower.work import Call, Heads, Work


class EdgesKernel(ByKeyHead):
    """Attention over tables of edges."""

    def __init__(self, work: Work, heads: Heads, device: torch.device, tables: Tables) -> None:
        self.work, self.heads, self.device, self.tables = work, heads, device, tables
        self.products = EdgeProducts(tables) if device.type == "cpu" and tables.batches else None

    @cached_property
    def blocks(self) -> ComposedTables:
        """The same attention with each query as a block."""
        return apart(lambda: ComposedTables(self.work, self.heads, self.device, self.tables))

    @cached_property
    def pieces(self) -> list[Piece]:
        """The queries of equal width, whose places follow those of the pieces before."""
        (step,) = self.blocks.steps
        return [Piece(batch, slice(0, batch.blocks), slice(0, 1)) for batch in step.batches]

    def traced(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        products = self._products(q, v)
        if products and self.work.plain and not call.dropout_p and unseen(q, k, v):
            return self.by_head(q, k, v, call, products)
        return self.composed(q, k, v, call)[0]

    def _products(self, q: Tensor, v: Tensor) -> EdgeProducts | None:
        """The products on edges where they can be taken."""
        some = 0 not in (len(q), q.shape[-1], v.shape[-1])
        return self.products if some and not is_transformed() else None

    def by_head(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, products: EdgeProducts
    ) -> Tensor:
        """The output [B, K, R, n_q, e] of plain softmax, without derivatives."""
        wide = wide_type(q)
        scale = scale_of(self.work, q.shape[-1])
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        scores, weights = (q.new_empty(products.places, dtype=wide) for _ in range(2))
        groups = []
        sizes = [piece.keys.numel() for piece in self.pieces]
        parts = *(torch.split(x, sizes) for x in (scores, weights)), self.pieces
        for part, share, piece in zip(*parts, strict=True):
            shape, mask = piece.keys.shape, self.blocks.blocks(piece, call).mask
            # which places are not edges, or are padded, of every sample
            drop = None if mask is None else (~mask[..., 0, :]).expand(len(q), 1, 1, *shape)
            groups.append((part.view(shape), share.view(shape), drop))
        for sample in range(q.shape[0]):
            for head in range(q.shape[1]):
                keys, values = (x[sample, head].to(wide).contiguous() for x in (k, v))
                for index in range(q.shape[2]):
                    at = sample, head, index
                    products.scores(q[at].to(wide).contiguous(), keys, scores, scale)
                    for part, share, drop in groups:
                        if drop is not None:
                            part.masked_fill_(drop[sample, 0, 0], -torch.inf)
                        torch.softmax(part, -1, out=share)
                        if drop is not None:
                            # rows whose keys are all padded have become NaN
                            share.masked_fill_(drop[sample, 0, 0], 0.0)
                    out[at] = products.to_queries(weights, values)
        return out

    def composed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """From the scores of all heads and edges."""
        products = self._products(q, v)
        if products is None:
            return self.blocks.composed(q, k, v, call)
        kept = q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        scores = product(products, None, q * scale_of(self.work, q.shape[-1]), k)
        found = []
        parts = torch.split(scores, [piece.keys.numel() for piece in self.pieces], -1)
        for piece, part in zip(self.pieces, parts, strict=True):
            part = torch.unflatten(part, -1, tuple(piece.keys.shape)).unsqueeze(-2)
            blocks = self.blocks.blocks(piece, call)
            found.append(self.blocks.formula.weights(part, blocks, call))
        weights, sums = zip(*found, strict=True)
        flat = joined([each.flatten(3) for each in weights], -1)
        out, lse = product(products, flat, None, v), None
        if sums[0] is not None:
            lse = self.blocks.steps[0].ordered(sums, -torch.inf)
            if self.work.normalize == "softmax1":
                out, lse = with_zero((out, lse))
        return out.to(kept), lse
