"""Decoding with a causal graph of bounded look-back: the keys that later positions may read.

Once the look-back is full, a step that may write over its state keeps them in a ring: the key of
each new position takes the place of one that no later position reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.exact import fused, grouped
from attnspec.backends.common.masks import mask_plan, with_data
from attnspec.backends.common.merging import Outputs
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.common.torch_modes import apart, unseen
from attnspec.graphs.look_back import LookBack
from attnspec.graphs.relation import evaluate_pairs
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call, Streamable, Work


@dataclass(frozen=True, eq=False)
class KeyCache:
    """Keys [B, K, w, d] and values [B, K, w, d_v] at some positions before `count`, and what was
    said of these: which are real, bool [B, w], None where all are, and the run-time inputs that the
    graph reads, [B, w] each.

    Positions are ascending. In a ring they are not listed: with `turn` > 0 it is of the first
    f = w - turn positions and of the last turn - 1 before `count`, of which p stands at p or, from
    f on, at f + (p - f) mod turn; what stands where the next one goes is read no more.
    """

    keys: Tensor
    values: Tensor
    positions: np.ndarray
    count: int
    padding: Tensor | None = None
    data: Mapping[str, Tensor] = field(default_factory=dict)
    turn: int = 0

    def moved(
        self, of: Callable[[Tensor, int], Tensor], positions: np.ndarray, turn: int = 0
    ) -> KeyCache:
        """The same with something done to each of its tensors along its axis of keys; at these
        positions."""
        return KeyCache(
            of(self.keys, 2),
            of(self.values, 2),
            positions,
            self.count,
            None if self.padding is None else of(self.padding, 1),
            {name: of(values, 1) for name, values in self.data.items()},
            turn,
        )

    def taken(self, places: np.ndarray, positions: np.ndarray) -> KeyCache:
        """What stands at some places, int64 [w'], in memory of its own; at these positions."""
        index = torch.from_numpy(places).to(self.keys.device)
        return self.moved(lambda x, axis: x.index_select(axis, index), positions)

    def part(self, chosen: np.ndarray) -> KeyCache:
        """The same of the positions that are chosen, bool [w]."""
        return self if chosen.all() else self.taken(np.flatnonzero(chosen), self.positions[chosen])

    def joined(self, new: KeyCache) -> KeyCache:
        """This and what is new, one after the other."""
        some = self.padding is not None or new.padding is not None
        return KeyCache(
            torch.cat([self.keys, new.keys], 2),
            torch.cat([self.values, new.values], 2),
            np.concatenate([self.positions, new.positions]),
            new.count,
            torch.cat([self.real, new.real], 1) if some else None,
            {name: torch.cat([self.data[name], new.data[name]], -1) for name in new.data},
        )

    @property
    def real(self) -> Tensor:
        """Which keys are real, bool [B, w]."""
        if self.padding is not None:
            return self.padding
        shape, device = (len(self.keys), self.keys.shape[2]), self.keys.device
        return torch.ones(shape, dtype=torch.bool, device=device)

    # --- as a ring -----------------------------------------------------------------------------

    def ring(self, reach: LookBack) -> KeyCache | None:
        """The same as a ring; None where it does not fill one, or is not told by its positions
        alone."""
        width = reach.first + reach.before
        if self.turn or reach.marked or self.data or len(self.positions) != width:
            return self if self.turn else None
        turn = reach.before + 1
        at = torch.from_numpy(_place(self.positions, reach.first, turn)).to(self.keys.device)

        def placed(x: Tensor, axis: int) -> Tensor:
            shape = (*x.shape[:axis], width + 1, *x.shape[axis + 1 :])
            return x.new_zeros(shape).index_copy_(axis, at, x)

        return self.moved(placed, self.positions[:0], turn)

    def in_order(self) -> KeyCache:
        """The same one after the other."""
        if not self.turn:
            return self
        first, last = self.keys.shape[2] - self.turn, self.count - self.turn + 1
        positions = np.concatenate([np.arange(first), np.arange(last, self.count)])
        return self.taken(_place(positions, first, self.turn), positions)

    def written(self, k: Tensor, v: Tensor, padding: Tensor | None) -> KeyCache:
        """The ring with the key [B, K, 1, d] and value of the next position, in the same memory:
        this one must not be gone on from again."""
        first = self.keys.shape[2] - self.turn
        place = first + (self.count - first) % self.turn
        self.keys[:, :, place : place + 1] = k
        self.values[:, :, place : place + 1] = v
        real = self.padding if padding is None else self.real
        if real is not None:
            real[:, place] = True if padding is None else padding[:, 0]
        return replace(self, count=self.count + 1, padding=real)

    @property
    def is_writable(self) -> bool:
        """Whether torch lets it be written here: what inference mode made is read alone outside."""
        tensors = self.keys, self.values, self.padding
        made = any(x is not None and x.is_inference() for x in tensors)
        return torch.is_inference_mode_enabled() or not made


def _place(positions: np.ndarray, first: int, turn: int) -> np.ndarray:
    return np.where(positions < first, positions, first + (positions - first) % turn)


@dataclass(frozen=True, eq=False)
class Seen:
    """What some new positions may read, how it lies to the queries, one block of them, and which
    keys later positions may read, bool [w]."""

    every: KeyCache
    formula: Formula
    blocks: Blocks
    later: np.ndarray

    @cached_property
    def kept(self) -> KeyCache:
        """What is kept for later positions."""
        return self.every.part(self.later)

    @cached_property
    def left(self) -> KeyCache:
        """What no later position reads."""
        return self.every.part(~self.later)


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor [B, w] of some positions, ascending, that is read by position as one [B, n] is."""

    values: Tensor
    positions: Tensor

    def __getitem__(self, index: tuple[object, Tensor]) -> Tensor:
        place = torch.searchsorted(self.positions, index[1].contiguous())
        # what is not kept is in no pair, and is asked for only beside a mask that says so
        return self.values[:, place.clamp_max(len(self.positions) - 1)]


@dataclass(frozen=True)
class Keeper:
    """Keeps the keys of some heads as far as a graph looks back."""

    reach: LookBack
    heads: tuple[int, ...]
    device: torch.device

    def seen(self, work: Work, k: Tensor, v: Tensor, call: Call, before: KeyCache | None) -> Seen:
        """What new positions with keys k [B, K, t, d] and values v [B, K, t, d_v] may read; padding
        and inputs of the call are those of these positions."""
        first = 0 if before is None else before.count
        at = np.arange(first, first + k.shape[2])
        data = {name: call.data[name] for name in work.reads}
        every = KeyCache(k, v, at, first + len(at), call.padding, data)
        if before is not None:
            every = before.joined(every)
        mask, formula = self._mask(work, every, at), self.formula(work, len(at), every.count)
        symbols = self.symbols(at[:, None], every.positions) if work.changes.placed else {}
        blocks = Blocks(mask[:, None, None, None], symbols=symbols)
        return Seen(every, formula, blocks, self._later(every))

    def symbols(self, q: np.ndarray, k: np.ndarray) -> dict[str, Tensor]:
        """Positions as scores read them."""
        return {name: torch.from_numpy(x).to(self.device) for name, x in (("q", q), ("k", k))}

    def formula(self, work: Work, n_q: int, n_k: int) -> Formula:
        """The formula of a work for so many positions."""
        here = Work(work.relation, n_q, n_k, work.scale, work.changes, work.normalize)
        return Formula(here, self.heads, self.device)

    def _mask(self, work: Work, every: KeyCache, at: np.ndarray) -> Tensor:
        """Which keys the positions read, bool [B or 1, t, w]."""
        q, k, n = at[:, None], every.positions[None], every.count
        mask = mask_plan(work.relation, q, k, n, self.device)(self._placed(every), n)
        mask = mask.expand(*mask.shape[:-2], len(at), k.size).reshape(-1, len(at), k.size)
        return mask if every.padding is None else mask & every.padding[:, None]

    def _later(self, every: KeyCache) -> np.ndarray:
        """What later positions may read, bool [w]."""
        at = every.positions
        later = (at < self.reach.first) | (at >= every.count - self.reach.before)
        if self.reach.marked:
            placed, index = self._placed(every), torch.from_numpy(at).to(self.device)
            for tokens in self.reach.marked:
                member = cast(Tensor, with_data(tokens, placed).contains(index, every.count))
                # samples that mark others keep those, too: their masks tell them apart
                later |= member.reshape(-1, len(at)).any(0).cpu().numpy()
        return later

    def _placed(self, every: KeyCache) -> dict[str, Placed]:
        if not every.data:
            return {}
        at = torch.from_numpy(every.positions).to(self.device)
        return {name: Placed(values, at) for name, values in every.data.items()}


class RingRows(NamedTuple):
    """How r = `LIMITS.ring` positions read a ring of w places, the first a multiple of r: masks
    bool [r, w], whether these are of whole rows, and positions int64 [r, …] where scores ask."""

    formula: Formula
    masks: Tensor
    whole: list[bool]
    symbols: dict[str, Tensor]

    @staticmethod
    def of(work: Work, keeper: Keeper, number: int) -> RingRows:
        """The rows of the positions from `LIMITS.ring` times a number on."""
        first, turn = keeper.reach.first, keeper.reach.before + 1
        q = np.arange(number * LIMITS.ring, (number + 1) * LIMITS.ring)[:, None]
        place = np.arange(first + turn)[None]
        # the last position up to q that stands at a place
        k = np.where(place < first, place, q - (q - place) % turn)
        n = int(q[-1, 0]) + 1
        # before a ring is full no row of it is asked for
        pairs = evaluate_pairs(work.relation, q, k.clip(0), n) & (k >= 0)
        symbols = keeper.symbols(q, k) if work.changes.placed else {}
        masks, whole = torch.from_numpy(pairs).to(keeper.device), [bool(row.all()) for row in pairs]
        return RingRows(keeper.formula(work, 1, n), masks, whole, symbols)

    def blocks(self, ring: KeyCache) -> Blocks:
        """How the last position of a ring reads it, as one block."""
        row = (ring.count - 1) % LIMITS.ring
        mask = None if self.whole[row] else self.masks[row].view(1, 1, 1, 1, 1, -1)
        if ring.padding is not None:
            real = ring.padding[:, None, None, None, None]
            mask = real if mask is None else mask & real
        return Blocks(mask, symbols={name: x[row] for name, x in self.symbols.items()})


@dataclass(frozen=True, eq=False)
class GraphStream:
    """Goes on with a graph: keeps the keys that a later position may read, no other."""

    work: Work
    keeper: Keeper
    rows: Cache[int, RingRows] = field(default_factory=lambda: Cache(LIMITS.rows_kept))

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[Outputs, object]:
        before, plain = cast("KeyCache | None", state), self.work.plain and not with_lse
        after = self._ring(before, k, v) if call.in_place and q.shape[2] == 1 else None
        if after is not None:
            after = every = after.written(k, v, call.padding)
            number = (every.count - 1) // LIMITS.ring
            rows = self.rows.get(
                number, lambda: apart(lambda: RingRows.of(self.work, self.keeper, number))
            )
            formula, blocks = rows.formula, rows.blocks(every)
        else:
            before = None if before is None else before.in_order()
            seen = self.keeper.seen(self.work, k, v, call, before)
            every, formula, blocks, after = seen.every, seen.formula, seen.blocks, seen.kept
        queries, keys, values = grouped(q, k), every.keys, every.values
        # the fused kernel has no second derivatives
        if plain and unseen(q, keys, values):
            mask = None if blocks.mask is None else blocks.mask[:, 0, 0]
            scale = scale_of(self.work, q.shape[-1])
            out, lse = fused(queries, keys, values, mask, scale), None
        else:
            out, lse = formula.of_block(queries, keys, values, blocks, call)
        out = out.reshape(*q.shape[:3], v.shape[-1])
        return (out, None if lse is None else lse.flatten(1, 2)), after

    def _ring(self, before: KeyCache | None, k: Tensor, v: Tensor) -> KeyCache | None:
        """What is kept, where the next position may be written into it."""
        # what is written over must not be needed for derivatives
        if before is None or self.work.reads or not unseen(k, v, before.keys, before.values):
            return None
        ring = before.ring(self.keeper.reach)
        return ring if ring is not None and ring.is_writable else None


@dataclass(frozen=True, eq=False)
class InPieces:
    """Goes on some positions at a time: many take time and memory in proportion to their number,
    where a position meets all keys of its step, though it reads few."""

    stream: Streamable

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[Outputs, object]:
        if q.shape[2] <= LIMITS.stream:
            return self.stream.step(q, k, v, call, state, with_lse)
        outs, sums = [], []
        for low in range(0, q.shape[2], LIMITS.stream):
            at = slice(low, low + LIMITS.stream)
            padding = None if call.padding is None else call.padding[:, at]
            data = {name: values[:, at] for name, values in call.data.items()}
            here = replace(call, padding=padding, data=data)
            parts = q[:, :, at], k[:, :, at], v[:, :, at]
            (out, lse), state = self.stream.step(*parts, here, state, with_lse)
            outs.append(out)
            if lse is not None:
                sums.append(lse)
        return (torch.cat(outs, 2), torch.cat(sums, 2) if sums else None), state
