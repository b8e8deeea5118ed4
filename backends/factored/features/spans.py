"""Sums of features by blocks of positions: what each block reads, in which frames it computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch.nn import functional

from attnspec.backends.common.merging import LOWEST
from attnspec.backends.factored.features.chunks import Frames, Room
from attnspec.backends.factored.features.maps import FeatureMap, Features, Paired, Tables
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.ir.mechanisms.declaration import BLOCK, CHUNK


@dataclass(frozen=True)
class Summing:
    """How features are summed; `chunk` positions are computed pair by pair."""

    map: FeatureMap
    causal: bool
    quotient: Quotient
    chunk: int = CHUNK
    block: int = BLOCK

    @cached_property
    def paired(self) -> Paired | None:
        """The map, if the products of its features have a shorter formula."""
        return self.map if isinstance(self.map, Paired) else None


@dataclass(frozen=True)
class Given:
    """What is summed: q [B, K, R, n_q, d], k [B, K, n_k, d], v [B, K, n_k, d_v], `padding` bool
    [B, n_k] or None, and, of a gate, frames of keys and rows [B, K, n_k] in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    padding: torch.Tensor | None
    gate: tuple[torch.Tensor, torch.Tensor] | None
    tables: Tables

    def gradients(self) -> Given:
        """Tensors to fill with the gradients of what is given, and to add those of tables and gates
        to."""
        gate = self.gate
        q, k, v = (x.new_empty(x.shape) for x in (self.q, self.k, self.v))
        gates = None if gate is None else (torch.zeros_like(gate[0]), torch.zeros_like(gate[1]))
        return Given(
            q, k, v, None, gates, {name: torch.zeros_like(x) for name, x in self.tables.items()}
        )

    def part(self, share: Share) -> Given:
        """What is given to some samples and key heads, as views."""
        samples, heads = share
        return Given(
            self.q[share],
            self.k[share],
            self.v[share],
            None if self.padding is None else self.padding[samples],
            None if self.gate is None else (self.gate[0][share], self.gate[1][share]),
            {name: x if len(x) == 1 else x[heads] for name, x in self.tables.items()},
        )


Share: TypeAlias = "tuple[slice, slice]"
"""Some samples and some key heads."""


