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
from functools import reduce
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.composed import filled, places_of
from attnspec.backends.common.exact import ByKeyHead, grouped, has_numbers, rows_of_size
from attnspec.backends.common.merging import Partial, merged, with_zero
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.scores import ScoreFunction
from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.flex.attention import Blocks, Kind, attend, number_on
from attnspec.backends.flex.block_lists import FEWEST, runs_of, visited
from attnspec.backends.flex.steps import BLOCK, LARGEST
from attnspec.backends.flex.tiles import StepTiles
from attnspec.backends.tables.kernel import ByTables
from attnspec.ir.scalars import PAIR, Apply, Symbol
from attnspec.ir.scores import TABLE, S
from attnspec.layout.axes import Axis
from attnspec.layout.steps import Banded
from attnspec.lower.work import BackendError, Call, Heads, Work

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What FlexAttention computes in."""

NARROWEST = 16
"""Numbers of a head on a GPU at least; zeros stand behind fewer."""

INDEXED = (1 << 31) - 1
"""Words of the masks of all samples of a step at most: an index has 32 bits."""


class FlexKernel(ByTables):
    """Attention over disjoint steps, each a compiled call."""

    reuses = ()

    def __init__(
        self, work: Work, heads: Heads, device: torch.device, bands: Sequence[Banded]
    ) -> None:
        super().__init__(work, heads, device)
        steps = [FlexStep(band, work, device) for band in bands]
        self.steps = [step for step in steps if len(step.tiles.layout.keys)]
        function = ScoreFunction(work.changes, heads, work.n_k, device)
        self.fixed = {name: _single(x) for name, x in function.constants.items()}
        self.statements = function.statements
        if work.scale is not None:
            # as a constant, each would be compiled apart
            self.fixed["#scale"] = torch.tensor(work.scale, device=device)
            self.statements = (Apply("*", (S, Symbol("#scale"))), *self.statements)

    def goes_fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
        if call.dropout_p or not has_numbers(q, k, v) or q.dtype not in TYPES or not self.steps:
            return False
        # on a GPU the gradient of a learned table is added up by atomic operations, in any order
        settled = not q.is_cpu and not torch.are_deterministic_algorithms_enabled()
        needed = call.tables.values() if not q.is_cpu else (q, k, v, *call.tables.values())
        return settled or unseen(*needed)

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        if not q.is_cpu:
            return super().partial(q, k, v, call)
        # compiled for the CPU it has no log-sum-exps
        return cast("Partial", ByKeyHead.partial(self, q, k, v, call))

    def _fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q], on the CPU zeros."""
        shape, out_size, several = q.shape[:3], v.shape[-1], len(self.steps) > 1
        scale = self.scale_of(q.shape[-1]) if self.work.scale is None else 1.0
        keys, parts = k.shape[1], [q, k, v]
        if call.padding is not None or self.work.reads:
            # each sample has lists of its own, which all of its heads share
            keys = 1
        else:
            parts = [grouped(q, k).flatten(0, 1), *(x.flatten(0, 1)[:, None] for x in (k, v))]
        if not q.is_cpu:
            parts = [rows_of_size(x, max(NARROWEST, x.shape[-1])) for x in parts]
        heads = number_on(q.device, keys, "keys"), number_on(q.device, parts[0].shape[1], "repeat")
        changes = self._changes(call, len(q))
        kind = Kind(
            scale,
            self.statements,
            tuple(changes),
            padded=call.padding is not None,
            own=any(step.tiles.looks for step in self.steps),
            lse=not q.is_cpu,
            bounded=not self.work.changes.everywhere,
        )
        if several:
            # gradients of the steps add up in float32
            parts = [widened(x) for x in parts]
        results = []
        for step in self.steps:
            sides = zip((step.q, step.k, step.k), parts, strict=True)
            rows = [side.ordered(x.to(q.dtype)) for side, x in sides]
            blocks = step.blocks(call, len(q))
            out, lse = attend(kind, rows, blocks, heads, tuple(changes.values()))
            lse = out.new_zeros(out.shape[:-1]) if lse is None else lse
            out, lse = step.q.natural(out, 0.0), step.q.natural(lse, -torch.inf)
            # half types would be rounded after every step
            results.append((out.to(lse.dtype) if several else out, lse))
        out, lse = reduce(merged, results)
        if self.work.normalize == "softmax1":
            out, lse = with_zero((out, lse))
        return out.to(q.dtype)[..., :out_size].reshape(*shape, out_size), lse.reshape(shape)

    def _changes(self, call: Call, samples: int) -> dict[str, tuple[Tensor, ...]]:
        """The tensors behind the names in scores."""
        found: dict[str, tuple[Tensor, ...]] = {x: (y,) for x, y in self.fixed.items()}
        n_q, n_k = self.work.n_q, self.work.n_k
        for name in sorted(self.work.changes.symbols):
            called, brackets, _ = name.partition("[" if name.endswith(TABLE) else "(")
            if not brackets:
                continue
            learned = called in call.tables
            x = call.tables[called] if learned else _single(call.data[called])
            sizes = [x[0].numel()]
            if name.endswith(PAIR):
                sizes = [samples, n_q, n_k, n_k - n_q, int(len(x) > 1)]
            # each use has a tensor of its own
            uses = (number_on(x.device, size, f"{name} {at}") for at, size in enumerate(sizes))
            found[name] = x.flatten(), *uses
        return found


