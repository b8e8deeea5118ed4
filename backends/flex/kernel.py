"""The kernel of FlexAttention's steps: tokens in order, a call for each step, results merged.

On a GPU autograd goes through FlexAttention's own backward, log-sum-exps included, and refuses a
second one. On the CPU, where it has neither a backward nor log-sum-exps, calls that ask for them go
the composed way, by tiles in natural order, as everywhere dropout, padding on the CPU, transforms
and float64 do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.bands.kernel import ByTiles
from attnspec.backends.common.exact import is_plain
from attnspec.backends.common.flash import rows_of_size
from attnspec.backends.common.merging import merged, with_zero
from attnspec.backends.common.score_formula import bucket_table, scale_of, slopes_of
from attnspec.backends.flex.attention import Blocks, Kind, Sides, attend, blocks_of
from attnspec.backends.flex.block_lists import BYTES_MOST, block_lists
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.work import Alibi, BackendError, Bias, Call, Softcap, Work

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What FlexAttention computes in."""

NARROWEST = 16
"""Numbers of a head on a GPU at least; zeros stand behind fewer."""


class FlexKernel(ByTiles):
    """Attention over disjoint steps, each a compiled call."""

    reuses = False

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        layouts: Sequence[StepLayout],
    ) -> None:
        super().__init__(work, heads, device)
        self.steps = [FlexStep(layout, work, device) for layout in layouts if len(layout.keys)]
        self.changes = Changes(work, heads, device)
        self.finds_lse = device.type != "cpu"

    def goes_fast(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
        if not is_plain(q, k, v, call) or q.dtype not in TYPES or not self.steps:
            return False
        if not q.is_cpu:
            return True
        asks = any(x.requires_grad for x in (q, k, v, *call.tables.values()))
        return call.padding is None and not (torch.is_grad_enabled() and asks)

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q]."""
        if not q.is_cpu:
            return super().partial(q, k, v, call)
        # compiled for the CPU it has none
        parts = q.view(len(q), k.shape[1], -1, *q.shape[2:]), k, v
        out, lse = self.composed(*parts, call)
        return out.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])

    def _fast(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, K, R, n_q, d_v] and its log-sum-exps [B, K, R, n_q]; on the CPU, where it
        is asked for the output alone, zeros."""
        shape, scale, out_size = q.shape[:4], scale_of(self.work, q.shape[-1]), v.shape[-1]
        parts = [q.flatten(0, 1), *(x.flatten(0, 1)[:, None] for x in (k, v))]
        if not q.is_cpu:
            parts = [rows_of_size(x, max(NARROWEST, x.shape[-1])) for x in parts]
        changes = self.changes.of(call)
        kind = Kind(scale, self.changes.kinds, call.padding is not None, self.finds_lse)
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        for step in self.steps:
            out, lse = step(kind, parts, shape[1], call.padding, changes)
            if lse is None:
                lse = out.new_zeros(out.shape[:-1])
            found = (out, lse) if found is None else merged(found, (out, lse))
        if found is None:
            raise ValueError("a graph without pairs goes the composed way")
        out, lse = found
        if self.work.normalize == "softmax1":
            out, lse = with_zero(out, lse)
        out, lse = (torch.unflatten(x, 0, shape[:2]) for x in (out[..., :out_size], lse))
        return out, lse


