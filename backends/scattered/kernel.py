"""Attention edge by edge in torch: no score is computed but those of the edges.

Three means, one meaning. On the CPU, plain softmax of which no derivative is asked for runs head by
head in a workspace of one number for each edge. Everything else on the CPU takes the same products
of `backends.scattered.products` as differentiable operations. Elsewhere, under compilation and
transforms, the keys of each query are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from attnspec.backends.common.exact import ByKeyHead
from attnspec.backends.common.score_formula import HALF, Blocks, Formula, scale_of, widened
from attnspec.backends.common.torch_modes import apart, is_transformed, unseen
from attnspec.backends.scattered.products import EdgeProducts, product
from attnspec.layout.edge_list import EdgeLayout, Rows
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work


class Group:
    """Queries of equal width as tensors: each is a block of one query in terms of the formula."""

    def __init__(self, rows: Rows, layout: EdgeLayout, device: torch.device) -> None:
        self.rows, self.layout, self.device = rows, layout, device
        self.places = layout.slice_of(rows)
        self.shape = (rows.last - rows.first, rows.width)

    @cached_property
    def queries(self) -> torch.Tensor:
        """The queries, int32 [queries]."""
        return self._kept(self.layout.queries_of(self.rows))

    @cached_property
    def keys(self) -> torch.Tensor:
        """The key of every place, int32 [queries, width]."""
        return self._kept(self.layout.keys[self.places].reshape(self.shape))

    @cached_property
    def _edges(self) -> torch.Tensor | None:
        return None if self.rows.held is None else self._kept(self.rows.held)

    def _kept(self, values: np.ndarray) -> torch.Tensor:
        return apart(lambda: torch.from_numpy(values).to(self.device))

    def mask(self, padding: torch.Tensor | None, part: slice = slice(None)) -> torch.Tensor | None:
        """The places of a part of the queries that are edges, bool [B or 1, queries, width]; None
        where all are."""
        edges = None if self._edges is None else self._edges[None, part]
        if padding is None:
            return edges
        real = padding[:, self.keys[part]]
        return real if edges is None else edges & real

    def blocks(
        self, padding: torch.Tensor | None, distance: bool, part: slice = slice(None)
    ) -> Blocks:
        """Mask and distances of a part of the queries."""
        mask = self.mask(padding, part)
        mask = None if mask is None else mask[:, None, None, :, None]
        if not distance:
            return Blocks(None, mask)
        positions = self.queries[part, None].long() + self.layout.n_k - self.layout.n_q
        return Blocks((positions - self.keys[part])[:, None], mask)


class ScatteredKernel(ByKeyHead):
    """Attention over the edges of a layout."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, layout: EdgeLayout
    ) -> None:
        self.work, self.heads, self.device, self.layout = work, heads, device, layout
        self.products = EdgeProducts(layout) if device.type == "cpu" else None
        self.groups = [Group(rows, layout, device) for rows in layout.rows]
        self.back = None
        if layout.order is not None:
            self.back = torch.from_numpy(layout.order.argsort()).to(device)

    @cached_property
    def formula(self) -> Formula:
        """The formula, from scores on."""
        return apart(lambda: Formula(self.work, self.heads, self.device))

    def traced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
        products = self._products(q, v)
        if products is None or not self.work.plain or call.dropout_p:
            return self.composed(q, k, v, call)[0]
        if unseen(q, k, v):
            return self.by_head(q, k, v, call.padding, products)
        return self.on_edges(q, k, v, call, products, True)[0]

    def composed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        products = self._products(q, v)
        if products is None:
            return self.gathered(q, k, v, call)
        return self.on_edges(q, k, v, call, products, False)

    def _products(self, q: torch.Tensor, v: torch.Tensor) -> EdgeProducts | None:
        """The products on edges where they can be taken."""
        some = 0 not in (len(q), q.shape[-1], v.shape[-1]) and self.groups
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
            real = None if padding is None else padding[sample : sample + 1]
            masks = [group.mask(real) for group in self.groups]
            dropped = [None if mask is None else ~mask[0] for mask in masks]
            for head in range(q.shape[1]):
                keys, values = (_flat(x[sample, head], wide) for x in (k, v))
                for index in range(q.shape[2]):
                    at = sample, head, index
                    found = products.scores(_flat(q[at], wide), keys, scale, into)
                    for group, drop in zip(self.groups, dropped, strict=True):
                        part, share = (x[group.places].view(group.shape) for x in (found, weights))
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, K, R, n_q, e] from scores of all heads and edges, and its log-sum-exps
        [B, K, R, n_q], if there are any; with `softmax` weights are torch's, without these."""
        kept = q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        found = product(products, None, q * scale_of(self.work, q.shape[-1]), k)
        weights, sums = [], []
        sizes = [group.shape[0] * group.shape[1] for group in self.groups]
        for group, part in zip(self.groups, torch.split(found, sizes, -1), strict=True):
            part = torch.unflatten(part, -1, group.shape)
            blocks = group.blocks(call.padding, self.formula.needs_distance)
            if softmax:
                mine = _softmax(part, None if blocks.mask is None else ~blocks.mask[..., 0, :])
            else:
                mine, lse = self.formula.weights(part.unsqueeze(-2), blocks, call)
                sums.append(lse)
            weights.append(mine.flatten(3))
        joined = weights[0] if len(weights) == 1 else torch.cat(weights, -1)
        out = product(products, joined, None, v).to(kept)
        return out, None if softmax else self._in_order(sums, found)

    def gathered(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same, for which keys and values of all edges are copied."""
        batch, keys, repeat, rows, size = q.shape
        kept, outs, sums = q.dtype, [], []
        # gradients of a key that many queries read add up in float32
        q, k, v = widened(q), widened(k), widened(v)
        for group in self.groups:
            count, width = group.shape
            per_query = max(1, batch * keys * width * max(size, v.shape[-1], repeat))
            step = max(1, LIMITS.piece // per_query)
            for low in range(0, count, step):
                part = slice(low, min(low + step, count))
                at = group.keys[part].flatten()
                blocks = group.blocks(call.padding, self.formula.needs_distance, part)
                found, lse = self.formula.partial(
                    q.index_select(3, group.queries[part]).unsqueeze(4),
                    k.index_select(2, at).view(batch, keys, -1, width, size),
                    v.index_select(2, at).view(batch, keys, -1, width, v.shape[-1]),
                    blocks,
                    call,
                )
                outs.append(found.squeeze(4))
                sums.append(lse)
        rest = rows - sum(group.shape[0] for group in self.groups)
        if rest:
            # without keys, which the formula says in a way that can be differentiated
            none = q[:, :, :, :rest], k[:, :, :0], v[:, :, :0]
            out, lse = self.formula.of_block(*none, Blocks(None, None), call)
            outs.append(out)
            sums.append(None if lse is None else lse[..., None])
        out = torch.cat(outs, 3).to(kept)
        out = out if self.back is None else out.index_select(3, self.back)
        return out, self._in_order(sums, q[..., 0])

    def _in_order(
        self, sums: Sequence[torch.Tensor | None], like: torch.Tensor
    ) -> torch.Tensor | None:
        """The log-sum-exps [B, K, R, count, 1] of all groups for the queries in order; `like`
        [B, K, R, …] says of how many heads. None where a group has none."""
        kept = [lse[..., 0] for lse in sums if lse is not None]
        if len(kept) < len(sums):
            return None
        rest = self.work.n_q - sum(lse.shape[3] for lse in kept)
        empty = 0.0 if self.work.normalize == "softmax1" else -torch.inf
        wide = torch.promote_types(like.dtype, torch.float32)
        nothing = like.new_full((*like.shape[:3], rest), empty, dtype=wide)
        lse = torch.cat([*kept, nothing], 3)
        return lse if self.back is None else lse.index_select(3, self.back)


def _softmax(scores: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
    """The weights of scores [..., width] without places that are dropped; 0 in rows of none."""
    if dropped is None:
        return torch.softmax(scores, -1)
    # rows whose keys are all dropped become NaN, as do gradients, which the masks make 0
    weights = torch.softmax(scores.masked_fill(dropped, -torch.inf), -1)
    return weights.masked_fill(dropped, 0.0)


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous()
