"""The keys of a few queries in torch: read as views where they are ranges, else gathered.

What is computed of them is the definition, in operations that differentiate to any order, export
and run on every device; where no gradient is asked for, plain softmax goes through
`scaled_dot_product_attention`, which is the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.masks import MaskPlan, mask_plan
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.common.torch_modes import is_transformed
from attnspec.backends.rows.keys import RowLayout
from attnspec.lower.work import Call, Work


class RowsKernel:
    """Attention of the last few positions over the keys of a layout."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], device: torch.device, layout: RowLayout
    ) -> None:
        self.work = work
        self.plain = work.plain and layout.count > 0
        keys = layout.keys
        self.ranges = None if isinstance(keys, np.ndarray) else keys
        self.whole = self.ranges == [range(work.n_k)]
        self.index = _tensor(keys, device) if isinstance(keys, np.ndarray) else None
        self.held = None if layout.held is None else _tensor(layout.held, device)
        self.formula = Formula(work, heads, device)
        self.plan: MaskPlan | None = None
        self.distance: torch.Tensor | None = None
        if work.reads or self.formula.needs_distance:
            q_at = np.arange(work.n_k - work.n_q, work.n_k)[:, None]
            k_at = layout.positions[None]
            if work.reads:
                self.plan = mask_plan(work.relation, q_at, k_at, work.n_k, device)
            if self.formula.needs_distance:
                queries, keys = work.positions
                apart = queries[:, None] - keys[layout.positions]
                self.distance = _tensor(apart[None], device)

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and its log-sum-exps [B, H, n_q], by the formula."""
        batch, heads, rows, size = q.shape
        k, v, mask = self._read(k, 2), self._read(v, 2), self._mask(call)
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], 1, rows, size)
        blocks = Blocks(self.distance, None if mask is None else mask[:, None, None, None])
        out, lse = self.formula.partial(q, k[:, :, None], v[:, :, None], blocks, call)
        out = out.reshape(batch, heads, rows, v.shape[-1])
        return out, None if lse is None else lse.reshape(batch, heads, rows)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        batch, heads, rows, size = q.shape
        keys = k.shape[1]
        graded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if not (self.plain and size and v.shape[-1]) or graded or is_transformed():
            return self.partial(q, k, v, call)[0]
        k, v = self._read(k, 2), self._read(v, 2)
        mask = self._mask(call)
        # query heads that share a key head are more rows of one product
        q = q.reshape(batch, keys, heads // keys, rows, size)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat(1, heads // keys, 1)
        out = functional.scaled_dot_product_attention(
            q.flatten(2, 3),
            k,
            v,
            attn_mask=None if mask is None else mask[:, None],
            dropout_p=call.dropout_p,
            scale=scale_of(self.work, size),
        )
        return out.reshape(batch, heads, rows, v.shape[-1])

    def _read(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """The keys of the layout along an axis: a view where they are one range."""
        if self.whole:
            return x
        if self.index is not None:
            return x.index_select(axis, self.index)
        before = (slice(None),) * axis
        parts = [x[(*before, slice(at.start, at.stop, at.step))] for at in self.ranges or []]
        if not parts:
            return x[(*before, slice(0, 0))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def _mask(self, call: Call) -> torch.Tensor | None:
        """Which query reads which of the keys, bool [B or 1, n_q or 1, w]; None where all do."""
        mask = None if self.held is None else self.held[None]
        if self.plan is not None:
            mask = self.plan.mask(call.data, self.work.n_k)
            mask = mask if mask.dim() == 3 else mask[None]
        if call.padding is not None:
            real = self._read(call.padding, 1)[:, None]
            mask = real if mask is None else mask & real
        return mask


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
