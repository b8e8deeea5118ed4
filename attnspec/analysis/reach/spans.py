"""Layers in which every query reads one span of keys around itself: windows, blocks, dilations.

What is read through such layers is again one span, so a query's reach is two numbers, and following
it takes a step per hop however long the sequence is. With a step s, all of this holds inside each
residue class modulo s, and no class ever reads another.

Spans are used where their ends never move back from one query of a class to the next: then the
lowest key that a span of queries reads is the lowest key of its first query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from attnspec.analysis.reach.chain import Chain
from attnspec.graphs.relation import Relation, probes


@dataclass(frozen=True, eq=False)
class Spans:
    """For each query the first and the last key of its class that it reads, int64 [n] each."""

    step: int
    first: np.ndarray
    last: np.ndarray

    def through(self, inner: Spans) -> Spans:
        """What is read through this layer and then through those of `inner`."""
        return Spans(self.step, inner.first[self.first], inner.last[self.last])

    def same(self, other: Spans) -> bool:
        return np.array_equal(self.first, other.first) and np.array_equal(self.last, other.last)

    def missing(self, causal: bool) -> np.ndarray:
        """How many allowed keys each query does not read, int64 [n]."""
        n = len(self.first)
        q = np.arange(n)
        top = q if causal else np.full(n, n - 1)
        read = (np.minimum(self.last, top) - self.first) // self.step + 1
        return np.asarray(top + 1 - read)

    def unread(self, query: int, causal: bool) -> int | None:
        """The first allowed key that a query does not read."""
        first, last = int(self.first[query]), int(self.last[query])
        top = query if causal else len(self.first) - 1
        if first > 0:
            return 0
        if self.step > 1 and top > 0:
            return 1
        return last + 1 if last < top else None


def themselves(n: int, step: int) -> Spans:
    """Every query reads itself."""
    return Spans(step, np.arange(n), np.arange(n))


@lru_cache(maxsize=8)
def spans_of(chain: Chain) -> tuple[Spans, ...] | None:
    """The spans of all layers of a chain, None where some query reads anything else."""
    unions: list[Spans] = []
    for relations in chain.layers:
        spans = _layer(relations, chain.n)
        if spans is None or (unions and spans.step != unions[0].step):
            return None
        unions.append(spans)
    return tuple(unions)


@lru_cache(maxsize=16)
def _layer(relations: frozenset[Relation], n: int) -> Spans | None:
    # a few queries first: most graphs are refused by them
    sample = probes(n)
    if _together(relations, sample, n) is None:
        return None
    spans = _together(relations, np.arange(n), n)
    if spans is None:
        return None
    step = spans.step
    ordered = all((ends[step:] >= ends[:-step]).all() for ends in (spans.first, spans.last))
    return spans if ordered else None


def _together(relations: frozenset[Relation], queries: np.ndarray, n: int) -> Spans | None:
    """The spans of several relations, which all hold the query and so are one."""
    every: list[Spans] = []
    for relation in relations:
        spans = _spans(relation, queries, n)
        if spans is None or (every and spans.step != every[0].step):
            return None
        every.append(spans)
    first = np.minimum.reduce([spans.first for spans in every])
    last = np.maximum.reduce([spans.last for spans in every])
    return Spans(every[0].step, first, last)


def _spans(relation: Relation, queries: np.ndarray, n: int) -> Spans | None:
    """The span of each query, itself included; None where it has gaps or lies elsewhere."""
    part = relation.progressions(queries, n)
    if part is None:
        return None
    start, stop, step = np.broadcast_arrays(*part)
    if step.size == 0:
        return None
    width = int(step.min())
    if width != int(step.max()):
        return None
    count = np.maximum(0, -((start - stop) // width))
    some = count > 0
    if ((start - queries[:, None]) % width * some).any():
        return None
    last = np.where(some, start + (count - 1) * width, -1)
    low = np.minimum(queries, np.where(some, start, n).min(axis=1))
    high = np.maximum(queries, last.max(axis=1))
    # the keys are disjoint: they fill the span if they are as many as it holds, but for the query
    reads_itself = ((start <= queries[:, None]) & (queries[:, None] <= last)).any(axis=1)
    if (count.sum(axis=1) + ~reads_itself != (high - low) // width + 1).any():
        return None
    return Spans(width, low, high)


def layers_needed(chain: Chain, spans: tuple[Spans, ...]) -> int | None:
    """The fewest layers after which all allowed pairs are joined, None for never.

    The repeated last layer is followed by doubling, so that this takes O(n log n) steps beyond the
    distinct layers.
    """
    reach = themselves(chain.n, spans[0].step)
    for layers, each in enumerate((reach, *spans)):
        reach = each.through(reach)
        if not reach.missing(chain.causal).any():
            return layers
    doubled = [spans[-1]]
    while doubled[-1].through(reach).missing(chain.causal).any():
        longer = doubled[-1].through(doubled[-1])
        if longer.same(doubled[-1]):
            return None
        doubled.append(longer)
    # the most layers that still leave a pair, binary digit by binary digit, and one more
    for power in range(len(doubled) - 1, -1, -1):
        further = doubled[power].through(reach)
        if further.missing(chain.causal).any():
            reach, layers = further, layers + (1 << power)
    return layers + 1
