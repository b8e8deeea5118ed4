"""Modules of files that stand alone, held against what the spec means like all others."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnspec.backends.factored.backend import FactoredBackend
from attnspec.backends.one_block.backend import Dense
from attnspec.graphs.stack import Stack, has_mechanism
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.numbers import SIZE
from attnspec.verification.samples import sample_inputs
from attnspec.verification.tables import held_rows


class Alone(CompiledAttention):
    """A module of another class as one that can be verified: what it learns is this one's, and a
    call is a call of it."""

    def __init__(self, program: Program, kind: type[nn.Module]) -> None:
        backend = FactoredBackend.name if has_mechanism(program) else Dense.name
        super().__init__(plan_data(program, backend), SIZE)
        alone = kind(SIZE) if "head_size" in inspect.signature(kind).parameters else kind()
        for name, parameter in self.named_parameters():
            alone.register_parameter(name, parameter)
        # not a module of this one, whose parameters would be there twice
        self.alone = (alone,)

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.alone[0](*tensors, **options)
        return out


def beyond(program: Program) -> int:
    """A length at which no size that the graphs name reaches everything: what a block, or the keys
    that are drawn, leave out is seen at none that is shorter."""
    sizes = [
        math.prod(max(1, x) for name, x in leaf.arguments if type(x) is int and name != "seed")
        for leaf in program.leaves
    ]
    return min(LIMITS.every_pair, 2 * max(sizes, default=1) + 1)


def mask_alone(program: Program, n: int, mask_mod_of: Callable[..., Any]) -> tuple[int, str | None]:
    """How many queries of each head the mask of a file was compared for, and the first that differs
    from the spec, or None.

    Raises AttnSpecError for a length that the spec does not have, ValueError as the file does.
    """
    lengths, _ = crossed(program, n)
    data = sample_inputs(program, n)
    stack = Stack(lengths, {name: x[0].numpy() for name, x in data.items()})
    heads, layers = program.head_count, program.layer_count
    count = min(n, max(8, LIMITS.pairs_at_once // (heads * layers * n)))
    rows = np.linspace(0, n - 1, count, dtype=np.int64)
    at = [torch.from_numpy(x) for x in np.ix_(np.arange(1), np.arange(heads), rows, np.arange(n))]
    for layer in range(layers):
        mask = mask_mod_of(layer, (1, heads, n, n), "cpu", data)(*at).expand(1, heads, -1, n)
        for head in range(heads):
            meant = held_rows(stack.relation(n, layer, head), rows, n)
            wrong = np.flatnonzero((mask[0, head].numpy() != meant).any(1))
            if len(wrong):
                return len(rows), f"layer {layer}, head {head}, query {rows[wrong[0]]}"
    return len(rows), None
