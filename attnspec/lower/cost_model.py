"""What each unit of work is estimated to cost: the rates of the cost model.

A backend says how much of what a work takes: calls, pairs of tiles, tokens put in order. Its
estimate is the sum of these amounts, each times its rate. The rates that ship were measured on one
machine; `attnspec calibrate` measures them on another and writes a file, which is read once, when
the first estimate is made.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeAlias

from attnspec.lower.work import Work

FORMAT = 1
"""Of the file."""

VARIABLE = "ATTNSPEC_RATES"
"""The environment variable that names another file; empty, no file is read."""

LARGEST = 1 << 16
"""Bytes of a file that are read at most; it has about two thousand."""

Amounts: TypeAlias = Mapping[str, float]
"""How much of what a work takes, by the names of `Rates`."""


SHARED = frozenset({"dense_call", "torch_call", "tiles_call", "bands_step"})
"""What is done once for all samples and heads."""


@dataclass(frozen=True)
class Rates:
    """Seconds for a unit of each kind of work, for one head of size 64 in float32, forward.

    The defaults were measured with two threads.
    """

    dense_call: float = 2e-5
    """A call of the definition."""

    dense_pair: float = 6e-9
    """A pair: scores, mask, softmax and sum of values, one after the other."""

    torch_call: float = 2e-5
    """A call of torch's own attention."""

    torch_pair: float = 1.7e-9
    """A pair that it looks at."""

    torch_masked: float = 0.1e-9
    """What a pair costs more where a mask is added."""

    tiles_call: float = 3e-5
    """A call."""

    tiles_row: float = 2e-6
    """A query tile: its share of calls, gathers and copies."""

    tiles_pair_32: float = 9e-9
    """A pair of a tile of 32 queries and 32 keys."""

    tiles_pair_64: float = 7.5e-9
    """A pair of a tile of 64 queries and 64 keys."""

    tiles_pair_128: float = 6.5e-9
    """A pair of a tile of 128 queries and 128 keys."""

    tiles_masked: float = 0.4e-9
    """What a pair costs more in a tile that needs a mask of its own."""

    bands_step: float = 2e-5
    """A step: its calls."""

    bands_row: float = 2e-7
    """A query tile of a step."""

    bands_query: float = 5e-8
    """A query of a step, whatever it reads."""

    bands_pair: float = 2.2e-9
    """A pair of a tile."""

    bands_masked: float = 0.2e-9
    """What a pair costs more in a tile with a mask."""

    bands_gather: float = 2e-8
    """A key of a query tile whose key tiles do not follow one another."""

    bands_reorder: float = 3e-8
    """A position whose key and value are put in order."""

    bands_merge: float = 8e-8
    """A query whose results of two steps are merged."""

    bands_layout: float = 1.7e-3
    """Laying out the run-time inputs of a call."""

    scattered_call: float = 2.5e-5
    """A call."""

    scattered_row: float = 8e-8
    """A query."""

    scattered_edge: float = 5.4e-9
    """An edge: its score, its softmax and its value."""

    def seconds(self, amounts: Amounts, copies: int = 1) -> float:
        """The estimate of a work that takes these amounts, one of so many that share its calls."""
        return sum(
            amount * float(getattr(self, name)) / (copies if name in SHARED else 1)
            for name, amount in amounts.items()
        )


@dataclass(frozen=True)
class Calibration:
    """Rates as they were measured on a machine, described in general terms."""

    rates: Rates
    threads: int
    torch: str
    machine: Mapping[str, object]

    def data(self) -> dict[str, object]:
        """What the file holds."""
        return {
            "format": FORMAT,
            "threads": self.threads,
            "torch": self.torch,
            "machine": dict(self.machine),
            "rates": {entry.name: getattr(self.rates, entry.name) for entry in fields(Rates)},
        }


class RatesError(Exception):
    """A file of rates that is not as `attnspec calibrate` writes it."""


def current() -> Rates:
    """The rates that estimates are made with: this machine's, or those that ship."""
    found = calibration()
    return Rates() if found is None else found.rates


def origin() -> str:
    """Whose rates these are, as a plan says it."""
    found = calibration()
    if found is None:
        return "by default rates (two CPU threads)"
    return f"by this machine's rates ({found.threads} CPU thread{'s' * (found.threads != 1)})"


@cache
def calibration() -> Calibration | None:
    """What was measured on this machine, None where nothing was; the file is read once.

    Warns of a file that cannot be used: the default rates are used then.
    """
    path = rates_path()
    if path is None:
        return None
    try:
        return read(path)
    except RatesError as error:
        reason = str(error)
    except FileNotFoundError:
        if not os.environ.get(VARIABLE):
            return None
        reason = f"{VARIABLE} names it, and it is not there"
    except (OSError, ValueError) as error:
        # a ValueError is a name that no file can have
        reason = str(getattr(error, "strerror", None) or error).lower()
    warnings.warn(
        f"the default rates are used for estimates, not the file {path}: {reason};"
        " `attnspec calibrate` writes it anew, `attnspec calibrate --reset` removes it",
        stacklevel=2,
    )
    return None


def rates_path() -> str | None:
    """The file of this machine's rates, which need not exist; None where there is no place."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return named or None
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if sys.platform == "win32":
        folder = os.environ.get("APPDATA", "")
    elif not os.path.isabs(folder):
        # the specification of these folders says to ignore a relative one
        home = (
            ("~", "Library", "Application Support")
            if sys.platform == "darwin"
            else ("~", ".config")
        )
        folder = os.path.expanduser(os.path.join(*home))
    return os.path.join(folder, "attnspec", "rates.json") if os.path.isabs(folder) else None


def read(path: str) -> Calibration:
    """The calibration in a file; raises OSError, or RatesError where it is not one."""
    with open(path, "rb") as file:
        content = file.read(LARGEST + 1)
    try:
        data = json.loads(content) if len(content) <= LARGEST else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise RatesError("it is damaged, one JSON object is required")
    if data.get("format") != FORMAT:
        raise RatesError(f"format {FORMAT} is required, found {data.get('format')!r:.40}")
    known = {entry.name for entry in fields(Rates)}
    rates, threads = data.get("rates"), data.get("threads")
    torch, machine = data.get("torch"), data.get("machine")
    if not isinstance(rates, dict) or set(rates) != known:
        raise RatesError("it was measured by another version, its rates are not those of this one")
    for name, value in rates.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise RatesError(f"`{name}` must be a number of seconds above 0, found {value!r:.40}")
    if type(threads) is not int or not isinstance(torch, str) or not isinstance(machine, dict):
        raise RatesError("it is damaged, it does not say where it was measured")
    return Calibration(Rates(**rates), threads, torch, machine)


def dense_seconds(work: Work) -> float:
    """Seconds of torch's dense attention, without a mask, for one head of size 64, forward: what
    every other way is measured against."""
    amounts = {"torch_call": 1, "torch_pair": work.n_q * work.n_k}
    return current().seconds(amounts, work.copies)
