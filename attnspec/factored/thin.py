"""Softmax attention with few keys or few queries, where nothing is differentiated.

Head by head its scores are long thin products. Those with few keys are computed some queries at a
time; those with few queries are kept for one head at a time, which is less than its keys.
"""

from __future__ import annotations

import torch

from attnspec.factored.products import against, outer, unseen

FEW = 256
"""Keys or queries that are few."""

MANY = 1024
"""How many there are of the other side at least."""

ROWS = 4096
"""Queries whose weights are computed at once."""


def is_thin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attend_thin` is for it."""
    rows, columns = q.shape[2], k.shape[2]
    few, many = sorted((rows, columns))
    return (
        0 < few <= FEW
        and many >= MANY
        and q.dtype == torch.float32
        and q.device.type == "cpu"
        and unseen(q, k, v)
    )


def attend_thin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale q k^T) v [B, H, n_q, d_v] of q [B, H, n_q, d], k [B, K, n_k, d] and v
    [B, K, n_k, d_v], where K divides H."""
    batch, heads, rows, _ = q.shape
    repeat = heads // k.shape[1]
    attend = _few_keys if k.shape[2] <= rows else _few_queries
    out = q.new_empty(batch, heads, rows, v.shape[3])
    for sample in range(batch):
        for head in range(heads):
            at = sample, head // repeat
            attend(q[sample, head], k[at], v[at], scale, out[sample, head])
    return out


def _few_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    k, v = k * scale, v.T.contiguous()
    for low in range(0, len(q), ROWS):
        weights = torch.softmax(against(q[low : low + ROWS], k), -1)
        out[low : low + ROWS] = against(weights, v)


def _few_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    scores = against(k, q * scale)
    weights = scores.sub_(scores.amax(0)).exp_()
    out[:] = outer(weights, v) / weights.sum(0)[:, None]
