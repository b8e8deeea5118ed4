"""One spec under test: what was asked of the package, what it refused, and what was found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle.meaning import masks
from oracle.tree import Attention

import attnspec


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: what was asked, at which length, and what came of it."""

    check: str
    message: str
    n: int | None = None


@dataclass
class Trial:
    """One spec under test, with what was asked and found."""

    spec: Attention
    numbers: np.random.Generator
    checks: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    meaning: Callable[..., np.ndarray] = masks

    def found(self, check: str, message: str, n: int | None = None) -> None:
        self.findings.append(Finding(check, message, n))

    def same(self, check: str, ok: bool, message: str, n: int | None = None) -> None:
        self.checks[check] += 1
        if not ok:
            self.found(check, message, n)

    def refused(self, check: str, error: Exception) -> None:
        self.refusals[f"{check}: {kind_of(error)}"] += 1

    def crashed(self, check: str, error: BaseException, n: int | None = None) -> None:
        self.found(check, f"{type(error).__name__}: {str(error)[:400]}", n)


def kind_of(error: Exception) -> str:
    """What a refusal says, without the numbers and names in it."""
    if isinstance(error, attnspec.SpecError):
        first = error.diagnostics[0]
        return f"{first.code} {plain(first.message)}"
    return f"{type(error).__name__} {plain(str(error))}"


def plain(message: str) -> str:
    words = re.sub(r"`[^`]*`", "`…`", message.splitlines()[0] if message else "")
    return re.sub(r"-?\d[\d.,]*", "0", words)[:110]


def lengths(spec: Attention, numbers: np.random.Generator, most: int) -> list[int]:
    """Some lengths: mostly short ones, now and then longer ones; those of a constant grid."""
    if spec.grid and all(each.kind == "number" for each in spec.grid):
        cells = 1
        for each in spec.grid:
            cells *= int(each.parts[0])  # type: ignore[arg-type]
        return [cells + spec.extra_tokens]
    least = 6 if spec.grid else 0
    found = {int(numbers.integers(least, 41 if numbers.random() < 0.5 else 17))}
    if numbers.random() < 0.3:
        found.add(int(numbers.integers(least + 1, 25)))
    if numbers.random() < 0.06:
        found.add(int(numbers.integers(41, most)))
    width = int(spec.grid[0].parts[0]) if spec.grid else 1  # type: ignore[arg-type]
    return sorted(n // width * width + spec.extra_tokens * bool(spec.grid) for n in found)


def has_mechanism(spec: Attention) -> bool:
    return any(each.kind == "mechanism" for top in spec.statements() for each in top.walk())


def shown(sample: dict[str, Any]) -> str:
    return str({key: np.asarray(value).tolist() for key, value in sample.items()})[:300]
