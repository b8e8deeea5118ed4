"""The three products of attention on edges, and their derivatives, which are the same three.

For rows a of the queries, rows b of the keys and a number w for each place of a key in tables:
`scores` are the a . b of every place, `to_queries` sums w b for each query, and `to_keys` sums w a
for each key. None of them takes memory for more than its result.
"""

from __future__ import annotations

import warnings
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import coo_array
from torch import Tensor

from attnspec.backends.common.composed import filled
from attnspec.backends.common.torch_modes import Function
from attnspec.layout.tables import Tables


class EdgeProducts:
    """The products over tables of edges on the CPU, float32 or float64, one head at a time."""

    def __init__(self, tables: Tables) -> None:
        batches, self.n_q, self.n_k = tables.batches, tables.n_q, tables.n_k
        self._queries = np.concatenate([batch.q[:, 0] for batch in batches])
        self._widths = np.concatenate([np.full(len(x.k), x.k.shape[1]) for x in batches])
        self._edges = np.concatenate([batch.k.ravel() for batch in batches]) >= 0
        # a place that is no edge has the key before it: nothing is read that the row does not read
        self._keys = np.concatenate([filled(batch.k).ravel() for batch in batches])
        self.places = len(self._keys)
        offsets = np.concatenate([[0], np.cumsum(self._widths)]).astype(np.int32)
        self.keys, self.offsets = torch.from_numpy(self._keys), torch.from_numpy(offsets)
        natural = np.array_equal(self._queries, np.arange(self.n_q))
        self.order = None if natural else torch.from_numpy(self._queries)
        with warnings.catch_warnings():
            # torch calls the format a beta, once in a process
            warnings.simplefilter("ignore")
            none = torch.zeros(0, dtype=torch.int32, device="cpu")
            torch.sparse_csr_tensor(none.new_zeros(2), none, none.float(), (1, 1), device="cpu")

    @cached_property
    def _by_key(self) -> tuple[Tensor, ...]:
        """The edges by key, int32: where keys start [n_k + 1], and each edge's query and place."""
        place = np.flatnonzero(self._edges).astype(np.int32)
        queries = np.repeat(self._queries, self._widths)[place]
        table = coo_array((place, (queries, self._keys[place])), (self.n_q, self.n_k)).tocsc()
        return tuple(map(torch.from_numpy, (table.indptr, table.indices, table.data)))

    def scores(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """Fills `out` [places] with scale a . b of every place: a [n_q, d], b [n_k, d]."""
        # what stands there is multiplied by 0, and must be finite for that
        out.zero_()
        if self.order is not None:
            a = a.index_select(0, self.order)
        shape = len(self.offsets) - 1, self.n_k
        into = torch.sparse_csr_tensor(self.offsets, self.keys, out, shape, device=out.device)
        torch.sparse.sampled_addmm(into, a, b.t(), beta=0.0, alpha=scale, out=into)

    def to_queries(self, w: Tensor, b: Tensor) -> Tensor:
        """Sums [n_q, d] of w [places] times b [n_k, d] over the keys of each query."""
        out = _sums(self.offsets, self.keys, w, b)
        if self.order is None:
            return out
        return out.new_zeros(self.n_q, out.shape[1]).index_copy_(0, self.order, out)

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
        ctx.products = products
        if w is None:
            out = a.new_empty(*a.shape[:3], products.places)
        elif a is None:
            out = b.new_empty(*w.shape[:3], products.n_q, b.shape[-1])
        else:
            out = a.new_zeros(*a.shape[:2], products.n_k, a.shape[-1])
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
