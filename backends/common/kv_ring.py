"""Keys that are kept in place: once a graph's look-back is full, the key of each new position takes
the place of one that no later position reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnspec.backends.common.kv_keeper import Keeper, Kept
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.graphs.relation import evaluate_pairs
from attnspec.limits import LIMITS
from attnspec.lower.work import Work


@dataclass(frozen=True, eq=False)
class Ring:
    """Keys [B, K, w, d] and values [B, K, w, d_v] of the `first` positions and of the last ones
    before `count`, which is at least w - 1: position p stands at p or, from `first` on, at
    first + (p - first) mod (w - first). `padding` says which are real, bool [B, w], None where all
    are. One place is that of the next position: what stands there is read no more."""

    keys: torch.Tensor
    values: torch.Tensor
    first: int
    count: int
    padding: torch.Tensor | None = None

    @staticmethod
    def of(kept: Kept, keeper: Keeper) -> Ring | None:
        """What is kept, in places; None where it does not fill them, or is not told by its
        positions alone."""
        first, before = keeper.reach.first, keeper.reach.before
        if keeper.reach.marked or kept.data or len(kept.positions) != first + before:
            return None
        at = torch.from_numpy(_place(kept.positions, first, before + 1)).to(kept.keys.device)

        def placed(x: torch.Tensor, axis: int) -> torch.Tensor:
            shape = (*x.shape[:axis], first + before + 1, *x.shape[axis + 1 :])
            return x.new_zeros(shape).index_copy_(axis, at, x)

        padding = None if kept.padding is None else placed(kept.padding, 1)
        return Ring(placed(kept.keys, 2), placed(kept.values, 2), first, kept.count, padding)

    def kept(self) -> Kept:
        """The same one after the other, in memory of its own."""
        turn = self.keys.shape[2] - self.first
        last = np.arange(self.count - turn + 1, self.count)
        positions = np.concatenate([np.arange(self.first), last])
        at = torch.from_numpy(_place(positions, self.first, turn)).to(self.keys.device)
        padding = None if self.padding is None else self.padding.index_select(1, at)
        keys, values = self.keys.index_select(2, at), self.values.index_select(2, at)
        return Kept(keys, values, positions, self.count, padding)

    def written(self, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None) -> Ring:
        """The ring with the key [B, K, 1, d] and value of the next position, in the same memory:
        this one must not be gone on from again."""
        place = self.first + (self.count - self.first) % (self.keys.shape[2] - self.first)
        self.keys[:, :, place : place + 1] = k
        self.values[:, :, place : place + 1] = v
        real = self.padding
        if padding is not None and real is None:
            real = padding.new_ones(len(padding), self.keys.shape[2])
        if real is not None:
            real[:, place] = True if padding is None else padding[:, 0]
        return Ring(self.keys, self.values, self.first, self.count + 1, real)

    @property
    def is_writable(self) -> bool:
        """Whether torch lets it be written here: what inference mode made is read alone outside."""
        held = self.keys, self.values, self.padding
        made = any(x is not None and x.is_inference() for x in held)
        return torch.is_inference_mode_enabled() or not made


@dataclass(frozen=True, eq=False)
class Rows:
    """How r = `LIMITS.ring` positions read a ring of w places, the first a multiple of r: masks
    bool [r, w], None for those of whole rows, distances int64 [r, w] where scores ask."""

    formula: Formula
    masks: torch.Tensor
    whole: tuple[bool, ...]
    distances: torch.Tensor | None

    @staticmethod
    def of(work: Work, keeper: Keeper, number: int) -> Rows:
        """The rows of the positions from `LIMITS.ring` times a number on."""
        first, turn = keeper.reach.first, keeper.reach.before + 1
        q = np.arange(number * LIMITS.ring, (number + 1) * LIMITS.ring)[:, None]
        place = np.arange(first + turn)[None]
        # the last position up to q that stands at a place
        k = np.where(place < first, place, q - (q - place) % turn)
        n = int(q[-1, 0]) + 1
        # before a ring is full no row of it is asked for
        held = evaluate_pairs(work.relation, q, k.clip(0), n) & (k >= 0)
        here = Work(work.relation, 1, n, work.scale, work.changes, work.normalize)
        formula = Formula(here, keeper.heads, keeper.device)
        distances = torch.from_numpy(q - k).to(keeper.device) if formula.needs_distance else None
        masks = torch.from_numpy(held.copy()).to(keeper.device)
        return Rows(formula, masks, tuple(bool(row.all()) for row in held), distances)

    def blocks(self, ring: Ring) -> Blocks:
        """How the last position of a ring reads it, as one block."""
        row = (ring.count - 1) % LIMITS.ring
        mask = None if self.whole[row] else self.masks[row].view(1, 1, 1, 1, 1, -1)
        if ring.padding is not None:
            real = ring.padding[:, None, None, None, None]
            mask = real if mask is None else mask & real
        distance = None if self.distances is None else self.distances[row].view(1, 1, -1)
        return Blocks(distance, mask)


def _place(positions: np.ndarray, first: int, turn: int) -> np.ndarray:
    return np.where(positions < first, positions, first + (positions - first) % turn)