def _single(x: Tensor) -> Tensor:
    """Numbers as scores are computed: float32, or whole."""
    return x.float() if x.is_floating_point() else x.long()


class FlexStep:
    """One step: its blocks, and where its tokens are."""

    def __init__(self, band: Banded, work: Work, device: torch.device) -> None:
        self.tiles, self.reads = StepTiles(band, work, device, (BLOCK, BLOCK)), work.reads
        layout, masks = self.tiles.layout, self.tiles.static
        if masks.bits.nbytes > LARGEST:
            raise BackendError(
                f"the backend 'flex' refuses: its masks are {masks.bits.nbytes:,} bytes, and at"
                f" most {LARGEST:,} are kept"
            )
        self.q = Ordered(layout.q, work.n_k - work.n_q, work.n_q, device)
        self.k = Ordered(layout.k, 0, work.n_k, device)
        self.shape = self.q.places // BLOCK, self.k.places // BLOCK
        runs = None if self.tiles.looks else runs_of(layout)
        # no views, of which torch compiles anew for other tensors behind them
        self.runs = () if runs is None else tuple(torch.tensor(x, device=device) for x in runs)
        self.whole = None if self.reads else self._left(Call(), 1)
        self.last: Remembered[Blocks] = Remembered()

    def blocks(self, call: Call, samples: int) -> Blocks:
        """What a call leaves of the step, kept while the same inputs and padding come again."""
        read = [call.data[name] for name in self.reads]
        read += [] if call.padding is None else [call.padding]
        if self.whole is not None and not read:
            return self.whole
        return self.last.get(read, lambda: self._left(call, samples), samples)

    def _left(self, call: Call, samples: int) -> Blocks:
        """The blocks of a call of so many samples."""
        masks = self.tiles(call.data, samples)
        if self.tiles.looks and masks.bits.numel() > INDEXED:
            raise BackendError(
                f"the backend 'flex' refuses: masks of {len(masks.some)} samples take"
                f" {4 * masks.bits.numel():,} bytes, and at most {4 * INDEXED:,} are indexed; fewer"
                " samples, or the backend triton, take less"
            )
        full = masks.full if masks.alike is None else masks.full & masks.alike
        some, full, numbers = map(self._in_blocks, (masks.some, full, masks.numbers))
        real = self.k.held[None]
        if call.padding is not None:
            real = real & call.padding[:, self.k.index]
            by_block = torch.unflatten(real, 1, (-1, BLOCK))
            some = some & by_block.any(-1)[:, None]
            full = full & by_block.all(-1)[:, None]
        labels = []
        if masks.labels is not None:
            by_place = (masks.labels[:, :, x.index + x.first] for x in (self.q, self.k))
            labels = [x.movedim(1, 0).flatten(1) for x in by_place]
        return Blocks(
            visited(some, full),
            number_on(real.device, self.shape[0], "tall"),
            number_on(real.device, self.shape[1], "wide"),
            numbers.int().flatten().clone(),
            masks.bits,
            real.expand(samples, -1).flatten().clone(),
            self.q.at,
            self.k.at,
            self.runs,
            tuple(zip(*labels, strict=True)),
        )

    def _in_blocks(self, x: Tensor) -> Tensor:
        """A number of each tile, [B, tiles], as one of each block, [B, q blocks, k blocks]."""
        blocks = x.new_zeros(len(x), *self.shape)
        blocks[:, self.tiles.entries[0], self.tiles.entries[1]] = x
        return blocks


class Ordered:
    """One side of a step on a device: the positions first <= p < first + count at its places."""

    def __init__(self, side: Axis, first: int, count: int, device: torch.device) -> None:
        blocks = np.full((max(FEWEST, side.count), BLOCK), -1, np.int64)
        blocks[: side.count, : side.size] = side.positions
        positions = blocks.ravel()
        self.first, self.count, self.places = first, count, len(positions)
        rows = np.where(positions >= 0, positions - first, -1)
        self.is_natural = np.array_equal(rows[:count], np.arange(count))
        self.at = torch.from_numpy(positions.astype(np.int32)).to(device)
        self.held = torch.from_numpy(rows >= 0).to(device)
        # where none stands, the last one before it, so that a block tells of its own
        self.index = torch.from_numpy(filled(rows[None])[0]).to(device)
        back = places_of(rows, count)
        self.back = torch.from_numpy(back).to(device)
        self.is_complete = bool((back < self.places).all())

    def ordered(self, x: Tensor) -> Tensor:
        """[b, H, count, d] -> [b, H, places, d]."""
        if not self.is_natural:
            return x.index_select(2, self.index)
        missing = self.places - self.count
        return functional.pad(x, (0, 0, 0, missing)) if missing else x

    def natural(self, x: Tensor, nothing: float) -> Tensor:
        """[b, H, places, …] -> [b, H, count, …], `nothing` where a position has no place."""
        if self.is_natural:
            return x[:, :, : self.count]
        if not self.is_complete:
            x = torch.cat([x, x.new_full((*x.shape[:2], 1, *x.shape[3:]), nothing)], 2)
        return x.index_select(2, self.back)
