"""Synthesizer: softmax over logits that no query and key are compared for.

The logits of `dense` and `factorized_random` are products of two thin matrices, so that they are
attention over synthesised rows and columns and need no n x n memory; `random` holds n x n numbers
as it is, and `factorized_dense` multiplies its two factors elementwise.
Source: Tay et al. 2021, "Synthesizer: Rethinking Self-Attention for Transformer Models", section 3.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from attnspec.backends.common.score_formula import weigh, widened
from attnspec.backends.factored.low_rank.softmax import (
    MechanismKernel,
    attend,
    lower_triangle,
    repeated,
)
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.lower.work import Call


class SynthesizerKernel(MechanismKernel[Synthesizer]):
    """Runs `synthesizer`, over all pairs or the causal ones."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        kept, declared = q.dtype, self.declared
        q, k, v = widened(q), widened(k), widened(v)
        learned = {name: table.to(q.dtype) for name, table in call.tables.items()}
        if declared.kind in ("dense", "factorized_random"):
            out = self._thin(q, k, v, learned, call)
        else:
            out = self._full(q, k, v, learned, call)
        return out.to(kept)

    def _thin(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        learned: dict[str, torch.Tensor],
        call: Call,
    ) -> torch.Tensor:
        batch, heads, n_q, size = q.shape
        n_k = k.shape[2]
        if self.declared.kind == "dense":
            hidden = perceived(q, learned["hidden"], learned["hidden_bias"])
            # the bias is the product with a hidden unit that is always 1
            rows = torch.cat([hidden, hidden.new_ones(batch, heads, n_q, 1)], 3)
            weight, bias = (learned[name][:, :n_k] for name in ("weight", "bias"))
            columns = torch.cat([weight, bias[..., None]], 2)
        else:
            rows = learned["rows"][:, n_k - n_q : n_k].expand(batch, heads, -1, -1)
            columns = learned["columns"][:, :n_k]
        columns = columns.expand(batch, heads, -1, -1)
        if self.declared.products:
            share = torch.sigmoid(learned["mix"])[..., None]
            rows = torch.cat([(1 - share) * size**-0.5 * q, share * rows], 3)
            columns = torch.cat([repeated(k, heads), columns], 3)
        return attend(
            rows,
            columns,
            repeated(v, heads),
            1.0,
            mask=None if call.padding is None else call.padding[:, None, None],
            causal=self.causal,
            dropout_p=call.dropout_p,
        )

    def _full(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        learned: dict[str, torch.Tensor],
        call: Call,
    ) -> torch.Tensor:
        heads, n_q, size = q.shape[1:]
        n_k = k.shape[2]
        if self.declared.kind == "random":
            logits = learned["logits"][None, :, n_k - n_q : n_k, :n_k]
        else:
            hidden = perceived(q[:, :, None], learned["hidden"], learned["hidden_bias"])
            short = self.declared.factors[0]
            first, second = hidden.unbind(2)
            weight, bias = learned["weight"], learned["bias"][:, None]
            tiled = first @ weight[:, :short].transpose(1, 2) + bias[..., :short]
            held = second @ weight[:, short:].transpose(1, 2) + bias[..., short:]
            # column j has the factors j mod a and j // a
            logits = (held[..., None] * tiled[..., None, :]).flatten(3)[..., :n_k]
        if self.declared.products:
            share = torch.sigmoid(learned["mix"])[..., None]
            scores = (q * size**-0.5) @ repeated(k, heads).transpose(-1, -2)
            logits = (1 - share) * scores + share * logits
        mask = None if call.padding is None else call.padding[:, None, None]
        if self.causal:
            earlier = lower_triangle(n_q, n_k, q.device)
            mask = earlier if mask is None else mask & earlier
        weights = weigh(logits, mask, "softmax")
        if call.dropout_p:
            weights = weights.expand(len(q), heads, -1, -1)
            weights = functional.dropout(weights, call.dropout_p)
        return weights @ repeated(v, heads)


def perceived(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """relu(W x + b) of rows x [B, H, …, n, d], W [H or 1, …, h, d] and b [H or 1, …, h]."""
    return torch.relu(x @ weight.transpose(-1, -2) + bias[..., None, :])
