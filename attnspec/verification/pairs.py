"""The pairs of a layout held against the definition, each pair once and no other.

A short sequence is compared pair by pair. Of a long one, some queries are compared with all of
their keys; where the pairs that are held can be listed, each of them is looked up in the
definition, so that with the number of pairs of each query nothing is left to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from attnspec.backends.planner import choose
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import TooMuch
from attnspec.layout.steps import bands_of, seconds_of
from attnspec.limits import LIMITS
from attnspec.lower.costs import dense_seconds
from attnspec.lower.work import Work
from attnspec.verification.kernel_pairs import Blocks, Layout


def held_rows(relation: Relation, rows: np.ndarray, n: int) -> np.ndarray:
    """The definition for all keys of some queries, bool [rows, n]."""
    found = np.empty((len(rows), n), bool)
    step = max(1, LIMITS.pairs_at_once // max(1, n))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        found[low : low + step] = evaluate_pairs(relation, part[:, None], np.arange(n)[None], n)
    return found


def rows_fault(layout: Layout, rows: np.ndarray, held: np.ndarray) -> str | None:
    """The first pair of some queries that is not held as `held` [rows, n] says, or None."""
    n = held.shape[1]
    codes = [np.zeros(0, np.int64)]
    index = np.full(n, -1)
    index[rows] = np.arange(len(rows))
    for blocks in layout.parts:
        for q, k in _pairs(blocks, lambda queries: index[queries] >= 0):
            codes.append(index[q] * n + k)
    times = np.bincount(np.concatenate(codes), minlength=held.size)
    wrong = np.flatnonzero(times != held.ravel())
    if not len(wrong):
        return None
    row, key = divmod(int(wrong[0]), n)
    return _words(layout, int(rows[row]), key, int(times[wrong[0]]), bool(held[row, key]))


def counts_of(layout: Layout, n: int) -> np.ndarray:
    """How many keys the layout holds for each query, int64 [n]."""
    found = np.zeros(n, np.int64)
    for blocks in layout.parts:
        blocks.counts(found)
    return found


def counts_fault(counts: np.ndarray, relation: Relation, n_q: int) -> str | None:
    """The first of the last queries that has another number of keys in the graph, or what differs
    in all; for a graph that `is_counted`."""
    n = len(counts)
    meant = relation.degrees(n)
    wrong = np.flatnonzero(counts[n - n_q :] != meant[n - n_q :])
    if len(wrong):
        q = n - n_q + int(wrong[0])
        return f"query {q} has {counts[q]:,} keys, and {meant[q]:,} in the graph"
    # the default adds up the keys of the queries again
    if n_q < n or type(relation).edges is Relation.edges:
        return None
    total, known = int(counts.sum()), relation.edges(n)
    if total == known:
        return None
    return f"{total:,} pairs are held, and the graph has {known:,}"


def list_fault(layout: Layout, relation: Relation, n: int) -> str | None:
    """The first pair that is held and is no edge, or is held twice."""
    found = [np.zeros(0, np.int64)]
    for blocks in layout.parts:
        for q, k in _pairs(blocks, lambda queries: queries >= 0):
            held = evaluate_pairs(relation, q, k, n)
            if not held.all():
                at = int(np.flatnonzero(~held)[0])
                return _words(layout, int(q[at]), int(k[at]), 1, False)
            found.append(q * n + k)
    codes = np.sort(np.concatenate(found))
    twice = np.flatnonzero(codes[1:] == codes[:-1])
    if not len(twice):
        return None
    code = int(codes[twice[0]])
    return _words(layout, code // n, code % n, int((codes == code).sum()), True)


def is_counted(relation: Relation, n: int) -> bool:
    """Whether the keys of every query can be counted without looking at all pairs."""
    if relation.progressions(np.unique([0, n // 2, n - 1]), n) is not None:
        return True
    return _lists(relation, n) and relation.typical_degree(n) * n <= LIMITS.pairs_evaluated


def _lists(relation: Relation, n: int) -> bool:
    if relation.progressions(np.unique([0, n // 2, n - 1]), n) is not None:
        return True
    match relation:
        case Complement(term) | Shift(term) | Transpose(term):
            return _lists(term, n)
        case Union(terms):
            return all(_lists(term, n) for term in terms)
        case Intersection(terms):
            # the rows of one term are filtered by the others, and that one is no complement
            return all(_lists(term, n) for term in terms if not isinstance(term, Complement))
    return type(relation).rows is not Relation.rows


def _pairs(
    blocks: Blocks, choose: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs of the chosen queries, in parts."""
    wanted = (blocks.queries >= 0) & choose(blocks.queries)
    hit = np.flatnonzero(wanted.any(axis=1))
    if not len(hit):
        return
    for run in np.split(hit, np.flatnonzero(np.diff(hit) > 1) + 1):
        for low, high in blocks.chunks(int(run[0]), int(run[-1]) + 1):
            yield blocks.pairs(low, high, wanted[low:high])


