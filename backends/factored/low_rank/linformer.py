"""Linformer: queries attend to a fixed number of projected keys.

out = softmax(Q (E K)^T / sqrt(d)) (F V). Padding is projected as zeros; of pooled segments only
those with a real position count, and padded sequences give what shorter ones give.
Source: Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", section 4.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from attnspec.backends.common.score_formula import widened
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.low_rank.segments import occupied, segment_maxima, segment_means
from attnspec.backends.factored.low_rank.softmax import (
    MechanismKernel,
    attend,
    repeated,
    without_padding,
)
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.lower.work import Call


class LinformerKernel(MechanismKernel[Linformer]):
    """Runs `linformer`: learned parts `keys`, and `values` unless they share the one projection."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        kept, declared = q.dtype, self.declared
        q, k, v = widened(q), widened(k), widened(v)
        mask = None
        if declared.learned:
            k, v = self._projected(q, k, v, call)
            if declared.projection == "conv" and call.padding is not None:
                mask = _held(call.padding, declared.width)
        else:
            pool = segment_means if declared.projection == "mean" else segment_maxima
            k, v = pool(k, declared.rank, call.padding), pool(v, declared.rank, call.padding)
            if call.padding is not None:
                mask = occupied(call.padding, declared.rank)
        mask = None if mask is None else mask[:, None, None]
        scale = q.shape[3] ** -0.5
        return attend(q, k, v, scale, mask=mask, dropout_p=call.dropout_p).to(kept)

    def _projected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """E k and F v by the learned projections, of no padding."""
        by_keys = call.tables["keys"].to(k.dtype)
        by_values = call.tables["values"].to(k.dtype) if self.declared.apart else by_keys
        # heads with projections of their own read one key head each
        heads = q.shape[1] if len(by_keys) > 1 else k.shape[1]
        k, v = (repeated(without_padding(x, call.padding), heads) for x in (k, v))
        project = convolved if self.declared.projection == "conv" else projected
        return project(k, by_keys), project(v, by_values)

    def key_sums(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, at: torch.Tensor
    ) -> tuple[State, None]:
        """What keys and values at these positions add to the dense projections of all,
        [B heads, rank, d + d_v], of a call whose padding is theirs."""
        tables = {name: table.index_select(2, at) for name, table in call.tables.items()}
        mine = replace(call, tables=tables)
        found = self._projected(q, widened(k), widened(v), mine)
        return State(torch.cat(found, 3).flatten(0, 1)), None

    def onward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, before: State
    ) -> torch.Tensor:
        """The outputs of queries, where `before` has the projections of all positions."""
        rows = torch.unflatten(before.total, 0, (len(q), -1))
        keys, values = torch.split(rows, [k.shape[3], v.shape[3]], 3)
        scale = q.shape[3] ** -0.5
        return attend(widened(q), keys, values, scale, dropout_p=call.dropout_p).to(q.dtype)


def projected(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """E x [B, H, rank, d] of x [B, H, n, d] and E [H or 1, rank, at least n]."""
    return by[:, :, : x.shape[2]] @ x


def convolved(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Products of a kernel [H or 1, width] with consecutive rows of x [B, H, n, d], as many as
    there are, zeros behind the last: [B, H, ceil(n / width), d]."""
    width = by.shape[1]
    behind = -x.shape[2] % width
    if behind:
        x = functional.pad(x, (0, 0, 0, behind))
    return (by[:, None, None] @ torch.unflatten(x, 2, (-1, width))).squeeze(3)


def _held(padding: torch.Tensor, width: int) -> torch.Tensor:
    """Whether rows of `width` positions hold a real one, bool [B, ceil(n / width)]."""
    padded = functional.pad(padding, (0, -padding.shape[1] % width))
    return torch.unflatten(padded, 1, (-1, width)).any(-1)
