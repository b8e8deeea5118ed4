"""Sequences cut into segments of consecutive positions, and what stands for each: mean or maximum.

n positions in m segments: the first m - n mod m have n // m positions, the others one more; with
fewer positions than segments each position is its own. Padding does not count: the real positions
of a sample are cut as a sequence of their own, so that padding changes no result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def segment_means(x: torch.Tensor, count: int, padding: torch.Tensor | None = None) -> torch.Tensor:
    """The means [B, H, m, d] of m = min(count, n) segments of x [B, H, n, d]; 0 for an empty one.

    `padding` is bool [B, n], True for a real position.
    """
    if padding is not None:
        member = members(padding, min(count, x.shape[2])).to(x.dtype)
        sizes = member.sum(-1, keepdim=True).clamp_min(1.0)
        return (member / sizes)[:, None] @ x
    # torch takes sums many times faster than means
    return _of_segments(x, count, lambda parts: parts.sum(3) / parts.shape[3])


def segment_maxima(
    x: torch.Tensor, count: int, padding: torch.Tensor | None = None
) -> torch.Tensor:
    """The maxima [B, H, m, d] of m = min(count, n) segments of x [B, H, n, d]; 0 for an empty one.

    `padding` is bool [B, n], True for a real position.
    """
    if padding is not None:
        count = min(count, x.shape[2])
        number = _numbers(padding, count)[:, None, :, None].expand(x.shape)
        # what is padding goes to one segment more, which is cut off
        found = x.new_full((*x.shape[:2], count + 1, x.shape[3]), -torch.inf)
        found = found.scatter_reduce(2, number, x, "amax")[:, :, :count]
        return found.masked_fill(found == -torch.inf, 0.0)
    return _of_segments(x, count, lambda parts: parts.amax(3))


def _of_segments(
    x: torch.Tensor, count: int, pooled: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What `pooled` makes of segments [B, H, m, length, d], first of the short ones, then of the
    others."""
    n = x.shape[2]
    count = min(count, n)
    if count == n:
        return x
    size, long = divmod(n, count)
    cut = (count - long) * size
    parts = [pooled(torch.unflatten(x[:, :, :cut], 2, (count - long, size)))]
    if long:
        parts.append(pooled(torch.unflatten(x[:, :, cut:], 2, (long, size + 1))))
    return torch.cat(parts, 2) if long else parts[0]


def occupied(padding: torch.Tensor, count: int) -> torch.Tensor:
    """Which of min(count, n) segments hold a real position, bool [B, m], for `padding` [B, n]."""
    # real positions fill the first segments, and as many as there are
    at = torch.arange(min(count, padding.shape[1]), device=padding.device)
    return at < padding.sum(-1, keepdim=True)


def members(padding: torch.Tensor, count: int) -> torch.Tensor:
    """Whether a segment has a position, bool [B, count, n], for real positions `padding` [B, n]."""
    numbers = torch.arange(count, device=padding.device)
    return _numbers(padding, count)[:, None] == numbers[:, None]


def _numbers(padding: torch.Tensor, count: int) -> torch.Tensor:
    """The segment of each real position, int64 [B, n]; `count` for padding."""
    place = padding.cumsum(-1) - 1
    real = padding.sum(-1, keepdim=True)
    cuts = real.clamp(1, count)
    size = real // cuts
    short = cuts - real % cuts
    cut = short * size
    late = short + (place - cut) // (size + 1)
    number = torch.where(place < cut, place // size.clamp_min(1), late)
    return number.masked_fill(~padding, count)
