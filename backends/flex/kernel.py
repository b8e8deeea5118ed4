"""The kernel of FlexAttention's steps: tokens in order, a call for each step, results merged.

Which blocks a call visits is known from the layout; where keys are missing, or inputs ask something
of pairs, the lists are thinned on the device. On a GPU autograd goes through FlexAttention's own
backward, that of log-sum-exps included, and torch refuses a second one. On the CPU, where it has
neither a backward nor log-sum-exps, calls that ask for them go the composed way, as everywhere
those with dropout, transforms or float64 do; and so do on a GPU gradients of learned tables where
torch.use_deterministic_algorithms asks for the same bits each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.exact import grouped, is_plain
from attnspec.backends.common.flash import rows_of_size
from attnspec.backends.common.merging import merged, with_zero
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.score_formula import bucket_table, scale_of, slopes_of, widened
from attnspec.backends.flex.attention import Blocks, Kind, Sides, attend, blocks_of, number_on
from attnspec.backends.flex.block_lists import BLOCK, BYTES_MOST, BlockLists, block_lists
from attnspec.backends.flex.conditions import Shape, condition_of, in_blocks
from attnspec.backends.tables.kernel import ByTables
from attnspec.graphs.relation import Relation
from attnspec.layout.tile_layout import StepLayout
from attnspec.lower.work import Alibi, BackendError, Bias, Call, Change, Softcap, Work

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What FlexAttention computes in."""

NARROWEST = 16
"""Numbers of a head on a GPU at least; zeros stand behind fewer."""


