"""How many allowed pairs are not joined yet after 0, 1, 2, … layers, and the first of them.

All figures about all pairs follow from this one list: the depth is its length, the mean shortest
path its sum over the pairs, the fraction reached one less its entries. Four ways lead to it: bits
of all pairs, ends of spans, the queries of one period, and, where none of these can, a sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

import numpy as np

from attnspec.analysis.reach import bitsets
from attnspec.analysis.reach.chain import Chain
from attnspec.analysis.reach.spans import Spans, spans_of, themselves
from attnspec.analysis.reach.walks import hops
from attnspec.graphs.forms.prelude import predicate_of
from attnspec.graphs.operators import Complement, Intersection, Transpose, Union
from attnspec.graphs.predicates.periods import comparisons, period_of
from attnspec.graphs.relation import Relation, probes
from attnspec.ir.scalars import fold, symbols
from attnspec.limits import LIMITS


def period(chain: Chain) -> int | None:
    """The least known p for which moving a pair by p positions changes nothing, or None."""
    every = (_period(relation, chain.n) for layer in chain.layers for relation in layer)
    return _common(every) if chain.causal else None


def _common(periods: Iterable[int | None]) -> int | None:
    every = list(periods)
    known = [each for each in every if each]
    return lcm(*known) if len(known) == len(every) else None


def _period(relation: Relation, n: int) -> int | None:
    if isinstance(relation, Complement | Transpose):
        return _period(relation.term, n)
    if isinstance(relation, Union | Intersection):
        return _common(_period(term, n) for term in relation.terms)
    predicate = predicate_of(relation)
    if predicate is None:
        return relation.moves_by
    predicate = fold(predicate, {"n": n})
    # a grid has rows and columns, and so no such period
    flat = set(symbols(predicate)) <= {"q", "k"}
    return _common(period_of(each).both for each in comparisons(predicate)) if flat else None


SAMPLED = 8
"""Queries that stand for all where nothing exact is known."""


@dataclass(frozen=True)
class Spread:
    """The allowed pairs not joined after 0, 1, … layers; the last entry stays for ever, or until
    the last layer that was asked for.

    `first` are the smallest such pairs, None where there is none. `pairs` is the number of allowed
    pairs and `own` that of pairs (q, q) among them. With `sampled` queries, all of these are about
    their pairs only.
    """

    pairs: int
    own: int
    missing: tuple[int, ...]
    first: tuple[tuple[int, int] | None, ...]
    sampled: int = 0

    @property
    def layers(self) -> int | None:
        """After how many layers every pair is joined; None where one never is."""
        return len(self.missing) - 1 if self.missing[-1] == 0 else None

    def after(self, layers: int) -> tuple[int, tuple[int, int] | None]:
        """The pairs not joined after some layers: their number and the first."""
        at = min(layers, len(self.missing) - 1)
        return self.missing[at], self.first[at]


def spread(chain: Chain, most: int | None = None) -> Spread:
    """The spread over up to `most` layers; raises TooMuch where a graph is too large to search.

    Exact up to n = `LIMITS.every_pair`, and beyond for causal graphs that repeat themselves.
    """
    n = chain.n
    if n == 0:
        return Spread(0, 0, (0,), (None,))
    repeats = period(chain)
    if repeats is not None and repeats <= n:
        few = repeats <= LIMITS.few_queries
        if few or (n > LIMITS.every_pair and repeats * n <= LIMITS.soon):
            # each query of the last period stands for those whole periods before it
            return _by_queries(chain, [(q, repeats) for q in range(n - repeats, n)], most)
    if n <= LIMITS.every_pair:
        most = n * chain.distinct + 1 if most is None else most
        spans = spans_of(chain)
        if spans is not None:
            return _by_spans(chain, spans, most)
        missing, first = zip(*bitsets.levels(chain, most), strict=True)
        return Spread(chain.pairs, chain.n, missing, first)
    queries = probes(n, SAMPLED).tolist()
    return _by_queries(chain, [(q, n) for q in queries], most, sampled=len(queries))


def _by_spans(chain: Chain, spans: tuple[Spans, ...], most: int) -> Spread:
    reach = themselves(chain.n, spans[0].step)
    missing: list[int] = []
    first: list[tuple[int, int] | None] = []
    for layers in range(most + 1):
        absent = reach.missing(chain.causal)
        missing.append(int(absent.sum()))
        first.append(_first_of(reach, absent, chain.causal))
        if not missing[-1]:
            break
        grown = spans[min(layers, len(spans) - 1)].through(reach)
        if layers >= len(spans) - 1 and grown.same(reach):
            break
        reach = grown
    return Spread(chain.pairs, chain.n, tuple(missing), tuple(first))


def _first_of(reach: Spans, absent: np.ndarray, causal: bool) -> tuple[int, int] | None:
    query = int((absent > 0).argmax())
    key = reach.unread(query, causal) if absent[query] else None
    return None if key is None else (query, key)


def _by_queries(
    chain: Chain, queries: Iterable[tuple[int, int]], most: int | None, sampled: int = 0
) -> Spread:
    """The spread of some queries, each with the period by which its pairs may be moved back; with n
    it stands for itself."""
    n = chain.n
    pairs = itself = never = 0
    counts = np.zeros(1, np.int64)
    least = np.full(1, n * n)
    never_first = n * n
    for query, repeats in queries:
        key = np.arange(chain.allowed(query))
        layers = hops(chain, query, most)[: len(key)]
        moves = key // repeats
        weight = moves + 1
        code = (query - moves * repeats) * n + key - moves * repeats
        joined = layers >= 0
        size = max(len(counts), int(layers.max()) + 1)
        counts = np.pad(counts, (0, size - len(counts)))
        least = np.pad(least, (0, size - len(least)), constant_values=n * n)
        # as floats these are exact, below 2 ** 53
        counts += np.bincount(layers[joined], weight[joined], size).astype(np.int64)
        np.minimum.at(least, layers[joined], code[joined])
        never += int(weight[~joined].sum())
        never_first = min(never_first, int(code[~joined].min(initial=n * n)))
        pairs += int(weight.sum())
        itself += int(weight[query])
    # after L layers those are missing that take more than L
    later = np.append(np.cumsum(counts[::-1])[::-1][1:], 0) + never
    first = np.append(np.minimum.accumulate(least[::-1])[::-1][1:], n * n)
    codes = np.minimum(first, never_first)
    return Spread(
        pairs,
        itself,
        tuple(later.tolist()),
        tuple(divmod(code, n) if code < n * n else None for code in codes.tolist()),
        sampled,
    )
