"""A graph whose pairs are written down one by one: what tensors decided."""

from __future__ import annotations

import numpy as np

from attnspec.graphs.relation import Edges, Elementwise, Relation


class WrittenPairs(Relation):
    """The pairs that a mask bool [n, n] holds; compared by identity."""

    numpy_only = True

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.mask[q, k]

    def rows(self, first: int, last: int, n: int) -> Edges:
        q, k = np.nonzero(self.mask[first:last])
        return q + first, k
