"""Heads that one kernel runs: which queries and keys are theirs, and where their outputs stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attnspec.lower.work import Kernel, Work
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.decisions import Decision

Selection: TypeAlias = torch.Tensor | range | None
"""Which heads: their numbers, as a range where they are one, None for all."""


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that one kernel runs; `queries` and `keys` select them.

    `tables` has what the kernel calls its tables, with the names of the parameters.
    """

    kernel: Kernel
    work: Work
    heads: tuple[int, ...]
    queries: Selection
    keys: Selection
    tables: tuple[tuple[str, str], ...]

    def parts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Parts:
        """Queries of these heads, and the keys and values that they read."""
        if self.keys is not None:
            k, v = selected(k, 1, self.keys), selected(v, 1, self.keys)
        return q if self.queries is None else selected(q, 1, self.queries), k, v


def draw_of(work: Work, draws: tuple[int, int]) -> int:
    """Which random features a work draws after so many calls in training and requests for new
    ones: every so many calls they are drawn anew, never where that is 0."""
    redraw = int(getattr(work.mechanism, "redraw", 0))
    return draws[0] // redraw + draws[1] if redraw else 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """The groups of one layer, where each head's output stands among theirs, and what the data
    decide for them."""

    groups: tuple[Group, ...]
    order: Selection
    decisions: tuple[Decision, ...] = ()

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The outputs of the groups, [B, H, …], in the order of the heads."""
        whole = parts[0] if len(parts) == 1 else torch.cat([*parts], 1)
        return whole if self.order is None else selected(whole, 1, self.order)


def selection(chosen: Sequence[int], count: int, device: torch.device) -> Selection:
    """Some of so many heads."""
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step > 0 and list(chosen) == list(heads := range(chosen[0], chosen[-1] + 1, step)):
        return None if len(heads) == count else heads
    return torch.tensor(chosen, device=device)


def selected(x: torch.Tensor, axis: int, heads: Selection | Sequence[int]) -> torch.Tensor:
    """Some heads of a tensor: a view where they are a range."""
    if heads is None:
        return x
    if not isinstance(heads, range):
        return x.index_select(axis, torch.as_tensor(heads, device=x.device))
    return x[(*(slice(None),) * axis, slice(heads.start, heads.stop, heads.step))]
