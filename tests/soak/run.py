"""One spec from a seed, everything asked of it, and what was found made small."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FrameType

import numpy as np
import torch
from oracle.meaning import masks
from oracle.scalars import Invalid
from oracle.tree import Attention, text
from population import sample_of

import attnspec
from soak.calls import modules
from soak.checks import masks_or_formulas, pairs, parsed
from soak.generator import spec_of
from soak.shrink import shrunk
from soak.trial import Trial, lengths
from soak.verdicts import verdicts


@dataclass(frozen=True)
class Outcome:
    """A spec that was tried and, if anything was found, the smallest that shows the same."""

    trial: Trial
    small: Trial

    def __str__(self) -> str:
        # what took too long may take less when it is tried again
        shown = self.small if self.small.findings else self.trial
        first = shown.findings[0]
        n = "" if first.n is None else f"n = {first.n}: "
        set_ = "".join(f"{key} = {value} " for key, value in shown.spec.overrides)
        return f"{first.check}: {n}{first.message}\n{set_ and 'with ' + set_}\n{text(shown.spec)}"


@lru_cache(maxsize=1)
def knows_stable() -> bool:
    """Whether the package knows the claim `stable`. What `random_blocks` draws under `causal`
    changed with it, so that neither is asked of a package without."""
    try:
        attnspec.parse("attention a { attend self require stable }")
    except attnspec.SpecError:
        return False
    return True


class TooLong(BaseException):
    """A spec took longer than it may."""


def one(
    seed: str,
    without: Set[str] = frozenset(),
    meaning: Callable[..., np.ndarray] = masks,
    seconds: int = 0,
) -> Outcome | None:
    """Everything about the spec of a seed, in so many seconds unless 0; None for one with words
    that are left out."""
    spec = spec_of(seed)
    words = spec.words()
    if not knows_stable():
        spec = replace(spec, claims=tuple(c for c in spec.claims if c.expr.parts[0] != "stable"))
        without = without | {"causal random_blocks"}
    if words & without:
        return None
    trial = tried(spec, seed, meaning, seconds)
    if not trial.findings:
        return Outcome(trial, trial)
    check = trial.findings[0].check

    def fails(smaller: Attention) -> bool:
        found = tried(smaller, seed, meaning, seconds).findings
        return any(each.check == check for each in found)

    return Outcome(trial, tried(shrunk(spec, fails), seed, meaning, seconds))


def tried(
    spec: Attention, seed: str, meaning: Callable[..., np.ndarray] = masks, seconds: int = 0
) -> Trial:
    """Everything asked of one spec, by draws that the seed decides."""
    torch.set_num_threads(1)
    drawn = np.random.default_rng(np.frombuffer(seed.encode(), np.uint8))
    trial = Trial(spec, drawn, meaning=meaning)
    before = signal.signal(signal.SIGALRM, _alarm) if seconds else None
    if seconds:
        signal.alarm(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            _ask(trial)
    except TooLong:
        trial.found("time", f"took more than {seconds} seconds")
    except Exception:
        # nothing of the package: what asks it is caught where it asks
        trial.found("tester", traceback.format_exc(limit=-4))
    finally:
        if seconds:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return trial


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooLong


def _ask(trial: Trial) -> None:
    spec = parsed(trial)
    if spec is None:
        return
    # each part draws for itself, so that leaving a claim out changes nothing else
    part = trial.numbers.integers(2**62, size=4)
    trial.numbers = np.random.default_rng(part[0])
    chosen = lengths(trial.spec, trial.numbers, 300)
    for n in chosen:
        try:
            known = masks_or_formulas(trial.spec, n, sample_of(trial.spec.inputs, n, trial.numbers))
        except Invalid:
            known = np.zeros(0)
        if known is not None:
            trial.numbers = np.random.default_rng([part[1], n])
            pairs(trial, spec, n)
    if trial.spec.claims:
        trial.numbers = np.random.default_rng(part[2])
        verdicts(trial, spec)
    trial.numbers = np.random.default_rng(part[3])
    if trial.numbers.random() < 0.7:
        modules(trial, spec, [n for n in chosen if n <= 130] or chosen[:1])
