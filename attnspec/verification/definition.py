"""The definition for some queries of one head: all keys, masked as `holds` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attnspec.backends.common.score_formula import Formula, Shares, scale_of, shares
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

NAMES = ("output", "dq", "dk", "dv")
"""What every attention has; learned tables follow."""


@dataclass(frozen=True, eq=False)
class Results:
    """Outputs of the queries looked at [rows, d], and what a gradient there leaves: for all
    queries and keys [n, d], and for the learned tables [buckets].

    `largest` is the largest number that stands in outputs and gradients, or would without the part
    of the gradients that goes through the sums of weights: the two parts may cancel, and leave the
    roundings of numbers of that size."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    largest: float = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(zip(self.names, self.tensors, strict=True))


def gradients(
    out: torch.Tensor, upstream: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What the gradient `upstream` of an output leaves; zeros for what it does not depend on.

    Of a sum, because torch loads sympy to compare the shapes of an output and its gradient.
    """
    total = (out * upstream).sum()
    return torch.autograd.grad(
        total, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
    )


class Definition:
    """Heads of one work [h] at the positions `rows` [r], which read the keys `held` [r, n]."""

    def __init__(
        self, work: Work, heads: tuple[int, ...], rows: np.ndarray, held: np.ndarray
    ) -> None:
        self.work, self.heads = work, list(heads)
        self.rows, self.held = torch.from_numpy(rows), torch.from_numpy(held)
        self.formula = Formula(work, heads, torch.device("cpu"))

    def at(self, places: np.ndarray) -> Definition:
        """The same at some of its rows."""
        heads, rows = tuple(self.heads), self.rows.numpy()
        return Definition(self.work, heads, rows[places], self.held.numpy()[places])

    def weights(
        self, q: torch.Tensor, k: torch.Tensor, tables: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The weights [h, r, n] of q [h, n_q, d] and k [h, n, d]; tables [h, buckets]."""
        found = [self._shares(q, k, tables, part).weights for part in self._parts()]
        return torch.cat(found, 1)

    def _shares(
        self, q: torch.Tensor, k: torch.Tensor, tables: Mapping[str, torch.Tensor], part: slice
    ) -> Shares:
        """The same of a part of the rows, as numerators and what divides them."""
        rows, n = self.rows[part], k.shape[1]
        scores = (q[:, rows - (n - q.shape[1])] * scale_of(self.work, q.shape[2])) @ k.mT
        distance = None
        if self.formula.needs_distance:
            distance = (rows[:, None] - torch.arange(n))[None]
        scores = self.formula.changed(scores[None, :, None, None], distance, Call(tables=tables))
        return shares(scores[0, :, 0, 0], self.held[part], self.work.normalize)

    def _parts(self) -> Iterator[slice]:
        """Parts of the rows that are computed in one go."""
        step = max(1, LIMITS.pairs_at_once // max(1, len(self.heads) * self.held.shape[1]))
        for low in range(0, len(self.rows), step):
            yield slice(low, low + step)

    def results(
        self,
        given: Sequence[torch.Tensor],
        grad: torch.Tensor,
        tables: Mapping[str, torch.Tensor],
        *,
        sized: bool,
    ) -> list[Results]:
        """Outputs and gradients of each head, for q [h, n_q, d], k and v [h, n, d], where the
        gradient of the outputs looked at is `grad` [h, r, d], and that of all others is 0; with the
        largest number if `sized`."""
        q, k, v = leaves = [x.detach().requires_grad_() for x in given]
        learned = {name: x.detach().requires_grad_() for name, x in tables.items()}
        leaves = [*leaves, *learned.values()]
        sums, steady = ([torch.zeros_like(x) for x in leaves] for _ in range(2))
        outs = []
        for part in self._parts():
            found = self._shares(q, k, learned, part)
            out = found.weights @ v
            outs.append(out.detach())
            if not out.requires_grad:
                continue
            ways = [(out, sums)]
            if sized and found.total is not None:
                fixed = replace(found, total=found.total.detach()).weights
                ways.append((fixed @ v, steady))
            for from_out, into in ways:
                grads = gradients(from_out, grad[:, part], leaves)
                for result, share in zip(into, grads, strict=True):
                    result += share
        tensors = torch.cat(outs, 1), *sums
        names = *NAMES, *(f"gradient of {name}" for name in learned)
        sizes = [x.abs().flatten(1).amax(1) for x in (*tensors[:4], *steady[:3]) if x[0].numel()]
        largest = torch.stack(sizes).amax(0).tolist() if sizes else [0.0] * len(self.heads)
        return [
            Results(names, tuple(x[place] for x in tensors), size)
            for place, size in enumerate(largest)
        ]
