"""`chosen`: lists that an input brings."""

from __future__ import annotations

import torch

from attnspec.backends.decided.choice import Choice
from attnspec.backends.decided.given import Given
from attnspec.backends.decided.lists import ListChoice
from attnspec.graphs.patterns.chosen import Chosen


def decide(leaf: Chosen, given: Given) -> Choice:
    """The listed blocks, each once; raises ValueError for one that there is not."""
    size, name = leaf.choices.size, leaf.choices.name  # type: ignore[attr-defined]
    blocks = given.data[name].to(torch.int64)
    count = -(-given.n_k // size)
    wrong = (blocks < -1) | (blocks >= count)
    if bool(wrong.any()):
        raise ValueError(
            f"`{name}` must name key blocks 0 … {count - 1}, {size} of {given.n_k} keys each, or -1"
            f" for none, got {int(blocks[wrong][0])}"
        )
    blocks = blocks.sort(-1).values
    again = torch.zeros_like(blocks, dtype=torch.bool)
    again[..., 1:] = blocks[..., 1:] == blocks[..., :-1]
    blocks = torch.where(again, -1, blocks).sort(-1).values
    start = blocks.new_zeros(len(blocks), 1)
    first_row = start + given.first_query
    return ListChoice(blocks, start, first_row, size, 1, given.n_q, given.n_k)
