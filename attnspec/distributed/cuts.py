"""What must travel between two ranks: a vertex cover of least weight, found by a maximal flow.

For every pair (q, k) between them the key's row travels to the query, or the query's row to the
key and its partial result back. The rows that travel are a vertex cover of a bipartite graph; the
cheapest one is a minimal cut, and the maximal flow, of equal value, proves that none is cheaper
(König 1931, Ford and Fulkerson 1956).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Runs = np.ndarray
"""Disjoint runs low <= i < high of rows as a rank's tensors count them, ascending, int64 [m, 2]."""

MOST = 2**31 - 1
"""What the flow of scipy counts to."""


FAR = 1 << 23
"""Numbers of rows that stand this far apart belong to blocks that have nothing to do with each
other: no sequence that is planned is so long."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The key rows and the query rows that travel, what they weigh, the flow that proves that it is
    the least for these blocks, and of each block how many of its queries travel, and how many of
    its keys do not: int64 [m]."""

    keys: Runs
    queries: Runs
    weight: int
    flow: int
    moved: np.ndarray
    kept: np.ndarray


def least_cut(
    queries: Runs,
    keys: Runs,
    key_weight: int,
    query_weight: int | np.ndarray,
    blocks: tuple[np.ndarray, np.ndarray] | None = None,
) -> Cut:
    """The cheapest rows for blocks of some runs of queries times some runs of keys; `blocks` are
    the numbers of the block of each run of queries and of keys, run by run unless said. A row of
    the queries of block i weighs `query_weight[i]`, 0 where these cannot travel."""
    of_queries, of_keys = blocks or (np.arange(len(queries)), np.arange(len(keys)))
    count = len(query_weight) if isinstance(query_weight, np.ndarray) else len(queries)
    each = np.broadcast_to(np.asarray(query_weight, np.int64), count)
    if not (len(queries) and len(keys)):
        nobody = np.zeros(count, np.int64)
        return Cut(none(), none(), 0, 0, nobody, nobody)
    common = int(np.gcd.reduce(each, initial=key_weight))
    q, q_of = _elements(queries)
    k, k_of = _elements(keys)
    q_at, q_block = _members(q_of, of_queries)
    k_at, k_block = _members(k_of, of_keys)
    q_weights, k_weights = np.zeros(len(q) - 1, np.int64), np.zeros(len(k) - 1, np.int64)
    q_rows, k_rows = np.diff(q), np.diff(k)
    # what lies between the blocks is in none of them, and weighs nothing
    q_weights[q_at] = q_rows[q_at] * each[q_block]
    k_weights[k_at] = k_rows[k_at] * key_weight
    total = int(q_weights.sum()) + int(k_weights.sum())
    unit = max(1, -(-total // common // (MOST - 1)))
    stays = np.zeros(len(q_weights), bool)
    stays[q_at] = each[q_block] == 0
    weights = [x // (common * unit) for x in (q_weights, k_weights)]
    weights[0][stays] = int(weights[1].sum()) + 1
    taken_q, taken_k, flow = _cover((q_at, q_block), (k_at, k_block), count, *weights)
    return Cut(
        _ends(k, taken_k),
        _ends(q, taken_q),
        int(k_weights[taken_k].sum() + q_weights[taken_q].sum()),
        flow * common * unit,
        np.bincount(q_block, (q_rows * taken_q)[q_at], count).astype(np.int64),
        np.bincount(k_block, (k_rows * ~taken_k)[k_at], count).astype(np.int64),
    )


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


def runs_of(rows: np.ndarray) -> Runs:
    """Ascending rows as runs."""
    if not len(rows):
        return none()
    first = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    return np.stack([rows[first], rows[np.append(first[1:], len(rows)) - 1] + 1], 1)


def rows_of(runs: Runs) -> np.ndarray:
    """The rows one by one, int64."""
    size = runs[:, 1] - runs[:, 0]
    ends = np.cumsum(size)
    return np.asarray(np.arange(int(size.sum())) + np.repeat(runs[:, 0] - (ends - size), size))


def _elements(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Where any of the runs begins or ends, [e + 1], and of which elements between two such places
    each run consists, as first and last + 1."""
    at, inverse = np.unique(runs, return_inverse=True)
    return at, inverse.reshape(runs.shape)


def _ends(at: np.ndarray, taken: np.ndarray) -> Runs:
    chosen = np.flatnonzero(taken)
    return union(np.stack([at[chosen], at[chosen + 1]], 1))


Members = tuple[np.ndarray, np.ndarray]
"""Elements of all blocks one after the other, and whose each is."""


def _cover(
    q: Members, k: Members, blocks: int, q_weights: np.ndarray, k_weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Which elements of queries and keys are taken, and the flow, in the weights' unit.

    An element may stand in no block. Blocks that share no element with others take the lighter of
    their sides; the flow finds what all others take.
    """
    alone, sums = np.ones(blocks, bool), []
    for (at, block), weights in ((q, q_weights), (k, k_weights)):
        shared = np.bincount(at, minlength=len(weights)) > 1
        alone[block[shared[at]]] = False
        sums.append(np.bincount(block, weights[at], blocks).astype(np.int64))
    by_queries = sums[0] < sums[1]
    taken = np.zeros(len(q_weights), bool), np.zeros(len(k_weights), bool)
    for mine, (at, block), chosen in zip(taken, (q, k), (by_queries, ~by_queries), strict=True):
        mine[at[(alone & chosen)[block]]] = True
    flow = int(np.minimum(*sums)[alone].sum())
    if not alone.all():
        flow += _by_flow(q, k, np.cumsum(~alone) - 1, alone, (q_weights, k_weights), taken)
    return *taken, flow


def _by_flow(
    q: Members,
    k: Members,
    number: np.ndarray,
    left_out: np.ndarray,
    weights: tuple[np.ndarray, np.ndarray],
    taken: tuple[np.ndarray, np.ndarray],
) -> int:
    """Marks the elements that are taken for all blocks but some, which are `number`ed from 0 on;
    returns the flow.

    Each block is a node between the elements of its two sides, so that a block of many elements
    costs their sum, not their product.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    sides, numbers = [], []
    for at, block in (q, k):
        at, block = at[~left_out[block]], block[~left_out[block]]
        elements, inverse = np.unique(at, return_inverse=True)
        sides.append((inverse, number[block]))
        numbers.append(elements)
    (q_at, q_block), (k_at, k_block) = sides
    q_weights, k_weights = (each[some] for each, some in zip(weights, numbers, strict=True))
    queries, blocks = len(q_weights), int(number[-1]) + 1
    first_key = 1 + queries + blocks
    sink = first_key + len(k_weights)
    free = int(k_weights.sum()) + 1
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
    taken[0][numbers[0]] = ~reached[1 : 1 + queries]
    taken[1][numbers[1]] = reached[first_key:sink]
    return int(found.flow_value)


def _members(of: np.ndarray, block: np.ndarray) -> Members:
    """The elements of all blocks one after the other, and whose each is, by the elements and the
    block of each run."""
    size = of[:, 1] - of[:, 0]
    ends = np.cumsum(size)
    whose = np.repeat(block, size)
    return np.arange(int(size.sum())) + np.repeat(of[:, 0] - (ends - size), size), whose
