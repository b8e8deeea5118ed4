"""What a layer takes, on paper: work and bytes in the order in which ranks do them.

Pairs are counted, of each rank those that it computes; where bytes travel while pairs are computed,
the longer of the two is what it takes. No rank answers another's queries before they are there, so
that each step ends when the slowest rank is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from attnspec.distributed.exchange import Exchange


@dataclass(frozen=True)
class Rates:
    """What is assumed: `link`, bytes a second that reach a rank (5e10 is a network of 400 Gbit/s);
    `speed`, its operations a second."""

    link: float = 5e10
    speed: float = 2e14


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of all heads that each rank computes, float64 [ranks]: of its own queries and keys,
    of queries that came, and of its own queries with keys that came."""

    home: np.ndarray
    answers: np.ndarray
    guests: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return np.asarray(self.home + self.answers + self.guests)

    @property
    def balance(self) -> float | None:
        """The most pairs of a rank by the mean."""
        total = self.total
        return float(total.max() / total.mean()) if total.sum() else None


def together(parts: Sequence[Pairs | None]) -> Pairs | None:
    """The pairs of several groups of heads; None where those of one were not counted."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return Pairs(*(sum(getattr(part, entry.name) for part in known) for entry in fields(Pairs)))


def pairs_of(exchange: Exchange, graph: int, heads: int) -> Pairs | None:
    """The pairs of one graph of an exchange, None where nobody counted its keys. How many a rank's
    queries have is exact; these are spread evenly over the keys that they read."""
    degrees, partition = exchange.readings[graph].degrees, exchange.partition
    if degrees is None:
        return None
    away = np.zeros(exchange.keys.shape)
    lengths = np.array(partition.lengths, np.float64)
    for bar in np.unique(exchange.bars).tolist():
        sums = partition.sums(degrees * exchange.moves(graph, bar))
        away += sums[:, None] * (lengths / max(1, partition.n)) * (exchange.bars == bar)
    here = partition.sums(degrees) - away.sum(1)
    own = exchange.keys.diagonal() / np.maximum(1, exchange.keys.sum(1))
    return Pairs(heads * here * own, heads * away.sum(0), heads * here * (1 - own))


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
    zero = np.zeros(len(there))
    now = Pairs(zero, zero, zero) if pairs is None else pairs
    home, answers, guests = (x * each / rates.speed for x in (now.home, now.answers, now.guests))
    steps = (home, came), (answers, zero), (guests, returned)
    return Estimate(
        sum(float(work.max(initial=0)) for work, _ in steps),
        sum(float(links.max(initial=0)) for _, links in steps),
        sum(float(np.maximum(work, links).max(initial=0)) for work, links in steps),
    )
