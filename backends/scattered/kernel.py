"""Attention edge by edge in torch: no score is computed but those of the edges.

Three means, one meaning. On the CPU, plain softmax runs head by head in a workspace of one number
for each edge, with its backward written out. Everything else on the CPU, dropout and second
derivatives included, takes the same products of `backends.scattered.products` as differentiable
operations. Elsewhere, under compilation and transforms, the keys of each query are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.exact import grouped
from attnspec.backends.common.score_formula import (
    HALF,
    Blocks,
    Formula,
    scale_of,
    shares,
    widened,
)
from attnspec.backends.common.torch_modes import (
    Function,
    apart,
    derivatives,
    is_transformed,
)
from attnspec.backends.scattered.products import EdgeProducts, scores, to_queries
from attnspec.layout.edge_list import EdgeLayout, Rows
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

_softmax_backward = torch.ops.aten._softmax_backward_data


class EdgeFormula(Formula):
    """The formula, also from given scores on."""

    def weights(
        self, scores: torch.Tensor, blocks: Blocks, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights [B, K, R, G, h, w] of scaled scores, and their log-sum-exps [B, K, R, G, h],
        if there are any."""
        scores = self.changed(scores, blocks.distance, call)
        found = shares(scores, blocks.mask, self.work.normalize)
        weights = found.weights
        if call.dropout_p:
            weights = functional.dropout(weights, call.dropout_p)
        return weights, found.lse


class Group:
    """Queries of equal width as tensors: each is a block of one query in terms of the formula."""

    def __init__(self, rows: Rows, layout: EdgeLayout, device: torch.device) -> None:
        self.rows, self.layout, self.device = rows, layout, device
        self.places = layout.slice_of(rows)
        self.shape = (rows.last - rows.first, rows.width)
        self.before = layout.n_k - layout.n_q

    @cached_property
    def queries(self) -> torch.Tensor:
        """The queries, int32 [queries]."""
        return self._kept(self.layout.queries_of(self.rows))

    @cached_property
    def keys(self) -> torch.Tensor:
        """The key of every place, int32 [queries, width]."""
        return self._kept(self.layout.keys[self.places].reshape(self.shape))

    @cached_property
    def held(self) -> torch.Tensor | None:
        """The places that are edges, bool [queries, width]; None where all are."""
        return None if self.rows.held is None else self._kept(self.rows.held)

    def _kept(self, values: np.ndarray) -> torch.Tensor:
        return apart(lambda: torch.from_numpy(values).to(self.device))

    @cached_property
    def _spare(self) -> torch.Tensor | None:
        return None if self.rows.held is None else self._kept(~self.rows.held)

    def blocks(self, part: slice, padding: torch.Tensor | None, distance: bool) -> Blocks:
        """Mask and distances of a part of the queries."""
        keys = self.keys[part]
        mask = None if self.held is None else self.held[part, None]
        if padding is not None:
            real = padding[:, keys][:, None, None, :, None]
            mask = real if mask is None else mask & real
        if not distance:
            return Blocks(None, mask)
        return Blocks((self.queries[part, None].long() + self.before - keys)[:, None], mask)

    def dropped(self, real: torch.Tensor | None) -> torch.Tensor | None:
        """The places that count for nothing, bool [queries, width], where keys are `real` [n_k]."""
        if real is None:
            return self._spare
        held = real[self.keys]
        return ~(held if self.held is None else held & self.held)


