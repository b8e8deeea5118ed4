"""`GRAPH + MECHANISM`: exact weights on the pairs of a graph, the kernel's on all others, and one
sum of both below.

out_i = sum_j w_ij v_j / sum_j w_ij, w_ij = exp(s_ij) on the graph and f(q_i) . g(k_j) elsewhere.
Nothing of size n x n is made: the kernel's sums over all keys are taken as they are, and on the
pairs of the graph, tile by tile, what the kernel gave them is replaced. Features are computed piece
by piece, on the way back again, so that memory does not go with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnspec.factored.attending import check_no_dropout
from attnspec.factored.feature_kernel import FeatureKernel, summed_up
from attnspec.factored.features import Tables
from attnspec.factored.hybrid_stream import HybridStream
from attnspec.factored.merging import (
    columns_of_piece,
    graph_of,
    merged,
    rows_of_piece,
    shared_quotient,
)
from attnspec.factored.quotients import Undivided
from attnspec.keeping import Keeper
from attnspec.layout import tile_layout
from attnspec.pieces import Piece, add, folded, keys_of, put, rows_of
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
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        given = self.kernel.given(q, k, v, call)
        kind = torch.promote_types(q.dtype, torch.float32)
        given = replace(given, q=given.q.to(kind), k=given.k.to(kind), v=given.v.to(kind))
        sums, frames = summed_up(replace(self.kernel.how, quotient=Undivided()), given)
        names = sorted(call.tables)
        parts = [given.q, given.k, given.v, sums, *(call.tables[name] for name in names)]
        if is_transformed() or torch.compiler.is_compiling():
            out = self.composed(parts[:4], frames, given.tables, call)
        elif torch.is_grad_enabled() and any(x.requires_grad for x in parts):
            out = _Pieced.apply(self, call, given.tables, names, frames, *parts)  # type: ignore[no-untyped-call]
        else:
            out = self.forward(parts[:4], frames, given.tables, call)
        return out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])

    def pieces(self) -> list[Piece]:
        """What is computed at once, one after the other."""
        return [
            piece
            for run in self.tiled.runs
            for piece in run.pieces(4 * run.height * run.width, 4 * run.width)
        ]

    def piece(
        self,
        given: Sequence[torch.Tensor],
        frames: torch.Tensor,
        tables: Tables,
        piece: Piece,
        call: Call,
    ) -> torch.Tensor:
        """The outputs of the queries of a piece [B, K, R, blocks, h, d_v], whose rows and frames
        are given."""
        q, k, v, sums = given
        rows = rows_of_piece(self.kernel, q, sums, frames, tables)
        columns = columns_of_piece(self.kernel, k, v, tables)
        blocks = self.tiled.blocks(piece, call)
        return merged(self.work, self.formula, self.quotient, rows, columns, blocks, call)

    def forward(
        self, parts: Sequence[torch.Tensor], frames: torch.Tensor, tables: Tables, call: Call
    ) -> torch.Tensor:
        """The output [B, K, R, n_q, d_v]; a query without a pair of the graph has the kernel
        alone. `parts` are q, k, v and the sums of the kernel, in `frames`."""
        sums = parts[3]
        out = sums.new_empty(*sums.shape[:-1], sums.shape[-1] - 1)
        if not self.tiled.complete:
            out.copy_(self.quotient.of(sums, frames))
        for piece in self.pieces():
            found = self.piece(_given(parts, piece), _frames(frames, piece), tables, piece, call)
            put(out, piece, folded(found))
        return out

    def composed(
        self, parts: Sequence[torch.Tensor], frames: torch.Tensor, tables: Tables, call: Call
    ) -> torch.Tensor:
        """The same in operations that differentiate to any order."""
        outs = [
            self.piece(_given(parts, piece), _frames(frames, piece), tables, piece, call).flatten(
                3, 4
            )
            for piece in self.pieces()
        ]
        if self.tiled.complete:
            return torch.cat(outs, 3).index_select(3, self.tiled.order)
        # a row more stands for the queries that no piece has
        outs.append(parts[3][:, :, :, :1, :-1])
        count = sum(out.shape[3] for out in outs[:-1])
        placed = torch.cat(outs, 3).index_select(3, self.tiled.order)
        alone = self.quotient.of(parts[3], frames)
        return torch.where((self.tiled.order < count)[:, None], placed, alone)

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        frames: torch.Tensor,
        tables: Tables,
        names: Sequence[str],
        call: Call,
    ) -> list[torch.Tensor]:
        """The gradients of `parts`, what is learned by `names` behind the others."""
        q, k, v, sums, *learned = parts
        tiles = -(-k.shape[2] // TILE)
        grad_q, grad_sums = torch.zeros_like(q), torch.zeros_like(sums)
        if not self.tiled.complete:
            grad_sums = self.quotient.gradient(grad, out, sums[..., -1], frames)
        by_tiles = [x.new_zeros(*x.shape[:2], tiles, TILE, x.shape[3]) for x in (k, v)]
        of_learned = [torch.zeros_like(x) for x in learned]
        for piece in self.pieces():
            with torch.enable_grad():
                leaves = [
                    x.detach().requires_grad_() for x in (*_given(parts[:4], piece), *learned)
                ]
                given_call = replace(call, tables=dict(zip(names, leaves[4:], strict=True)))
                kind = {name: table.to(q.dtype) for name, table in given_call.tables.items()}
                found = self.piece(
                    leaves[:4], _frames(frames, piece), {**tables, **kind}, piece, given_call
                )
            some = torch.autograd.grad(
                found, leaves, rows_of(grad, piece), allow_unused=True, materialize_grads=True
            )
            put(grad_q, piece, folded(some[0]))
            put(grad_sums, piece, folded(some[3]))
            for into, share in zip(by_tiles, some[1:3], strict=True):
                add(into, piece, share)
            for table, share in zip(of_learned, some[4:], strict=True):
                table += share
        grad_k, grad_v = (x.flatten(2, 3)[:, :, : k.shape[2]] for x in by_tiles)
        return [grad_q, grad_k, grad_v, grad_sums, *of_learned]

    def streamed(self, keeper: Keeper) -> HybridStream:
        """What goes on with it from a state."""
        return HybridStream(self.work, self.kernel, keeper)


class _Pieced(torch.autograd.Function):
    """Piece by piece, and composed for derivatives of the derivative."""

    @staticmethod
    def forward(ctx, kernel, call, tables, names, frames, *parts):  # type: ignore[no-untyped-def]
        out = kernel.forward(parts[:4], frames, tables, call)
        ctx.kernel, ctx.call, ctx.names = kernel, replace(call, tables={}), names
        ctx.drawn = {name: x for name, x in tables.items() if name not in names}
        ctx.save_for_backward(*parts, frames, out)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *parts, frames, out = ctx.saved_tensors
        if not torch.is_grad_enabled():
            grads = ctx.kernel.backward(grad, out, parts, frames, ctx.drawn, ctx.names, ctx.call)
            return None, None, None, None, None, *grads
        learned = dict(zip(ctx.names, parts[4:], strict=True))
        tables = {**ctx.drawn, **{name: x.to(grad.dtype) for name, x in learned.items()}}
        again = ctx.kernel.composed(parts[:4], frames, tables, replace(ctx.call, tables=learned))
        wanted = [x for x in parts if x.requires_grad]
        found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True, allow_unused=True))
        grads = [next(found) if x.requires_grad else None for x in parts]
        return None, None, None, None, None, *grads


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


def _given(parts: Sequence[torch.Tensor], piece: Piece) -> list[torch.Tensor]:
    """What a piece is given of q, k, v and sums."""
    q, k, v, sums = parts
    return [rows_of(q, piece), keys_of(k, piece), keys_of(v, piece), rows_of(sums, piece)]


def _frames(frames: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The frames of its rows."""
    return rows_of(frames[..., None], piece)[..., 0]
