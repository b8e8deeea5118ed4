"""`GRAPH + MECHANISM` in operations that differentiate to any order, transform, trace and run on
any device: in tiles in natural order, or, where the data of a call decide the graph, on all pairs.

Tiles without a pair of the graph are sums of features; pairs in other tiles are weighed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from attnspec.backends.common.labels import certain, possible
from attnspec.backends.common.masks import Holding, MaskPlan, by_key_head, mask_plan, with_data
from attnspec.backends.common.score_formula import Blocks, Formula, unit
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.spans import Given
from attnspec.backends.factored.hybrid.merging import (
    Columns,
    Rows,
    Weighed,
    columns_of_kernel,
    exact_part,
    joined,
    kernel_part,
    rows_of_kernel,
    shared_quotient,
)
from attnspec.backends.factored.hybrid.tile_sums import TileSums
from attnspec.backends.factored.low_rank.softmax import check_no_dropout
from attnspec.backends.tables.composed import ComposedTables, Piece
from attnspec.graphs.operators import Complement, Intersection
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.relation import Relation
from attnspec.layout.from_rows import tables_of
from attnspec.layout.steps import natural_layout
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.work import Call, Work, graph_of

Weigh = Callable[[Rows, Columns, Blocks], Weighed]
"""What the pairs of some blocks weigh."""


class OpenTables(ComposedTables):
    """Tiles of the pairs that a mechanism may weigh beside a graph that a call decides, of which
    those are left out that the graph turns out to hold."""

    def less(self, blocks: Blocks, piece: Piece, call: Call, key_heads: int) -> Blocks:
        """The blocks of a piece without the pairs of the graph, for so many key heads."""
        n = self.work.n_k
        at = piece.queries[..., None] + n - self.work.n_q, piece.keys[:, None]
        number = 4 if self.work.decided else 3
        data = {name: _beside_blocks(x, number) for name, x in call.data.items()}
        held = with_data(self.work.relation, data).holds(*at, n)
        if not self.work.decided:
            held = held.unsqueeze(-4)
        held = held[(None,) * (5 - held.dim())]
        if held.shape[1] == 1:
            held = held[:, :, None]
        else:
            held = torch.unflatten(held, 1, (key_heads, -1))
        mask = ~held if blocks.mask is None else blocks.mask & ~held
        return replace(blocks, mask=mask)


@dataclass(frozen=True, eq=False)
class ByBlocks:
    """A choice that is asked for positions in blocks, of all samples and heads."""

    choice: Holding

    def holds(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.choice.holds(q[None, None], k[None, None])


def _beside_blocks(value: Any, number: int) -> Any:
    """A choice, or an input, beside blocks, rows and columns: a number of each sample, which has so
    many axes, has one more."""
    if not isinstance(value, torch.Tensor):
        return ByBlocks(value)
    return value[..., None] if value.dim() == number else value


class HybridFormula:
    """Runs a graph and the features of a kernel under one denominator."""

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        kernel: FeatureKernel,
        device: torch.device,
    ) -> None:
        self.work, self.heads, self.kernel, self.device = work, heads, kernel, device
        self.quotient = shared_quotient(kernel)
        graph, n_q, n_k = graph_of(work), work.n_q, work.n_k
        self.formula = Formula(graph, heads, device)
        self.whole: TileSums | None = None
        if not (work.reads or work.decided):
            rest = natural_layout(others_of(work), n_q, n_k, kernel.how.chunk)
            whole = _full(rest)
            self.others = self._composed(_some(rest, whole))
            self.whole = TileSums(whole, kernel.how.chunk, device)

    @cached_property
    def pairs(self) -> tuple[MaskPlan, torch.Tensor]:
        """Of a graph that a call decides: its mask of all pairs, and their distances."""
        n_q, n_k = self.work.n_q, self.work.n_k
        rows, columns = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)[None]

        def built() -> tuple[MaskPlan, torch.Tensor]:
            mask = mask_plan(self.work.relation, rows, columns, n_k, self.device)
            return mask, torch.from_numpy((rows - columns)[None]).to(self.device)

        # they are kept, so the modes of this call must not reach them
        return apart(built)

    def _composed(self, layout: StepLayout) -> ComposedTables:
        graph = graph_of(self.work)
        tables = tables_of([layout], graph.n_q, graph.n_k)
        return ComposedTables(graph, self.heads, self.device, tables)

    @cached_property
    def open(self) -> tuple[OpenTables, TileSums]:
        """Of a graph that a call decides: the tiles that may hold pairs of it and of the mechanism,
        and sums of those that hold the mechanism's alone."""
        work, tile = self.work, self.kernel.how.chunk

        def others(graph: Relation) -> StepLayout:
            return natural_layout(
                others_of(replace(work, relation=graph)), work.n_q, work.n_k, tile
            )

        relation = work.relation
        most, whole = others(certain(relation)), _full(others(possible(relation)))
        layout = _some(most, whole)

        def built() -> tuple[OpenTables, TileSums]:
            tables = tables_of([layout], work.n_q, work.n_k)
            open_ = OpenTables(graph_of(work), self.heads, self.device, tables)
            return open_, TileSums(whole, tile, self.device)

        # they are kept, so the modes of this call must not reach them
        return apart(built)

    @cached_property
    def graph(self) -> ComposedTables:
        """The tiles of a static graph."""
        graph = graph_of(self.work)
        sizes = graph.n_q, graph.n_k
        layout = natural_layout(graph.relation, *sizes, self.kernel.how.chunk)
        # it is kept, so the modes of this call must not reach it
        return apart(lambda: self._composed(layout))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the logarithms [B, H, n_q] of its denominators."""
        check_no_dropout(f"a graph with `{self.kernel.name}`", call.dropout_p)
        if self.work.unit_keys:
            # all that is attended scores them, the mechanism too
            k = unit(k)
        given = self.kernel.given(q, k, v, call)
        rows, columns = rows_of_kernel(self.kernel, given), columns_of_kernel(self.kernel, given)
        if self.whole is None:
            parts = self._of_all_pairs(rows, columns, call)
        else:
            exact = _by_tables(self.graph, rows, columns, partial(self._exact, call=call), call)
            parts = [exact, *self._others(given, rows, columns, call)]
        return self._joined(q, v, parts)

    def beside(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same where the output [B, H, n_q, d_v] and the log-sum-exps [B, H, n_q] of the graph
        are known. One that a call decides must answer for tensors of positions."""
        if self.work.unit_keys:
            k = unit(k)
        given = self.kernel.given(q, k, v, call)
        rows, columns = rows_of_kernel(self.kernel, given), columns_of_kernel(self.kernel, given)
        out, lse = (x.reshape(*given.q.shape[:-1], -1) for x in exact)
        known = Weighed(pad(out.to(lse.dtype), (0, 1), value=1.0), lse)
        others = self._others(given, rows, columns, call)
        return self._joined(q, v, [known, *others])

    def _joined(
        self, q: torch.Tensor, v: torch.Tensor, parts: list[Weighed]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = joined(self.quotient, parts)
        out = out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
        return out, None if lse is None else lse.reshape(q.shape[:3])

    def _of_all_pairs(self, rows: Rows, columns: Columns, call: Call) -> list[Weighed]:
        plan, distance = self.pairs
        mask = plan.mask(call.data, self.work.n_k)
        if not self.work.decided:
            mask = mask.view(-1, 1, *mask.shape[-2:])
        # the kernel may give each query head keys of its own
        mask = by_key_head(mask, rows.q.shape[1])
        others = ~mask
        if self.work.causal:
            others = others & (distance >= 0)
        if call.padding is not None:
            real = call.padding[:, None, None, None, None]
            mask, others = mask & real, others & real
        rows, columns = rows.mapped(lambda x: x.unsqueeze(3)), columns.mapped(_as_block)
        exact = self._exact(rows, columns, Blocks(distance, mask), call)
        by_kernel = kernel_part(self.kernel, rows, columns, others)
        return [part.mapped(lambda x: x.flatten(3, 4)) for part in (exact, by_kernel)]

    def _others(self, given: Given, rows: Rows, columns: Columns, call: Call) -> list[Weighed]:
        """What the mechanism gives the pairs that are not the graph's: in tiles that hold both, and
        in whole ones."""
        tiles, whole = self.open if self.whole is None else (self.others, self.whole)

        def by_kernel(rows: Rows, columns: Columns, blocks: Blocks) -> Weighed:
            return kernel_part(self.kernel, rows, columns, blocks.mask)

        return [
            _by_tables(tiles, rows, columns, by_kernel, call),
            whole(self.kernel, given),
        ]

    def _exact(self, rows: Rows, columns: Columns, blocks: Blocks, call: Call) -> Weighed:
        return exact_part(self.work, self.formula, rows, columns, blocks, call)


def others_of(work: Work) -> Relation:
    """The pairs that the kernel weighs."""
    others = Complement(graph_of(work).relation)
    return Intersection((others, Causal())) if work.causal else others


def _as_block(x: torch.Tensor) -> torch.Tensor:
    """Columns as those of one block."""
    return x.unsqueeze(2)


def _some(layout: StepLayout, whole: np.ndarray) -> StepLayout:
    """The tiles of a layout but those that are `whole`, as `_full` has them."""
    row = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
    some = ~whole[row, layout.keys]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(some)])[layout.starts]
    return replace(layout, starts=starts, keys=layout.keys[some], kinds=layout.kinds[some])


