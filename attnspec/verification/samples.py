"""What is drawn to try a program: run-time inputs, and the queries that are examined."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from attnspec.ir.program import Program

CHOICES = 3
"""Blocks that each query chooses in a sample."""

DOCUMENTS = 5
"""About how many runs of equal labels a sequence has."""


def sample_inputs(program: Program, n: int, n_q: int | None = None) -> dict[str, torch.Tensor]:
    """Inputs for a batch of one and the last n_q of n positions, or all."""
    data = {}
    for entry in program.inputs:
        blocks = -(-n // entry.size) if entry.kind in ("choices", "scores") else 0
        match entry.kind:
            case "tokens":
                made = torch.rand(1, n) < 0.1
                if entry.at_most is not None:
                    made &= made.cumsum(1) <= entry.at_most
            case "ids":
                made = (torch.rand(1, n) < DOCUMENTS / n).cumsum(1)
            case "numbers":
                # whole, because a predicate may divide them, and some equal
                made = torch.randint(0, max(2, n // 2), (1, n))
            # what is about heads all of them have in common
            case "choices":
                made = torch.randint(-1, blocks, (1, 1, n if n_q is None else n_q, CHOICES))
            case "scores":
                made = torch.randn(1, 1, n, blocks)
            case "pairs":
                made = torch.randn(1, 1, n if n_q is None else n_q, n)
            case "buckets":
                # two at least, of which one would read all
                made = torch.randint(0, max(2, n // DOCUMENTS), (1, 1, 2, n))
            case _:
                made = torch.tensor([n // 2])
        data[entry.name] = made
    return data


def words_of(program: Program, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """What such inputs are, in words, each with its name."""
    kinds: dict[str, Callable[[torch.Tensor], str]] = {
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
