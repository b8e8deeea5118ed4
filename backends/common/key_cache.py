"""Decoding with a causal graph of bounded look-back: the keys that later positions may read.

Once the look-back is full, a step that may write over its state keeps them in a ring: the key of
each new position takes the place of one that no later position reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from attnspec.backends.common.exact import fused, grouped
from attnspec.backends.common.masks import mask_plan, with_data
from attnspec.backends.common.merging import Outputs
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.common.torch_modes import apart, unseen
from attnspec.graphs.look_back import LookBack
from attnspec.graphs.relation import evaluate_pairs
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call, Heads, Work


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
    padding: Tensor | None
    data: Mapping[str, Tensor]
    turn: int = 0

    def moved(
        self, of: Callable[[Tensor, int], Tensor], positions: np.ndarray, turn: int = 0
    ) -> KeyCache:
        """The same with each tensor changed along its axis of keys; at these positions."""
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
        """The same as a ring; None where it does not fill one, or positions do not say so."""
        if self.turn:
            return self
        width = reach.first + reach.before
        if reach.marked or self.data or len(self.positions) != width:
            return None
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


# what holds it is a tree of tensors, which may be selected and copied as one
register_dataclass(KeyCache)


def _place(positions: np.ndarray, first: int, turn: int) -> np.ndarray:
    return np.where(positions < first, positions, first + (positions - first) % turn)


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor [B, w] of some positions, ascending, that is read by position as one [B, n] is."""

    values: Tensor
    positions: Tensor

    def __getitem__(self, index: tuple[object, Tensor]) -> Tensor:
        place = torch.searchsorted(self.positions, index[1].contiguous())
        # what is not kept is in no pair, and is asked for only beside a mask that says so
        return self.values[:, place.clamp_max(len(self.positions) - 1)]


@dataclass(frozen=True, eq=False)
class KeyStream:
    """Goes on with the graph of some heads, as far as it looks back: keeps the keys that a later
    position may read, no other."""

    work: Work
    reach: LookBack
    heads: Heads
    device: torch.device

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: object, with_lse: bool = False
    ) -> tuple[Outputs, object]:
        """As `Streamable.step`, some positions at a time: a position meets all keys of its step,
        though it reads few."""
        if q.shape[2] <= LIMITS.stream:
            return self.advanced(q, k, v, call, state, with_lse)
        partials = []
        for low in range(0, q.shape[2], LIMITS.stream):
            at = slice(low, low + LIMITS.stream)
            padding = None if call.padding is None else call.padding[:, at]
            data = {name: values[:, at] for name, values in call.data.items()}
            here = replace(call, padding=padding, data=data)
            parts = q[:, :, at], k[:, :, at], v[:, :, at]
            outputs, state = self.advanced(*parts, here, state, with_lse)
            partials.append(outputs)
        outs, sums = zip(*partials, strict=True)
        return (torch.cat(outs, 2), None if sums[0] is None else torch.cat(sums, 2)), state

    advanced: ClassVar[Callable[..., tuple[Outputs, object]]]
    """A step of few positions."""

    def seen(
        self, k: Tensor, v: Tensor, call: Call, before: KeyCache | None
    ) -> tuple[KeyCache, Formula, Blocks, np.ndarray]:
        """What new positions with keys k [B, K, t, d] and values v [B, K, t, d_v] may read, and how
        it lies to the queries, one block of them; and which of these keys later positions may read,
        bool [w]. Padding and inputs of the call are those of the new positions."""
        first = 0 if before is None else before.count
        at = np.arange(first, first + k.shape[2])
        data = {name: call.data[name] for name in self.work.reads}
        every = KeyCache(k, v, at, first + len(at), call.padding, data)
        if before is not None:
            every = before.joined(every)
        index = torch.from_numpy(every.positions).to(self.device)
        placed = {name: Placed(values, index) for name, values in every.data.items()}
        q_at, k_at, n = at[:, None], every.positions, every.count
        mask = mask_plan(self.work.relation, q_at, k_at[None], n, self.device)(placed)
        mask = mask.expand(*mask.shape[:-2], len(at), len(k_at)).reshape(-1, len(at), len(k_at))
        if every.padding is not None:
            mask = mask & every.padding[:, None]
        later = (k_at < self.reach.first) | (k_at >= n - self.reach.before)
        for tokens in self.reach.marked:
            member = cast(Tensor, with_data(tokens, placed).contains(index, n))
            # samples that mark others keep those, too: their masks tell them apart
            later |= member.reshape(-1, len(k_at)).any(0).cpu().numpy()
        symbols = {"q": torch.from_numpy(q_at).to(self.device), "k": index}
        blocks = Blocks(mask[:, None, None, None], symbols=symbols)
        return every, self._formula(len(at), n), blocks, later

    def _formula(self, n_q: int, n_k: int) -> Formula:
        work = replace(self.work, n_q=n_q, n_k=n_k, unit_keys=False)
        return Formula(work, self.heads, self.device)


