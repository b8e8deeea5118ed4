"""Causal sums of elementwise features in the kernels of flash-linear-attention.

The package sums products of features and values; what they are divided by is summed here, in
float32, as it would round the sums of keys to the type of the keys.
"""

from __future__ import annotations

from typing import Any

import torch

from attnspec.backends.factored.features.spans import Given, Summing


class Packaged:
    """A way of sums that the package computes, and differentiates once. What it has no kernel for
    (float64, no positions, fewer queries than keys) goes block by block."""

    def takes(self, given: Given) -> bool:
        """Whether it has kernels for these tensors."""
        if given.q.dtype == torch.float64 or given.gate is not None:
            return False
        whole = given.q.shape[3] == given.k.shape[2]
        return whole and all(x.numel() for x in (given.q, given.k, given.v))

    def outputs(self, how: Summing, given: Given) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """What they are worth, the sums of their weights, and what autograd kept on the way."""
        parts = given.q, given.k, given.v
        asks = any(x.requires_grad for x in parts)
        leaves = [x.detach().requires_grad_(asks) for x in parts]
        with torch.set_grad_enabled(asks):
            out, total = _outputs(how, leaves, given.padding)
        return out.detach(), total.detach(), (out, leaves) if asks else None

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[torch.Tensor, torch.Tensor, Any],
        grad: torch.Tensor,
    ) -> Given:
        """The gradients of what is given."""
        out, leaves = found[2]
        # the same way back may be asked for again
        of_q, of_k, of_v = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        return Given(of_q, of_k, of_v, None, None, {})


def _outputs(
    how: Summing, parts: list[torch.Tensor], padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [B, K, R, n, e] and the sums of weights [B, K, R, n]."""
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    q, k, v = parts
    kind = torch.promote_types(q.dtype, torch.float32)
    f, g = how.map.queries(q, {}).values, how.map.keys(k, {}).values
    if padding is not None:
        g = g * padding[:, None, :, None]
    total = f.new_zeros(f.shape[:-1], dtype=kind)
    if how.quotient.divides:
        total = (f.to(kind) * g.to(kind).cumsum(2)[:, :, None]).sum(-1)
    # sums of features leave the range of float16
    used = torch.bfloat16 if q.dtype == torch.bfloat16 else kind
    repeat = q.shape[2]
    rows = [f.flatten(1, 2), *(x.repeat_interleave(repeat, 1) for x in (g, v))]
    turned = [x.to(used).transpose(1, 2) for x in rows]
    sums = chunk_linear_attn(*turned, scale=1.0, normalize=False)[0]
    sums = sums.transpose(1, 2).reshape(*q.shape[:-1], v.shape[-1]).to(kind)
    if how.quotient.divides:
        sums = sums / how.quotient.divisor(total, None)[..., None]
    return sums.to(q.dtype), total
