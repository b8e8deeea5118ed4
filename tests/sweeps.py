"""Sweeps of which a part is run by default and the whole by `make slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def few(cases: Iterable[Any], kept: int | Collection[Any] = 2) -> Collection[Any]:
    """Of cases that say much the same one in so many, or those that are named; the rest is slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow]
            * (at % kept > 0 if isinstance(kept, int) else case not in kept),
        )
        for at, case in enumerate(cases)
    ]


def checkered(*axes: Iterable[Any], of: int = 2) -> Collection[Any]:
    """All combinations, as the fields of a chessboard: those whose numbers add up to an odd one, or
    to no multiple of so many, are slow. Each value of an axis with as many stays; of three axes
    with several values each pair stays, too."""
    return [
        pytest.param(
            *(value for _, value in each),
            marks=pytest.mark.slow if sum(at for at, _ in each) % of else (),
        )
        for each in product(*map(enumerate, axes))
    ]
