"""Partial results of one query over different keys become one: steps of a plan, a graph beside a
mechanism, sums of earlier keys and new ones, the shards of several devices.

A partial result is an output with its log-sum-exp, or sums of values by weights, that of the
weights among them, times exp of a logarithm: the first is the second with the sums (out, 1). All
are brought into one frame, the largest logarithm. What takes no `into` differentiates to any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOWEST = -1e37
"""In place of minus infinity, so that differences stay numbers: below every score, and a tenth of
the range of float32, so that several add up to a number."""

Partial = tuple[Tensor, Tensor]
"""Outputs [..., n, d] and their log-sum-exps [..., n], -inf without a key."""

Outputs = tuple[Tensor, Tensor | None]
"""The same of weights that may have no log-sum-exps: then None."""


def wide_type(x: Tensor) -> torch.dtype:
    """The type that sums of a tensor's numbers are kept in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after the other along an axis."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def in_one_frame(logs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest of logarithms along an axis, which stays with size 1, a constant; and exp of all
    in that frame, 0 for those that are -inf."""
    top = logs.detach().amax(dim, keepdim=True)
    return top, torch.exp(logs - top.clamp(min=LOWEST))


def merged(first: Partial, second: Partial) -> Partial:
    """Both results as one, in the type of the first."""
    top, weights = in_one_frame(torch.stack([first[1], second[1]]), 0)
    total = weights.sum(0)
    # a row without a key keeps 0, and the gradient of a logarithm of 0 is not a number
    total = total.masked_fill(total == 0, 1.0)
    share = (weights[1] / total)[..., None]
    one, other = first[0].to(share.dtype), second[0].to(share.dtype)
    return torch.lerp(one, other, share).to(first[0].dtype), top[0] + torch.log(total)


def merge(into: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """The same of two parts in place, without derivatives and in four calls; `into` has the type of
    its log-sum-exps, so that no small share is rounded away."""
    (out, lse), (other, sums) = into, more
    # -inf less -inf is not a number: there is no key
    share = torch.sigmoid(sums - lse).nan_to_num_()[..., None]
    out.lerp_(other.to(out.dtype), share)
    torch.logaddexp(lse, sums, out=lse)


def with_zero(found: Partial, logit: Tensor | None = None) -> Partial:
    """The same with a key of value 0 in every row, of score `logit` or 0: sinks, `softmax1`."""
    out, lse = found
    zero = torch.zeros_like(lse) if logit is None else logit.expand_as(lse)
    return merged(found, (out.new_zeros(()).expand_as(out), zero))
