"""The keys that a causal graph of bounded look-back may still read, which generation keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch

from attnspec.backends.common.masks import mask_plan, with_data
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.graphs.look_back import LookBack
from attnspec.graphs.relation import evaluate_pairs
from attnspec.lower.work import Call, Work


@dataclass(frozen=True, eq=False)
class Kept:
    """Keys [B, K, w, d] and values [B, K, w, d_v] at some positions before `count`, ascending, and
    what was said of these: which are real, bool [B, w], None where all are, and the run-time inputs
    that the graph reads, [B, w] each."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: np.ndarray
    count: int
    padding: torch.Tensor | None = None
    data: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def part(self, chosen: np.ndarray) -> Kept:
        """The same of the positions that are chosen, bool [w]."""
        if chosen.all():
            return self
        index = torch.from_numpy(np.flatnonzero(chosen)).to(self.keys.device)
        return Kept(
            self.keys.index_select(2, index),
            self.values.index_select(2, index),
            self.positions[chosen],
            self.count,
            None if self.padding is None else self.padding.index_select(1, index),
            {name: values.index_select(1, index) for name, values in self.data.items()},
        )


@dataclass(frozen=True, eq=False)
class Seen:
    """What some new positions may read: keys [B, K, w, d] and values [B, K, w, d_v], how they lie
    to the queries, one block of them, and which of them later positions may read, bool [w]."""

    every: Kept
    formula: Formula
    blocks: Blocks
    later: np.ndarray

    @property
    def keys(self) -> torch.Tensor:
        return self.every.keys

    @property
    def values(self) -> torch.Tensor:
        return self.every.values

    @cached_property
    def kept(self) -> Kept:
        """What is kept for later positions."""
        return self.every.part(self.later)

    @cached_property
    def left(self) -> Kept:
        """What no later position reads."""
        return self.every.part(~self.later)


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor [B, w] of some positions, ascending, that is read by position as one [B, n] is."""

    values: torch.Tensor
    positions: torch.Tensor

    def __getitem__(self, index: tuple[object, torch.Tensor]) -> torch.Tensor:
        place = torch.searchsorted(self.positions, index[1].contiguous())
        # what is not kept is in no pair, and is asked for only beside a mask that says so
        return self.values[:, place.clamp_max(len(self.positions) - 1)]


@dataclass(frozen=True)
class Keeper:
    """Keeps the keys of some heads as far as a graph looks back."""

    reach: LookBack
    heads: tuple[int, ...]
    device: torch.device

    def seen(
        self, work: Work, k: torch.Tensor, v: torch.Tensor, call: Call, before: Kept | None
    ) -> Seen:
        """What new positions with keys k [B, K, t, d] and values v [B, K, t, d_v] may read; padding
        and inputs of the call are those of these positions."""
        rows = k.shape[2]
        first = 0 if before is None else before.count
        at = np.arange(first, first + rows)
        data = {name: call.data[name] for name in work.reads}
        every = Kept(k, v, at, first + rows, call.padding, data)
        if before is not None:
            every = _joined(before, every)
        formula, mask = self._formula(work, every, rows), self._mask(work, every, at)
        distance = None
        if formula.needs_distance:
            apart = (at[:, None] - every.positions)[None]
            distance = torch.from_numpy(apart).to(self.device)
        blocks = Blocks(distance, mask[:, None, None, None])
        return Seen(every, formula, blocks, self._later(every))

    def _formula(self, work: Work, every: Kept, rows: int) -> Formula:
        here = Work(work.relation, rows, every.count, work.scale, work.changes, work.normalize)
        return Formula(here, self.heads, self.device)

    def _mask(self, work: Work, every: Kept, at: np.ndarray) -> torch.Tensor:
        """Which keys the positions read, bool [B or 1, t, w]."""
        q, k = at[:, None], every.positions[None]
        if work.reads:
            plan = mask_plan(work.relation, q, k, every.count, self.device)
            mask = plan.mask(cast("Mapping[str, torch.Tensor]", self._placed(every)), every.count)
            mask = mask.expand(*mask.shape[:-2], len(at), k.size).reshape(-1, len(at), k.size)
        else:
            held = np.broadcast_to(
                evaluate_pairs(work.relation, q, k, every.count), (len(at), k.size)
            )
            mask = torch.from_numpy(held.copy()).to(self.device)[None]
        return mask if every.padding is None else mask & every.padding[:, None]

    def _later(self, every: Kept) -> np.ndarray:
        """What later positions may read, bool [w]."""
        at = every.positions
        later = (at < self.reach.first) | (at >= every.count - self.reach.before)
        if self.reach.marked:
            placed, index = self._placed(every), torch.from_numpy(at).to(self.device)
            for tokens in self.reach.marked:
                held = with_data(tokens, placed).contains(index, every.count)
                # samples that mark others keep those, too: their masks tell them apart
                later |= cast(torch.Tensor, held).reshape(-1, len(at)).any(0).cpu().numpy()
        return later

    def _placed(self, every: Kept) -> dict[str, Placed]:
        at = torch.from_numpy(every.positions).to(self.device)
        return {name: Placed(values, at) for name, values in every.data.items()}


def _joined(before: Kept, new: Kept) -> Kept:
    """What is kept and what is new, one after the other."""
    padding = None
    if before.padding is not None or new.padding is not None:
        padding = torch.cat([_real(before), _real(new)], 1)
    return Kept(
        torch.cat([before.keys, new.keys], 2),
        torch.cat([before.values, new.values], 2),
        np.concatenate([before.positions, new.positions]),
        new.count,
        padding,
        {name: torch.cat([before.data[name], new.data[name]], 1) for name in new.data},
    )


def _real(kept: Kept) -> torch.Tensor:
    if kept.padding is not None:
        return kept.padding
    batch, _, width, _ = kept.keys.shape
    return torch.ones(batch, width, dtype=torch.bool, device=kept.keys.device)
