"""Which statement rules which layer and head: the innermost wins, two of one depth are an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from attnspec.elaborate.collect import Collector
from attnspec.source import Span

V = TypeVar("V")

MOST_CLASHES = 50
"""More than are shown; the search for them ends there."""


@dataclass(frozen=True)
class Where:
    """The layers and heads that a scope covers, and how deep it is nested."""

    layers: frozenset[int]
    heads: frozenset[int]
    depth: int = 0
    block: int = 0


@dataclass(frozen=True)
class Ruling(Generic[V]):
    """A value with the scope it holds in and the statement that says so."""

    value: V
    where: Where
    span: Span


def resolve(
    rulings: list[Ruling[V]], layers: int, heads: int, what: str, collector: Collector
) -> list[list[Ruling[V] | None]]:
    """The ruling of each layer and head, None where there is none."""
    # number of the ruling that holds, -1 for none; outer scopes first, so that inner ones win
    table = np.full((layers, heads), -1)
    clashes = 0
    for number, ruling in sorted(enumerate(rulings), key=lambda pair: pair[1].where.depth):
        cells = np.ix_(sorted(ruling.where.layers), sorted(ruling.where.heads))
        for other in sorted({*table[cells].flat}) if clashes < MOST_CLASHES else []:
            if other >= 0 and rulings[other].where.depth == ruling.where.depth:
                inside = np.argwhere(table[cells] == other)[0]
                layer = sorted(ruling.where.layers)[inside[0]]
                head = sorted(ruling.where.heads)[inside[1]]
                _clash(rulings[other], ruling, layer, head, what, collector)
                clashes += 1
        table[cells] = number
    found = [*rulings, None]
    return [[found[number] for number in row] for row in table.tolist()]


def _clash(
    first: Ruling[V], second: Ruling[V], layer: int, head: int, what: str, collector: Collector
) -> None:
    collector.add(
        "A404",
        f"two `{what}` of the same depth claim layer {layer}, head {head}",
        second.span,
        related=(("the other one stands here", first.span),),
        help="narrow one of the scopes",
    )


def ranges(numbers: list[int]) -> str:
    """Numbers in the notation of the language: `0..3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in parts)
