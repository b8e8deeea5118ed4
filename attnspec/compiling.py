"""From a spec to a module, in this process or as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from attnspec._version import __version__
from attnspec.analysis.edges import total_edges
from attnspec.backends import BACKENDS
from attnspec.bind import BindError
from attnspec.data import plan_data
from attnspec.declared import longest_of
from attnspec.diagnostics import AttnSpecError, InternalError
from attnspec.emit import emit
from attnspec.figures import degree, density
from attnspec.given import device_of
from attnspec.ir import Program
from attnspec.planning import AUTO
from attnspec.plugins import owner_of
from attnspec.refusals import require_willing
from attnspec.runtime import CompiledAttention
from attnspec.stack import Stack
from attnspec.target import BackendError
from attnspec.verification import EXHAUSTIVE, Verification, verify, verify_pairs

if TYPE_CHECKING:
    from attnspec.spec import Spec

TOLD = 1024
"""The length whose figures stand in a module's docstring, where the spec has it."""

VERIFIED = 65
"""The length at which every module is verified before it is written, where the spec has it."""

TILED = 193
"""The length at which the pairs of every module are verified, too: bands have several tiles there,
and none of the usual sizes divides it."""

ACCELERATORS = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
"""What else a machine may have, with the module that says so."""

OWN = tuple(backend.name for backend in BACKENDS)
"""The backends of this package, which every module of a spec is verified with."""

LONGEST = 1024
"""A spec that has one length only is verified by its values if it is no longer than this, else by
its pairs."""


def compile_program(
    program: Program,
    backend: str = "auto",
    device: str | torch.device | None = None,
    head_size: int | None = None,
) -> CompiledAttention:
    """The module of a program, on a device, with parameters for heads of a size.

    Raises BackendError for a backend that is unknown or refuses the program at every length,
    AttnSpecError for a device that is not there.
    """
    if device is None:
        require_willing(program, backend)
        return CompiledAttention(plan_data(program, backend), head_size)
    place = usable(device)
    require_willing(program, backend, (place.type,))
    return CompiledAttention(plan_data(program, backend), head_size).to(place)


def usable(device: str | torch.device) -> torch.device:
    """The device, if tensors can be put on it; raises AttnSpecError otherwise."""
    place = torch.device(device_of(device))
    try:
        torch.empty(0, device=place)
    # a build without the device raises AssertionError, a machine without it RuntimeError
    except (AssertionError, RuntimeError) as error:
        there = ["cpu", *(name for name, home in ACCELERATORS.items() if home.is_available())]
        raise AttnSpecError(
            f"the device must be one that is here, {', '.join(there)}, got {str(place)!r}:"
            f" {str(error).partition('. ')[0]:.100}"
        ) from None
    return place


def emit_spec(spec: Spec, *, standalone: bool = False, backend: str = "auto") -> str:
    """The text of a spec's module, verified at two small lengths before it is returned.

    Raises BackendError for a backend that refuses the spec at every length, or that a module that
    stands alone cannot hold.
    """
    require_willing(spec.program, backend)
    if standalone and backend != AUTO and backend not in OWN:
        raise BackendError(
            f"a standalone module holds the backends of attnspec alone, {', '.join(OWN)},"
            f" and {backend} is of {owner_of(backend)}"
        )
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
        return [f"How many pairs it has is not said here: {stack.unknown}."]
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
    """Verify the module at small lengths; a fault is a defect of the compiler."""
    fixed = spec.program.fixed_length
    longest = longest_of(spec.program)
    n = min(VERIFIED, longest or VERIFIED) if fixed is None else fixed
    # at a small length the cheapest is the definition itself, so every backend is tried
    # (those of this package, so that the same spec gives the same text wherever it is compiled)
    names = OWN if backend == AUTO else (backend,)
    programs = _by_kind(spec.program)
    if n > LONGEST:
        held = _pairs_verified(programs, names, n) if n <= EXHAUSTIVE else []
        if not held:
            return f"Not verified when it was compiled: it has one length, {n:,}."
        return (
            f"Verified at n = {n:,}, its one length, when it was compiled, every pair of"
            f" {', '.join(held)}; no values."
        )
    tried: list[str] = []
    few: list[str] = []
    refused = ""
    for program, name in product(programs, names):
        try:
            found = verify(program, n, backend=name)
        except (BackendError, BindError) as error:
            refused = str(error)
            continue
        _require_ok(found, name)
        (tried if found.exhaustive else few).append(name)
    told = [
        f"by the backend{'s' if len(those) > 1 else ''} {', '.join(those)}{what}"
        for those, what in (
            (tried, ": every pair, values and gradients"),
            (few, ": the same of the last queries"),
        )
        if those
    ]
    if not told:
        return f"Not verified when it was compiled: {refused}."
    if fixed is None:
        held = _pairs_verified(programs, tried, TILED)
        if held:
            told.append(f"at n = {TILED} every pair of {', '.join(held)}")
    apart = ", graphs and mechanisms apart" if len(programs) > 1 else ""
    return f"Verified at n = {n} when it was compiled{apart}, {'; '.join(told)}."


def _by_kind(program: Program) -> tuple[Program, ...]:
    """The program, where its heads are all graphs or all mechanisms; else one of each kind, the
    heads of the other kind doing what the first of this kind does.

    No backend runs both kinds, and each is to be verified with every backend that runs it.
    """
    graphs = [attend for attend in program.attends if attend.mechanism is None]
    formulas = [attend for attend in program.attends if attend.mechanism is not None]
    if not graphs or not formulas:
        return (program,)
    return tuple(
        replace(
            program,
            attends=tuple(each if each in kind else kind[0] for each in program.attends),
        )
        for kind in (graphs, formulas)
    )


def _pairs_verified(programs: Sequence[Program], names: Sequence[str], n: int) -> list[str]:
    """Verify the pairs that backends hold; those that hold any and do not refuse."""
    held = []
    for program, name in product(programs, names):
        try:
            found = verify_pairs(program, n, backend=name)
        except (BackendError, BindError):
            # what it does at this length it is not asked for
            continue
        _require_ok(found, name)
        if found.checks and found.exhaustive:
            held.append(name)
    return held


def _require_ok(found: Verification, name: str) -> None:
    """Raise an error if there is a fault in what a backend does."""
    if not found.ok and name not in OWN:
        raise BackendError(
            f"the backend {name} of {owner_of(name)} computes something else than the spec:"
            f"\n{found}"
        )
    if not found.ok:
        raise InternalError(f"the compiled module differs from the spec:\n{found}")
