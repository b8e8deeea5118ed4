"""Partial results of one query over different keys, merged by their log-sum-exps.

The operations differentiate to any order.
"""

from __future__ import annotations

import torch


def merged(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [..., n, d] and the log-sum-exps [..., n], -inf without a key, of both."""
    (out, lse), (other, sums) = first, second
    # -inf less -inf is no number, and its gradient none either
    none = (lse == -torch.inf) & (sums == -torch.inf)
    lse, sums = (x.masked_fill(none, 0.0) for x in (lse, sums))
    share = torch.sigmoid(sums - lse)[..., None].to(out.dtype)
    total = torch.logaddexp(lse, sums).masked_fill(none, -torch.inf)
    return torch.lerp(out, other, share), total


def with_zero(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a key of score and value 0 in every row: `softmax1`."""
    total = torch.logaddexp(lse, torch.zeros_like(lse))
    return out * torch.exp(lse - total)[..., None].to(out.dtype), total
