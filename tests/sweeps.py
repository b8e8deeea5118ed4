"""Sweeps over several things, of which a half is run by default and the whole by `make slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def checkered(*axes: Iterable[Any]) -> Collection[Any]:
    """All combinations, as the fields of a chessboard: those whose numbers add up to an odd one are
    slow. Each value of an axis stays; of three axes with several values each pair stays, too."""
    return [
        pytest.param(
            *(value for _, value in each),
            marks=pytest.mark.slow if sum(at for at, _ in each) % 2 else (),
        )
        for each in product(*map(enumerate, axes))
    ]


def in_turn(many: Iterable[Any], few: Sequence[Any]) -> list[Any]:
    """Each of many values with each of a few: in every run with one of them in turn, so that each
    value of both is tried, and with the others among the slow tests."""
    return [
        pytest.param(one, other, marks=() if at % len(few) == place else pytest.mark.slow)
        for at, one in enumerate(many)
        for place, other in enumerate(few)
    ]