class FlexKernel(ByTables):
    """Attention over disjoint steps, each a compiled call."""

    reuses = ()

    def __init__(
        self,
        work: Work,
        heads: tuple[int, ...],
        device: torch.device,
        layouts: Sequence[StepLayout],
        parts: Sequence[StepLayout] = (),
        condition: Relation | None = None,
    ) -> None:
        """With a condition, what inputs ask of pairs beside the steps; its parts are laid out in
        natural order, as then the one step is."""
        super().__init__(work, heads, device)
        self.condition = condition
        self.parts = [checked(block_lists(layout), device) for layout in parts]
        self.steps = [FlexStep(layout, work, device) for layout in layouts if len(layout.keys)]
        self.changes = Changes(work, heads, device)
        self.finds_lse = device.type != "cpu"

    def goes_fast(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
        if not is_plain(q, k, v, call) or q.dtype not in TYPES or not self.steps:
            return False
        # on a GPU the gradient of a learned table is added up by atomic operations, in any order
        settled = not q.is_cpu and not torch.are_deterministic_algorithms_enabled()
        needed = call.tables.values() if not q.is_cpu else (q, k, v, *call.tables.values())
        return settled or not (torch.is_grad_enabled() and any(x.requires_grad for x in needed))

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q]."""
        if not q.is_cpu:
            return super().partial(q, k, v, call)
        # compiled for the CPU it has none
        out, lse = self.composed(grouped(q, k), k, v, call)
        return out.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])

    def _fast(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q], on the CPU zeros."""
        shape, out_size = q.shape[:3], v.shape[-1]
        scale = scale_of(self.work, q.shape[-1]) if self.work.scale is None else 1.0
        decided = call.padding is not None or self.condition is not None
        if decided:
            # each sample has lists of its own, which all of its heads share
            parts = [q, k, v]
        else:
            parts = [grouped(q, k).flatten(0, 1), *(x.flatten(0, 1)[:, None] for x in (k, v))]
        if not q.is_cpu:
            parts = [rows_of_size(x, max(NARROWEST, x.shape[-1])) for x in parts]
        changes, padded = self.changes.of(call), call.padding is not None
        kind = Kind(scale, self.changes.kinds, padded, lse=self.finds_lse)
        keys = 1 if decided else k.shape[1]
        if len(self.steps) > 1 and not self.finds_lse:
            raise ValueError("without log-sum-exps the results of several steps are not merged")
        if len(self.steps) > 1:
            # gradients of the steps add up in float32
            parts = [widened(x) for x in parts]
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        for step in self.steps:
            mine = [x.to(q.dtype) for x in parts]
            out, lse = step(kind, mine, keys, self.asked(step, call, len(q)), changes)
            if lse is None:
                lse = out.new_zeros(out.shape[:-1])
            if len(self.steps) > 1:
                # half types would be rounded after every step
                out = out.to(lse.dtype)
            found = (out, lse) if found is None else merged(found, (out, lse))
        if found is None:
            raise ValueError("a graph without pairs goes the composed way")
        out, lse = with_zero(found) if self.work.normalize == "softmax1" else found
        return out.to(q.dtype)[..., :out_size].reshape(*shape, out_size), lse.reshape(shape)

    def asked(self, step: FlexStep, call: Call, samples: int) -> Asked:
        """What a call leaves of a step, kept while the same inputs and padding come again."""
        reads = () if self.condition is None else self.work.reads
        given = [*(call.data[name] for name in reads)]
        given += [] if call.padding is None else [call.padding]
        if not given:
            return step.whole
        return step.last.get(given, lambda: self._asked(step, call, samples), samples)

    def _asked(self, step: FlexStep, call: Call, samples: int) -> Asked:
        real = step.k.held[None]
        if call.padding is not None:
            real = real & call.padding[:, step.k.index]
        real = real.expand(samples, -1)
        some, whole = real_blocks(real, step.q.places // BLOCK)
        if self.condition is None:
            return Asked(step.blocks.decided(some, whole), real.flatten())
        given = {name: call.data[name] for name in self.work.reads}
        places = step.q.index + step.q.first, step.k.index
        found = condition_of(self.condition, given, *places, self.work.n_k)
        masks = [part.numbers.view(-1, step.k.places // BLOCK) for part in self.parts]
        always, perhaps = in_blocks(found, masks)
        blocks = step.blocks.decided(some & perhaps, whole & always)
        numbers = [x.expand(samples, -1).flatten() if x.dim() else x for x in found.numbers]
        parts = [(part.numbers, part.bits) for part in self.parts]
        return Asked(blocks, real.flatten(), found.shape, tuple(numbers), tuple(parts))


def checked(found: BlockLists, device: torch.device) -> Blocks:
    """Blocks on a device; raises BackendError where their masks are too many."""
    if len(found.bits) > BYTES_MOST:
        raise BackendError(
            f"the backend flex refuses: its masks are {len(found.bits):,} bytes, and at most"
            f" {BYTES_MOST:,} are kept"
        )
    return blocks_of(found, device)


class Asked(NamedTuple):
    """What a call leaves of a step: its blocks; which keys are real, bool [samples * k places]; the
    shape of the condition, its numbers and parts, as `Sides` has them."""

    blocks: Blocks
    real: torch.Tensor
    shape: Shape = ()
    numbers: tuple[torch.Tensor, ...] = ()
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class FlexStep:
    """One step: its blocks, and where its tokens are."""

    def __init__(self, layout: StepLayout, work: Work, device: torch.device) -> None:
        found = block_lists(layout)
        self.blocks = checked(found, device)
        self.known: tuple[str, ...] = ()
        self.options: tuple[str, ...] = ()
        if device.type != "cpu":
            # both sides are whole blocks, which of lengths that change torch does not know
            self.known = self.options = ("IS_DIVISIBLE",)
            # ROWS_GUARANTEED_SAFE asks for more than rows without empties: a key among the first
            # that a row looks at, as many as a tile of its kernel has
            if found.contiguous:
                self.options = (*self.known, "BLOCKS_ARE_CONTIGUOUS")
        self.q = Ordered(found.q_at, work.n_k - work.n_q, work.n_q, device)
        self.k = Ordered(found.k_at, 0, work.n_k, device)
        self.whole = Asked(self.blocks, self.k.held)
        self.last: Remembered[Asked] = Remembered()

    def __call__(
        self,
        kind: Kind,
        parts: Sequence[torch.Tensor],
        keys: int,
        asked: Asked,
        changes: tuple[tuple[torch.Tensor, ...], ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [b, R, n_q, d_v] of q [b, R, n_q, d], k and v [b, K, n_k, d], and its
        log-sum-exps [b, R, n_q] if the kind asks."""
        q, k, v = self.q.ordered(parts[0]), self.k.ordered(parts[1]), self.k.ordered(parts[2])
        options = self.options if asked is self.whole else self.known
        runs = len(asked.blocks.runs) // 2
        kind = kind._replace(options=options, condition=asked.shape, runs=runs)
        counts = [number_on(q.device, count) for count in (keys, q.shape[1])]
        at, given = (self.q.at, self.k.at), (asked.numbers, asked.parts)
        sides = Sides(counts[0], counts[1], *at, asked.real, changes, *given)
        out, lse = attend(kind, q, k, v, asked.blocks, sides)
        return self.q.natural(out, 0.0), None if lse is None else self.q.natural(lse, -torch.inf)


def real_blocks(real: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks have a key, and which all, bool [samples, rows, k blocks], for keys
    [samples, k places]."""
    found = torch.unflatten(real, 1, (-1, BLOCK))
    some, whole = (x[:, None].expand(-1, rows, -1) for x in (found.any(-1), found.all(-1)))
    return some, whole


class Changes:
    """What score changes read, in tensors; `kinds` is what they are called. A scale of the spec's
    own comes first: as a constant, each would be compiled apart."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.changes: list[Change | None] = [*work.changes]
        self.kinds = tuple(type(change).__name__.lower() for change in work.changes)
        self.fixed: list[tuple[torch.Tensor, ...]] = []
        if work.scale is not None:
            self.changes, self.kinds = [None, *work.changes], ("scale", *self.kinds)
            self.fixed.append((torch.tensor(work.scale, device=device),))
        slopes = slopes_of(work.changes, heads)
        for change in work.changes:
            if isinstance(change, Softcap):
                self.fixed.append((torch.tensor(change.cap, device=device),))
            elif isinstance(change, Alibi):
                self.fixed.append((torch.tensor(slopes[change], device=device),))
            else:
                buckets = bucket_table(change, work.n_k, device, torch.int32)
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
        # where none stands, the last one before it, so that a block tells of its own
        known = np.maximum.accumulate(np.where(held, np.arange(self.places), 0))
        self.is_natural = np.array_equal(positions[:count], first + np.arange(count))
        self.at = torch.from_numpy(np.maximum(positions, 0).astype(np.int32)).to(device)
        self.held = torch.from_numpy(held).to(device)
        self.index = torch.from_numpy(np.maximum(positions[known] - first, 0)).to(device)
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
