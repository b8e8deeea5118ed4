"""What runs `favor`, `rfa` and `rbf`: sums of random features, drawn for every head of every layer.

Heads that share a key head have features of their own of its keys.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from torch.nn import functional

from attnspec.backends.factored.features.directions import directions
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.maps import FeatureMap, Tables
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.random_features import RandomFeatures, UnitWaves
from attnspec.backends.factored.features.spans import Summing
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.lower.work import Work

SMALL = 1e-6
"""How far sums of weights that may be negative or vanish are kept from 0."""


def favor_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs `favor`."""
    declared = cast(Favor, work.mechanism)
    factor = None if work.scale is None else math.sqrt(work.scale)
    return _kernel(
        work,
        heads,
        RandomFeatures(declared.kind, declared.features, factor),
        Quotient(
            least=0.0 if declared.kind in ("positive", "hyperbolic") else SMALL,
            signed=declared.kind == "trig",
        ),
        declared.orthogonal,
    )


def rbf_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs `rbf`."""
    declared = cast(Rbf, work.mechanism)
    features = RandomFeatures("gaussian", declared.features, 1 / declared.sigma)
    return _kernel(work, heads, features, Quotient(), True)


def rfa_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs `rfa`."""
    declared = cast(Rfa, work.mechanism)
    quotient = Quotient(least=SMALL, floor=declared.floor, signed=True)
    kernel = _kernel(work, heads, UnitWaves(declared.features), quotient, False)
    return replace(kernel, gate=gate_frames) if declared.gated else kernel


def gate_frames(
    k: torch.Tensor, tables: Tables, padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames t, r [B, H, n] in float64 of sums S_i = g_i S_(i-1) + (1 - g_i) f_i: a key j weighs
    exp(t_j - r_i) = (1 - g_j) g_(j+1) ... g_i, with g = sigmoid(gate . k + gate_bias).

    Padding passes the sums on as they are.
    """
    logits = (k.to(torch.promote_types(k.dtype, torch.float32)) * tables["gate"][:, None]).sum(-1)
    logits = (logits + tables["gate_bias"][:, None]).double()
    kept = functional.logsigmoid(logits)
    if padding is not None:
        kept = kept.masked_fill(~padding[:, None], 0.0)
    rows = -kept.cumsum(-1)
    return functional.logsigmoid(-logits) + rows, rows


def _kernel(
    work: Work,
    heads: tuple[int, ...],
    features: FeatureMap,
    quotient: Quotient,
    orthogonal: bool,
) -> FeatureKernel:
    declared = cast("Favor | Rfa | Rbf", work.mechanism)

    def draws(size: int, kind: torch.dtype, device: torch.device, draw: int) -> Tables:
        wanted = declared.seed, work.layer, heads, draw, declared.features, size, orthogonal
        return {"directions": directions(wanted, kind, device)}

    how = Summing(features, work.causal, quotient)
    return FeatureKernel(declared.name, how, by_head=True, draws=draws)
