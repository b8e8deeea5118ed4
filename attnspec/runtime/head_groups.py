"""Heads that one kernel runs: which queries and keys are theirs, and where their outputs stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from attnspec.lower.work import Call, Kernel, Work, key_heads
from attnspec.runtime.decisions import Decision, decisions_of

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

    def parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of these heads, and the keys and values that they read."""
        return self.rows(q), selected(k, 1, self.keys), selected(v, 1, self.keys)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to these heads of [B, H, n_q, …]."""
        return selected(x, 1, self.queries)

    def draw(self, draws: tuple[int, int]) -> int:
        """Which random features are drawn, after so many calls in training and requests for new
        ones."""
        return draw_of(self.work, draws)


def draw_of(work: Work, draws: tuple[int, int]) -> int:
    """The same of a work: every so many calls its features are drawn anew, never where that is
    0."""
    redraw = int(getattr(work.mechanism, "redraw", 0))
    return draws[0] // redraw + draws[1] if redraw else 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """The groups of one layer, where each head's output stands among theirs, and what the data
    decide for them."""

    groups: tuple[Group, ...]
    order: Selection
    decisions: tuple[Decision, ...] = ()

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        tables: Callable[[Group], Mapping[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """The output [B, H, n_q, d_v] of a call that is the same for all heads, but for the
        `tables` of each group if something is learned."""
        if self._alone is not None and tables is None:
            return self._alone(q, k, v, call)
        outs = []
        for group in self.groups:
            if tables is not None:
                call = Call(call.padding, tables=tables(group), data=call.data)
            outs.append(group.kernel(*group.parts(q, k, v), call))
        return self.joined(outs)

    @cached_property
    def _alone(self) -> Kernel | None:
        """The kernel of all heads as they stand, if one runs them."""
        first = self.groups[0]
        every = first.queries is None and first.keys is None and self.order is None
        return first.kernel if every and len(self.groups) == 1 else None

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the groups have found, [B, H, …], in the order of the heads."""
        return selected(parts[0] if len(parts) == 1 else torch.cat([*parts], 1), 1, self.order)


def group_of(
    kernel: Kernel,
    work: Work,
    members: tuple[int, ...],
    heads: int,
    ratio: int,
    tables: tuple[tuple[str, str], ...],
    device: torch.device,
) -> Group:
    """The group of some of the heads, each key head being read by `ratio` of them."""
    return Group(
        kernel=kernel,
        work=work,
        heads=members,
        queries=selection(members, heads, device),
        keys=selection(key_heads(members, ratio), heads // ratio, device),
        tables=tables,
    )


def together(groups: Sequence[Group], heads: int, device: torch.device) -> Prepared:
    """Groups that have all heads between them."""
    flat = [head for group in groups for head in group.heads]
    order = sorted(range(heads), key=flat.__getitem__)
    works = [(group.work, group.heads) for group in groups]
    return Prepared(tuple(groups), selection(order, heads, device), decisions_of(works))


def selection(chosen: tuple[int, ...] | list[int], count: int, device: torch.device) -> Selection:
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step > 0 and list(chosen) == list(found := range(chosen[0], chosen[-1] + 1, step)):
        return None if len(found) == count else found
    return torch.tensor(chosen, device=device)


def selected(x: torch.Tensor, axis: int, heads: Selection) -> torch.Tensor:
    """Some heads of a tensor: a view where they are a range."""
    if heads is None:
        return x
    if isinstance(heads, torch.Tensor):
        return x.index_select(axis, heads)
    return x[(*(slice(None),) * axis, slice(heads.start, heads.stop, heads.step))]
