"""Yun's test: whether a stack of sparse attention can approximate every function on sequences; and
BigBird's, whether every layer holds a star.

Sufficient are, with the layers used in turn as often as is needed: every position reads itself in
every layer; some order of all positions has each read the one before it in one of the layers; and
every position comes to know every other. With the first, the last is that the union of the layers
is strongly connected.
Source: Yun et al. 2020, "O(n) Connections are Expressive Enough", assumption 1 and theorem 1;
Zaheer et al. 2020, "Big Bird", theorem 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspec.analysis.counting.degrees import degrees_of, readers_of
from attnspec.analysis.quality import Figure, Unknown
from attnspec.analysis.reach.chain import layers_of, union_of
from attnspec.analysis.reach.walks import hops
from attnspec.analysis.spectrum.undirected import own
from attnspec.graphs.operators import Union
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.stack import Stack

LONGEST_SEARCH = 16_384
"""Up to this length it is looked for who comes to know whom, hop by hop."""

FEW = 12
"""Up to this length all orders are tried."""


def universal(stack: Stack, n: int) -> Figure[bool]:
    """Whether the three conditions hold at n > 0 positions, with the one that fails in the note;
    raises Unknown where no order was found and none is excluded, TooMuch."""
    if stack.program.causal and n > 1:
        return Figure(False, note="the first position never comes to know a later one")
    chain = layers_of(stack, n)
    for layer in range(chain.distinct):
        alone = ~own(Union(tuple(sorted(chain.at(layer), key=repr))), n)
        if alone.any():
            where = f" in layer {layer}" if chain.distinct > 1 else ""
            return Figure(False, note=f"position {alone.argmax():,} does not read itself{where}")
    union = Union(tuple(sorted(union_of(stack, n).at(0), key=repr)))
    up, down = (_follows(union, order, n) for order in (np.arange(n), np.arange(n)[::-1]))
    if not (up and down):
        missed = _missed(stack, n)
        if missed is not None:
            return Figure(False, note=f"position {missed[0]:,} never comes to know {missed[1]:,}")
    if up or down or any(_follows(union, order, n) for order in _orders(union, n)):
        return Figure(True)
    if n <= FEW:
        mask = evaluate_pairs(union, np.arange(n)[:, None], np.arange(n)[None], n)
        if _has_path(mask):
            return Figure(True)
        return Figure(False, note="no order of all positions has each read the one before")
    # all but one read another, and all but one are read by another, along any order
    for counts, what in ((degrees_of, "read no other"), (readers_of, "are read by no other")):
        ends = np.flatnonzero(counts(union, n) <= 1)
        if len(ends) > 1:
            return Figure(False, note=f"positions {ends[0]:,} and {ends[1]:,} {what}")
    raise Unknown("no order was found in which each position reads the one before it")


def _follows(union: Relation, order: np.ndarray, n: int) -> bool:
    """Whether each position of an order reads the one before it."""
    return bool(evaluate_pairs(union, order[1:], order[:-1], n).all())


def _missed(stack: Stack, n: int) -> tuple[int, int] | None:
    """A position and another that it never comes to know, or None."""
    if n > LONGEST_SEARCH:
        raise Unknown(f"who comes to know whom is looked for up to n = {LONGEST_SEARCH:,}")
    graph = union_of(stack, n)
    away = np.flatnonzero(hops(graph, 0) < 0)
    if len(away):
        return 0, int(away[0])
    away = np.flatnonzero(hops(graph.reversed(), 0) < 0)
    return (int(away[0]), 0) if len(away) else None


def _orders(union: Union, n: int) -> Iterator[np.ndarray]:
    """Orders by residue class, up and down in turn or all the same way, from either end."""
    steps = {step for term in union.terms for step, _ in term.strides(n) if 1 < step < n}
    for step in sorted(steps):
        classes = [np.arange(residue, n, step) for residue in range(step)]
        turned = [part[::-1] if index % 2 else part for index, part in enumerate(classes)]
        for parts in (classes, turned):
            order = np.concatenate(parts)
            yield order
            yield order[::-1]


def _has_path(mask: np.ndarray) -> bool:
    """Whether some order of a few positions has each read the one before, by sets of positions."""
    n = len(mask)
    readers = [sum(1 << q for q in range(n) if mask[q, k] and q != k) for k in range(n)]
    # for each set that an order passes, the positions in which it may end
    ends = [0] * (1 << n)
    for start in range(n):
        ends[1 << start] = 1 << start
    for passed in range(1, 1 << n):
        for last in range(n):
            if ends[passed] >> last & 1:
                for following in range(n):
                    if readers[last] >> following & 1 and not passed >> following & 1:
                        ends[passed | 1 << following] |= 1 << following
    return ends[-1] != 0


# --- star -----------------------------------------------------------------------------------------


def star(stack: Stack, n: int) -> Figure[bool]:
    """Whether every layer has a position that reads all and that all read, at n > 0 positions.

    With every position reading itself, too, the sparse graph is a universal approximator (Zaheer et
    al. 2020, "Big Bird", theorem 1): the note says where that is not so. Raises TooMuch.
    """
    chain = layers_of(stack, n)
    hubs = []
    for layer in range(chain.distinct):
        heads = Union(tuple(sorted(chain.at(layer), key=repr)))
        rows, columns = degrees_of(heads, n) == n, readers_of(heads, n) == n
        both = np.flatnonzero(rows & columns)
        where = "" if chain.distinct == 1 else f"layer {layer}: "
        if not len(both):
            what = "reads all" if not rows.any() else "is read by all"
            if rows.any() and columns.any():
                what = "reads all and is read by all"
            return Figure(False, note=f"{where}no position {what}")
        alone = ~own(heads, n)
        if alone.any():
            hubs.append(f"{where}position {both[0]:,}; {alone.argmax():,} does not read itself")
        else:
            hubs.append(f"{where}position {both[0]:,}")
    return Figure(True, note="; ".join(dict.fromkeys(hubs)))
