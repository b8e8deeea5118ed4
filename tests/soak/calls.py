"""Modules held against the definition: outputs, gradients, steps, the emitted text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from oracle.scalars import Invalid
from views import SHAPES, Call, Case, check, errors_of, step_errors, written

from attnspec.spec import Spec
from soak.trial import Trial, has_mechanism

FORMULAS = ("auto", "factored")
GRAPHS = ("auto", "auto", "dense", "tiles", "bands", "rows", "scattered")
"""Backends for specs with mechanisms and without; `auto` twice, for it is what is used."""


def modules(trial: Trial, spec: Spec, chosen: list[int]) -> None:
    """Calls of a backend at some lengths, steps, and the emitted class."""
    draw = trial.numbers
    backend = str(draw.choice(FORMULAS if has_mechanism(trial.spec) else GRAPHS))
    for n in chosen:
        shape = str(draw.choice(SHAPES))
        layer = int(draw.integers(trial.spec.layers)) if trial.spec.layers else 0
        # what relu divides by comes near 0, and 1 + cos is a difference: in a narrow type neither
        # is comparable to the roundings of the definition
        exact = bool({"relu", "taylor"} & trial.spec.words()) or draw.random() < 0.5
        call = Call(Case(spec, n, trial.spec), shape, (torch.float32, torch.float64)[exact], layer)
        _ask(trial, f"call of {backend}, {shape}", n, partial(check, call, backend))
        if trial.findings:
            return
    if backend != "auto" or not chosen or not chosen[-1]:
        return
    call = Call(Case(spec, chosen[-1], trial.spec), str(draw.choice(SHAPES[::4])), torch.float64)
    if trial.spec.causal:
        _ask(trial, "steps", chosen[-1], lambda: step_errors(call))
    if draw.random() < 0.05:
        module = written(spec, standalone=bool(draw.random() < 0.5))
        _ask(trial, "written module", chosen[-1], lambda: errors_of(call, module))


def _ask(trial: Trial, what: str, n: int, ask: Callable[[], list[str] | None]) -> None:
    try:
        faults = ask()
    except Invalid as error:
        # the module was asked first, and took it
        trial.found(what, f"took what has no meaning: {error}", n)
    except ValueError as error:
        trial.refused(what.split(" of ")[0], error)
    except Exception as error:
        trial.crashed(what, error, n)
    else:
        trial.same(what.split(" of ")[0], not faults, "; ".join(faults or ()), n)
