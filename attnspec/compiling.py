"""From a spec to a module, in this process or as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnspec._version import __version__
from attnspec.backends import BACKENDS
from attnspec.data import plan_data
from attnspec.diagnostics import AttnSpecError, InternalError
from attnspec.emit import emit
from attnspec.figures import degree, density, total_edges
from attnspec.ir import Program
from attnspec.planning import AUTO
from attnspec.runtime import CompiledAttention
from attnspec.stack import Stack
from attnspec.verification import verify

if TYPE_CHECKING:
    from attnspec.spec import Spec

TOLD = 1024
"""The length whose figures stand in a module's docstring, where the spec has it."""

VERIFIED = 65
"""The length at which every module is verified before it is written, where the spec has it."""

LONGEST = 1024
"""A spec that has one length only is verified if it is no longer than this."""


def compile_program(
    program: Program, backend: str = "auto", device: str | torch.device | None = None
) -> CompiledAttention:
    """The module of a program, on a device.

    Raises BackendError for a backend that is unknown or refuses what it is asked by name to run.
    """
    module = CompiledAttention(plan_data(program, backend))
    return module if device is None else module.to(device)


def emit_spec(spec: Spec, *, standalone: bool = False, backend: str = "auto") -> str:
    """The text of a spec's module, verified at a small length before it is returned."""
    return emit(
        spec.program,
        text=spec.source,
        fingerprint=spec.fingerprint,
        version=__version__,
        facts=[*_figures(spec), _verified(spec, backend)],
        backend=backend,
        standalone=standalone,
    )


def _figures(spec: Spec) -> list[str]:
    """What the graph costs at one length, in a line, where it is known before run time."""
    stack = Stack(spec)
    if stack.unknown:
        return [f"Pairs are known at run time: {stack.unknown}."]
    lengths = stack.lengths((TOLD,))
    if not lengths:
        return []
    n = lengths[0]
    edges = total_edges(stack, n)
    return [
        f"At n = {n:,}: {edges:,} pairs, {100 * density(stack, n):.3g} % of all,"
        f" at most {degree(stack, n):,} keys a query."
    ]


def _verified(spec: Spec, backend: str) -> str:
    """Verify the module at a small length; a fault is a defect of the compiler."""
    fixed = Stack(spec).fixed_length()
    n = VERIFIED if fixed is None else fixed
    if n > LONGEST:
        return f"Not verified when it was compiled: it has one length, {n:,}."
    tried: list[str] = []
    refused = ""
    # at a small length the cheapest is the definition itself, so every backend is tried
    for name in [each.name for each in BACKENDS] if backend == AUTO else [backend]:
        try:
            found = verify(spec.program, n, backend=name)
        except (AttnSpecError, ValueError) as error:
            refused = str(error)
            continue
        if not found.ok:
            raise InternalError(f"the compiled module differs from the spec:\n{found}")
        tried.append(name)
    if not tried:
        return f"Not verified when it was compiled: {refused}."
    by = f"by the backend{'s' if len(tried) > 1 else ''} {', '.join(tried)}"
    return f"Verified at n = {n} when it was compiled, {by}: every pair, values and gradients."
