"""`GRAPH + MECHANISM`: exact weights on the pairs of a graph, the kernel's on all others, and one
sum of both below.

out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = exp(s_ij) on the graph and f(q_i) . g(k_j) elsewhere.
Nothing of size n x n is made: the kernel's sums over all keys are taken as they are, and on the
pairs of the graph, tile by tile, what the kernel gave them is replaced.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from attnspec.factored.attending import check_no_dropout
from attnspec.factored.feature_kernel import FeatureKernel
from attnspec.factored.hybrid_stream import HybridStream
from attnspec.factored.merging import (
    Columns,
    Rows,
    columns_of_kernel,
    graph_of,
    merged,
    rows_of_kernel,
    shared_quotient,
)
from attnspec.factored.summing import State
from attnspec.keeping import Keeper
from attnspec.layout import tile_layout
from attnspec.pieces import Piece, keys_of, rows_of
from attnspec.runs import runs_of
from attnspec.target import Call, Work, mechanism_of
from attnspec.tiled import TiledKernel, is_transformed

TILE = 64
"""The size of the tiles in which the graph is laid out."""


class HybridKernel:
    """Runs a graph and the features of a kernel under one denominator."""

    def __init__(self, work: Work, kernel: FeatureKernel, tiled: TiledKernel) -> None:
        self.work, self.kernel, self.tiled = work, kernel, tiled
        self.quotient = shared_quotient(kernel)
        self.formula = tiled.formula

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        name = self.kernel.name
        check_no_dropout(f"a graph with `{name}`", call.dropout_p)
        given = self.kernel.given(q, k, v, call)
        rows, _ = rows_of_kernel(self.kernel, given, State())
        columns = columns_of_kernel(self.kernel, given)
        outs = [self._empty(rows)]
        # pieces are computed again on the way back: all their scores at once would be many
        again = torch.is_grad_enabled() and not (is_transformed() or torch.compiler.is_compiling())
        for run in self.tiled.runs:
            block = run.height * run.width
            for piece in run.pieces(4 * block, 4 * run.width):
                given_piece = rows, columns, piece, call
                if again:
                    found = checkpoint(
                        self._piece, *given_piece, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    found = self._piece(*given_piece)
                outs.append(found.flatten(3, 4))
        out = self._placed(outs, rows)
        return out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])

    def _piece(self, rows: Rows, columns: Columns, piece: Piece, call: Call) -> torch.Tensor:
        """The outputs of the queries of a piece [B, K, R, blocks, h, d_v]."""
        parts = Rows(
            rows_of(rows.q, piece),
            rows_of(rows.features, piece),
            rows_of(rows.log[..., None], piece)[..., 0],
            rows_of(rows.sums, piece),
            rows_of(rows.logs[..., None], piece)[..., 0],
        )
        keys = Columns(
            keys_of(columns.k, piece),
            keys_of(columns.features, piece),
            keys_of(columns.log[..., None], piece)[..., 0],
            keys_of(columns.values, piece),
        )
        blocks = self.tiled.blocks(piece, call)
        return merged(self.work, self.formula, self.quotient, parts, keys, blocks, call)

    def streamed(self, keeper: Keeper) -> HybridStream:
        """What goes on with it from a state."""
        return HybridStream(self.work, self.kernel, keeper)

    def _empty(self, rows: Rows) -> torch.Tensor:
        return rows.sums[:, :, :, :1, :-1]

    def _placed(self, outs: list[torch.Tensor], rows: Rows) -> torch.Tensor:
        """The outputs in their places; a query without a pair of the graph has the kernel alone."""
        if self.tiled.complete:
            outs = outs[1:]
            return torch.cat(outs, 3).index_select(3, self.tiled.order)
        alone = self.quotient.of(rows.sums, rows.logs)
        count = sum(out.shape[3] for out in outs[1:])
        placed = torch.cat([*outs[1:], outs[0]], 3).index_select(3, self.tiled.order)
        return torch.where((self.tiled.order < count)[:, None], placed, alone)


def hybrid_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> HybridKernel:
    """Runs a graph with a mechanism whose kernel is one of features."""
    # the registry lists this builder beside those of all kernels
    from attnspec.factored import KERNELS

    kernel = KERNELS[mechanism_of(work).name](work, heads, device)
    if not isinstance(kernel, FeatureKernel):
        raise ValueError(f"`{mechanism_of(work).name}` gives no weights to single pairs")
    graph = graph_of(work)
    layout = tile_layout(graph.relation, graph.n_q, graph.n_k, TILE)
    tiled = TiledKernel(graph, heads, device, runs_of(layout), layout.masks)
    return HybridKernel(work, kernel, tiled)
