"""What must travel between two ranks: a vertex cover of least weight, found by a maximal flow.

For every pair (q, k) between them the key's row travels to the query, or the query's row to the
key and its partial result back. The rows that travel are a vertex cover of a bipartite graph; the
cheapest one is a minimal cut, and the maximal flow, of equal value, proves that none is cheaper
(König 1931, Ford and Fulkerson 1956).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

Runs = np.ndarray
"""Disjoint runs low <= i < high of rows as a rank's tensors count them, ascending, int64 [m, 2]."""

MOST = 2**31 - 1
"""What the flow of scipy counts to."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The key rows and the query rows that travel, what they weigh, and the flow that proves that
    it is the least for these blocks."""

    keys: Runs
    queries: Runs
    weight: int
    flow: int


def least_cut(queries: Runs, keys: Runs, key_weight: int, query_weight: int | None) -> Cut:
    """The cheapest rows for blocks `queries[i]` x `keys[i]`; without a weight queries stay."""
    if query_weight is None:
        runs = union(keys)
        weight = count(runs) * key_weight
        return Cut(runs, none(), weight, weight)
    common = gcd(key_weight, query_weight)
    q, q_of = _elements(queries)
    k, k_of = _elements(keys)
    q_rows, k_rows = np.diff(q, axis=0)[:, 0], np.diff(k, axis=0)[:, 0]
    unit = max(1, -(-(_sum(q_rows, query_weight) + _sum(k_rows, key_weight)) // common // MOST))
    weights = [
        rows * (w // common // unit) for rows, w in ((q_rows, query_weight), (k_rows, key_weight))
    ]
    taken_q, taken_k, flow = _cover(q_of, k_of, *weights)
    ends = [_ends(q, taken_q), _ends(k, taken_k)]
    weight = count(ends[1]) * key_weight + count(ends[0]) * query_weight
    return Cut(ends[1], ends[0], weight, flow * common * unit)


def _sum(rows: np.ndarray, weight: int) -> int:
    return int(rows.sum()) * weight


def none() -> Runs:
    """No rows."""
    return np.zeros((0, 2), np.int64)


def count(runs: Runs) -> int:
    """The rows of disjoint runs."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def union(runs: Runs) -> Runs:
    """The rows of any runs, as disjoint ones."""
    if not len(runs):
        return none()
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    first = np.ones(len(runs), bool)
    first[1:] = runs[1:, 0] > reach[:-1]
    last = np.append(first[1:], True)
    return np.stack([runs[first, 0], reach[last]], 1)


def rows_of(runs: Runs) -> np.ndarray:
    """The rows one by one, int64."""
    size = runs[:, 1] - runs[:, 0]
    ends = np.cumsum(size)
    return np.asarray(np.arange(int(size.sum())) + np.repeat(runs[:, 0] - (ends - size), size))


def _elements(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Where any of the runs begins or ends, [e + 1, 1], and of which elements between two such
    places each run consists, as first and last + 1."""
    at, inverse = np.unique(runs, return_inverse=True)
    return at[:, None], inverse.reshape(runs.shape)


def _ends(at: np.ndarray, taken: np.ndarray) -> Runs:
    chosen = np.flatnonzero(taken)
    return union(np.stack([at[chosen, 0], at[chosen + 1, 0]], 1))


def _cover(
    q_of: np.ndarray, k_of: np.ndarray, q_weights: np.ndarray, k_weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Which elements of queries and keys are taken, and the flow, in the weights' unit.

    An element may stand in no block. Each block is a node between the elements of its two sides,
    so that a block of many elements costs their sum, not their product.
    """
    if len(q_of) == 1 and len(q_weights) == 1 and len(k_weights) == 1:
        cheaper = bool(k_weights[0] <= q_weights[0])
        both = np.array([not cheaper]), np.array([cheaper])
        return *both, int(min(k_weights[0], q_weights[0]))
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    q_at, q_block = _members(q_of)
    k_at, k_block = _members(k_of)
    queries, blocks = len(q_weights), len(q_of)
    first_key = 1 + queries + blocks
    sink = first_key + len(k_weights)
    free = int(min(q_weights.sum(), k_weights.sum())) + 1
    tails = [np.zeros(queries, np.int64), 1 + q_at, 1 + queries + k_block]
    heads = [1 + np.arange(queries), 1 + queries + q_block, first_key + k_at]
    room = [q_weights, np.full(len(q_at), free), np.full(len(k_at), free)]
    tails.append(first_key + np.arange(len(k_weights)))
    heads.append(np.full(len(k_weights), sink))
    room.append(k_weights)
    graph = csr_array(
        (np.concatenate(room).astype(np.int32), (np.concatenate(tails), np.concatenate(heads))),
        shape=(sink + 1, sink + 1),
    )
    found = maximum_flow(graph, 0, sink)
    left = csr_array(graph - found.flow)
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = np.zeros(sink + 1, bool)
    reached[breadth_first_order(left, 0, return_predecessors=False)] = True
    # the cut edges: from the source to queries that are not reached, from keys that are to the sink
    return (
        ~reached[1 : 1 + queries] & (q_weights > 0),
        reached[first_key:sink],
        int(found.flow_value),
    )


def _members(of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The elements of all blocks one after the other, and whose each is."""
    size = of[:, 1] - of[:, 0]
    ends = np.cumsum(size)
    block = np.repeat(np.arange(len(of)), size)
    return np.arange(int(size.sum())) + np.repeat(of[:, 0] - (ends - size), size), block
