"""What is known of pairs before tensors decide them: at most how many.

Each pattern says what it knows of itself; here it is put together with what stands beside it.
"""

from __future__ import annotations

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.relation import DataDependent, Relation
from attnspec.graphs.token_sets import reads_data


def most_keys(relation: Relation, n: int) -> np.ndarray:
    """The keys of each query at most, int64 [n]."""
    if isinstance(relation, DataDependent):
        return np.full(n, min(n, relation.most_keys(n)), np.int64)
    if isinstance(relation, Union | Intersection):
        parts = np.stack([most_keys(term, n) for term in relation.terms])
        return np.asarray(
            np.minimum(n, parts.sum(0)) if isinstance(relation, Union) else parts.min(0)
        )
    if reads_data(relation):
        return np.full(n, n, np.int64)
    return degrees_of(relation, n)