def shares(how: Summing, given: Given) -> list[Share]:
    """What is computed at once: as many samples and heads as fit a block with all positions. Long
    sequences go head by head, so that many positions make a block."""
    batch, heads, repeat, _, size = given.q.shape
    wide = max(size, given.v.shape[-1], how.map.width(size)) * repeat
    together = max(1, how.block // max(1, wide * given.k.shape[2]))
    some = max(1, together // max(1, heads))
    return [
        (slice(sample, sample + some), slice(head, head + together))
        for sample in range(0, batch, some)
        for head in range(0, heads, together)
    ]


@dataclass(frozen=True)
class Span:
    """Positions low <= j < high in chunks of `chunk`."""

    low: int
    high: int
    chunk: int


def _whole(low: int, high: int) -> Span:
    return Span(low, high, high - low)


@dataclass(frozen=True)
class Framed:
    """The frames of a block, those from which its chunks count [N, S], and that of the state after
    it [N]."""

    local: Frames | None
    start: torch.Tensor | None
    end: torch.Tensor | None


def _framed(
    keys: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, end: torch.Tensor
) -> Framed:
    """The frames of chunks [N, S, c], counted from the states before them; `first` is that of the
    first state."""
    start = torch.cat([first[:, None], rows[:, :-1, -1]], 1)
    return Framed(Frames(keys - start[..., None], rows - start[..., None]), start, end)


class Sums:
    """One computation: what is given, cut into spans. `most` positions are in one, None for as many
    as `block` allows. In a `room`, where nothing is differentiated, spans write what those before
    them wrote."""

    def __init__(
        self, how: Summing, given: Given, most: int | None = None, room: Room | None = None
    ) -> None:
        self.how, self.given, self.room = how, given, room
        self.batch, self.heads, self.repeat, rows, size = given.q.shape
        self.length = given.k.shape[2]
        self.first = self.length - rows
        self.kind = torch.promote_types(given.q.dtype, torch.float32)
        wide = max(size, given.v.shape[-1], how.map.width(size)) * self.batch * self.heads
        self.most = max(1, how.block // (wide * self.repeat)) if most is None else most

    @property
    def before(self) -> list[Span]:
        """The keys that are summed before any query is looked at: one chunk to a span."""
        high = self.first if self.how.causal else self.length
        return [_whole(at, min(at + self.most, high)) for at in range(0, high, self.most)]

    @property
    def spans(self) -> list[Span]:
        """The positions of the queries."""
        low, high, chunk = self.first, self.length, self.how.chunk
        if not self.how.causal:
            return [_whole(at, min(at + self.most, high)) for at in range(low, high, self.most)]
        step = max(chunk, self.most // chunk * chunk)
        whole = low + (high - low) // chunk * chunk
        found = [Span(at, min(at + step, whole), chunk) for at in range(low, whole, step)]
        return found if whole == high else [*found, Span(whole, high, high - whole)]

    # --- what a block reads --------------------------------------------------------------------

    def queries(self, span: Span) -> torch.Tensor:
        """Rows of queries [B, K, S R c, d]."""
        low, high = span.low - self.first, span.high - self.first
        return self.stacked(self.given.q[:, :, :, low:high].to(self.kind), span)

    def stacked(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """Rows of queries [B, K, R, S c, e] as [B, K, S R c, e], chunk by chunk."""
        if self.repeat > 1:
            x = x.reshape(*x.shape[:3], -1, span.chunk, x.shape[4]).transpose(2, 3)
        return x.flatten(2, -2)

    def keys(self, span: Span) -> torch.Tensor:
        return self.given.k[:, :, span.low : span.high].to(self.kind)

    def values(self, span: Span) -> torch.Tensor:
        """Rows of values [N, S, c, e]: behind each a 1, whose sum is that of the weights."""
        v = self.given.v[:, :, span.low : span.high].to(self.kind)
        if self.how.quotient.divides:
            v = functional.pad(v, (0, 1), value=1.0)
        return self.chunked(v, span)

    def unchunked(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[N, S, R c, e] as rows of queries [B, K, R, S c, e]."""
        x = x.view(self.batch, self.heads, -1, self.repeat, span.chunk, x.shape[-1])
        return x.transpose(2, 3).flatten(3, 4)

    def chunked(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[B, K, S r c, m] as [N, S, r c, m]."""
        count = (span.high - span.low) // span.chunk
        return x.reshape(self.batch * self.heads, count, -1, x.shape[-1])

    def masked(self, found: Features, span: Span) -> Features:
        """Features of keys, none of padding."""
        padding = self.given.padding
        if padding is None:
            return found
        real = padding[:, None, span.low : span.high]
        log = None if found.log is None else found.log.masked_fill(~real, -torch.inf)
        return Features(found.values.masked_fill(~real[..., None], 0.0), log)

    # --- frames --------------------------------------------------------------------------------

    def frames(self, found: Features, base: torch.Tensor | None, span: Span) -> Framed:
        """The frames of a block whose first state is in the frame `base` [N]."""
        if self.given.gate is not None:
            keys, rows = (self.lines(x[:, :, span.low : span.high], span) for x in self.given.gate)
            first = torch.zeros_like(rows[:, 0, 0]) if base is None else base
            return _framed(keys, rows, first, rows[:, -1, -1])
        if found.log is None:
            return Framed(None, None, None)
        keys = self.lines(found.log.detach(), span)
        if base is None:
            base = keys.new_full(keys.shape[:1], LOWEST)
        rows = torch.cummax(torch.cat([base[:, None], keys.flatten(1)], 1), 1).values[:, 1:]
        # a state that holds nothing has the frame of the first key, which no later one changes
        first = rows.masked_fill(rows <= LOWEST, torch.inf).amin(1)
        first = torch.where(base > LOWEST, base, torch.where(first < torch.inf, first, 0.0))
        framed = torch.maximum(rows, first[:, None]).view(keys.shape)
        return _framed(keys, framed, first, rows[:, -1])

    def lines(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[B, K, S c] as [N, S, c]."""
        return x.reshape(self.batch * self.heads, -1, span.chunk)

    def logs(
        self, found: Features, frames: Frames | None, start: torch.Tensor | None, span: Span
    ) -> torch.Tensor | None:
        """Sums of queries are those that are meant, divided by exp of this [N, S, R c]; those of a
        gate are the ones that are meant, since what it forgets is gone."""
        total = None
        if found.log is not None:
            rows = self.repeat * span.chunk
            total = found.log.detach().reshape(self.batch * self.heads, -1, rows)
        if start is None or self.given.gate is not None:
            return total
        rows_at = start[..., None]
        if frames is not None:
            rows_at = (rows_at + frames.rows).repeat(1, 1, self.repeat)
        rows_at = rows_at.to(self.kind)
        return rows_at if total is None else total + rows_at
