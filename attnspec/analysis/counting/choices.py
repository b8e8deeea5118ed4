"""What is known of pairs before tensors decide them: at most how many, and how many are expected.

Each pattern says what it knows of itself; here it is put together with what stands beside it.
"""

from __future__ import annotations

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.relation import DataDependent, Relation, decided_in
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


def expected_keys(relation: Relation, n: int, causal: bool) -> tuple[np.ndarray, set[str]] | None:
    """The keys that are expected of each query, float [n], with what is assumed; None where nothing
    is expected. Terms are taken for independent of each other."""
    allowed = np.arange(1, n + 1) if causal else np.full(n, n)
    if isinstance(relation, DataDependent):
        found = relation.expected_keys(n, allowed)
        return None if found is None else (found[0], {found[1]} - {""})
    if isinstance(relation, Union | Intersection):
        joined = isinstance(relation, Union)
        # its past is what they choose from already
        terms = [t for t in relation.terms if not (causal and isinstance(t, Causal))]
        left, assumed = np.ones(n), set[str]()
        for term in terms:
            part = expected_keys(term, n, causal)
            if part is None:
                return None
            share = np.minimum(1.0, part[0] / np.maximum(1, allowed))
            left *= 1 - share if joined else share
            assumed |= part[1]
        if len(terms) > 1 and decided_in(relation):
            assumed.add("terms independent of each other")
        return allowed * (1 - left if joined else left), assumed
    if reads_data(relation):
        return None
    past = Intersection((relation, Causal())) if causal else relation
    return degrees_of(past, n).astype(float), set()