def _full(layout: StepLayout) -> np.ndarray:
    """Which tiles are whole, bool [tiles of queries, tiles of keys]."""
    held = np.zeros((layout.q.count, layout.k.count), bool)
    row = np.repeat(np.arange(layout.q.count), np.diff(layout.starts))
    held[row, layout.keys] = layout.kinds == FULL_TILE
    return held


def _by_tables(
    tables: ComposedTables, rows: Rows, columns: Columns, weigh: Weigh, call: Call
) -> Weighed:
    """What the pairs of some tables weigh, for all queries in order."""
    nothing = rows.log.new_zeros(*rows.log.shape[:4], columns.values.shape[-1])
    if not tables.steps:
        return Weighed(nothing, nothing[..., :1])
    parts = []
    (step,) = tables.steps
    for batch in step.batches:
        for piece in batch.pieces(4 * batch.height * batch.width, 4 * batch.width):
            blocks = tables.blocks(piece, call)
            if isinstance(tables, OpenTables):
                blocks = tables.less(blocks, piece, call, rows.q.shape[1])
            parts.append(
                weigh(rows.mapped(piece.of_queries), columns.mapped(piece.of_keys), blocks)
            )
    return Weighed(*(step.ordered([getattr(x, name) for x in parts]) for name in ("sums", "log")))
