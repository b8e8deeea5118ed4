"""Exact weights and those of a kernel in one sum: `GRAPH + MECHANISM` on some rows and columns.

All of a row is computed in one frame, the larger of that of its sums and of its highest score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from attnspec.factored.blocks import Given, Sums
from attnspec.factored.feature_kernel import FeatureKernel
from attnspec.factored.quotients import Quotient
from attnspec.factored.summing import State, summed
from attnspec.formula import Blocks, Formula, scale_of
from attnspec.target import Call, Work


@dataclass(frozen=True)
class Rows:
    """What the kernel says of queries [B, K, R, …, n, …]: features, their frames [.., 1], the sums
    over all keys with that of the weights last, and the frames of these."""

    q: torch.Tensor
    features: torch.Tensor
    log: torch.Tensor
    sums: torch.Tensor
    logs: torch.Tensor

    def mapped(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """The same with something made of every tensor."""
        return Rows(*(of(x) for x in (self.q, self.features, self.log, self.sums, self.logs)))


@dataclass(frozen=True)
class Columns:
    """The same of keys [B, K, …, n, …], and values with a 1 behind each."""

    k: torch.Tensor
    features: torch.Tensor
    log: torch.Tensor
    values: torch.Tensor

    def mapped(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Columns:
        """The same with something made of every tensor."""
        return Columns(*(of(x) for x in (self.k, self.features, self.log, self.values)))


def shared_quotient(kernel: FeatureKernel) -> Quotient:
    """What sums of exact weights and of a kernel's are divided by.

    Nothing is added to sums of weights that are not negative, nor are they kept away from 0: exact
    weights may be as small as they like, and sum to less than any constant.
    """
    mine = kernel.how.quotient
    return Quotient(least=mine.least if mine.signed else 0.0, floor=mine.floor, signed=mine.signed)


def rows_of_kernel(
    kernel: FeatureKernel, given: Given, state: State, most: int | None = None
) -> tuple[Rows, State]:
    """What the kernel says of all queries, on top of the sums in `state`, and the state after; in
    blocks of `most` positions, None for as many as fit a block."""
    sums = Sums(kernel.how, given, most)
    parts, logs = [], []
    for found in summed(sums, state):
        parts.append(sums.unchunked(found.sums, found.span))
        log = found.logs
        if log is None:
            log = found.sums.new_zeros(found.sums.shape[:-1])
        logs.append(sums.unchunked(log[..., None], found.span))
        state = found.after
    total, frames = torch.cat(parts, 3), torch.cat(logs, 3)
    q = given.q.to(total.dtype)
    queries = kernel.how.map.queries(q.flatten(2, 3), given.tables)
    features = queries.values.view(*q.shape[:4], -1)
    log = torch.zeros_like(frames) if queries.log is None else queries.log.view(frames.shape)
    return Rows(q, features, log.detach(), total, frames.detach()), state


def columns_of_kernel(kernel: FeatureKernel, given: Given) -> Columns:
    """What it says of all keys."""
    kind = torch.promote_types(given.k.dtype, torch.float32)
    k, v = given.k.to(kind), given.v.to(kind)
    found = kernel.how.map.keys(k, given.tables)
    log = k.new_zeros(k.shape[:-1]) if found.log is None else found.log.detach()
    return Columns(k, found.values, log[..., None], functional.pad(v, (0, 1), value=1.0))


def merged(
    work: Work,
    formula: Formula,
    quotient: Quotient,
    rows: Rows,
    columns: Columns,
    blocks: Blocks,
    call: Call,
) -> torch.Tensor:
    """The outputs of rows [B, K, R, G, h, …] whose pairs of the graph are among the columns
    [B, K, G, w, …]."""
    scores = (rows.q * scale_of(work, rows.q.shape[-1])) @ columns.k[:, :, None].mT
    scores = formula.changed(scores, blocks.distance, call)
    mask = blocks.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    top = torch.maximum(scores.detach().amax(-1, keepdim=True), rows.logs)
    # what the kernel gave the pairs, whose frames are below that of their row
    frame = rows.log + columns.log[:, :, None].mT - top
    if mask is not None:
        frame = frame.masked_fill(~mask, -torch.inf)
    given = rows.features @ columns.features[:, :, None].mT * torch.exp(frame)
    weights = torch.exp(scores - top) - given
    sums = weights @ columns.values[:, :, None] + rows.sums * torch.exp(rows.logs - top)
    return quotient.of(sums, top[..., 0])
