"""The pairs that one relation has and another has not, without a mask of either.

They are counted as the edges of any relation are, in closed form or from rows; a row is examined
only where its pairs are named.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.graphs.operators import difference
from attnspec.graphs.relation import Relation, evaluate_pairs

EXAMPLES = 5
"""The most pairs that are named."""

RUNS = 4
"""The most runs of keys that a row is written with."""


@dataclass(frozen=True)
class Pairs:
    """Some pairs (q, k): how many, of how many queries, from `first` to `last`, and the first few,
    ordered by query and key. No pairs have `first` and `last` None, and are false."""

    count: int = 0
    queries: int = 0
    first: int | None = None
    last: int | None = None
    examples: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def shown(self) -> str:
        """The first few, in words."""
        return ", ".join([*map(str, self.examples), *"…" * (self.count > len(self.examples))])

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {**asdict(self), "examples": [list(pair) for pair in self.examples]}


def only_in(first: Relation, second: Relation, n: int) -> Pairs:
    """The pairs of the first relation that the second has not, counted exactly.

    Raises TooMuch where that means looking at too many pairs.
    """
    counts = degrees_of(difference(first, second), n)
    queries = np.flatnonzero(counts)
    if len(queries) == 0:
        return Pairs()
    examples = (
        (query, key)
        for query in queries[:EXAMPLES].tolist()
        for key in np.flatnonzero(row(first, query, n) & ~row(second, query, n)).tolist()
    )
    some, ends = tuple(islice(examples, EXAMPLES)), (int(queries[0]), int(queries[-1]))
    return Pairs(int(counts.sum()), len(queries), *ends, some)


def row(relation: Relation, query: int, n: int) -> np.ndarray:
    """The keys of one query, bool [n], by the definition."""
    return evaluate_pairs(relation, np.array([query]), np.arange(n), n)


def row_text(relation: Relation, query: int, n: int) -> str:
    """The keys of one query as `0..3, 8, 16, …`; `nothing` where there is none."""
    keys = np.flatnonzero(row(relation, query, n))
    if len(keys) == 0:
        return "nothing"
    starts = np.append(0, np.flatnonzero(np.diff(keys) > 1) + 1)
    ends = np.append(starts[1:], len(keys)) - 1
    runs = [
        f"{low}" if low == high else f"{low}..{high}"
        for low, high in zip(keys[starts[:RUNS]].tolist(), keys[ends[:RUNS]].tolist(), strict=True)
    ]
    if len(starts) > RUNS:
        # what lies between is left out, the end is not
        runs[RUNS - 1 :] = ["…", str(keys[-1])]
    return ", ".join(runs)
