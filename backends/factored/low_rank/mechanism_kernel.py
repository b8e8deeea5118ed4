"""What kernels of one mechanism each are built of."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import torch

from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.lower.work import Work

Declared = TypeVar("Declared", bound=MechanismDeclaration)


class MechanismKernel(Generic[Declared]):
    """Runs a mechanism as it is declared, with the causal form or not."""

    def __init__(self, work: Work, heads: tuple[int, ...], device: torch.device) -> None:
        self.declared, self.causal = cast(Declared, work.mechanism), work.causal
