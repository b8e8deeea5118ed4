"""The attention of a mechanism, with what it learns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attnspec.compile.standalone.sources.calls import given
from attnspec.compile.standalone.sources.linear import mix

LONGEST: int | None = None
PARTS: dict[str, tuple[tuple[int | str, ...], str, float]] = {}


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
        real = given(q, k, v, layer, inputs, key_padding_mask).get("key padding")
        if dropout_p:
            raise ValueError(f"there are no weights to drop: dropout_p must be 0, got {dropout_p}")
        wide, repeat = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
        k, v = (each.to(wide).repeat_interleave(repeat, 1) for each in (k, v))
        if 0 in (q.shape[0], q.shape[2]):
            return q @ (k.mT @ v).to(q.dtype)
        return mix(q.to(wide), k, v, layer, real, {}).to(q.dtype)


class Learner(nn.Module):
    """q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] -> [B, H, n_q, d_v]; queries
    are the last n_q positions, `key_padding_mask` is bool [B, n_k], True for a real key."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        for name, (shape, _, _) in PARTS.items():
            sizes = [head_size if isinstance(size, str) else size for size in shape]
            self.register_parameter(name, nn.Parameter(torch.empty(sizes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts what is learned anew, as PARTS says."""
        for name, (_, start, by) in PARTS.items():
            part = self.get_parameter(name)
            if start == "constant":
                nn.init.constant_(part, by)
            elif start == "uniform":
                nn.init.uniform_(part, -by, by)
            else:
                nn.init.normal_(part, 0.0, by if start == "normal" else by * part.shape[-1] ** -0.5)

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
        real = given(q, k, v, layer, inputs, key_padding_mask).get("key padding")
        if dropout_p:
            raise ValueError(f"no weights are dropped here: dropout_p must be 0, got {dropout_p}")
        if LONGEST is not None and k.shape[2] > LONGEST:
            raise ValueError(f"n is at most {LONGEST}, got {k.shape[2]}")
        wide, repeat = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
        k, v = (each.to(wide).repeat_interleave(repeat, 1) for each in (k, v))
        if 0 in (q.shape[0], q.shape[2]):
            return q @ (k.mT @ v).to(q.dtype)
        # the rows of this layer, [heads or 1, ...]
        parts = {name: self.get_parameter(name).to(wide) for name in PARTS}
        learned = {name: each[layer if len(each) > 1 else 0] for name, each in parts.items()}
        return mix(q.to(wide), k, v, layer, real, learned).to(q.dtype)
