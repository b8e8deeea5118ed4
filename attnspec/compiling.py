"""From a program to a module, in this process or as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnspec.ir import Program
from attnspec.runtime import FORMAT, CompiledAttention

if TYPE_CHECKING:
    from attnspec.data import Plain


def plan_data(program: Program, backend: str) -> dict[str, Plain]:
    """What a compiled attention is built from: plain data, as it stands in an emitted module."""
    from attnspec.data import to_data

    return {"format": FORMAT, "backend": backend, "program": to_data(program)}


def compile_program(
    program: Program, backend: str = "auto", device: str | torch.device | None = None
) -> CompiledAttention:
    """The module of a program, on a device.

    Raises BackendError for a backend that is unknown or refuses what it is asked by name to run.
    """
    module = CompiledAttention(plan_data(program, backend))
    return module if device is None else module.to(device)
