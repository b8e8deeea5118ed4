"""What is decided once tensors are there: which pairs a graph has, for masks and for tiles.

Positions are those of the whole sequence, 0 <= position < n_k; queries are the last n_q of them.
Position tensors of fewer than four axes hold for every sample and head; of more, the first two axes
are [B or 1, H or 1]. Answers have the shape [B or 1, H or 1, *broadcast of the rest].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from attnspec.graphs.relation import Relation
from attnspec.lower.work import Call, Work

Part = TypeVar("Part")

Holds = Callable[[Tensor, Tensor], Tensor]
"""Whether q reads k, bool, or what is added to the score: of positions that broadcast, int64."""


@dataclass(frozen=True, eq=False)
class TileLists:
    """Tiles of queries, and for each the tiles of keys in which its pairs lie.

    An order is int64 [B or 1, H or 1, slots], the position in each slot, -1 for none; None where
    slot s has the s-th query or key. Tile t has the slots t * tile <= s < (t + 1) *
    tile, the last one perhaps fewer. `lists` is int64 [B or 1, H or 1, query tiles, r], numbers of
    key tiles, -1 for none, in any order, none twice. `holds` are the pairs that are computed here:
    of several layouts of one choice each pair is in one alone, and it may have pairs nowhere else
    than in its tiles; `whole` says that it has all that are in its tiles, `alike` whether heads
    that share keys share their lists, None where that is not known.
    """

    q_order: Tensor | None
    k_order: Tensor | None
    q_tile: int
    k_tile: int
    lists: Tensor
    holds: Holds
    whole: bool = False
    alike: bool | None = None

    def is_shared(self, repeat: int) -> bool:
        """Whether so many heads that follow one another have the same order and lists."""
        if repeat == 1 or not self.whole or self.alike is not None:
            return repeat == 1 or (self.whole and bool(self.alike))
        return all(
            x is None
            or x.shape[1] == 1
            or all(bool((x[:, i::repeat] == x[:, ::repeat]).all()) for i in range(1, repeat))
            for x in (self.q_order, self.k_order, self.lists)
        )

    def of_groups(self, repeat: int) -> TileLists:
        """The same for the first of every so many heads."""

        def every(x: Tensor) -> Tensor:
            return x if x.shape[1] == 1 else x[:, ::repeat]

        q_order, k_order = (x if x is None else every(x) for x in (self.q_order, self.k_order))
        return replace(self, q_order=q_order, k_order=k_order, lists=every(self.lists))


class Choice:
    """The pairs of one graph for the tensors of a call; padding of keys is cut elsewhere.

    Tensors among the fields of a choice are [B or 1, H or 1, ...].
    """

    def holds(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether query position q reads key position k: bool, elementwise."""
        raise NotImplementedError

    def layouts(self) -> tuple[TileLists, ...]:
        """Tiles that hold all pairs; at least one layout."""
        raise NotImplementedError

    @property
    def lists(self) -> Mapping[str, Tensor]:
        """What was decided, in the words of the language."""
        raise NotImplementedError

    # --- what some graphs change beside the pairs ----------------------------------------------

    def counts(self, q: Tensor, k: Tensor) -> Tensor:
        """How often each pair is weighed, int, 0 where it is none, of a choice that is counted."""
        raise NotImplementedError

    weight: Tensor | None = None
    """Numbers [B, H, …] that are 1, and have a gradient: keys and values of some pairs are
    multiplied with them."""

    def factor(self, q: Tensor, k: Tensor) -> Tensor:
        """What keys and values are multiplied with for each pair, of a choice with weights."""
        raise NotImplementedError

    def of_weight(self, sums: Tensor) -> Tensor:
        """The gradient of the weights [B, H, …], given those of the factor of each entry in the
        lists of the one layout [B, H, query tiles, r]: the sums over their pairs."""
        raise NotImplementedError

    def attending(self, q: Tensor) -> Tensor:
        """What attends in place of the queries [B, H, n_q, d]."""
        return q

    def rounds(self) -> tuple[Choice, ...]:
        """The choices whose outputs are averaged, where that is asked for."""
        return ()

    counted: bool = False
    """Whether some pairs are weighed several times."""


def rounds_of(work: Work, call: Call) -> list[Call]:
    """The calls whose outputs are averaged, if any are."""
    return [
        replace(call, data={**call.data, leaf: choice})
        for leaf in work.decided
        for choice in call.data[leaf].rounds()
    ]


def mean_of(outs: Sequence[Tensor], some: Sequence[Tensor]) -> Tensor:
    """The mean outputs [..., n_q, d] of rounds where queries have keys, bool [..., n_q], or 0."""
    kind = torch.promote_types(outs[0].dtype, torch.float32)
    total = reduce(torch.add, [out.to(kind) for out in outs])
    count = torch.stack(list(some)).sum(0)[..., None]
    return (total / count.clamp_min(1)).to(outs[0].dtype)


def part_of(value: Part, samples: slice, heads: Tensor | slice) -> Part:
    """A choice, or what there is in one, for some of the samples and heads."""
    if isinstance(value, Tensor):
        found = value if len(value) == 1 else value[samples]
        return found if found.shape[1] == 1 else found[:, heads]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return type(value)(part_of(part, samples, heads) for part in value)
    if isinstance(value, Mapping):
        return {key: part_of(part, samples, heads) for key, part in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, Relation | type):
        parts = {x.name: part_of(getattr(value, x.name), samples, heads) for x in fields(value)}
        return replace(value, **parts)
    return value


def look_up(table: Tensor, position: Tensor) -> Tensor:
    """table[b, h, position[b, h, ...]] of a table [B, H, n]: [B, H, ...]."""
    position = position.view(*(1,) * (4 - position.dim()), *position.shape)
    lead = [max(sizes) for sizes in zip(table.shape[:2], position.shape[:2], strict=True)]
    position = position.expand(*lead, *position.shape[2:])
    return table.expand(*lead, -1).gather(2, position.flatten(2)).view(position.shape)
