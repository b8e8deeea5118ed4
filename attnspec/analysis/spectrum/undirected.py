"""The union of all layers and heads, every pair taken both ways: what spectra are defined on."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspec.analysis.counting.conjunctions import Listed
from attnspec.analysis.counting.degrees import degrees_of
from attnspec.graphs.operators import Union, transpose_of
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import Stack, TooMuch

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MOST_EDGES = 1 << 25
"""The most edges that are written out, both ways counted."""


@lru_cache(maxsize=4)
def both_ways(stack: Stack, n: int) -> Union:
    """The relation of all pairs (q, k) of which one reads the other; raises as `Stack.bound`."""
    relations = {relation for _, _, relation in stack.bound(n).found}
    ways = relations | {transpose_of(relation) for relation in relations}
    return Union(tuple(sorted(ways, key=repr)))


def degrees_both_ways(stack: Stack, n: int) -> np.ndarray:
    """The number of neighbours of each position, itself included where it reads itself, int64 [n];
    raises TooMuch."""
    return degrees_of(both_ways(stack, n), n)


@lru_cache(maxsize=2)
def edges_both_ways(stack: Stack, n: int) -> csr_array:
    """The pairs as a float64 matrix of ones [n, n] with sorted indices; raises TooMuch."""
    from scipy.sparse import csr_array

    if int(degrees_both_ways(stack, n).sum()) > MOST_EDGES:
        raise TooMuch(f"more than {MOST_EDGES:,} pairs are not listed, n = {n:,}")
    total: Any = csr_array((n, n), dtype=np.int8)
    for relation in both_ways(stack, n).terms:
        listed = Listed(relation, n)
        ones = np.ones(len(listed.keys), np.int8)
        part = csr_array((ones, listed.keys, listed.pointers), shape=(n, n))
        total = (total + part).minimum(1)
    edges: csr_array = csr_array(total.astype(np.float64))
    edges.sort_indices()
    return edges


def own(relation: Relation, n: int) -> np.ndarray:
    """Which positions read themselves, bool [n]."""
    every = np.arange(n)
    return evaluate_pairs(relation, every, every, n)
