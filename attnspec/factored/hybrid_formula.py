"""`GRAPH + MECHANISM` in operations that differentiate to any order, transform, trace and run on
any device: in tiles in natural order, or, where the graph reads run-time inputs, on all pairs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from attnspec.factored.attending import check_no_dropout
from attnspec.factored.feature_kernel import WHOLE, FeatureKernel
from attnspec.factored.merging import (
    Columns,
    Rows,
    columns_of_kernel,
    merged,
    rows_of_kernel,
    shared_quotient,
)
from attnspec.factored.summing import State
from attnspec.formula import Blocks, Formula
from attnspec.layout import tile_layout
from attnspec.masking import mask_plan
from attnspec.pieces import keys_of, rows_of
from attnspec.runs import runs_of
from attnspec.target import Call, Work, graph_of
from attnspec.tiled import TiledKernel

TILE = 64
"""The size of the tiles."""


class HybridFormula:
    """Runs a graph and the features of a kernel under one denominator."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], kernel: FeatureKernel, device: torch.device
    ) -> None:
        self.work, self.kernel = work, kernel
        self.quotient = shared_quotient(kernel)
        graph = graph_of(work)
        self.formula = Formula(graph, heads, device)
        self.tiled: TiledKernel | None = None
        if not work.reads:
            layout = tile_layout(graph.relation, graph.n_q, graph.n_k, TILE)
            self.tiled = TiledKernel(graph, heads, device, runs_of(layout), layout.masks)
            return
        rows, columns = np.arange(work.n_k - work.n_q, work.n_k)[:, None], np.arange(work.n_k)[None]
        self.mask = mask_plan(graph.relation, rows, columns, work.n_k, device)
        self.distance = torch.from_numpy((rows - columns)[None]).to(device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        given = self.kernel.given(q, k, v, call)
        rows, _ = rows_of_kernel(self.kernel, given, State(), WHOLE)
        columns = columns_of_kernel(self.kernel, given)
        if self.tiled is None:
            out = self._of_all_pairs(rows, columns, call)
        else:
            out = self._of_tiles(self.tiled, rows, columns, call)
        return out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])

    def _of_all_pairs(self, rows: Rows, columns: Columns, call: Call) -> torch.Tensor:
        mask = self.mask.mask(call.data, self.work.n_k)
        mask = mask.view(-1, 1, 1, 1, *mask.shape[-2:])
        if call.padding is not None:
            mask = mask & call.padding[:, None, None, None, None]
        sides = rows.mapped(lambda x: x.unsqueeze(3)), columns.mapped(lambda x: x.unsqueeze(2))
        return self._merged(*sides, Blocks(self.distance, mask), call)

    def _of_tiles(
        self, tiled: TiledKernel, rows: Rows, columns: Columns, call: Call
    ) -> torch.Tensor:
        outs = []
        for run in tiled.runs:
            for piece in run.pieces(4 * run.height * run.width, 4 * run.width):
                sides = (
                    rows.mapped(partial(rows_of, piece=piece)),
                    columns.mapped(partial(keys_of, piece=piece)),
                )
                outs.append(self._merged(*sides, tiled.blocks(piece, call), call))
        # behind what pieces have stand all queries by the kernel alone, for those without a pair
        count = sum(out.shape[3] for out in outs)
        alone = self.quotient.of(rows.sums, rows.logs[..., 0])
        places = torch.arange(len(tiled.order), device=tiled.order.device)
        index = torch.where(tiled.order < count, tiled.order, count + places)
        return torch.cat([*outs, alone], 3).index_select(3, index)

    def _merged(self, rows: Rows, columns: Columns, blocks: Blocks, call: Call) -> torch.Tensor:
        """The outputs [B, K, R, n, d_v] of some blocks."""
        found = merged(self.work, self.formula, self.quotient, rows, columns, blocks, call)
        return found.flatten(3, 4)
