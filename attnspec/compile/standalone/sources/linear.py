"""What mechanisms do whose weights are products of features."""

from __future__ import annotations

import torch
from torch import Tensor

from attnspec.compile.standalone.sources.features import directions, elu1, positive, waves
from attnspec.compile.standalone.sources.sums import (
    all_sums,
    divided,
    gated_sums,
    together,
    with_ones,
)

LONGEST: int | None = None

Learned = dict[str, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, layer: int, dropout_p: float, x: Learned, learned: Learned
) -> Tensor:
    """mix(q, k, v) in float32 at least, with a head of keys for each of queries."""
    if dropout_p:
        raise ValueError(f"there are no weights to drop: dropout_p must be 0, got {dropout_p}")
    if LONGEST is not None and k.shape[2] > LONGEST:
        raise ValueError(f"n is at most {LONGEST}, got {k.shape[2]}")
    wide, repeat = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (each.to(wide).repeat_interleave(repeat, 1) for each in (k, v))
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):
        return q @ (k.mT @ v).to(q.dtype)
    learned = {name: each.to(wide) for name, each in learned.items()}
    return mix(q.to(wide), k, v, layer, x.get("key padding"), learned).to(q.dtype)


def mix(q: Tensor, k: Tensor, v: Tensor, layer: int, real: Tensor | None, x: Learned) -> Tensor:
    """Sums of the features of keys, divided by those of the weights."""
    (f, log), (g, logs) = elu1(q), elu1(k)
    g, top = together(g, logs, real)
    return divided(all_sums(f, g, with_ones(v)), log + top)


def mix_drawn(
    q: Tensor, k: Tensor, v: Tensor, layer: int, real: Tensor | None, x: Learned
) -> Tensor:
    """Sums of the random features of keys, divided by those of the weights."""
    w = directions(layer, *q.shape[1::2], q.dtype, str(q.device))
    (f, log), (g, logs) = positive(q, w), positive(k, w)
    g, top = together(g, logs, real)
    return divided(all_sums(f, g, with_ones(v)), log + top)


def mix_waves(
    q: Tensor, k: Tensor, v: Tensor, layer: int, real: Tensor | None, x: Learned
) -> Tensor:
    """Sums of the random features of keys, divided by those of the weights."""
    w = directions(layer, *q.shape[1::2], q.dtype, str(q.device)) * x["rfa_spread"][:, None]
    (f, log), (g, logs) = waves(q, w), waves(k, w)
    g, top = together(g, logs, real)
    return divided(all_sums(f, g, with_ones(v)), log + top)


def mix_gated(
    q: Tensor, k: Tensor, v: Tensor, layer: int, real: Tensor | None, x: Learned
) -> Tensor:
    """Sums of the random features of keys, which a learned gate forgets; padding passes them on."""
    w = directions(layer, *q.shape[1::2], q.dtype, str(q.device)) * x["rfa_spread"][:, None]
    (f, log), (g, _) = waves(q, w), waves(k, w)
    gate = k @ x["rfa_gate"][..., None] + x["rfa_gate_bias"][:, None, None]
    if real is not None:
        gate = gate.masked_fill(~real[:, None, :, None], torch.inf)
    return divided(gated_sums(f, g, with_ones(v), gate), log)
