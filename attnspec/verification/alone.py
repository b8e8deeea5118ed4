"""Modules of files that stand alone, held against what the spec means like all others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from attnspec.backends.dense.backend import Dense
from attnspec.backends.factored.backend import FactoredBackend
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.numbers import SIZE
from attnspec.verification.report import Verification
from attnspec.verification.verify import verify


class Alone(CompiledAttention):
    """A module of another class as one that can be verified: what it learns is this one's, and a
    call is a call of it."""

    def __init__(self, program: Program, kind: type[nn.Module]) -> None:
        graphs = all(attend.mechanism is None for attend in program.attends)
        backend = Dense.name if graphs else FactoredBackend.name
        super().__init__(plan_data(program, backend), SIZE)
        sized = "head_size" in inspect.signature(kind).parameters
        alone = kind(SIZE) if sized else kind()
        for name, parameter in self.named_parameters():
            alone.register_parameter(name, parameter)
        # not a module of this one, whose parameters would be there twice
        self.alone = (alone,)

    def forward(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """A call of the other one."""
        out: torch.Tensor = self.alone[0](*tensors, **options)
        return out


def verify_alone(program: Program, n: int, kind: type[nn.Module]) -> Verification:
    """Compares the class of a file that stands alone with the meaning of its program.

    Raises ValueError as `verify` does.
    """
    return verify(program, n, module=Alone(program, kind))
