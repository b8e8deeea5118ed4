"""Verdicts on claims, against brute force at the lengths that they speak of."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import truth
from oracle.scalars import Invalid
from oracle.tree import Attention, Claim
from population import sample_of

from attnspec.spec import Spec
from soak.trial import Trial, has_mechanism, plain, shown

LENGTHS = (1, 2, 64, 257)
"""Where claims about every n are looked at, as far as the package does and brute force can."""


def verdicts(trial: Trial, spec: Spec) -> None:
    """Each verdict against brute force, at the lengths it speaks of."""
    try:
        found = spec.verdicts
        if trial.numbers.random() < 0.05:
            spec.check()
    except Exception as error:
        trial.crashed("check", error)
        return
    for claim, verdict in zip(trial.spec.claims, found, strict=True):
        trial.checks[f"claim {verdict.status}"] += 1
        said = f"`{verdict.claim.text}` {verdict.status}"
        if verdict.status == "unchecked" or (verdict.status == "checked" and not verdict.lengths):
            trial.refusals[f"claim: {plain(verdict.diagnostics[0].message)}"] += 1
        elif verdict.status == "refuted":
            _refuted(trial, claim, verdict, said)
        else:
            at = verdict.lengths if verdict.status == "checked" else (*claim.at, 3, 7, 12, 20)
            _holds(trial, claim, at, said)


def _refuted(trial: Trial, claim: Claim, verdict: Any, said: str) -> None:
    n = verdict.failed_at
    if n is None:
        first = verdict.diagnostics[0]
        trial.refusals[f"claim: {first.code} {plain(first.message)}"] += 1
        if not _claim_invalid(trial.spec, claim) and not has_mechanism(trial.spec):
            trial.found("claim", f"{said}, {first.message}")
        return
    if n > LENGTHS[-1] or trial.spec.inputs or has_mechanism(trial.spec):
        return
    try:
        ok = not truth.holds(trial.spec, claim, n)
    except Invalid:
        return
    trial.same("claim", ok, f"{said} at n = {n}, where it holds", n)
    _holds(trial, claim, [m for m in verdict.lengths if m < n], f"{said} at n = {n} first")


def _claim_invalid(spec: Attention, claim: Claim) -> bool:
    for n in claim.at or (1, 2, 64, 257):
        try:
            truth.holds(spec, claim, n, sample_of(spec.inputs, n, np.random.default_rng(0)))
        except Invalid:
            return True
    return False


def _holds(trial: Trial, claim: Claim, at: Any, said: str) -> None:
    if has_mechanism(trial.spec) and claim.expr.kind not in ("subset", "same"):
        return
    for n in at:
        if n > LENGTHS[-1] or n == 0:
            continue
        sample = sample_of(trial.spec.inputs, n, trial.numbers)
        try:
            ok = truth.holds(trial.spec, claim, n, sample)
        except Invalid:
            continue
        trial.same("claim", ok, f"{said}, but at n = {n} it does not hold {shown(sample)}", n)
