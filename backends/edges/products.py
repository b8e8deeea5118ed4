"""The three products of attention on edges, and their derivatives, which are the same three.

For rows a of the queries, rows b of the keys and a number w for each place of a layout:
`scores` are the a . b of every place, `to_queries` sums w b for each query, and `to_keys` sums w a
for each key. None of them takes memory for more than its result.
"""

from __future__ import annotations

import warnings
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import Function
from attnspec.layout.edge_list import EdgeLayout


class EdgeProducts:
    """The products over one layout on the CPU, in float32 or float64, for one head at a time."""

    def __init__(self, layout: EdgeLayout) -> None:
        self.layout = layout
        self.places = len(layout.keys)
        self.keys = torch.from_numpy(layout.keys)
        self.offsets = torch.from_numpy(layout.offsets)
        self.order = None if layout.order is None else torch.from_numpy(layout.order)
        with warnings.catch_warnings():
            # torch calls the format a beta, once in a process
            warnings.simplefilter("ignore")
            none = torch.zeros(0, dtype=torch.int32, device="cpu")
            torch.sparse_csr_tensor(none.new_zeros(2), none, none.float(), (1, 1), device="cpu")

    @cached_property
    def _by_key(self) -> tuple[Tensor, Tensor, Tensor]:
        starts, queries, places = self.layout.by_key
        return torch.from_numpy(starts), torch.from_numpy(queries), torch.from_numpy(places)

    def scores(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """Fills `out` [places] with scale a . b of every place: a [n_q, d], b [n_k, d]."""
        # what stands there is multiplied by 0, and must be finite for that
        out.zero_()
        if self.order is not None:
            a = a.index_select(0, self.order)
        shape = self.layout.n_q, self.layout.n_k
        into = torch.sparse_csr_tensor(self.offsets, self.keys, out, shape, device=out.device)
        torch.sparse.sampled_addmm(into, a, b.t(), beta=0.0, alpha=scale, out=into)

    def to_queries(self, w: Tensor, b: Tensor) -> Tensor:
        """Sums [n_q, d] of w [places] times b [n_k, d] over the keys of each query."""
        out = _sums(self.offsets, self.keys, w, b)
        if self.order is None:
            return out
        return torch.empty_like(out).index_copy_(0, self.order, out)

    def to_keys(self, w: Tensor, a: Tensor) -> Tensor:
        """Sums [n_k, d] of w [places] times a [n_q, d] over the queries of each key."""
        starts, queries, places = self._by_key
        return _sums(starts, queries, w.index_select(0, places), a)


def _sums(offsets: Tensor, columns: Tensor, w: Tensor, x: Tensor) -> Tensor:
    sums: Tensor
    if x.dtype == torch.float32:
        sums = torch.embedding_bag(x, columns, offsets, False, 0, False, w, True)[0]
    else:
        # a bag is fast for float32 alone
        shape = (len(offsets) - 1, len(x))
        table = torch.sparse_csr_tensor(offsets, columns, w, shape, device=w.device)
        sums = torch.sparse.mm(table, x, "sum")
    return sums


def product(products: EdgeProducts, *three: Tensor | None) -> Tensor:
    """The derivative of f = sum of w (a . b) over places by the one of w, a and b that is None:
    scores [B, K, R, places] of a [B, K, R, n_q, d] and b [B, K, n_k, d], sums [B, K, R, n_q, d] of
    w [B, K, R, places] times b, or those [B, K, n_k, d] of w times a."""
    sums: Tensor = _Product.apply(products, *three)  # type: ignore[no-untyped-call]
    return sums


class _Product(Function):
    """Linear in each of the two that are there: its derivatives are such products again."""

    @staticmethod
    def forward(ctx, products, w, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(w, a, b)
        ctx.products, layout = products, products.layout
        if w is None:
            out = a.new_empty(*a.shape[:3], products.places)
        elif a is None:
            out = b.new_empty(*w.shape[:3], layout.n_q, b.shape[-1])
        else:
            out = a.new_zeros(*a.shape[:2], layout.n_k, a.shape[-1])
        for index in np.ndindex(*(a if w is None else w).shape[:3]):
            group = index[:2]
            if w is None:
                rows, keys = a[index].contiguous(), b[group].contiguous()
                products.scores(rows, keys, out[index])
            elif a is None:
                out[index] = products.to_queries(w[index].contiguous(), b[group].contiguous())
            else:
                out[group] += products.to_keys(w[index].contiguous(), a[index].contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        three = [grad if x is None else x for x in ctx.saved_tensors]
        return None, *(
            product(ctx.products, *three[:at], None, *three[at + 1 :]) if asked else None
            for at, asked in enumerate(ctx.needs_input_grad[1:])
        )
