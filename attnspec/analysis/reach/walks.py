"""From one query: after how many layers it has read each key, and through which positions.

After L layers, query q has read row q of (A_{L-1} or I) … (A_1 or I)(A_0 or I): the walk starts at
the top. With S_i the positions read at the outputs below layer i, one more layer on top makes
every S_i larger, and what is new in S_i was read by what is new in S_{i+1}. So each position is
followed once for each distinct layer, however many layers there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.analysis.reach.chain import Chain
from attnspec.analysis.reach.spans import Spans, spans_of

NEVER = -1


def hops(chain: Chain, query: int, most: int | None = None) -> np.ndarray:
    """Layers until `query` has read each key, int64 [n], -1 for never, or not within `most`."""
    spans = spans_of(chain)
    if spans is not None:
        return _by_spans(spans, query, chain.n, most)
    return entered(chain, query, most)[0].astype(np.int64)


def entered(chain: Chain, query: int, most: int | None = None) -> list[np.ndarray]:
    """For each distinct layer i and position the number of layers after which S_i holds it, int32
    [n] with -1 for never, or not within `most`."""
    n, distinct = chain.n, chain.distinct
    times = [np.full(n, NEVER, np.int32) for _ in range(distinct)]
    reached = [np.zeros(n, bool) for _ in range(distinct)]
    # no mark is left in it between two reads
    marks = np.zeros(n, bool)
    start = np.array([query])
    times[0][query], reached[0][query] = 0, True
    joined, layers, below = 1, 0, start
    while joined < chain.allowed(query) and (layers < distinct or len(below)) and layers != most:
        layers += 1
        top = min(layers, distinct) - 1
        # on top of the distinct layers, the last reads what was new below it one layer ago
        fresh = start if layers <= distinct else below
        for layer in range(top, -1, -1):
            fresh = _read(chain, layer, fresh, reached[layer], marks)
            times[layer][fresh] = layers
            if layer == top:
                below = fresh
        joined += len(fresh)
    return times


def told(chain: Chain, key: int) -> np.ndarray:
    """Layers until each query has read `key`, int64 [n], -1 for never: the readers of what knows it
    are followed from the first layer up."""
    back = chain.reversed()
    times = np.full(chain.n, NEVER, np.int64)
    times[key] = 0
    fresh, layers = np.array([key]), 0
    while layers < back.distinct or len(fresh):
        # a layer of its own may be the first to read what has been known for long
        marked = times >= 0 if layers < back.distinct else times == layers
        fresh = np.flatnonzero(back.graph(layers).read(marked) & (times < 0))
        layers += 1
        times[fresh] = layers
    return times


def _read(
    chain: Chain, layer: int, queries: np.ndarray, known: np.ndarray, marks: np.ndarray
) -> np.ndarray:
    """The positions that queries read or are and that were not known; they now are."""
    if len(queries) == 0:
        return queries
    low, high = chain.graph(layer).mark(queries, marks)
    marks[queries] = True
    # queries ascend; nothing outside of these ends is examined
    low, high = min(low, int(queries[0])), max(high, int(queries[-1]) + 1)
    part = marks[low:high]
    fresh = low + np.flatnonzero(part > known[low:high])
    part[:] = False
    known[fresh] = True
    return fresh


def _by_spans(spans: tuple[Spans, ...], query: int, n: int, most: int | None) -> np.ndarray:
    """What a query reads is a span all the way: its ends are followed, layer by layer."""
    every = {each: _ends(each, query) for each in set(spans)}
    ends = [every[each] for each in spans]
    step, distinct = spans[0].step, len(spans)
    residue, cell = query % step, query // step
    low, high = [cell], [cell]
    below, above = cell, cell
    layers = 0
    while layers != most:
        layers += 1
        top = min(layers, distinct) - 1
        if layers <= distinct:
            below, above = cell, cell
        first, last = ends[top]
        moved = first[below], last[above]
        if layers > distinct and moved == (below, above):
            break
        below, above = moved
        down, up = moved
        for first, last in reversed(ends[:top]):
            down, up = first[down], last[up]
        low.append(down)
        high.append(up)
        if down == 0 and up == len(first) - 1:
            break
    steps = np.full(n, NEVER, np.int64)
    reached = np.empty(high[-1] - low[-1] + 1, np.int64)
    levels = np.arange(len(low))
    reached[: cell - low[-1] + 1] = np.repeat(levels, -np.diff(low, prepend=cell + 1))[::-1]
    reached[cell - low[-1] :] = np.repeat(levels, np.diff(high, prepend=cell - 1))
    steps[residue::step][low[-1] : high[-1] + 1] = reached
    return steps


def _ends(spans: Spans, query: int) -> tuple[list[int], list[int]]:
    """The ends of the spans of the query's class, counted within the class."""
    part = slice(query % spans.step, None, spans.step)
    return (spans.first[part] // spans.step).tolist(), (spans.last[part] // spans.step).tolist()


@dataclass(frozen=True)
class Read:
    """One step of a walk: at `layer`, `query` reads `key`."""

    layer: int
    query: int
    key: int


def walk(chain: Chain, query: int, key: int) -> list[Read] | None:
    """The reads by which `query` comes to read `key` after the fewest layers, from the top down.

    Layers in which a position stays where it is are left out. None where there is no walk.
    """
    spans = spans_of(chain)
    if spans is not None and len(spans) == 1:
        return _greedy(spans[0], query, key)
    times = entered(chain, query)
    layers = int(times[0][key])
    if layers < 0:
        return None
    steps: list[Read] = []
    at, time, position = 0, layers, key
    while time:
        top = min(time, chain.distinct) - 1
        # layers above the distinct ones repeat the last, the highest first
        layer = at if at < top or layers <= chain.distinct else at + layers - time
        if at < top:
            before, at = np.flatnonzero(times[at + 1] == time), at + 1
        elif time <= chain.distinct:
            before, time = np.array([query]), 0
        else:
            before, time = np.flatnonzero(times[at] == time - 1), time - 1
        reader = _reader(chain, layer, before, position)
        if reader != position:
            steps.append(Read(layer, reader, position))
        position = reader
    return steps[::-1]


def _reader(chain: Chain, layer: int, queries: np.ndarray, key: int) -> int:
    """The first of the queries that is the key or reads it."""
    if (queries == key).any():
        return key
    # of any relation: a set has another order in each process
    reads = np.zeros(queries.shape, bool)
    for relation in chain.at(layer):
        reads |= np.asarray(relation.holds(queries, np.int64(key), chain.n))
    return int(queries[np.flatnonzero(reads)[0]])


def _greedy(spans: Spans, query: int, key: int) -> list[Read] | None:
    """As far as each span goes: their ends never move back, so that is the shortest."""
    if (query - key) % spans.step:
        return None
    ends = spans.first if key < query else spans.last
    places = [query]
    while places[-1] != key:
        far = int(ends[places[-1]])
        if far == places[-1]:
            return None
        places.append(max(key, far) if key < query else min(key, far))
    layers = range(len(places) - 2, -1, -1)
    return [Read(*each) for each in zip(layers, places, places[1:], strict=False)]