class ScatteredKernel:
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
    def formula(self) -> EdgeFormula:
        """The formula, from scores on."""
        return apart(lambda: EdgeFormula(self.work, self.heads, self.device))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        batch, heads, rows, size = q.shape
        q = grouped(q, k)
        empty = 0 in (batch, size, v.shape[-1]) or not self.groups
        if empty or self.products is None or is_transformed():
            out, _ = self.gathered(q, k, v, call)
        elif call.dropout_p or not self.work.plain:
            out, _ = self.on_edges(q, k, v, call, self.products)
        elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out = _Plain.apply(q, k, v, call.padding, self)  # type: ignore[no-untyped-call]
        else:
            out = self.forward(q, k, v, call.padding, None)
        return out.reshape(batch, heads, rows, v.shape[-1])

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and its log-sum-exps [B, H, n_q], if there are any."""
        parts = grouped(q, k), k, v
        empty = 0 in (q.shape[0], q.shape[-1], v.shape[-1]) or not self.groups
        if empty or self.products is None or is_transformed():
            out, lse = self.gathered(*parts, call)
        else:
            out, lse = self.on_edges(*parts, call, self.products)
        return out.reshape(*q.shape[:3], v.shape[-1]), None if lse is None else lse.flatten(1, 2)

    # --- head by head --------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, e]; fills `weights` [B, K, R, places] if there are any."""
        products = self._products()
        wide = torch.float32 if q.dtype in HALF else q.dtype
        scale = scale_of(self.work, q.shape[-1])
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        into = products.workspace(wide)
        spare = torch.empty_like(into.values())
        for sample in range(q.shape[0]):
            real = None if padding is None else padding[sample]
            dropped = [group.dropped(real) for group in self.groups]
            for head in range(q.shape[1]):
                keys, values = (_flat(x[sample, head], wide) for x in (k, v))
                for index in range(q.shape[2]):
                    at = sample, head, index
                    found = spare if weights is None else weights[at]
                    of_edges = products.scores(_flat(q[at], wide), keys, scale, into)
                    self._softmax(of_edges, dropped, found)
                    out[at] = products.to_queries(found, values)
        return out

    def _softmax(
        self, given: torch.Tensor, dropped: Sequence[torch.Tensor | None], into: torch.Tensor
    ) -> None:
        for group, drop in zip(self.groups, dropped, strict=True):
            part, found = (x[group.places].view(group.shape) for x in (given, into))
            if drop is not None:
                part.masked_fill_(drop, -torch.inf)
            torch.softmax(part, -1, out=found)
            if drop is not None:
                # rows whose keys are all padded have become NaN
                found.masked_fill_(drop, 0.0)

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        asks: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of q, k and v that are asked for; `saved` are q, k, v and the weights."""
        q, k, v, weights = saved
        products = self._products()
        wide = weights.dtype
        scale = scale_of(self.work, q.shape[-1])
        into = products.workspace(wide)
        slopes = torch.empty_like(into.values())
        grad_q, grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) if ask else None
            for x, ask in zip((q, k, v), asks, strict=True)
        )
        for sample in range(q.shape[0]):
            for head in range(q.shape[1]):
                keys, values = (_flat(x[sample, head], wide) for x in (k, v))
                sum_k, sum_v = torch.zeros_like(keys), torch.zeros_like(values)
                for index in range(q.shape[2]):
                    at = sample, head, index
                    row = _flat(grad[at], wide)
                    if grad_v is not None:
                        sum_v += products.to_keys(weights[at], row)
                    if grad_q is None and grad_k is None:
                        continue
                    of_weights = products.scores(row, values, scale, into)
                    self._softmax_backward(of_weights, weights[at], slopes)
                    if grad_q is not None:
                        grad_q[at] = products.to_queries(slopes, keys)
                    if grad_k is not None:
                        sum_k += products.to_keys(slopes, _flat(q[at], wide))
                if grad_k is not None:
                    grad_k[sample, head] = sum_k
                if grad_v is not None:
                    grad_v[sample, head] = sum_v
        return grad_q, grad_k, grad_v

    def _softmax_backward(
        self, grad: torch.Tensor, weights: torch.Tensor, into: torch.Tensor
    ) -> None:
        for group in self.groups:
            parts = (x[group.places].view(group.shape) for x in (grad, weights))
            _softmax_backward(
                *parts, -1, weights.dtype, grad_input=into[group.places].view(group.shape)
            )

    def _products(self) -> EdgeProducts:
        if self.products is None:
            raise RuntimeError("products on edges run on the CPU alone")
        return self.products

    # --- in differentiable operations ----------------------------------------------------------

    def on_edges(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        products: EdgeProducts,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, K, R, n_q, e] from scores of all heads and edges, and its log-sum-exps
        [B, K, R, n_q], if there are any."""
        kept = q.dtype
        q, k, v = widened(q), widened(k), widened(v)
        found = scores(q * scale_of(self.work, q.shape[-1]), k, products)
        weights, sums = [], []
        for group in self.groups:
            blocks = group.blocks(slice(None), call.padding, self.formula.needs_distance)
            count, width = group.shape
            part = found[..., group.places].reshape(*found.shape[:3], count, 1, width)
            mine, lse = self.formula.weights(part, blocks, call)
            weights.append(mine.flatten(3))
            sums.append(lse)
        out = to_queries(torch.cat(weights, -1), v, products).to(kept)
        return out, self._in_order(sums, found)

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
                blocks = group.blocks(part, call.padding, self.formula.needs_distance)
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
            none = q[:, :, :, :rest, None], k[:, :, None, :0], v[:, :, None, :0]
            out, lse = self.formula.partial(*none, Blocks(None, None), call)
            outs.append(out.squeeze(4))
            sums.append(lse)
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


class _Plain(Function):
    """Plain softmax head by head; differentiable products give derivatives of its derivative."""

    @staticmethod
    def forward(ctx, q, k, v, padding, kernel):  # type: ignore[no-untyped-def]
        wide = torch.float32 if q.dtype in HALF else q.dtype
        weights = q.new_empty(*q.shape[:3], kernel.products.places, dtype=wide)
        out = kernel.forward(q, k, v, padding, weights)
        ctx.save_for_backward(q, k, v, weights)
        ctx.kernel, ctx.padding = kernel, padding
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        kernel, asks = ctx.kernel, ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled():
            return *kernel.backward(grad, ctx.saved_tensors, asks), None, None

        def run(*given):  # type: ignore[no-untyped-def]
            return kernel.on_edges(*given, Call(padding=ctx.padding), kernel.products)[:1]

        return *derivatives(run, ctx.saved_tensors[:3], asks, [grad]), None, None


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous()
