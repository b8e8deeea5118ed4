"""What is tried: inputs as a call might bring them, and queries of a long sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnspec.ir import Program
from attnspec.verification.held import Blocks

DOCUMENTS = 5
"""About how many runs of equal labels a sequence has."""


def sample_inputs(program: Program, n: int) -> dict[str, torch.Tensor]:
    """Inputs for a batch of one: a tenth of the tokens, documents of unequal lengths, half."""
    found = {}
    for entry in program.inputs:
        if entry.kind == "tokens":
            marked = torch.rand(1, n) < 0.1
            if entry.at_most is not None:
                marked &= marked.cumsum(1) <= entry.at_most
            found[entry.name] = marked
        elif entry.kind == "ids":
            found[entry.name] = (torch.rand(1, n) < DOCUMENTS / n).cumsum(1)
        else:
            found[entry.name] = torch.tensor([n // 2])
    return found


def sample_rows(count: int, most: int, blocks: Sequence[Blocks] = (), first: int = 0) -> np.ndarray:
    """`most` of the `count` positions from `first` on, ascending: both ends, the middle, the first
    and last queries of some of the blocks, and random ones. All of them where they are few."""
    last = first + count - 1
    if count <= 2 * most:
        return np.arange(first, last + 1)
    chosen = [first, last, first + count // 2, first + 1, last - 1]
    for index in np.unique(np.linspace(0, len(blocks) - 1, most // 8).astype(int)).tolist():
        if blocks:
            real = blocks[index].queries
            real = real[int(torch.randint(len(real), ()))]
            real = real[real >= 0]
            chosen.extend([*real[:1].tolist(), *real[-1:].tolist()])
    chosen.extend((first + torch.randperm(count)[: 2 * most]).tolist())
    return np.array(sorted(list(dict.fromkeys(chosen))[:most]))
