"""What a stack of layers lets one position learn of another: hops, paths, depth, diameter.

Hop l uses the graph of layer l, all heads together; the residual stream counts as reading oneself;
a spec with fewer layers repeats its last. `hops`, `path`, `depth` and what is read or reached after
each layer follow the layers in their order; `diameter`, `path_length` and `eccentricity` are about
the union of all layers and heads. Only allowed pairs count: all, or those with k <= q where the
spec is causal.

All functions raise TooMuch where a graph without closed form is too large to look into, and
otherwise as `Stack.bound` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from attnspec.analysis.quality import Figure
from attnspec.analysis.reach import walks
from attnspec.analysis.reach.chain import Chain, layers_of, union_of
from attnspec.analysis.reach.spans import layers_needed, spans_of
from attnspec.analysis.reach.spread import Spread, spread
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError, InternalError

Step = tuple[int, int, int]
"""Layer, head, and the position that is read there."""

Steps = tuple[Step, ...]
"""The reads by which a query comes to know a key, from the top layer down; the last reads the key.

A layer in which nothing needs to be read is left out. Layers count on where a spec repeats its
last.
"""


def hops(stack: Stack, n: int, query: int) -> np.ndarray:
    """Layers until `query` has read each key, int64 [n], -1 for never."""
    _require_positions(n, query)
    return walks.hops(layers_of(stack, n), query)


def told(stack: Stack, n: int, key: int) -> np.ndarray:
    """Layers until each query has read `key`, int64 [n], -1 for never."""
    _require_positions(n, key)
    return walks.told(layers_of(stack, n), key)


def path(stack: Stack, n: int, query: int, key: int) -> Steps | None:
    """The steps of a shortest path through the layers, None where there is none."""
    _require_positions(n, query, key)
    reads = walks.walk(layers_of(stack, n), query, key)
    if reads is None:
        return None

    @cache
    def heads(layer: int) -> list[tuple[int, int, Relation]]:
        every = range(stack.program.head_count)
        return [(layer, head, stack.relation(n, layer, head)) for head in every]

    # a spec with fewer layers repeats its last
    last = stack.program.layer_count - 1
    slots = [_slot(heads(min(read.layer, last)), read, n) for read in reads]
    return tuple((read.layer, slot[1], read.key) for read, slot in zip(reads, slots, strict=True))


def path_in_union(stack: Stack, n: int, query: int, key: int) -> Steps | None:
    """The same in the union of all layers and heads; the layers then are in no order."""
    _require_positions(n, query, key)
    reads = walks.walk(union_of(stack, n), query, key)
    if reads is None:
        return None
    found = stack.bound(n).found
    return tuple((*_slot(found, read, n), read.key) for read in reads)


def spread_in_layers(stack: Stack, n: int, most: int | None = None) -> Spread:
    """The allowed pairs not joined after 0, 1, … layers."""
    return spread(layers_of(stack, n), most)


def spread_in_union(stack: Stack, n: int) -> Spread:
    """The allowed pairs further apart than 0, 1, … steps in the union of all layers and heads."""
    return spread(union_of(stack, n))


def depth(stack: Stack, n: int) -> Figure[int | None]:
    """The fewest layers after which all allowed pairs are joined, None if some never are."""
    return _longest(layers_of(stack, n), "layers")


def diameter(stack: Stack, n: int) -> Figure[int | None]:
    """The longest shortest path between allowed pairs in the union, None if some pair has none."""
    return _longest(union_of(stack, n), "steps")


def path_length(stack: Stack, n: int) -> Figure[float | None]:
    """The mean shortest path between allowed pairs of different positions in the union, None if
    some pair has none; 0.0 where there are no such pairs."""
    figure = spread(union_of(stack, n))
    if figure.layers is None:
        return Figure(None, note=_never(figure))
    mean = sum(figure.missing) / max(1, figure.pairs - figure.own)
    if figure.sampled:
        return Figure(mean, "estimate", f"from {figure.sampled} of the queries")
    return Figure(mean)


def eccentricity(stack: Stack, n: int, position: int) -> Figure[int | None]:
    """The longest shortest path from a position to a key it is allowed, in the union; None if it
    never reads one of them."""
    _require_positions(n, position)
    chain = union_of(stack, n)
    layers = walks.hops(chain, position)[: chain.allowed(position)]
    never = np.flatnonzero(layers < 0)
    if len(never):
        return Figure(None, note=f"query {position} never reads key {never[0]}")
    return Figure(int(layers.max()))


# --- helpers --------------------------------------------------------------------------------------


def _longest(chain: Chain, unit: str) -> Figure[int | None]:
    if chain.n > LIMITS.every_pair:
        spans = spans_of(chain)
        if spans is not None:
            needed = layers_needed(chain, spans)
            return Figure(needed, note="" if needed is not None else _someone(chain))
    figure = spread(chain)
    if figure.layers is None:
        return Figure(None, note=_never(figure))
    if not figure.sampled or figure.layers == _at_most(chain):
        return Figure(figure.layers)
    query, key = figure.first[-2] or (0, 0)
    note = f"query {query} takes {figure.layers} {unit} to read key {key}, so this is a lower bound"
    return Figure(figure.layers, "estimate", f"from {figure.sampled} of the queries; {note}")


def _someone(chain: Chain) -> str:
    """Some pair that is never joined, looked for at the ends and in the middle."""
    for query in (0, chain.n - 1, chain.n // 2):
        never = np.flatnonzero(walks.hops(chain, query)[: chain.allowed(query)] < 0)
        if len(never):
            return f"query {query} never reads key {never[0]}"
    return "which is not known"


def _never(found: Spread) -> str:
    query, key = found.first[-1] or (0, 0)
    return f"query {query} never reads key {key}"


def _at_most(chain: Chain) -> int | None:
    """An upper bound of the distance of all allowed pairs where one graph repeats, or None."""
    n = chain.n
    if chain.distinct > 1:
        return None
    every = np.arange(1, n + 1) if chain.causal else np.full(n, n)
    if any(np.array_equal(relation.degrees(n), every) for relation in chain.at(0)):
        return 1
    if chain.causal:
        return None
    # every path may lead through one position, such as one that reads every key: there and on
    hubs, bounds, back = {0, n // 2, n - 1}, [], chain.reversed()
    for reading in chain.graph(0).readings:
        if reading.rows is not None and reading.columns is None and reading.pairs is None:
            hubs.add(int(reading.rows.argmax()))
            break
    for hub in hubs:
        there, on = walks.hops(back, hub), walks.hops(chain, hub)
        if (there >= 0).all() and (on >= 0).all():
            bounds.append(int(there.max() + on.max()))
    return min(bounds, default=None)


def _slot(slots: Iterable[tuple[int, int, Relation]], read: walks.Read, n: int) -> tuple[int, int]:
    """The first layer and head in which a pair is read."""
    for layer, head, relation in slots:
        if relation.holds(read.query, read.key, n):
            return layer, head
    raise InternalError(f"no head reads {read.key} from {read.query}")


def _require_positions(n: int, *positions: int) -> None:
    for position in positions:
        if not n:
            raise AttnSpecError(f"there is no position at n = 0, got {position}")
        if not 0 <= position < n:
            raise AttnSpecError(f"a position must be between 0 and {n - 1}, got {position}")
