"""What scores become: one of these functions, which is called `weigh` where it is taken over."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the pairs of the mask; a row without one weighs nothing."""
    none = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~(mask | none), -torch.inf).softmax(-1).masked_fill(none, 0.0)


def softmax1(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the pairs of the mask and one more logit, which is 0."""
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def relu(scores: Tensor, mask: Tensor) -> Tensor:
    """The positive scores of the pairs of the mask, divided by their sum."""
    weights = torch.relu(scores).masked_fill(~mask, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def sigmoid(scores: Tensor, mask: Tensor) -> Tensor:
    """The sigmoid of each score of a pair of the mask."""
    return torch.sigmoid(scores).masked_fill(~mask, 0.0)
