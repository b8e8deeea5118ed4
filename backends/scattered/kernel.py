"""Attention edge by edge in torch: no score is computed but those of the edges.

Three means, one meaning. On the CPU, plain softmax runs head by head in a workspace of one number
for each edge, with its backward written out. Everything else on the CPU, dropout and second
derivatives included, takes the same products of `backends.scattered.products` as differentiable
operations. Elsewhere, under compilation and transforms, the keys of each query are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from attnspec.backends.common.pieces import PIECE
from attnspec.backends.common.score_formula import HALF, Blocks, Formula, scale_of, weigh
from attnspec.backends.common.torch_modes import is_transformed
from attnspec.backends.scattered.products import EdgeProducts, scores, to_queries
from attnspec.layout.edge_list import EdgeLayout, Rows
from attnspec.lower.work import Call, Work

_softmax_backward = torch.ops.aten._softmax_backward_data


class EdgeFormula(Formula):
    """The formula, also from given scores on."""

    def weights(self, scores: torch.Tensor, blocks: Blocks, call: Call) -> torch.Tensor:
        """The weights [B, K, R, G, h, w] of scaled scores."""
        scores = self.changed(scores, blocks.distance, call)
        weights = weigh(scores, blocks.mask, self.work.normalize)
        return functional.dropout(weights, call.dropout_p) if call.dropout_p else weights


class Group:
    """Queries of equal width as tensors: each is a block of one query in terms of the formula."""

    def __init__(self, rows: Rows, layout: EdgeLayout, device: torch.device) -> None:
        self.places = layout.slice_of(rows)
        self.shape = (rows.last - rows.first, rows.width)
        keys = layout.keys[self.places].reshape(self.shape)
        self.queries = torch.from_numpy(layout.queries_of(rows)).to(device)
        self.keys = torch.from_numpy(keys).to(device)
        self.before = layout.n_k - layout.n_q
        self.held = None if rows.held is None else torch.from_numpy(rows.held).to(device)

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
            return None if self.held is None else ~self.held
        held = real[self.keys]
        return ~(held if self.held is None else held & self.held)


class ScatteredKernel:
    """Attention over the edges of a layout."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, layout: EdgeLayout
    ) -> None:
        self.work = work
        self.formula = EdgeFormula(work, heads, device)
        self.products = EdgeProducts(layout) if device.type == "cpu" else None
        self.groups = [Group(rows, layout, device) for rows in layout.rows]
        self.back = None
        if layout.order is not None:
            self.back = torch.from_numpy(layout.order.argsort()).to(device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        batch, heads, rows, size = q.shape
        q = q.view(batch, k.shape[1], heads // k.shape[1], rows, size)
        empty = 0 in (batch, size, v.shape[-1]) or not self.groups
        if empty or self.products is None or torch.compiler.is_compiling() or is_transformed():
            out = self.gathered(q, k, v, call)
        elif call.dropout_p or not self.work.plain:
            out = self.on_edges(q, k, v, call, self.products)
        elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out = _Plain.apply(q, k, v, call.padding, self)  # type: ignore[no-untyped-call]
        else:
            out = self.forward(q, k, v, call.padding, None)
        return out.reshape(batch, heads, rows, v.shape[-1])

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
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, e] from scores of all heads and edges."""
        kept = q.dtype
        if kept in HALF:
            q, k, v = q.float(), k.float(), v.float()
        found = scores(q * scale_of(self.work, q.shape[-1]), k, products)
        weights = []
        for group in self.groups:
            blocks = group.blocks(slice(None), call.padding, self.formula.needs_distance)
            count, width = group.shape
            part = found[..., group.places].reshape(*found.shape[:3], count, 1, width)
            weights.append(self.formula.weights(part, blocks, call).flatten(3))
        return to_queries(torch.cat(weights, -1), v, products).to(kept)

    def gathered(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, e], for which keys and values of all edges are copied."""
        batch, keys, repeat, rows, size = q.shape
        outs = []
        for group in self.groups:
            count, width = group.shape
            per_query = max(1, batch * keys * width * max(size, v.shape[-1], repeat))
            # a traced graph is better short: whoever compiles it plans its memory
            step = count if torch.compiler.is_compiling() else max(1, PIECE // per_query)
            for low in range(0, count, step):
                part = slice(low, min(low + step, count))
                at = group.keys[part].flatten()
                blocks = group.blocks(part, call.padding, self.formula.needs_distance)
                found = self.formula(
                    q.index_select(3, group.queries[part]).unsqueeze(4),
                    k.index_select(2, at).view(batch, keys, -1, width, size),
                    v.index_select(2, at).view(batch, keys, -1, width, v.shape[-1]),
                    blocks,
                    call,
                )
                outs.append(found.squeeze(4))
        rest = rows - sum(group.shape[0] for group in self.groups)
        if rest or not outs:
            # without keys, which the formula says in a way that can be differentiated
            none = q[:, :, :, :rest, None], k[:, :, None, :0], v[:, :, None, :0]
            outs.append(self.formula(*none, Blocks(None, None), call).squeeze(4))
        out = torch.cat(outs, 3)
        return out if self.back is None else out.index_select(3, self.back)


class _Plain(torch.autograd.Function):
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
        given = ctx.saved_tensors[:3]
        out = kernel.on_edges(*given, Call(padding=ctx.padding), kernel.products)
        wanted = [x for x, ask in zip(given, asks, strict=True) if ask]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return *(next(found) if ask else None for ask in asks), None, None


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous()
