"""Some queries over some keys of a long sequence: a part of what a rank computes.

The meaning is that of the definition: the graph asked at the positions that the rows have in the
whole sequence. Rows are taken some at a time, with those keys alone of which the cover of the graph
does not say that they are not read, and computed again backward, so that memory is that of the rows
and not of the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from attnspec.backends.common.masks import by_key_head, mask_plan
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.backends.common.torch_modes import apart
from attnspec.distributed.known import widest
from attnspec.graphs.relation import EMPTY, FULL, SOME, Tiles, is_closed
from attnspec.lower.work import Call, Work

SIDE = 128
"""Rows, and keys, that are asked about together."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Region:
    """Queries and keys by their positions in the whole sequence, int64 each; `work` is that of the
    heads at its whole length."""

    work: Work
    heads: tuple[int, ...]
    queries: np.ndarray
    keys: np.ndarray
    device: torch.device

    @cached_property
    def formula(self) -> Formula:
        """The scores' formula; the zero logit of `softmax1` is added where parts are merged."""
        merged = self.work.normalize == "softmax1"
        work = replace(self.work, normalize="softmax") if merged else self.work
        # what outlives a call is not built in its modes
        return apart(lambda: Formula(work, self.heads, self.device))

    @cached_property
    def chunks(self) -> tuple[tuple[int, int, np.ndarray, bool], ...]:
        """Rows, the numbers of the keys that they may read, and whether they read all of those."""
        if not len(self.keys):
            return tuple(
                (*rows, np.zeros(0, np.int64), False) for rows in _parts(len(self.queries))
            )
        relation, n = widest(self.work.relation), self.work.n_k
        closed = is_closed(relation)
        known = relation is self.work.relation
        rows, columns = _parts(len(self.queries)), _parts(len(self.keys))
        k = _hulls(self.keys, columns)
        found = []
        for low, high in rows:
            q = _hulls(self.queries, [(low, high)])
            kinds = np.full(len(columns), SOME, np.uint8)
            if closed:
                kinds = np.broadcast_to(relation.cover(q, k, n), len(columns))
            read = [np.arange(*columns[at]) for at in np.flatnonzero(kinds != EMPTY)]
            keys = np.concatenate([np.zeros(0, np.int64), *read])
            full = known and bool((kinds[kinds != EMPTY] == FULL).all())
            found.append((low, high, keys, full))
        return tuple(found)

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, H, rows, d_v] and its log-sum-exps [B, H, rows], None for weights that are
        no softmax, of q [B, H, rows, d], k and v [B, H_kv, keys, …]. The call's padding and inputs
        are those of the whole sequence."""
        outs, sums = [], []
        for out, lse in self._found(q, k, v, call):
            outs.append(out)
            sums.append(lse)
        if not outs:
            none = q.new_zeros(*q.shape[:2], 0, v.shape[-1])
            return none, none.sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        if sums[0] is None:
            return torch.cat(outs, 2), None
        return torch.cat(outs, 2), torch.cat([lse for lse in sums if lse is not None], 2)

    def _found(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        again = torch.is_grad_enabled() and len(self.chunks) > 1
        for low, high, keys, full in self.chunks:
            args = q[:, :, low:high], k, v, call, (low, high), keys, full
            if again:
                yield checkpoint(self._rows, *args, use_reentrant=False)
            else:
                yield self._rows(*args)

    def _rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        rows: tuple[int, int],
        keys: np.ndarray,
        full: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, heads, count, size = q.shape
        key_heads = k.shape[1]
        at = torch.from_numpy(keys).to(q.device)
        blocks = self._blocks(self.queries[slice(*rows)], self.keys[keys], call, key_heads, full)
        out, lse = self.formula.partial(
            q.reshape(batch, key_heads, heads // key_heads, 1, count, size),
            k.index_select(2, at)[:, :, None],
            v.index_select(2, at)[:, :, None],
            blocks,
            call,
        )
        shape = batch, heads, count
        return out.reshape(*shape, v.shape[-1]), None if lse is None else lse.reshape(shape)

    def _blocks(
        self, queries: np.ndarray, keys: np.ndarray, call: Call, key_heads: int, full: bool
    ) -> Blocks:
        """Distances and mask of some rows over some keys."""
        q, k, n, mask, distance = queries[:, None], keys[None], self.work.n_k, None, None
        if not full:
            held = mask_plan(self.work.relation, q, k, n, self.device).mask(call.data, n)
            held = held[:, None] if held.dim() == 3 else held
            mask = by_key_head(held, key_heads)
        if call.padding is not None:
            real = call.padding[:, torch.from_numpy(keys).to(self.device)]
            real = real[:, None, None, None, None]
            mask = real if mask is None else mask & real
        if self.formula.needs_distance:
            distance = torch.from_numpy(q - k).to(self.device)[None]
        return Blocks(distance, mask)


def _parts(count: int) -> list[tuple[int, int]]:
    return [(low, min(count, low + SIDE)) for low in range(0, count, SIDE)]


def _hulls(positions: np.ndarray, parts: list[tuple[int, int]]) -> Tiles:
    """Tiles that hold the positions of each part, and others where these are not one run: of such
    tiles EMPTY and FULL are true of the part, too."""
    step = 1
    steps = {int(s) for low, high in parts for s in np.unique(np.diff(positions[low:high]))}
    if len(steps) == 1 and min(steps) > 1:
        step = min(steps)
    least = np.array([positions[low:high].min() for low, high in parts])
    most = np.array([positions[low:high].max() for low, high in parts])
    return Tiles(least, most + 1, step)
