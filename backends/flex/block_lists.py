"""A step in blocks of 128 x 128 places, one for each of its tiles: lists of those that are visited,
and the runs of keys in them, in time and memory of its list of tiles alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.flex.steps import BLOCK
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout

FEWEST = 2
"""Blocks on each side: of a length of 1 the compiler makes a special case, which is one more to
compile."""

RUNS = 2
"""Runs of keys of a query that are compared with its place, in place of a mask that is read."""

PARTS = 8
"""Blocks of a query block, FULL neighbours as one, in which runs are looked for at most."""


def visited(some: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
    """The lists of FlexAttention for blocks that have a pair, and those whose pairs all are, bool
    [samples, q blocks, k blocks]: of each side how many of the other side each has, and which,
    ascending, contiguous, as its kernels read them whatever their strides are."""
    lists = []
    for blocks in (some & ~whole, some & whole):
        for each in (blocks[:, None], blocks.mT[:, None]):
            order = torch.argsort(~each, dim=-1, stable=True).to(torch.int32)
            lists.append((each.sum(-1, dtype=torch.int32).contiguous(), order.contiguous()))
    return tuple(x for at in (0, 2, 1, 3) for x in lists[at])


def runs_of(layout: StepLayout) -> np.ndarray | None:
    """The runs of key places of each query place: the first and the end of one or two, int32
    [2 * runs, q blocks * 128]; None where a query has more."""
    rows, columns, kinds = layout.rows, layout.keys, layout.kinds
    # FULL blocks that follow one another are one wide block
    full = (kinds == FULL_TILE) & (layout.k.size == BLOCK)
    follows = full[1:] & full[:-1] & (np.diff(rows) == 0) & (np.diff(columns) == 1)
    at = np.flatnonzero(np.concatenate([np.ones(min(1, len(rows)), bool), ~follows]))
    wider = BLOCK * (np.diff(at, append=len(rows)) - 1)
    rows, columns, kinds = rows[at], columns[at], kinds[at]
    masks = np.concatenate([layout.masks, np.ones((1, *layout.masks.shape[1:]), bool)])
    edges = np.diff(masks.astype(np.int8), axis=2, prepend=0, append=0)
    if np.bincount(rows).max(initial=0) > PARTS or (edges > 0).sum(2).max() > RUNS:
        return None
    # of two runs the first and the last are all, and of one they are the same
    sides = (edges > 0), (edges < 0)
    ends = [np.stack([x.argmax(2), masks.shape[2] - x[..., ::-1].argmax(2)], 2) for x in sides]
    some = np.asarray(masks.any(2))[kinds]
    # places of the keys of each query, those of all queries one behind the other
    wide = BLOCK * layout.k.count + 1
    lines = wide * (BLOCK * rows[:, None] + np.arange(layout.q.size))
    first, last = ((lines + BLOCK * columns[:, None])[..., None] + x[kinds] for x in ends)
    first, last = first[some], (last + wider[:, None, None])[some]
    # blocks whose runs touch share them
    first, last = np.setdiff1d(first, last), np.setdiff1d(last, first)
    query = first // wide
    number = np.arange(len(query)) - np.searchsorted(query, query)
    count = int(number.max(initial=0)) + 1
    if count > RUNS:
        return None
    runs = np.zeros((count, 2, BLOCK * max(FEWEST, layout.q.count)), np.int32)
    runs[number, 0, query], runs[number, 1, query] = first % wide, last % wide
    return runs.reshape(2 * count, -1)
