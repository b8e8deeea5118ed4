"""The pairs of one head, and of one layer, as a report counts them."""

from __future__ import annotations

from dataclasses import dataclass

from attnspec.analysis.counting.degrees import degrees_of, readers_of
from attnspec.graphs.relation import Relation
from attnspec.ir.program import Crossing


@dataclass(frozen=True)
class HeadCounts:
    """The pairs of one head of one layer, exactly.

    `degree`, `min_degree`, `mean_degree`: keys of one query; `readers`, `min_readers`: queries that
    read one key; `empty_rows` queries have no key, `unread_keys` no reader.
    """

    edges: int
    density: float
    degree: int
    min_degree: int
    mean_degree: float
    readers: int
    min_readers: int
    empty_rows: int
    unread_keys: int


def queries_of(sides: Crossing | None) -> slice:
    """Which positions are queries: all, or the first where they hold two sequences."""
    return slice(None if sides is None else sides.queries)


def head_counts(relation: Relation, n: int, sides: Crossing | None = None) -> HeadCounts:
    """The counts of a head at one or more positions, which may hold two sequences; raises
    TooMuch."""
    degrees = degrees_of(relation, n)[queries_of(sides)]
    readers = readers_of(relation, n)[: n if sides is None else sides.keys]
    edges = int(degrees.sum())
    return HeadCounts(
        edges=edges,
        density=edges / (len(degrees) * len(readers)),
        degree=int(degrees.max()),
        min_degree=int(degrees.min()),
        mean_degree=edges / len(degrees),
        readers=int(readers.max()),
        min_readers=int(readers.min()),
        empty_rows=int((degrees == 0).sum()),
        unread_keys=int((readers == 0).sum()),
    )
