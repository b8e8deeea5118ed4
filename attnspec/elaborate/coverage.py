"""Which statement rules which layer and head: the innermost wins, two of one depth are an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from attnspec.diagnostics import Diagnostic
from attnspec.elaborate.collect import Collector
from attnspec.source import Span

V = TypeVar("V")


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
    table: list[list[Ruling[V] | None]] = [[None] * heads for _ in range(layers)]
    clashes: dict[tuple[int, int], None] = {}
    for index, ruling in enumerate(rulings):
        for layer in ruling.where.layers:
            for head in ruling.where.heads:
                present = table[layer][head]
                if present is None or present.where.depth < ruling.where.depth:
                    table[layer][head] = ruling
                elif present.where.depth == ruling.where.depth and present is not ruling:
                    pair = (rulings.index(present), index)
                    if pair not in clashes:
                        clashes[pair] = None
                        _clash(present, ruling, layer, head, what, collector)
    return table


def _clash(
    first: Ruling[V], second: Ruling[V], layer: int, head: int, what: str, collector: Collector
) -> None:
    collector.diagnostics.append(
        Diagnostic(
            "A404",
            f"two `{what}` of the same depth claim layer {layer}, head {head}",
            second.span,
            related=(("the other one stands here", first.span),),
            help="narrow one of the scopes",
        )
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
