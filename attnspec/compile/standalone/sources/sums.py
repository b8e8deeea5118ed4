"""Attention as sums of features, linear in n: out_i = f_i . sum_j g_j v_j / f_i . sum_j g_j."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ADDED, LEAST, FLOOR = 1e-6, 0.0, 0.0


def divided(sums: Tensor, log: Tensor) -> Tensor:
    """Sums of values, the last of them of the weights, divided by that one: with ADDED to it, and
    LEAST or FLOOR as the least that it may be. Sums times exp(log) are what is meant."""
    total, unit = sums[..., -1:], torch.exp(-log)
    if ADDED:
        total = total + ADDED * unit
    if FLOOR:
        total = torch.maximum(total, FLOOR * unit)
    elif LEAST:
        away = torch.where(total < 0, -LEAST * unit, LEAST * unit)
        total = torch.where(total.abs() >= LEAST * unit, total, away)
    return sums[..., :-1] / torch.where(total == 0, 1.0, total)


def undivided(sums: Tensor, log: Tensor) -> Tensor:
    """The sums of values, which are divided by nothing."""
    return sums[..., :-1] * torch.exp(log)


def with_ones(v: Tensor) -> Tensor:
    """Values and a 1, whose sum is that of the weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def together(g: Tensor, log: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Features times exp(log) in one frame, those of padding 0, and the frame, [B, H, 1, 1]."""
    if real is not None:
        g, log = (each.masked_fill(~real[:, None, :, None], 0.0) for each in (g, log))
        log = log.masked_fill(~real[:, None, :, None], -torch.inf)
    top = log.detach().amax(2, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return g * torch.exp(log - top), top


def all_sums(f: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """f_i . sum_j g_j w_j over all j."""
    return f @ (g.mT @ w)


def causal_sums(f: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """f_i . sum_j g_j w_j over j <= i, the queries being the last positions; some at a time."""
    state, first = g.new_zeros(*g.shape[:2], g.shape[3], w.shape[3]), w.shape[2] - f.shape[2]
    found = []
    for low in range(0, w.shape[2], 128):
        some, more = g[:, :, low : low + 128], w[:, :, low : low + 128]
        rows = f[:, :, max(0, low - first) : max(0, low + 128 - first)]
        before = max(0, first - low)
        found.append(rows @ state + (rows @ some.mT).tril(before) @ more)
        state = state + some.mT @ more
    return torch.cat(found, 2)


def gated_sums(f: Tensor, g: Tensor, w: Tensor, gate: Tensor) -> Tensor:
    """f_i . S_i with S_i = a_i S_(i-1) + (1 - a_i) g_i w_i and a = sigmoid(gate) [B, H, n, 1]."""
    state, first = g.new_zeros(*g.shape[:2], g.shape[3], w.shape[3]), w.shape[2] - f.shape[2]
    found = []
    g, kept = g * torch.sigmoid(-gate), torch.nn.functional.logsigmoid(gate)
    for low in range(0, w.shape[2], 128):
        some, more = g[:, :, low : low + 128], w[:, :, low : low + 128]
        rows = f[:, :, max(0, low - first) : max(0, low + 128 - first)]
        # what is left of the state, and of each key, when a position is reached
        left = kept[:, :, low : low + 128].cumsum(2)
        mine = left[:, :, left.shape[2] - rows.shape[2] :]
        before = max(0, first - low)
        decay = torch.exp((mine - left.mT).tril(before)).tril(before)
        found.append(rows * torch.exp(mine) @ state + (rows @ some.mT * decay) @ more)
        end = left[:, :, -1:]
        state = state * torch.exp(end) + (some * torch.exp(end - left)).mT @ more
    return torch.cat(found, 2)


def unit(x: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays one."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length < torch.finfo(x.dtype).tiny ** 0.5, math.inf)


def exponentials(x: Tensor, log: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """exp(x + log), the largest of each row in its frame."""
    top = x.detach().amax(-1, keepdim=True)
    return torch.exp(x - top), top + log
