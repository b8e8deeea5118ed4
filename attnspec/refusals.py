"""Whether a backend that is asked for by name can run a program at any length."""

from __future__ import annotations

from collections.abc import Sequence

from attnspec.bind import BindError
from attnspec.ir import Program
from attnspec.planning import AUTO, backend_of, candidates
from attnspec.target import BackendError, Work, refusal_of
from attnspec.works import stand_ins, works_of

LENGTHS = (1, 64, 4096)
"""A refusal at lengths as far apart as these does not depend on the length."""

DEVICES = ("cpu", "cuda")
"""The devices that a module may be moved to later."""


def require_willing(program: Program, name: str, devices: Sequence[str] = DEVICES) -> None:
    """Raises BackendError, with every reason, where a backend refuses on all of the devices and at
    all lengths that the program has; unknown backends as well."""
    if name == AUTO:
        if any(attend.mechanism for attend in program.attends):
            _require_any(program)
        return
    backend = backend_of(name)
    lengths = LENGTHS if program.fixed_length is None else (program.fixed_length,)
    works = [found for n in lengths if (found := _works(program, n))]
    if len(works) < min(2, len(lengths)):
        # one length says nothing of the others
        return
    reasons: dict[str, str] = {}
    for device in devices:
        for at_length in works:
            refusals = (refusal_of(backend, work, device) for work in at_length)
            refusal = next((each for each in refusals if each is not None), None)
            if refusal is None:
                return
            # of the longest sequence, which is the most like those that are meant
            reasons[device] = refusal
    if reasons:
        distinct = dict.fromkeys(reasons.values())
        told = [*distinct] if len(distinct) == 1 else [f"on {d}, {r}" for d, r in reasons.items()]
        raise BackendError(f"the backend {name} refuses: {'; '.join(told)}")


def _require_any(program: Program) -> None:
    """Raises BackendError where no backend runs something of a program, at any length."""
    lengths = LENGTHS if program.fixed_length is None else (program.fixed_length,)
    refused: BackendError | None = None
    for n in lengths:
        try:
            found = [candidates(work, "cpu") for work in _works(program, n)]
        except BackendError as error:
            refused = error
        else:
            if found:
                return
    if refused is not None:
        raise refused


def _works(program: Program, n: int) -> list[Work]:
    """What all layers and heads compute at n positions; nothing where the program has no such n."""
    inputs = stand_ins(program)
    try:
        return [
            work
            for layer in range(program.layers or 1)
            for work, _ in works_of(program, layer, program.heads or 1, n, n, inputs)
        ]
    except BindError:
        return []
