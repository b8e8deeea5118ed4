"""Packed documents, as `position_ids` show them."""

from __future__ import annotations

import torch


def labels(position_ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [B, n], the number of the document that each token belongs to.

    A document begins where positions start again: at 0, or below the position before. Tokens that
    are not `real`, bool [B, n], are padding and begin none. A gap is no boundary.
    """
    starts = (position_ids[:, 1:] == 0) | (position_ids[:, 1:] < position_ids[:, :-1])
    if real is not None:
        starts = starts & real[:, 1:] & real[:, :-1]
    return torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))


def documents(
    position_ids: torch.Tensor | None, real: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The labels of packed documents; None where every sample is one document."""
    if position_ids is None or position_ids.ndim < 2 or position_ids.is_floating_point():
        return None
    # of the axes of several rotations that of the text comes first
    positions = position_ids if position_ids.ndim == 2 else position_ids.flatten(0, -3)[0]
    if real is not None and real.shape[-1] != positions.shape[-1]:
        return None
    found = labels(positions, real)
    return found if bool(found.any()) else None
