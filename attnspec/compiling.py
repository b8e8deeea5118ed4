"""From a program to a module, in this process or as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec._version import __version__
from attnspec.data import plan_data
from attnspec.diagnostics import AttnSpecError
from attnspec.emit import emit
from attnspec.ir import Program
from attnspec.planning import check_backend

if TYPE_CHECKING:
    import torch

    from attnspec.runtime import CompiledAttention
    from attnspec.spec import Spec

SHOWN_LENGTH = 1024
"""The length at which the docstring of a module counts edges, where the spec has no length of its
own."""


def compile_program(
    program: Program, backend: str = "auto", device: str | torch.device | None = None
) -> CompiledAttention:
    """The module of a program, on a device.

    Raises BackendError for a backend that is unknown.
    """
    from attnspec.runtime import CompiledAttention

    module = CompiledAttention(plan_data(program, backend))
    return module if device is None else module.to(device)


def emit_spec(spec: Spec, standalone: bool = False, backend: str = "auto") -> str:
    """The text of the module of a spec, with its figures in short.

    Raises BackendError for a backend that is unknown.
    """
    check_backend(backend)
    return emit(
        spec.program,
        text=spec.source,
        fingerprint=spec.fingerprint,
        version=__version__,
        facts=facts(spec),
        backend=backend,
        standalone=standalone,
    )


def facts(spec: Spec) -> list[str]:
    """The analysis in short: lines for the docstring."""
    from attnspec.figures import degree, density, total_edges
    from attnspec.stack import Stack

    stack = Stack(spec)
    if stack.unknown is not None:
        return [f"No pairs can be counted: {stack.unknown}."]
    found = []
    try:
        for n in stack.lengths((SHOWN_LENGTH,)):
            edges, share = total_edges(stack, n), density(stack, n)
            found.append(
                f"At n = {n:,}: {edges:,} pairs in all ({100 * share:.3g} % of the dense ones),"
                f" at most {degree(stack, n):,} keys for a query."
            )
    except AttnSpecError as error:
        found.append(f"No pairs are counted: {str(error).partition(chr(10))[0]}.")
    return found
