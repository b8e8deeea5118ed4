"""The keys that a causal graph of bounded look-back may still read, which generation keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnspec.formula import Blocks, Formula
from attnspec.look_back import LookBack
from attnspec.relations import evaluate_pairs
from attnspec.target import Work


@dataclass(frozen=True, eq=False)
class Kept:
    """Keys [B, K, w, d] and values [B, K, w, d_v] at some positions before `count`, ascending."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: np.ndarray
    count: int


@dataclass(frozen=True, eq=False)
class Seen:
    """What some new positions may read: keys [B, K, w, d] and values [B, K, w, d_v], how they lie
    to the queries, one block of them, and what is kept for later positions."""

    keys: torch.Tensor
    values: torch.Tensor
    formula: Formula
    blocks: Blocks
    kept: Kept


@dataclass(frozen=True)
class Keeper:
    """Keeps the keys of some heads as far as a graph looks back."""

    reach: LookBack
    heads: tuple[int, ...]
    device: torch.device

    def seen(self, work: Work, k: torch.Tensor, v: torch.Tensor, before: Kept | None) -> Seen:
        """What new positions with keys k [B, K, t, d] and values v [B, K, t, d_v] may read."""
        rows = k.shape[2]
        first = 0 if before is None else before.count
        count, at = first + rows, np.arange(first, first + rows)
        positions = at
        if before is not None:
            k, v = torch.cat([before.keys, k], 2), torch.cat([before.values, v], 2)
            positions = np.concatenate([before.positions, at])
        held = evaluate_pairs(work.relation, at[:, None], positions[None], count)
        mask = torch.from_numpy(np.broadcast_to(held, (rows, len(positions))).copy())
        here = Work(work.relation, rows, count, work.scale, work.changes, work.normalize)
        formula = Formula(here, self.heads, self.device)
        distance = None
        if formula.needs_distance:
            distance = torch.from_numpy((at[:, None] - positions)[None]).to(self.device)
        later = (positions < self.reach.first) | (positions >= count - self.reach.before)
        index = torch.from_numpy(np.flatnonzero(later)).to(self.device)
        kept = Kept(k.index_select(2, index), v.index_select(2, index), positions[later], count)
        return Seen(k, v, formula, Blocks(distance, mask.to(self.device)[None]), kept)
