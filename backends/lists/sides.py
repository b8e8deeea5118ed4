"""The two sides of a layout: the positions that its tiles have."""

from __future__ import annotations

from functools import cached_property

import torch
from torch.nn import functional


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
        whole = self.natural and (self.n - self.first) % self.size == 0
        return None if whole or bool(real.all()) else real

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
        return None if self.real is None and self.natural else found

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
