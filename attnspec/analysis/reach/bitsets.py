"""All pairs at once: what every query has read, one bit for each key, layer by layer.

A query's new keys are the bits of all positions that it reads, or-ed together. Where those are a
progression, two rows of a table suffice: the or over 2 ** j neighbours of a residue class, from
both ends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np

from attnspec.analysis.counting.conjunctions import Banded, Listed
from attnspec.analysis.counting.neighbours import Neighbours, Reading
from attnspec.analysis.counting.progressions import Group
from attnspec.analysis.reach.chain import Chain
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import InternalError

_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


Level: TypeAlias = "tuple[int, tuple[int, int] | None]"
"""How many allowed pairs are not joined after some layers, and the first of them."""


def levels(chain: Chain, most: int) -> list[Level]:
    """The state after 0, 1, … layers: up to `most`, until every allowed pair is joined or until no
    further layer can join one. A list that ends earlier ends in its last level for ever."""
    keys, queries = np.arange(chain.n), np.arange(chain.n)[:, None]
    read = packed(queries == keys)
    wanted = packed((keys <= queries) if chain.causal else (keys >= 0) | (queries >= 0))
    reached = [_level(wanted & ~read)]
    for layer in range(most):
        if not reached[-1][0]:
            break
        grown = through(chain.graph(layer), read)
        if layer >= chain.distinct - 1 and np.array_equal(grown, read):
            break
        read = grown
        reached.append(_level(wanted & ~read))
    return reached


def _level(missing: np.ndarray) -> Level:
    rows = np.flatnonzero(missing.any(axis=1))
    if len(rows) == 0:
        return 0, None
    bits = np.unpackbits(missing[rows[0]].view(np.uint8))
    count = int(_ONES[missing.view(np.uint8)].sum(dtype=np.int64))
    return count, (int(rows[0]), int(bits.argmax()))


def packed(pairs: np.ndarray) -> np.ndarray:
    """bool [m, n] as bits, uint64 [m, ceil(n / 64)], the first position in the highest bit of the
    first byte."""
    padding = -pairs.shape[1] % 64
    padded = np.pad(pairs, ((0, 0), (0, padding))) if padding else pairs
    return np.packbits(padded, axis=1).view(np.uint64)


def through(graph: Neighbours, read: np.ndarray) -> np.ndarray:
    """What each query has read after one more layer, uint64 [n, words]; itself is kept."""
    grown = read.copy()
    for reading in graph.readings:
        _read_through(reading, read, grown)
    return grown


def _read_through(reading: Reading, read: np.ndarray, grown: np.ndarray) -> None:
    band, columns = reading.plain, reading.columns
    rows = slice(None) if reading.rows is None else np.flatnonzero(reading.rows)
    if isinstance(band, Banded) and not band.relations:
        # a rectangle: its queries all read the same
        every = read if columns is None else read[columns]
        grown[rows] |= np.bitwise_or.reduce(every, axis=0)
        return
    union = grown if reading.rows is None else np.zeros_like(read)
    if isinstance(band, Banded):
        source = read if columns is None else np.where(columns[:, None], read, np.uint64(0))
        _ranges(band, source, union)
    else:
        _gathered(*_listed(reading), read, union)
    if reading.rows is not None:
        grown[rows] |= union[rows]


# --- progressions ---------------------------------------------------------------------------------


Lookups: TypeAlias = "tuple[np.ndarray, np.ndarray, np.ndarray]"
"""Rows, and two entries of a table for each: ranges of one step and one size class."""


@lru_cache(maxsize=32)
def _tables(band: Banded) -> list[tuple[Group, list[list[Lookups]]]]:
    """The progressions of each step; lookups j are those with 2 ** j to 2 ** (j + 1) - 1 keys."""
    made = []
    for group in band.groups(np.arange(band.n)):
        size = np.frexp(group.count.astype(np.float64))[1] - 1
        by_size = np.lexsort((group.row, size))
        lookups: list[list[Lookups]] = [[] for _ in range(int(size.max()) + 1)]
        for j in range(len(lookups)):
            members = by_size[slice(*np.searchsorted(size[by_size], (j, j + 1)))]
            while len(members):
                # a row may have several ranges: each goes to a lookup of its own
                fresh = np.diff(group.row[members], prepend=-1) > 0
                now = members[fresh]
                low = group.place[now]
                lookups[j].append((group.row[now], low, low + group.count[now] - (1 << j)))
                members = members[~fresh]
        made.append((group, lookups))
    return made


def _ranges(band: Banded, source: np.ndarray, grown: np.ndarray) -> None:
    for group, by_size in _tables(band):
        reach = group.ordered(source)
        for j, lookups in enumerate(by_size):
            if j:
                half = 1 << (j - 1)
                reach = reach[:-half] | reach[half:]
            for rows, low, high in lookups:
                grown[rows] |= reach[low] | reach[high]


# --- edges ----------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _listed(reading: Reading) -> tuple[np.ndarray, np.ndarray]:
    """The edges of a term as pointers and keys, for those that are not progressions."""
    band = reading.plain
    if isinstance(band, Listed):
        listed = band
    elif reading.pairs is None:
        raise InternalError("every pair is a progression")
    else:
        listed = Listed(reading.pairs, reading.n)
    if reading.columns is None:
        return listed.pointers, listed.keys
    kept = reading.columns[listed.keys]
    before = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(kept, out=before[1:])
    return before[listed.pointers], listed.keys[kept]


def _gathered(pointers: np.ndarray, keys: np.ndarray, read: np.ndarray, grown: np.ndarray) -> None:
    """Or into each row of `grown` the rows of `read` that its keys name."""
    first, rows = 0, len(read)
    while first < rows:
        # as many rows as have so many words to gather, but one at least
        most = int(pointers[first]) + max(1, LIMITS.words_gathered // read.shape[1])
        last = max(first + 1, int(np.searchsorted(pointers, most, side="right")) - 1)
        begin, end = pointers[first], pointers[last]
        with_keys = np.flatnonzero(np.diff(pointers[first : last + 1]))
        if len(with_keys):
            starts = pointers[first:last][with_keys] - begin
            gathered = np.bitwise_or.reduceat(read[keys[begin:end]], starts, axis=0)
            grown[first + with_keys] |= gathered
        first = last