def _words(layout: Layout, q: int, k: int, times: int, held: bool) -> str:
    pair = f"the pair ({q}, {k})"
    if not times:
        return f"no {layout.unit} holds {pair}"
    where = _places(layout, q, k)
    if not held:
        return f"{where[0]} holds {pair}, which is no edge"
    return f"{times} {layout.unit}s hold {pair}: {', '.join(where)}"


def _places(layout: Layout, q: int, k: int) -> list[str]:
    """Where a pair is held, in words; a tile whose every pair is held is FULL."""
    found = []
    for blocks in layout.parts:
        for block in np.flatnonzero((blocks.queries == q).any(axis=1)).tolist():
            keys, mask = blocks.keys(block, block + 1)[0], blocks.mask(block, block + 1)
            for row in np.flatnonzero(blocks.queries[block] == q).tolist():
                for column in np.flatnonzero(keys == k).tolist():
                    if mask is not None and not mask[0, row, column]:
                        continue
                    kind = f"a {layout.unit}"
                    if layout.unit == "tile":
                        kind = (
                            "a mask"
                            if _is_masked(mask, row, column, blocks.tile)
                            else ("a FULL tile")
                        )
                    found.append(f"{kind} of {blocks.what}")
    return found


def _is_masked(mask: np.ndarray | None, row: int, column: int, tile: tuple[int, int]) -> bool:
    if mask is None:
        return False
    top, left = row // tile[0] * tile[0], column // tile[1] * tile[1]
    return not mask[0, top : top + tile[0], left : left + tile[1]].all()


LAID_OUT = 5.0
"""Seconds that the forward of a head may be estimated to take for its layout to be built."""

RUN = 20.0
"""Seconds that the forward of all heads may be estimated to take for it to be run."""


@dataclass(frozen=True)
class Chosen:
    """What runs a work, and the estimate for one head, 0 for a sequence short enough to try."""

    backend: str
    seconds: float


def chosen_for(work: Work, relation: Relation, backend: str, forced: bool) -> Chosen:
    """What runs a work whose inputs make it this relation; `forced` where tables run whatever they
    cost. Raises TooMuch where building it, or its mask, is not affordable."""
    found = choose(work, "cpu", backend)
    name, seconds = found.name, 0.0
    if work.reads and name == "tables":
        seconds = seconds_of(bands_of(relation, work.n_q, work.n_k), work.n_q)
        if not forced and seconds > dense_seconds(work):
            name, seconds = "dense", dense_seconds(work)
    elif work.n_k > LIMITS.every_pair:
        seconds = found.cost(replace(work, relation=relation, reads=()) if work.reads else work)
    if work.n_k > LIMITS.every_pair:
        pairs = work.n_q * work.n_k
        if name == "dense" and pairs > LIMITS.pairs_listed:
            raise TooMuch(
                f"n = {work.n_k:,} is too long for the backend dense, which computes every score:"
                f" up to {LIMITS.pairs_listed:,} are allowed, and there are {pairs:,}"
            )
        if not seconds <= LAID_OUT:
            raise TooMuch(
                f"n = {work.n_k:,} is too long for the backend {name}: a head is estimated to take"
                f" {seconds:,.3g} s, and {LAID_OUT:,.3g} s are allowed"
            )
    return Chosen(name, seconds)
