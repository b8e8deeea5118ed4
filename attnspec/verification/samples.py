"""What is drawn to try a program: run-time inputs, and the queries that are examined."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from attnspec.ir.program import Input, Program
from attnspec.runtime.call_checks import PER_HEAD

CHOICES = 3
"""Blocks that each query chooses in a sample."""

DOCUMENTS = 5
"""About how many runs of equal labels a sequence has."""


def sample_inputs(program: Program, n: int, n_q: int | None = None) -> dict[str, Tensor]:
    """Inputs for a batch of one and the last n_q of n positions, or all: a tenth of the tokens,
    documents of unequal lengths, half, random numbers and choices."""
    data = {}
    for entry in program.inputs:
        if entry.kind == "tokens":
            marked = torch.rand(1, n) < 0.1
            if entry.at_most is not None:
                marked &= marked.cumsum(1) <= entry.at_most
            data[entry.name] = marked
        elif entry.kind == "ids":
            data[entry.name] = (torch.rand(1, n) < DOCUMENTS / n).cumsum(1)
        elif entry.kind == "numbers":
            # whole, because a predicate may divide them, and some equal
            data[entry.name] = torch.randint(0, max(2, n // 2), (1, n))
        elif entry.kind in PER_HEAD:
            data[entry.name] = about_heads(entry, n, n if n_q is None else n_q)
        else:
            data[entry.name] = torch.tensor([n // 2])
    return data


def about_heads(entry: Input, n: int, n_q: int) -> Tensor:
    """An input for a batch of one that all heads have in common."""
    blocks = -(-n // entry.size)
    match entry.kind:
        case "choices":
            return torch.randint(-1, blocks, (1, 1, n_q, CHOICES))
        case "scores":
            return torch.randn(1, 1, n, blocks)
        case "pairs":
            return torch.randn(1, 1, n_q, n)
        case _:
            # two at least, of which one would read all
            return torch.randint(0, max(2, n // DOCUMENTS), (1, 1, 2, n))


def words_of(program: Program, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What such inputs are, in words, each with its name."""
    kinds: dict[str, Callable[[Tensor], str]] = {
        "tokens": lambda x: f"{int(x.sum()):,} of {x.shape[1]:,} tokens",
        "ids": lambda x: f"{len(torch.unique(x)):,} labels",
        "numbers": lambda x: f"{int(x.min()):,} to {int(x.max()):,}",
        "length": lambda x: f"{int(x):,}",
    }
    words = []
    for name, kind in ((entry.name, entry.kind) for entry in program.inputs):
        shape = list(inputs[name].shape)
        what = kinds[kind](inputs[name]) if kind in kinds else f"random {kind} {shape}"
        words.append(f"`{name}` {what}")
    return tuple(words)


def sample_rows(count: int, most: int, first: int = 0) -> np.ndarray:
    """`most` of the `count` positions from `first` on, ascending: both ends, the middle and random
    ones. All of them where they are few."""
    if count <= 2 * most:
        return np.arange(first, first + count)
    ends = [0, count - 1, count // 2, 1, count - 2]
    chosen = [*ends, *torch.randperm(count)[: 2 * most].tolist()]
    return first + np.array(sorted(list(dict.fromkeys(chosen))[:most]))
