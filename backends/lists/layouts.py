"""Layouts of choices: orders of positions on both sides, and which key tiles a query tile reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch.nn import functional

from attnspec.backends.decided.choice import Choice, Holds
from attnspec.backends.decided.lists import ListChoice
from attnspec.graphs.relation import Relation

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Layout:
    """What `TileLists` says; slot s of a query order that is None is position `first` + s, and
    `whole` says that every pair of the tiles in a list holds."""

    q_order: torch.Tensor | None
    k_order: torch.Tensor | None
    q_tile: int
    k_tile: int
    lists: torch.Tensor
    holds: Holds
    first: int = 0
    whole: bool = False

    def is_shared(self, repeat: int) -> bool:
        """Whether so many heads that follow one another have the same order and lists."""
        return repeat == 1 or (
            self.whole
            and all(_is_shared(x, repeat) for x in (self.q_order, self.k_order, self.lists))
        )

    def of_groups(self, repeat: int) -> Layout:
        """The same for the first of every so many heads."""
        q_order, k_order = (
            x if x is None else _every(x, repeat) for x in (self.q_order, self.k_order)
        )
        return replace(self, q_order=q_order, k_order=k_order, lists=_every(self.lists, repeat))


def _every(x: torch.Tensor, repeat: int) -> torch.Tensor:
    return x if x.shape[1] == 1 else x[:, ::repeat]


def _is_shared(x: torch.Tensor | None, repeat: int) -> bool:
    if x is None or x.shape[1] == 1:
        return True
    return all(bool((x[:, each::repeat] == x[:, ::repeat]).all()) for each in range(1, repeat))


def layouts_of(choice: Choice, n_q: int, n_k: int, fewest: int = 1) -> tuple[Layout, ...]:
    """The layouts of a choice; lists of blocks are lists of tiles as they are, unless these would
    have fewer queries."""
    if isinstance(choice, ListChoice) and choice.shared_by >= fewest:
        return (_of_lists(choice, n_k - n_q, n_k),)
    return tuple(
        Layout(*(getattr(layout, entry.name) for entry in fields(layout)))
        for layout in choice.layouts()
    )


def _of_lists(choice: ListChoice, first: int, n: int) -> Layout:
    """Query tiles are the rows of the lists, key tiles the blocks."""
    before = choice.start + choice.first_row * choice.shared_by
    q_order = k_order = None
    if not bool((before == first).all()):
        slots = torch.arange(choice.blocks.shape[2] * choice.shared_by, device=before.device)
        q_order = before[..., None] + slots
        q_order = torch.where((q_order >= first) & (q_order < n), q_order, -1)
    if bool(choice.start.any()):
        k_order = choice.start[..., None] + torch.arange(n, device=before.device)
        k_order = torch.where(k_order < n, k_order, -1)
    tiles = choice.shared_by, choice.size, choice.blocks
    return Layout(q_order, k_order, *tiles, choice.holds, first, choice.within is None)


class Side:
    """The positions of tiles, int64 [B or 1, heads or 1, T, size], -1 for none."""

    def __init__(
        self,
        order: torch.Tensor | None,
        size: int,
        first: int,
        n: int,
        device: torch.device,
    ) -> None:
        self.size, self.n, self.first = size, n, first
        self.natural = order is None
        if order is None:
            order = torch.arange(first, first + -(-(n - first) // size) * size, device=device)
            order = torch.where(order < n, order, -1)[None, None]
        short = -order.shape[2] % size
        if short:
            order = functional.pad(order, (0, short), value=-1)
        self.places: torch.Tensor = order.reshape(*order.shape[:2], -1, size)

    @cached_property
    def real(self) -> torch.Tensor | None:
        """Which of the places are positions, None where all are."""
        real = self.places >= 0
        return None if bool(real.all()) else real

    @cached_property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest position of every tile, [.., T], of those without any n and
        -1."""
        places = self.places
        return places.masked_fill(places < 0, self.n).amin(-1), places.amax(-1)

    @cached_property
    def compact(self) -> torch.Tensor | None:
        """The tiles whose places are positions that follow one another; None where all are."""
        first, last = self.ends
        found = last - first == self.size - 1
        if not self.natural:
            found &= (self.places[..., :-1] < self.places[..., 1:]).all(-1)
        return None if bool(found.all()) else found

    def of(self, tiles: torch.Tensor) -> torch.Tensor:
        """The positions of tiles [B, heads, …] of each head: [B, heads, …, size]."""
        if not self.natural:
            return of_tiles(self.places, tiles)
        found = tiles[..., None] * self.size + torch.arange(self.size, device=tiles.device)
        return found if self.real is None else found.masked_fill_(found >= self.n, -1)


def of_tiles(x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """x [B or 1, heads or 1, T, …] of tiles [B, heads, …]."""
    if x.shape[:2] == (1, 1):
        found = x[0, 0].index_select(0, tiles.flatten())
        return found.view(*tiles.shape, *x.shape[3:])
    at = (
        torch.arange(count, device=tiles.device).view(-1, *(1,) * (tiles.dim() - 1 - axis))
        for axis, count in enumerate(x.shape[:2])
    )
    return x[(*at, tiles)]


def part_of(value: Value, samples: slice, heads: slice) -> Value:
    """A choice, or what there is in one, for some of the samples and heads."""
    if isinstance(value, torch.Tensor):
        found = value if len(value) == 1 else value[samples]
        return found if found.shape[1] == 1 else found[:, heads]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return type(value)(part_of(part, samples, heads) for part in value)
    if isinstance(value, Mapping):
        return {key: part_of(part, samples, heads) for key, part in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, Relation | type):
        parts = {
            entry.name: part_of(getattr(value, entry.name), samples, heads)
            for entry in fields(value)
        }
        return replace(value, **parts)
    return value
