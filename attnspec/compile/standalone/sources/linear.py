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

Learned = dict[str, Tensor]


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
