"""What is drawn to try a program: run-time inputs, and the queries that are examined."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from attnspec.ir.program import Input, Program

CHOICES = 3
"""Blocks that each query chooses in a sample."""

DOCUMENTS = 5
"""About how many runs of equal labels a sequence has."""


def sample_inputs(program: Program, n: int, n_q: int | None = None) -> dict[str, Tensor]:
    """Inputs for a batch of one and the last n_q of n positions, or all."""
    return {entry.name: drawn(entry, n, n if n_q is None else n_q) for entry in program.inputs}


def drawn(entry: Input, n: int, n_q: int) -> Tensor:
    """An input for a batch of one that all heads have in common: a tenth of the tokens, documents
    of unequal lengths, half, random numbers and choices."""
    blocks = -(-n // entry.size)
    match entry.kind:
        case "tokens":
            marked = torch.rand(1, n) < 0.1
            return marked if entry.at_most is None else marked & (marked.cumsum(1) <= entry.at_most)
        case "ids":
            return (torch.rand(1, n) < DOCUMENTS / n).cumsum(1)
        case "numbers":
            # whole, because a predicate may divide them, and some equal
            return torch.randint(0, max(2, n // 2), (1, n))
        case "choices":
            return torch.randint(-1, blocks, (1, 1, n_q, CHOICES))
        case "scores":
            return torch.randn(1, 1, n, blocks)
        case "pairs":
            return torch.randn(1, 1, n_q, n)
        case "buckets":
            # two at least, of which one would read all
            return torch.randint(0, max(2, n // DOCUMENTS), (1, 1, 2, n))
        case _:
            return torch.tensor([n // 2])


def words_of(program: Program, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What such inputs are, in words, each with its name."""
    words = []
    for entry in program.inputs:
        x = inputs[entry.name]
        match entry.kind:
            case "tokens":
                what = f"{int(x.sum()):,} of {x.shape[1]:,} tokens"
            case "ids":
                what = f"{len(torch.unique(x)):,} labels"
            case "numbers":
                what = f"{int(x.min()):,} to {int(x.max()):,}"
            case "length":
                what = f"{int(x):,}"
            case _:
                what = f"random {entry.kind} {list(x.shape)}"
        words.append(f"`{entry.name}` {what}")
    return tuple(words)


def sample_rows(count: int, most: int, first: int) -> np.ndarray:
    """`most` of the `count` positions from `first` on, ascending: both ends, the middle and random
    ones. All of them where they are few."""
    if count <= 2 * most:
        return np.arange(first, first + count)
    drawn = torch.randperm(count)[: 2 * most].tolist()
    chosen = dict.fromkeys([0, count - 1, count // 2, 1, count - 2, *drawn])
    return first + np.sort(list(chosen)[:most])
