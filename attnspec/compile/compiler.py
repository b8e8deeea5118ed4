"""From a spec to a module, in this process or as text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnspec.analysis.counting.degrees import total_edges
from attnspec.analysis.counting.figures import degree, density
from attnspec.analysis.reach.leaks import looks_ahead
from attnspec.backends import BACKENDS
from attnspec.backends.planner import AUTO, DEVICES, OWN, require_willing
from attnspec.backends.plugins import owner_of
from attnspec.check.lints import ahead_of
from attnspec.compile.emit import class_name, emit
from attnspec.graphs.bind import BindError
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.lower.lower import device_of
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.lower.work import BackendError
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError, InternalError
from attnspec.verification.alone import Alone, beyond, mask_alone
from attnspec.verification.report import Verification
from attnspec.verification.trial import Depth
from attnspec.verification.verify import verify

if TYPE_CHECKING:
    from attnspec.elaborate import Elaborated

TOLD = 1024
"""The length whose figures stand in a module's docstring, where the spec has it."""

VERIFIED = 65
"""The length at which every module is verified before it is written, where the spec has it."""

TILED = 193
"""The length at which the pairs of every module are verified, too: bands have several tiles there,
and none of the usual sizes divides it."""

WHOLE = 257
"""A spec that has one length only is verified in full up to this length, else by its
pairs and by the values of some queries."""

LONGEST = 1024
"""No values are examined where its one length is longer than this."""

WHAT = {
    "whole": "every pair, values and gradients",
    "pairs": "every pair",
    "values": f"values and gradients of {LIMITS.queries_sampled} queries",
    "some": f"the pairs of {LIMITS.queries_sampled} queries",
}
"""What is verified."""


def compile_program(
    program: Program,
    backend: str,
    device: str | torch.device | None,
    head_size: int | None,
) -> CompiledAttention:
    """The module of a program, on a device, with parameters for heads of a size.

    Raises BackendError for a backend that is unknown or refuses the program at every length,
    AttnSpecError for a device that is not there.
    """
    ahead = looks_ahead(program)
    if ahead is not None:
        lint = ahead_of(program, ahead)
        warnings.warn(f"{lint.code}: `{program.name}`: {lint.message}", stacklevel=3)
    place = None
    if device is not None:
        place = torch.device(device_of(device))
        try:
            torch.empty(0, device=place)
        # a build without the device raises AssertionError, a machine without it RuntimeError
        except (AssertionError, RuntimeError) as error:
            other = torch.accelerator.current_accelerator(check_available=True)
            there = "cpu" if other is None else f"cpu, {other.type}"
            raise AttnSpecError(
                f"the device must be available on this machine ({there}), got {str(place)!r}:"
                f" {str(error).partition('. ')[0]:.100}"
            ) from None
    require_willing(program, backend, DEVICES if place is None else (place.type,))
    module = CompiledAttention(plan_data(program, backend), head_size)
    return module if place is None else module.to(place)


def emit_spec(spec: Elaborated, *, standalone: bool, backend: str) -> str:
    """The text of a spec's module, verified at two small lengths before it is returned.

    Raises BackendError for a backend that refuses the spec at every length, or is asked for in a
    module that stands alone; StandaloneError for a spec that no such module says.
    """
    program = spec.program
    if not standalone:
        require_willing(program, backend)
        return emit(spec, [*_figures(program), _verified(program, backend)], backend)
    if backend != AUTO:
        raise BackendError(
            f"a standalone module has no backends, got {backend!r}: leave out --backend, or"
            " --standalone"
        )
    # what its parts are written with loads all of torch.compile
    from attnspec.compile.standalone import standalone_module

    body = standalone_module(program, class_name(program.name))
    return emit(spec, [*_figures(program), _verified_alone(program, body)], backend, body)


