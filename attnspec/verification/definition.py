"""The definition for some queries of one head: all keys, masked as `holds` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnspec.formula import Blocks, scale_of
from attnspec.scattered_kernel import EdgeFormula
from attnspec.target import Call, Work

AREA = 1 << 22
"""Scores in one go."""

NAMES = ("output", "dq", "dk", "dv")
"""What every attention has; learned tables follow."""


@dataclass(frozen=True, eq=False)
class Results:
    """Outputs of the queries looked at [rows, d], and what a gradient there leaves: for all
    queries and keys [n, d], and for the learned tables [buckets]."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(zip(self.names, self.tensors, strict=True))


class Definition:
    """One head of a work at the positions `rows` [r], which read the keys `held`, bool [r, n]."""

    def __init__(self, work: Work, head: int, rows: np.ndarray, held: np.ndarray) -> None:
        self.work = work
        self.rows, self.held = torch.from_numpy(rows), torch.from_numpy(held)
        self.formula = EdgeFormula(work, (head,), torch.device("cpu"))

    def weights(
        self, q: torch.Tensor, k: torch.Tensor, tables: Mapping[str, torch.Tensor], part: slice
    ) -> torch.Tensor:
        """The weights [rows of the part, n] of q [n_q, d] and k [n, d]; tables [1, buckets]."""
        rows = self.rows[part]
        scores = (q[rows - (len(k) - len(q))] * scale_of(self.work, q.shape[1])) @ k.T
        distance = None
        if self.formula.needs_distance:
            distance = (rows[:, None] - torch.arange(len(k)))[None]
        blocks = Blocks(distance, self.held[part])
        found = self.formula.weights(scores[None, None, None, None], blocks, Call(tables=tables))
        return found[0, 0, 0, 0]

    def parts(self) -> Iterator[slice]:
        """Parts of the queries that are computed in one go."""
        step = max(1, AREA // max(1, self.held.shape[1]))
        for low in range(0, len(self.rows), step):
            yield slice(low, low + step)

    def results(
        self,
        given: Sequence[torch.Tensor],
        grad: torch.Tensor,
        tables: Mapping[str, torch.Tensor],
    ) -> Results:
        """Outputs and gradients of q [n_q, d], k and v [n, d], where the gradient of the outputs
        looked at is `grad` [r, d], and that of all others is 0."""
        q, k, v = leaves = [x.detach().requires_grad_() for x in given]
        learned = {name: x.detach().requires_grad_() for name, x in tables.items()}
        leaves = [*leaves, *learned.values()]
        sums = [torch.zeros_like(x) for x in leaves]
        outs = []
        for part in self.parts():
            out = self.weights(q, k, learned, part) @ v
            outs.append(out.detach())
            if out.requires_grad:
                found = torch.autograd.grad(out, leaves, grad[part], allow_unused=True)
                for total, share in zip(sums, found, strict=True):
                    if share is not None:
                        total += share
        return Results(
            (*NAMES, *(f"gradient of {name}" for name in learned)),
            (torch.cat(outs), *sums),
        )
