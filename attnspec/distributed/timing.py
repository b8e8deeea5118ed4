"""What a layer takes, on paper: work and bytes in the order in which ranks do them.

Pairs are counted, of each rank those that it computes; where bytes travel while pairs are computed,
the longer of the two is what it takes. No rank answers another's queries before they are there, so
that each step ends when the slowest rank is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from attnspec.distributed.exchange import Exchange
from attnspec.distributed.partitions import Partition


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


def at_home(pairs: np.ndarray) -> Pairs:
    """Pairs of which no part waits for what travels meanwhile."""
    none = np.zeros_like(pairs)
    return Pairs(pairs, none, none)


def together(parts: Sequence[Pairs]) -> Pairs:
    """The pairs of several groups of heads."""
    return reduce(
        lambda a, b: Pairs(a.home + b.home, a.answers + b.answers, a.guests + b.guests), parts
    )


def pairs_of(
    exchange: Exchange, graph: int, heads: int, degrees: np.ndarray, partition: Partition
) -> Pairs:
    """The pairs of one graph of an exchange. How many a rank's queries have is exact; those that
    are not known to lie in one block or another are spread evenly over all of which that holds,
    and where blocks of several terms hold the same pairs, each has its share."""
    found = exchange.pairs[graph]
    lengths = np.array(partition.lengths, np.float64)
    known = (found.full + found.full_elsewhere).sum(1)
    unknown = lengths**2 + (found.some + found.some_elsewhere).sum(1)
    every = partition.sums(degrees)
    once = np.minimum(1.0, every / np.maximum(1.0, known))[:, None]
    density = np.maximum(0.0, every - known) / np.maximum(1.0, unknown)
    answers = (once * found.full_elsewhere + density[:, None] * found.some_elsewhere).sum(0)
    guests = (once * found.full + density[:, None] * found.some).sum(1)
    return Pairs(heads * density * lengths**2, heads * answers, heads * guests)


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
