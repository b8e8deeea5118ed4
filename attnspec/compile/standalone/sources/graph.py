"""The attention of a graph, without and with a learned table of relative positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attnspec.compile.standalone.sources import shifted
from attnspec.compile.standalone.sources.calls import given
from attnspec.compile.standalone.sources.plain import attend

HEADS: int | None = None
LAYERS: int | None = None
STEPS = (1, 2, 4)
TWO_SIDED = False


class Attention(nn.Module):
    """q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] -> [B, H, n_q, d_v]; queries
    are the last n_q positions, `key_padding_mask` is bool [B, n_k], True for a real key."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        x = given(q, k, v, layer, inputs, key_padding_mask)
        return attend(q, k, v, layer, dropout_p, x)


class Biased(nn.Module):
    """q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] -> [B, H, n_q, d_v]; queries
    are the last n_q positions, `key_padding_mask` is bool [B, n_k], True for a real key."""

    def __init__(self, head_size: int | None = None) -> None:
        super().__init__()
        buckets = (len(STEPS) + 1) * (1 + TWO_SIDED)
        self.bias_0 = nn.Parameter(torch.empty(LAYERS or 1, HEADS or 1, buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """At first no position is preferred."""
        nn.init.zeros_(self.bias_0)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        x, n = given(q, k, v, layer, inputs, key_padding_mask), k.shape[2]
        # the bucket of each distance q - k, from 1 - n on; STEPS are the least of all but the first
        distance = torch.arange(1 - n, max(1, n), device=q.device)
        far = distance.abs() if TWO_SIDED else distance.clamp_min(0)
        bucket = torch.bucketize(far, torch.tensor(STEPS, device=q.device), right=True)
        bucket = bucket + (distance < 0) * TWO_SIDED * (len(STEPS) + 1)
        bias = self.bias_0[layer if LAYERS else 0][:, bucket].expand(q.shape[1], -1)
        return shifted.attend(q, k, v, layer, dropout_p, x, bias.to(q.dtype))


class Changed(nn.Module):
    """q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] -> [B, H, n_q, d_v]; queries
    are the last n_q positions, `key_padding_mask` is bool [B, n_k], True for a real key."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        x = given(q, k, v, layer, inputs, key_padding_mask)
        return shifted.attend(q, k, v, layer, dropout_p, x, q)
