"""Equal labels, for example documents of a packed sequence: x[q] = x[k].

Edges: sum over labels of m**2, where m positions bear the label.
Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnspec.graphs.relation import (
    Edges,
    Elementwise,
    Progressions,
    Relation,
    Tiles,
    covered,
    in_runs,
    values_of,
)
from attnspec.graphs.token_sets import Data
from attnspec.ir.parameters import argument


@dataclass(frozen=True)
class Same(Relation):
    """The keys whose label is the query's. `ids` holds integers of the last axis n."""

    ids: Data = argument("ids", "an input of kind `ids`", positional=True)

    name: ClassVar = "same"
    one_sequence: ClassVar = (
        "compares labels of queries and keys, and inputs have values only for keys"
    )
    reads_itself: ClassVar = True
    symmetric: ClassVar = True
    anchored: ClassVar = False

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.ids.values[..., q] == self.ids.values[..., k]

    def progressions(self, q: np.ndarray, n: int) -> Progressions | None:
        """In closed form where every label stands in one run."""
        labels = self.classes(n)
        starts = np.flatnonzero(np.diff(labels, prepend=labels[:1] - 1)) if n else np.zeros(0, int)
        if len(np.unique(labels)) < len(starts):
            return None
        run = np.searchsorted(starts, q, side="right") - 1
        stops = np.append(starts[1:], n)
        return starts[run][:, None], stops[run][:, None], 1

    def rows(self, first: int, last: int, n: int) -> Edges:
        order, begin, count = self._groups(n)
        lengths = count[first:last]
        # a stable sort keeps the positions of a label in ascending order
        keys = order[in_runs(begin[first:last], lengths)]
        return np.repeat(np.arange(first, max(first, last)), lengths), keys

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        q_least, q_most = self._range(q, n)
        k_least, k_most = self._range(k, n)
        full = (q_least == k_most) & (q_most == k_least)
        return covered(full, (q_least <= k_most) & (k_least <= q_most))

    def classes(self, n: int) -> np.ndarray:
        return np.asarray(self.ids.values).reshape(-1)[:n]

    def _groups(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The positions sorted by label; of each, where its label begins there, and its count."""
        labels = self.classes(n)
        order = np.argsort(labels, kind="stable")
        begin = np.searchsorted(labels[order], labels, side="left")
        return order, begin, np.searchsorted(labels[order], labels, side="right") - begin

    def _range(self, tiles: Tiles, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The least and the greatest label of each tile."""
        labels, which = values_of(tiles, self.classes(n))
        return labels.min(axis=-1)[which], labels.max(axis=-1)[which]
