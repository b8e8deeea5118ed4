"""Every way of asking a relation for its pairs, compared with its definition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache

import numpy as np
import torch

from attnspec.graphs.relation import EMPTY, FULL, Relation, Tiles
from attnspec.graphs.token_sets import Data
from attnspec.layout.tile_layout import StepLayout

EXACT = frozenset(
    "full self causal window dilated residue strided block summary powers random random_blocks"
    " expander prefix".split()
)
"""The patterns whose cover says SOME only where it must, for tiles of consecutive positions."""


def definition(relation: Relation, n: int) -> np.ndarray:
    """The pairs by `holds` on arrays, bool [n, n]."""
    i = np.arange(n)
    held = np.asarray(relation.holds(i[:, None], i[None, :], n), dtype=bool)
    return np.broadcast_to(held, (n, n))


def times_held(layouts: Iterable[StepLayout], n: int) -> np.ndarray:
    """How many of the layouts hold each pair, int [n, n]."""
    held = np.zeros((n, n), int)
    for layout in layouts:
        np.add.at(held, layout.pairs(n), 1)
    return held


def faults(relation: Relation, n: int, sizes: tuple[int, ...] = (1, 3, 8, 64)) -> list[str]:
    """What an override says that the definition does not."""
    mask = definition(relation, n)
    found = [*_elementwise(relation, mask, n), *faults_of_rows(relation, mask, n)]
    found += _sides(relation, mask)
    for q_tiles, k_tiles in _tilings(n, sizes):
        found += _cover(relation, mask, q_tiles, k_tiles)
    turned = relation.transposed()
    if turned is not None and not np.array_equal(definition(turned, n), mask.T):
        found.append("transposed")
    return [f"{fault} of {relation} at n = {n}" for fault in found]


def faults_of_rows(relation: Relation, mask: np.ndarray, n: int) -> list[str]:
    """Ways in which rows are others than those of the pairs, bool [n, n]."""
    ways = _counts(relation, mask, n), _rows(relation, mask, n), _progressions(relation, mask, n)
    return [fault for way in ways for fault in way]


def _elementwise(relation: Relation, mask: np.ndarray, n: int) -> Iterator[str]:
    if n <= 12:
        pairs = [[bool(relation.holds(q, k, n)) for k in range(n)] for q in range(n)]
        if pairs != mask.tolist():
            yield "holds on integers"
    if n and takes_tensors(relation):
        i = torch.arange(n)
        held = relation.holds(i[:, None], i[None, :], n)
        if not isinstance(held, torch.Tensor) or held.dtype != torch.bool:
            yield "type of holds on tensors"
        elif not np.array_equal(held.expand(n, n).numpy(), mask):
            yield "holds on tensors"


def takes_tensors(part: object) -> bool:
    """Whether no part of a relation looks into numpy tables or numpy inputs."""
    if isinstance(part, Data) or (isinstance(part, Relation) and part.numpy_only):
        return False
    if isinstance(part, tuple):
        return all(map(takes_tensors, part))
    if is_dataclass(part):
        return all(takes_tensors(getattr(part, entry.name)) for entry in fields(part))
    return True


def _counts(relation: Relation, mask: np.ndarray, n: int) -> Iterator[str]:
    edges = relation.edges(n)
    if type(edges) is not int or edges != mask.sum():
        yield f"edges ({edges} instead of {mask.sum()})"
    degrees = relation.degrees(n)
    if degrees.shape != (n,) or not np.array_equal(degrees, mask.sum(axis=1)):
        yield "degrees"


def _sides(relation: Relation, mask: np.ndarray) -> Iterator[str]:
    if mask.size and "q" not in relation.sides and (mask != mask[:1]).any():
        yield "sides: the query decides"
    if mask.size and "k" not in relation.sides and (mask != mask[:, :1]).any():
        yield "sides: the key decides"
    if relation.symmetric and (mask != mask.T).any():
        yield "symmetric"
    # positions that are no cells of a grid have no pairs of it
    asked = mask.any(axis=1) if relation.needs_grid else np.ones(len(mask), bool)
    if relation.reads_itself and not mask.diagonal()[asked].all():
        yield "reads_itself"


def _rows(relation: Relation, mask: np.ndarray, n: int) -> Iterator[str]:
    for first, last in {(0, n), (n // 3, n // 2), (max(0, n - 1), n), (n // 2, n // 2)}:
        q, k = relation.rows(first, last, n)
        wanted_q, wanted_k = np.nonzero(mask[first:last])
        if not (np.array_equal(q, wanted_q + first) and np.array_equal(k, wanted_k)):
            yield f"rows {first} to {last}"


def _progressions(relation: Relation, mask: np.ndarray, n: int) -> Iterator[str]:
    q = np.arange(n)[::-2]
    closed = relation.progressions(q, n)
    if closed is None:
        return
    start, stop, step = np.broadcast_arrays(*closed)
    if start.ndim != 2 or len(start) != len(q):
        yield "shape of progressions"
        return
    # every key of every progression, one after another, as often as it is said
    counts = np.maximum(-((start - stop) // step), 0).ravel()
    at = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    keys = np.repeat(start.ravel(), counts) + at * np.repeat(step.ravel(), counts)
    rows = np.repeat(np.repeat(np.arange(len(q)), start.shape[1]), counts)
    inside = (keys >= 0) & (keys < n)
    times = np.zeros((len(q), n), np.int64)
    np.add.at(times, (rows[inside], keys[inside]), 1)
    wrong = (times != mask[q]).any(axis=1)
    wrong[rows[~inside]] = True
    yield from (f"progressions of query {query}" for query in q[wrong][:1])


def tiling(n: int, size: int, step: int) -> Tiles:
    """All positions in progressions of `step` with at most `size` members each."""
    starts, stops = [], []
    for residue in range(min(step, n)):
        for start in range(residue, n, size * step):
            starts.append(start)
            stops.append(min(start + size * step, n))
    return Tiles(np.array(starts, np.int64), np.array(stops, np.int64), step)


@cache
def _tilings(n: int, sizes: tuple[int, ...]) -> tuple[tuple[Tiles, Tiles], ...]:
    """Pairs of tilings, each once: at few positions many sizes are one tile."""
    if n == 0:
        return ()
    both = [((size, step), (size, step)) for size in sizes for step in (1, 3)]
    both += [((5, 1), (16, 1)), ((4, 6), (7, 4)), ((7, 1), (3, 5)), ((1, 1), (9, 2))]
    made: dict[str, tuple[Tiles, Tiles]] = {}
    for rows, columns in both:
        q, k = tiling(n, *rows), tiling(n, *columns)
        said = [(x.start.tolist(), x.stop.tolist(), x.step) for x in (q, k)]
        made.setdefault(str(said), (q, k))
    return tuple(made.values())


def _cover(relation: Relation, mask: np.ndarray, q: Tiles, k: Tiles) -> Iterator[str]:
    n = len(mask)
    rows, columns = len(q.start), len(k.start)
    q_tiles = Tiles(q.start[:, None], q.stop[:, None], q.step)
    k_tiles = Tiles(k.start[None, :], k.stop[None, :], k.step)
    said = relation.cover(q_tiles, k_tiles, n)
    where = f"cover of tiles {q.count.max()} x {q.step} by {k.count.max()} x {k.step}"
    if said.shape != (rows, columns) or said.dtype != np.uint8:
        yield f"type of {where}"
        return
    held = _sums(mask, q, k)
    full = held == q.count[:, None] * k.count[None, :]
    if (said[held > 0] == EMPTY).any() or (said[~full] == FULL).any():
        yield where
    elif relation.name in EXACT and q.step == k.step == 1:
        undecided = (said != FULL) & full | (said != EMPTY) & (held == 0)
        if undecided.any():
            yield f"exactness of {where}"


def _sums(mask: np.ndarray, q: Tiles, k: Tiles) -> np.ndarray:
    """The number of pairs in each pair of tiles."""
    n = len(mask)
    # products of matrices of reals are quick, and whole numbers of this size exact
    held: np.ndarray = _members(q, n) @ mask.astype(np.float32) @ _members(k, n).T
    return held


def _members(tiles: Tiles, n: int) -> np.ndarray:
    """Whether a tile has a position, float32 [tiles, n]."""
    i = np.arange(n)
    first, stop = tiles.start[:, None], tiles.stop[:, None]
    inside = (first <= i) & (i < stop) & ((i - first) % tiles.step == 0)
    return np.asarray(inside, np.float32)