class FlexStep:
    """One step: its blocks, and where its tokens are."""

    def __init__(self, layout: StepLayout, work: Work, device: torch.device) -> None:
        self.layout, self.device = layout, device
        found = block_lists(layout)
        if len(found.bits) > BYTES_MOST:
            raise BackendError(
                f"the backend flex refuses: its masks are {len(found.bits):,} bytes, and at most"
                f" {BYTES_MOST:,} are kept"
            )
        self.blocks = blocks_of(found, device)
        self._padded: Blocks | None = None
        self.options: tuple[str, ...] = ()
        if device.type != "cpu":
            proved = {
                "ROWS_GUARANTEED_SAFE": found.safe,
                "BLOCKS_ARE_CONTIGUOUS": found.contiguous,
            }
            self.options = tuple(name for name, held in proved.items() if held)
        self.q = Ordered(found.q_at, work.n_k - work.n_q, work.n_q, device)
        self.k = Ordered(found.k_at, 0, work.n_k, device)

    @property
    def padded(self) -> Blocks:
        """The same with every block looked into, made when keys are missing first."""
        if self._padded is None:
            self._padded = blocks_of(block_lists(self.layout, padded=True), self.device)
        return self._padded

    def __call__(
        self,
        kind: Kind,
        parts: Sequence[torch.Tensor],
        keys: int,
        padding: torch.Tensor | None,
        changes: tuple[tuple[torch.Tensor, ...], ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [b, R, n_q, d_v] of q [b, R, n_q, d], k and v [b, 1, n_k, d], and its
        log-sum-exps [b, R, n_q] if the kind asks."""
        q, k, v = self.q.ordered(parts[0]), self.k.ordered(parts[1]), self.k.ordered(parts[2])
        if padding is None:
            blocks, real = self.blocks, self.k.held
            kind = kind._replace(options=self.options)
        else:
            blocks, real = self.padded, (padding[:, self.k.index] & self.k.held).flatten()
        # filled on the device: nothing waits for a copy
        counts = [q.new_full((), count, dtype=torch.int32) for count in (keys, q.shape[1])]
        sides = Sides(counts[0], counts[1], self.q.at, self.k.at, real, changes)
        out, lse = attend(kind, q, k, v, blocks, sides)
        return self.q.natural(out, 0.0), None if lse is None else self.q.natural(lse, -torch.inf)


class Changes:
    """What score changes read, in tensors; `kinds` is what they are called."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.changes = work.changes
        self.kinds = tuple(type(change).__name__.lower() for change in work.changes)
        self.fixed: list[tuple[torch.Tensor, ...]] = []
        slopes = slopes_of(work.changes, heads)
        for change in work.changes:
            if isinstance(change, Softcap):
                self.fixed.append((torch.tensor(change.cap, device=device),))
            elif isinstance(change, Alibi):
                self.fixed.append((torch.tensor(slopes[change], device=device),))
            else:
                buckets = bucket_table(change, work.n_k, device).to(torch.int32)
                most, count = len(buckets) // 2, change.buckets
                numbers = (torch.tensor(x, device=device) for x in (most, count))
                self.fixed.append((buckets, *numbers))

    def of(self, call: Call) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The tensors of each change, those of learned tables among them."""
        return tuple(
            (*mine, call.tables[change.table].flatten()) if isinstance(change, Bias) else mine
            for change, mine in zip(self.changes, self.fixed, strict=True)
        )


class Ordered:
    """One side of a step on a device: the positions first <= p < first + count at its places."""

    def __init__(self, positions: np.ndarray, first: int, count: int, device: torch.device) -> None:
        self.first, self.count, self.places = first, count, len(positions)
        held = positions >= 0
        self.is_natural = bool((positions[:count] == first + np.arange(count)).all())
        self.is_natural &= len(positions) >= count
        self.at = torch.from_numpy(np.maximum(positions, 0).astype(np.int32)).to(device)
        self.held = torch.from_numpy(held).to(device)
        self.index = torch.from_numpy(np.where(held, positions - first, 0)).to(device)
        # the place of every position, one behind the last where it has none
        back = np.full(count, self.places)
        back[positions[held] - first] = np.flatnonzero(held)
        self.back = torch.from_numpy(back).to(device)
        self.is_complete = bool((back < self.places).all())

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """[b, H, count, d] -> [b, H, places, d]."""
        if not self.is_natural:
            return x.index_select(2, self.index)
        missing = self.places - self.count
        return functional.pad(x, (0, 0, 0, missing)) if missing else x

    def natural(self, x: torch.Tensor, nothing: float) -> torch.Tensor:
        """[b, H, places, …] -> [b, H, count, …], `nothing` where a position has no place."""
        if self.is_natural:
            return x[:, :, : self.count]
        if not self.is_complete:
            x = torch.cat([x, x.new_full((*x.shape[:2], 1, *x.shape[3:]), nothing)], 2)
        return x.index_select(2, self.back)
