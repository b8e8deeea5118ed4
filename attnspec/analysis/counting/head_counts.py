"""The pairs of one head, and of one layer, as a report counts them."""

from __future__ import annotations

from dataclasses import dataclass

from attnspec.analysis.counting.degrees import Counts


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


@dataclass(frozen=True)
class LayerCounts:
    """The pairs of one layer, those of its heads added up; `degree` is that of one head."""

    edges: int
    degree: int
    min_degree: int


def head_counts(counts: Counts) -> HeadCounts:
    """The counts of a head at one or more positions."""
    n = len(counts.degrees)
    return HeadCounts(
        edges=counts.edges,
        density=counts.edges / (n * n),
        degree=int(counts.degrees.max()),
        min_degree=int(counts.degrees.min()),
        mean_degree=counts.edges / n,
        readers=int(counts.readers.max()),
        min_readers=int(counts.readers.min()),
        empty_rows=len(counts.empty_rows),
        unread_keys=len(counts.unread_keys),
    )