@dataclass(frozen=True, eq=False)
class GraphStream(KeyStream):
    """Goes on with a graph alone."""

    rows: Cache[int, tuple[Formula, list[Blocks]]] = field(
        default_factory=lambda: Cache(LIMITS.rows_kept)
    )

    def advanced(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: object, with_lse: bool
    ) -> tuple[Outputs, object]:
        before = cast("KeyCache | None", state)
        after = self._ring(before, k, v) if call.in_place and q.shape[2] == 1 else None
        if after is not None:
            after = every = after.written(k, v, call.padding)
            number, row = divmod(every.count - 1, LIMITS.ring)
            formula, rows = self.rows.get(number, lambda: apart(lambda: self._rows(number)))
            blocks = rows[row]
            if every.padding is not None:
                real = every.padding[:, None, None, None, None]
                real = real if blocks.mask is None else blocks.mask & real
                blocks = replace(blocks, mask=real)
        else:
            before = None if before is None else before.in_order()
            every, formula, blocks, later = self.seen(k, v, call, before)
            after = every.part(later)
        queries, keys, values = grouped(q, k), every.keys, every.values
        # the fused kernel has no second derivatives
        if self.work.plain and not with_lse and unseen(q, keys, values):
            mask = None if blocks.mask is None else blocks.mask[:, 0, 0]
            scale = scale_of(self.work, q.shape[-1])
            out, lse = fused(queries, keys, values, mask, scale), None
        else:
            out, lse = formula.of_block(queries, keys, values, blocks, call)
        return (out.flatten(1, 2), None if lse is None else lse.flatten(1, 2)), after

    def _ring(self, before: KeyCache | None, k: Tensor, v: Tensor) -> KeyCache | None:
        """What is kept, where the next position may be written into it."""
        # what is written over must not be needed for derivatives
        if before is None or self.work.reads or not unseen(k, v, before.keys, before.values):
            return None
        ring = before.ring(self.reach)
        if ring is None or torch.is_inference_mode_enabled():
            return ring
        # what inference mode made is read alone outside
        tensors = ring.keys, ring.values, ring.padding
        return None if any(x is not None and x.is_inference() for x in tensors) else ring

    def _rows(self, number: int) -> tuple[Formula, list[Blocks]]:
        """How each of r = `LIMITS.ring` positions, the first number * r, reads a ring, which is
        full by then."""
        first, turn = self.reach.first, self.reach.before + 1
        q = np.arange(number * LIMITS.ring, (number + 1) * LIMITS.ring)[:, None]
        place = np.arange(first + turn)[None]
        # the last position up to q that stands at a place
        k = np.where(place < first, place, q - (q - place) % turn)
        n = int(q[-1, 0]) + 1
        pairs = evaluate_pairs(self.work.relation, q, k.clip(0), n) & (k >= 0)
        masks = torch.from_numpy(pairs[:, None, None, None, None, None]).to(self.device)
        at, keys = (torch.from_numpy(x).to(self.device) for x in (q, k))
        return self._formula(1, n), [
            Blocks(None if every.all() else mask, symbols={"q": query, "k": key})
            for every, mask, query, key in zip(pairs, masks, at, keys, strict=True)
        ]
