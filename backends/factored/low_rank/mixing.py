"""Mixings: the positions of a sequence are mixed by fixed or learned maps, whatever stands there.

Their input are the values, head by head, but for gMLP's gate, which multiplies the queries by what
it makes of the values: the two halves of the channels in the paper. Padding counts as zeros.
Sources: Lee-Thorp et al. 2022, "FNet", section 3; Tolstikhin et al. 2021, "MLP-Mixer", section 2;
Liu et al. 2021, "Pay Attention to MLPs", section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.low_rank.softmax import (
    MechanismKernel,
    check_no_dropout,
    repeated,
    without_padding,
)
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.ir.mechanisms.fourier import Fourier
from attnspec.ir.mechanisms.gmlp import Gmlp
from attnspec.ir.mechanisms.mixer import Mixer
from attnspec.lower.work import Call

LONG = 1 << 13
"""Positions from which on transforms along them are taken channel by channel."""


class FourierKernel(MechanismKernel[Fourier]):
    """Runs `fourier`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout("fourier", call.dropout_p)
        out = fourier(without_padding(widened(v), call.padding))
        return repeated(out, q.shape[1])[:, :, -q.shape[2] :].to(q.dtype)


def fourier(x: torch.Tensor) -> torch.Tensor:
    """Re(F_n X F_d) of x [..., n, d], the unnormalised transforms along both axes."""
    size = x.shape[-1]
    if x.shape[-2] >= LONG and unseen(x):
        out = x.new_empty(x.shape)
        for matrix, into in zip(x.flatten(0, -3), out.view(-1, *x.shape[-2:]), strict=True):
            _by_channels(matrix, into)
        return out
    half = torch.fft.fft(torch.fft.rfft(x, dim=-1), dim=-2).real
    # the other channels are the same numbers read backwards: position -i, channel -c
    rest = half[..., 1 : size - size // 2]
    rest = torch.cat([rest[..., :1, :], rest[..., 1:, :].flip(-2)], -2).flip(-1)
    return torch.cat([half, rest], -1)


def _by_channels(x: torch.Tensor, out: torch.Tensor) -> None:
    """The same of one matrix x [n, d], each channel transformed where it lies in one piece."""
    size = x.shape[1]
    half = torch.fft.fft(torch.fft.rfft(x, dim=1).T.contiguous()).real
    rest = half[1 : size - size // 2].flip(0)
    out[:, : len(half)] = half.T
    out[:1, len(half) :] = rest[:, :1].T
    out[1:, len(half) :] = rest[:, 1:].flip(1).T


class MixerKernel(MechanismKernel[Mixer]):
    """Runs `mixer`: learned parts `gain` and `shift` of the norm, `inner`, `inner_bias`, `outer`
    and `outer_bias` of the network along the positions."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout("mixer", call.dropout_p)
        n = v.shape[2]
        x = repeated(widened(v), q.shape[1])
        learned = {name: table.to(x.dtype) for name, table in call.tables.items()}
        normal = without_padding(normalised(x, learned), call.padding)
        inner = learned["inner"][..., :n] @ normal + learned["inner_bias"][..., None]
        out = x + learned["outer"][:, :n] @ functional.gelu(inner)
        out = out + learned["outer_bias"][:, :n, None]
        return out[:, :, -q.shape[2] :].to(q.dtype)


class GmlpKernel(MechanismKernel[Gmlp]):
    """Runs `gmlp`: learned parts `gain`, `shift` of the norm, `weight`, `bias` of the gate."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout("gmlp", call.dropout_p)
        n_q, n = q.shape[2], v.shape[2]
        if q.shape[3] != v.shape[3]:
            raise ValueError(
                "`gmlp` multiplies q by what it makes of v, so that both have one head size,"
                f" got {q.shape[3]} and {v.shape[3]}"
            )
        x = widened(v)
        learned = {name: table.to(x.dtype) for name, table in call.tables.items()}
        x = without_padding(normalised(repeated(x, q.shape[1]), learned), call.padding)
        weight = learned["weight"][:, n - n_q : n, :n]
        if self.causal:
            weight = weight.tril(n - n_q)
        gate = weight @ x + learned["bias"][:, n - n_q : n, None]
        return (widened(q) * gate).to(q.dtype)


def normalised(x: torch.Tensor, learned: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Layer normalisation of rows x [B, H, n, d] with `gain` and `shift` [H or 1, d]."""
    normal = functional.layer_norm(x, x.shape[-1:])
    return normal * learned["gain"][:, None] + learned["shift"][:, None]


class EfficientKernel(MechanismKernel[Efficient]):
    """Runs `efficient`; padding is no key, and no position that is counted."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout("efficient", call.dropout_p)
        kept, padding = q.dtype, call.padding
        q, k, v = widened(q), widened(k), without_padding(widened(v), padding)
        batch, heads, rows, size = q.shape
        keys = k.shape[1]
        if self.declared.normalize == "scaling":
            count = k.new_tensor(k.shape[2]) if padding is None else padding.sum(-1)
            # all queries of a batch of padding alone read nothing
            k = k / count.clamp(min=1).to(k.dtype).view(-1, 1, 1, 1)
        else:
            q = torch.softmax(q, -1)
            if padding is not None:
                # a sample without keys has values of 0 alone
                k = k.masked_fill(~padding[:, None, :, None], torch.finfo(k.dtype).min)
            k = torch.softmax(k, 2)
        context = k.transpose(-1, -2) @ v
        out = q.reshape(batch, keys, heads // keys * rows, size) @ context
        return out.view(batch, heads, rows, v.shape[-1]).to(kept)
