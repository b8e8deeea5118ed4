"""Sums of features over whole tiles of keys, other tiles for every tile of queries.

Sums over pairs of neighbouring tiles, pairs of these and so on are made once. Any set of tiles is
a few of them, a stretch at most two of each size, so that nothing is added to be taken away again.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from attnspec.backends.common.merging import in_one_frame
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.spans import Given
from attnspec.backends.factored.hybrid.merging import Weighed, features_of_queries, log_of


class TileSums:
    """What queries read of the tiles that `held`, bool [tiles of queries, tiles of keys], says."""

    def __init__(self, held: np.ndarray, tile: int, device: torch.device) -> None:
        self.tile, self.count = tile, held.shape[1]
        self.nodes = torch.from_numpy(_nodes(held)).to(device)

    def __call__(self, kernel: FeatureKernel, given: Given) -> Weighed:
        """The sums [B, K, R, n_q, e] of all queries."""
        states, logs = self._states(kernel, given)
        top, shares = in_one_frame(logs[:, :, self.nodes], 3)
        total = torch.zeros_like(states[:, :, :1])
        for slot, nodes in enumerate(self.nodes.unbind(1)):
            total = total + states.index_select(2, nodes) * shares[:, :, :, slot, None, None]
        rows = given.q.shape[3]
        found = features_of_queries(kernel, given.q.to(states.dtype), given)
        f = functional.pad(found.values, (0, 0, 0, -rows % self.tile))
        sums = torch.unflatten(f, 3, (-1, self.tile)) @ total[:, :, None]
        log = log_of(found) + top.repeat_interleave(self.tile, 2)[:, :, None, :rows]
        return Weighed(sums.flatten(3, 4)[:, :, :, :rows], log)

    def _states(self, kernel: FeatureKernel, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums [B, K, nodes, m, e] of all nodes, and their frames [B, K, nodes]; the last is
        empty."""
        kind = torch.promote_types(given.k.dtype, torch.float32)
        found = kernel.how.map.keys(given.k.to(kind), given.tables)
        log, values = log_of(found), functional.pad(given.v.to(kind), (0, 1), value=1.0)
        if given.padding is not None:
            log = log.masked_fill(~given.padding[:, None, :, None], -torch.inf)
        rest = -log.shape[2] % self.tile
        log = functional.pad(log, (0, 0, 0, rest), value=-torch.inf)
        g, w, log = (
            torch.unflatten(x, 2, (self.count, self.tile))
            for x in (
                functional.pad(found.values, (0, 0, 0, rest)),
                functional.pad(values, (0, 0, 0, rest)),
                log,
            )
        )
        top, shares = in_one_frame(log, 3)
        states, logs = [(g * shares).mT @ w], [top[..., 0, 0]]
        while states[-1].shape[2] > 1:
            # a tile too few is an empty one
            odd = states[-1].shape[2] % 2
            parts = functional.pad(states[-1], (0, 0, 0, 0, 0, odd))
            frames = functional.pad(logs[-1], (0, odd), value=-torch.inf)
            top, shares = in_one_frame(torch.unflatten(frames, 2, (-1, 2)), -1)
            parts = torch.unflatten(parts, 2, (-1, 2)) * shares[..., None, None]
            states.append(parts.sum(3))
            logs.append(top[..., 0])
        states.append(torch.zeros_like(states[-1][:, :, :1]))
        logs.append(torch.full_like(logs[-1][:, :, :1], -torch.inf))
        return torch.cat(states, 2), torch.cat(logs, 2)


def _nodes(held: np.ndarray) -> np.ndarray:
    """The largest nodes that make up each row of `held`, int64 [rows, most], and that which is
    empty in place of those that are not needed."""
    levels = [held]
    while levels[-1].shape[1] > 1:
        last = np.pad(levels[-1], ((0, 0), (0, levels[-1].shape[1] % 2)))
        levels.append(last[:, 0::2] & last[:, 1::2])
    used = [low & ~np.repeat(high, 2, axis=1)[:, : low.shape[1]] for low, high in pairwise(levels)]
    chosen = np.concatenate([*used, levels[-1]], axis=1)
    row, node = np.nonzero(chosen)
    counts = np.bincount(row, minlength=len(held))
    found = np.full((len(held), max(1, int(counts.max(initial=0)))), chosen.shape[1])
    found[row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)] = node
    return found
