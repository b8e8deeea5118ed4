"""The package held against the meaning: one spec, everything that can be asked of it.

A refusal is no finding where the meaning refuses too, or where the language allows it; it is
counted by its words. Whatever else is raised is one, and so is whatever differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import truth
from oracle.meaning import masks, slot
from oracle.scalars import Invalid
from oracle.tree import Attention, Claim, text
from population import sample_of
from views import FIGURES, PAIRS, Case, differing

import attnspec
from attnspec.spec import Spec
from soak.trial import Trial, has_mechanism, lengths

# --- text --------------------------------------------------------------------------------------


def parsed(trial: Trial) -> Spec | None:
    """The spec as the package reads it; None where it is refused, as it must be then."""
    written = text(trial.spec)
    try:
        spec = attnspec.parse(written, parameters=dict(trial.spec.overrides))
    except attnspec.SpecError as error:
        trial.checks["parse"] += 1
        if not _meaningless(trial.spec):
            trial.found("parse", f"refused what has a meaning: {error}")
        trial.refused("parse", error)
        return None
    except Exception as error:
        trial.crashed("parse", error)
        return None
    try:
        _slots(trial.spec)
    except Invalid as error:
        trial.found("parse", f"took what has no meaning: {error}")
        return None
    # each text is parsed once more, half of the time
    if trial.numbers.random() < 0.5:
        return spec
    again = attnspec.parse(spec.source)
    trial.same(
        "source", again == spec and again.source == spec.source, f"not itself:\n{spec.source}"
    )
    trial.same("fingerprint", again.fingerprint == spec.fingerprint, "another fingerprint")
    return spec


def _slots(spec: Attention) -> None:
    for layer in range(spec.layers or 1):
        for head in range(spec.heads or 1):
            slot(spec, layer, head)


def _meaningless(spec: Attention) -> bool:
    """Whether no length gives the spec, or a claim of it, a meaning."""
    numbers = np.random.default_rng(0)
    alive = False
    for n in [*lengths(spec, numbers, 60), 36, 5, 1]:
        try:
            _slots(spec)
            masks_or_formulas(spec, n, sample_of(spec.inputs, n, numbers))
            alive = True
        except Invalid:
            continue
    if not alive:
        return True
    return any(_claim_meaningless(spec, claim) for claim in spec.claims)


def _claim_meaningless(spec: Attention, claim: Claim) -> bool:
    for n in claim.at or (1, 2, 5, 36, 64):
        try:
            truth.holds(spec, claim, n, sample_of(spec.inputs, n, np.random.default_rng(0)))
            return False
        except Invalid:
            continue
    return True


def masks_or_formulas(spec: Attention, n: int, sample: dict[str, Any]) -> np.ndarray | None:
    """The masks, None where some head has a mechanism alone; `Invalid` at a length without."""
    if has_mechanism(spec):
        kinds = {each.nodes[0].kind for each in spec.statements() if each.kind == "attend"}
        if "mechanism" in kinds:
            return None
    return masks(spec, n, sample)


# --- pairs and figures -------------------------------------------------------------------------


def pairs(trial: Trial, spec: Spec, n: int) -> None:
    """Masks, adjacencies and, of what has no mechanism, figures at one length."""
    case = Case(spec, n, trial.spec)
    try:
        # by what the trial holds for the meaning
        case.__dict__["masks"] = trial.meaning(trial.spec, n, case.inputs)
    except Invalid as error:
        _must_refuse(trial, spec, n, case.inputs, error)
        return
    views = dict(PAIRS)
    if n and not has_mechanism(trial.spec) and trial.numbers.random() < 0.4:
        views |= {name: view for name, view in FIGURES.items() if name != "verdicts"}
    for name, view in views.items():
        try:
            faults = differing(case, {name: view})
        except Exception as error:
            trial.crashed(name, error, n)
            return
        trial.same(name, not faults, "; ".join(faults), n)


def _must_refuse(trial: Trial, spec: Spec, n: int, sample: dict[str, Any], reason: Invalid) -> None:
    refusals = 0
    for layer, head in np.ndindex(trial.spec.layers or 1, trial.spec.heads or 1):
        try:
            spec.mask(n, layer, head, sample)
        except ValueError as error:
            refusals += 1
            trial.refused("mask", error)
        except Exception as error:
            trial.crashed("mask", error, n)
            return
    trial.same("refusal", refusals > 0, f"took what has no meaning: {reason}", n)
