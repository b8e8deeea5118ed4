"""What a layer takes, on paper: work and bytes in the order in which ranks do them.

Pairs are counted, of each rank those that it computes; where bytes travel while pairs are computed,
the longer of the two is what it takes. No rank answers another's queries before they are there, so
that each step ends when the slowest rank is through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnspec.distributed.exchange import Exchange

SAMPLED = 4
"""Queries of a rank by which it is judged how many pairs are with its own keys."""


@dataclass(frozen=True)
class Rates:
    """What is assumed: `link`, bytes a second that reach a rank (5e10 is a network of 400 Gbit/s);
    `speed`, its operations a second."""

    link: float = 5e10
    speed: float = 2e14


Pairs = np.ndarray
"""The pairs of heads that each rank computes, float64 [3, ranks]: of its own queries and keys, of
queries that came, and of its own queries with keys that came."""


def balance_of(pairs: Pairs | None) -> float | None:
    """The most pairs of a rank by the mean; None where nobody counted them, or there are none."""
    if pairs is None or not pairs.any():
        return None
    total = pairs.sum(0)
    return float(total.max() / total.mean())


def pairs_of(exchange: Exchange, graph: int, heads: int) -> Pairs | None:
    """The pairs of one graph of an exchange, None where nobody counted its keys. How many a rank's
    queries have is exact; how many of them are with own keys is judged from a few queries."""
    degrees, partition = exchange.readings[graph].degrees, exchange.partition
    if degrees is None:
        return None
    away = np.zeros(exchange.keys.shape)
    lengths = np.array(partition.lengths, np.float64)
    for bar in np.unique(exchange.bars).tolist():
        sums = partition.sums(degrees * exchange.moves(graph, bar))
        away += sums[:, None] * (lengths / max(1, partition.n)) * (exchange.bars == bar)
    here = partition.sums(degrees) - away.sum(1)
    own = np.array([_own_share(exchange, graph, reader) for reader in range(len(here))])
    return heads * np.stack([here * own, away.sum(0), here * (1 - own)])


def _own_share(exchange: Exchange, graph: int, reader: int) -> float:
    """The part of the pairs of a rank's queries, those that stay, that is with its own keys."""
    partition, counted = exchange.partition, np.zeros(exchange.partition.ranks, np.int64)
    own = partition.positions(reader)
    stay = own[~exchange.moves(graph, int(exchange.bars[reader].min()))[own]]
    for query in (
        stay[(2 * np.arange(SAMPLED) + 1) * len(stay) // (2 * SAMPLED)] if len(stay) else ()
    ):
        keys = np.zeros(partition.n, bool)
        exchange.readings[graph].mark_keys(np.array([query]), keys)
        counted += partition.counts(keys)
    return float(counted[reader] / max(1, counted.sum()))


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer forward: of computing and of travelling each alone, and of both as they
    overlap; `computing` is 0 where nobody counted the pairs."""

    computing: float
    travelling: float
    together: float

    @property
    def hidden(self) -> float:
        """The share of the time of travelling in which ranks compute, 1 where nothing travels."""
        beside = self.computing + self.travelling - self.together
        return beside / self.travelling if self.travelling else 1.0


def estimate(
    there: np.ndarray, back: np.ndarray, pairs: Pairs | None, each: float, rates: Rates
) -> Estimate:
    """Bytes [from, to] that come first, and that go back; `each` are the operations of a pair."""
    came, returned = (links.sum(0) / rates.link for links in (there, back))
    none = np.zeros(len(there))
    home, answers, guests = np.stack([none] * 3) if pairs is None else pairs * each / rates.speed
    steps = (home, came), (answers, none), (guests, returned)
    return Estimate(
        sum(float(work.max(initial=0)) for work, _ in steps),
        sum(float(links.max(initial=0)) for _, links in steps),
        sum(float(np.maximum(work, links).max(initial=0)) for work, links in steps),
    )
