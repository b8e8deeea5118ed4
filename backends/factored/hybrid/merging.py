"""Exact weights and those of a kernel in one sum: `GRAPH + MECHANISM` on some rows and columns.

Every pair is weighed once, by its score or by the kernel, and sums over other pairs are joined to
these. Nothing is taken away again: what is left of sums that cancel is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from attnspec.backends.common.merging import in_one_frame
from attnspec.backends.common.score_formula import Blocks, Formula, scale_of
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import Features
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.spans import Given
from attnspec.backends.factored.features.sums import State
from attnspec.lower.work import Call, Work


@dataclass(frozen=True)
class Rows:
    """Queries [B, K, R, …, n, d], what products with keys are made of, and the frames of that
    [.., 1]."""

    q: torch.Tensor
    factors: torch.Tensor
    log: torch.Tensor

    def mapped(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """The same with something made of every tensor."""
        return Rows(of(self.q), of(self.factors), of(self.log))


@dataclass(frozen=True)
class Columns:
    """The same of keys [B, K, …, n, …], and values with a 1 behind each."""

    k: torch.Tensor
    factors: torch.Tensor
    log: torch.Tensor
    values: torch.Tensor

    def mapped(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Columns:
        """The same with something made of every tensor."""
        return Columns(of(self.k), of(self.factors), of(self.log), of(self.values))


@dataclass(frozen=True)
class Weighed:
    """Sums of values by their weights [..., n, e], that of the weights last, which stand for
    exp(log) times as much, log [..., n, 1]."""

    sums: torch.Tensor
    log: torch.Tensor

    def mapped(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Weighed:
        """The same with something made of both."""
        return Weighed(of(self.sums), of(self.log))


def shared_quotient(kernel: FeatureKernel) -> Quotient:
    """What sums of exact weights and of a kernel's are divided by.

    Nothing is added to sums of weights that are not negative, nor are they kept away from 0: exact
    weights may be as small as they like, and sum to less than any constant.
    """
    mine = kernel.how.quotient
    return Quotient(least=mine.least if mine.signed else 0.0, floor=mine.floor, signed=mine.signed)


def rows_of_kernel(kernel: FeatureKernel, given: Given) -> Rows:
    """What the kernel says of all queries."""
    q = given.q.to(torch.promote_types(given.q.dtype, torch.float32))
    if kernel.how.paired is not None:
        return Rows(q, q, torch.zeros_like(q[..., :1]))
    found = features_of_queries(kernel, q, given)
    return Rows(q, found.values, log_of(found))


def columns_of_kernel(kernel: FeatureKernel, given: Given) -> Columns:
    """What it says of all keys."""
    kind = torch.promote_types(given.k.dtype, torch.float32)
    k, values = given.k.to(kind), functional.pad(given.v.to(kind), (0, 1), value=1.0)
    if kernel.how.paired is not None:
        return Columns(k, k, torch.zeros_like(k[..., :1]), values)
    found = kernel.how.map.keys(k, given.tables)
    return Columns(k, found.values, log_of(found), values)


def features_of_queries(kernel: FeatureKernel, q: torch.Tensor, given: Given) -> Features:
    """The features of queries [B, K, R, n, d]: R heads share the map of a key head."""
    found = kernel.how.map.queries(q.flatten(2, 3), given.tables)
    log = None if found.log is None else found.log.view(q.shape[:-1])
    return Features(found.values.view(*q.shape[:-1], -1), log)


def log_of(found: Features) -> torch.Tensor:
    """The frames of features [..., 1], constants."""
    if found.log is None:
        return torch.zeros_like(found.values[..., :1].detach())
    return found.log.detach()[..., None]


def exact_part(
    work: Work, formula: Formula, rows: Rows, columns: Columns, blocks: Blocks, call: Call
) -> Weighed:
    """What the pairs of the graph weigh: rows [B, K, R, G, h, …] and columns [B, K, G, w, …]."""
    scores = (rows.q * scale_of(work, rows.q.shape[-1])) @ columns.k[:, :, None].mT
    scores = formula.changed(scores, blocks.distance, call)
    if blocks.mask is not None:
        scores = scores.masked_fill(~blocks.mask, -torch.inf)
    log, weights = in_one_frame(scores, -1)
    return Weighed(weights @ columns.values[:, :, None], log)


def kernel_part(
    kernel: FeatureKernel, rows: Rows, columns: Columns, mask: torch.Tensor | None
) -> Weighed:
    """What the kernel gives pairs of the same rows and columns."""
    f, g = rows.factors, columns.factors[:, :, None]
    paired = kernel.how.paired
    products = f @ g.mT if paired is None else paired.pairs(f, g)
    frame = rows.log + columns.log[:, :, None].mT
    if mask is not None:
        frame = frame.masked_fill(~mask, -torch.inf)
    log, shares = in_one_frame(frame, -1)
    return Weighed((products * shares) @ columns.values[:, :, None], log)


def part_of_sums(kernel: FeatureKernel, given: Given, state: State) -> Weighed:
    """What keys weigh together whose sums are given."""
    batch, heads = given.q.shape[:2]
    total = state.total.view(batch, heads, 1, *state.total.shape[1:])
    found = features_of_queries(kernel, given.q.to(total.dtype), given)
    log = log_of(found)
    if state.base is not None:
        log = log + state.base.to(log.dtype).view(batch, heads, 1, 1, 1)
    return Weighed(found.values @ total, log)


def joined(
    quotient: Quotient, parts: Sequence[Weighed]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What parts with disjoint pairs are worth together [..., n, d_v], and the logarithms [..., n]
    of what they are divided by; None where that may be negative."""
    # sums of nothing are 0 in every frame, and must not decide in which one the others are added
    logs = [
        part.log.masked_fill((part.sums == 0).all(-1, keepdim=True), -torch.inf) for part in parts
    ]
    top, shares = in_one_frame(torch.stack(logs), 0)
    terms = [part.sums * share for part, share in zip(parts, shares, strict=True)]
    # the frame of nothing is 0
    sums, log = torch.stack(terms).sum(0), torch.where(top > -torch.inf, top, 0.0)[0, ..., 0]
    divided = quotient.log_divisor(sums[..., -1], log) if quotient.positive else None
    return quotient.of(sums, log), divided