def _verified_alone(program: Program, body: str) -> str:
    """Verify the text of a module that stands alone, by running it."""
    space: dict[str, Any] = {"__name__": "standalone"}
    exec(compile(body, "standalone", "exec", dont_inherit=True), space)
    n, lines = _small(program), list[str]()
    if n <= LONGEST:
        try:
            found = verify(program, n, module=Alone(program, space[class_name(program.name)]))
        except BindError as error:
            return _words([], str(error))
        _require_ok(found)
        lines.append(f"at n = {n:,} {WHAT['whole']}")
    far = program.fixed_length or max(TILED, beyond(program))
    if "mask_mod_of" in space and (far > n or not lines):
        try:
            queries, fault = mask_alone(program, far, space["mask_mod_of"])
        except (AttnSpecError, ValueError):
            # a length that the spec does not have, or that is refused by the file
            return _words(lines, f"it has no mask at n = {far:,}")
        if fault is not None:
            raise InternalError(f"the mask differs from the spec at n = {far}: {fault}")
        lines.append(f"at n = {far:,} the pairs of {queries:,} queries")
    return _words(lines, f"it has one length, {n:,}")


def _small(program: Program) -> int:
    """The length at which a module is verified."""
    fixed = program.fixed_length
    return min(VERIFIED, longest_of(program) or VERIFIED) if fixed is None else fixed


def _figures(program: Program) -> list[str]:
    """What the graph costs at one length, in a line, where it is known before run time."""
    stack = Stack(program)
    if stack.unknown:
        return [f"How many pairs it has is not said here: {stack.unknown}."]
    return [
        f"At n = {n:,}: {total_edges(stack, n):,} pairs, {100 * density(stack.bound(n), n):.3g} %"
        f" of all, at most {degree(stack.bound(n), n):,} keys a query."
        for n in stack.lengths((TOLD,))
    ]


def _verified(program: Program, backend: str) -> str:
    """Verify the module at small lengths, one of a long length by its pairs and as many values as
    is quick; a fault is a defect of the compiler."""
    n, lines = _small(program), list[str]()
    # at a small length the cheapest is the definition itself, so every backend is tried
    # (those of this package, so that the same spec gives the same text wherever it is compiled)
    names = OWN if backend == AUTO else (backend,)
    refused = list[str]()
    # no backend runs both graphs and mechanisms, and each kind is to be verified with every backend
    # that runs it: heads of the other kind do what the first of this kind does
    attends = program.attends
    kinds = [[x for x in attends if (x.mechanism is None) is graph] for graph in (True, False)]
    programs = [
        replace(program, attends=tuple(x if x in kind else kind[0] for x in attends))
        for kind in kinds
        if kind
    ]
    trials: list[tuple[int, Depth]] = [(n, "whole")]
    if n > WHOLE:
        longest: dict[Depth, int] = {"pairs": LIMITS.every_pair, "values": LONGEST}
        trials = [(n, depth) for depth, most in longest.items() if n <= most]
    elif program.fixed_length is None:
        trials.append((TILED, "pairs"))
    for length, depth in trials:
        backends, every = dict[str, None](), True
        for each in programs:
            try:
                found = verify(each, length, names, depth=depth)
            except (BackendError, BindError, TooMuch) as error:
                # what it does at this length it is not asked for
                refused.append(str(error))
                continue
            _require_ok(found)
            backends |= dict.fromkeys(check.backend for check in found.checks)
            every &= found.exhaustive
        what = WHAT[depth if every else "some" if depth == "pairs" else "values"]
        lines += [f"at n = {length:,} {what} of {', '.join(backends)}"] if backends else []
    refused.append(f"it has one length, {n:,}")
    return _words(lines, refused[0], ", graphs and mechanisms apart" if len(programs) > 1 else "")


def _words(lines: Sequence[str], refused: str, apart: str = "") -> str:
    """What was verified, or why nothing was."""
    if not lines:
        return f"Not verified when it was compiled: {refused}."
    return f"Verified when it was compiled{apart}: {'; '.join(lines)}."


def _require_ok(found: Verification) -> None:
    """Raise an error if there is a fault in what a backend does."""
    names = {check.backend for check in found.faults}
    if names & {AUTO, *(backend.name for backend in BACKENDS)}:
        raise InternalError(f"the compiled module differs from the spec:\n{found}")
    for name in names:
        raise BackendError(
            f"the backend {name} of {owner_of(name)} computes something else than the spec:"
            f"\n{found}"
        )
