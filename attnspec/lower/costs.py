"""What works are estimated to cost: three rates of a device, and what each unit of a kernel weighs.

A backend says how much a work takes: calls, pairs, positions put in order. A unit is a multiple of
one of three rates. The rates of a CPU that ship were measured on one machine, those of a GPU are
derived from published figures; `attnspec calibrate` measures them on another machine and writes a
file for the type of device, which is read once, when the first estimate is made.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TypeAlias

from attnspec.lower.work import Work

FORMAT = 2
"""Of the file."""

VARIABLE = "ATTNSPEC_RATES"
"""The environment variable that names another file, of the CPU's rates, with those of other devices
beside it; empty, no file is read."""

LARGEST = 1 << 16
"""Bytes of a file that are read at most; it has some hundred."""

Amounts: TypeAlias = Mapping[str, float]
"""How much a work takes of each of the rates, by their names."""

Units: TypeAlias = Mapping[str, float]
"""How many of each unit a step or a work takes."""


@dataclass(frozen=True)
class Rates:
    """Seconds for one head of size 64, forward: float32 on a CPU, bfloat16 on a busy GPU."""

    call: float
    """A call of torch's attention."""

    pair: float
    """A pair of a query and a key in it."""

    edge: float
    """A pair that is listed by itself: its score, its softmax and its value."""

    def seconds(self, amounts: Amounts) -> float:
        """The estimate of a work that takes these amounts."""
        return sum(amount * float(getattr(self, name)) for name, amount in amounts.items())


NAMES = tuple(rate.name for rate in fields(Rates))

SHIPPED = {"cpu": Rates(2e-5, 1.7e-9, 9e-9), "cuda": Rates(1e-5, 8.5e-13, 1e-11)}
"""The rates where nothing was measured, by type of device: two threads of a CPU, and an NVIDIA
H200."""

UNITS: Mapping[str, str] = {
    "call": "call",  # done once for all heads that share it
    "host": "call",  # what all steps of a call take on the host beside, once for all heads
    "start": "call",  # done for every head
    "layout": "call",  # laying out run-time inputs, once for all heads
    "lists": "call",  # laying out the lists that an input brings, likewise
    "row": "call",  # a tile of queries
    "pair": "pair",
    "masked": "pair",  # what a pair costs more in a tile with a mask
    "query": "pair",  # a query of a step, whatever it reads
    "gather": "pair",  # a key that is copied
    "reorder": "pair",  # a position that is put in order
    "mask": "pair",  # a pair of the mask that a choice makes in every call
    "entry": "pair",  # a block of keys that one query reads by itself
    "merge": "pair",  # a query whose results of two steps are merged
    "edge": "edge",
    "gathered": "edge",  # what an edge costs more where its key and value are copied
    "degree": "edge",  # a query of listed edges
}
"""The rate that each unit is a multiple of."""

SHARED = ("call", "host", "layout", "lists")
"""Units that all heads of a sample share."""

WEIGHTS: Mapping[str, Mapping[str, Units]] = {
    "cpu": {
        "dense": {"call": 1, "pair": 3.5, "mask": 3},
        "torch": {"call": 1, "pair": 1, "masked": 0.06, "mask": 3},
        "tiles": {"call": 1.5, "row": 0.1, "pair": 3.6, "gather": 54, "masked": 0.24},
        "tables": {
            **{"host": 0, "call": 20, "row": 0.01, "query": 36, "pair": 1.3, "masked": 0.12},
            **{"gather": 40, "reorder": 18, "merge": 47, "layout": 85},
            **{"lists": 200, "entry": 580},
        },
        "edges": {"start": 7, "degree": 15, "edge": 1, "gathered": 2.4},
    },
    "cuda": {
        # a dozen operations; a float32 score is written or read ten times
        "dense": {"call": 12, "pair": 19, "mask": 4},
        "torch": {"call": 5, "pair": 1, "masked": 0.3, "mask": 4},
        # the keys and values of a tile are written and read again
        "tiles": {"call": 30, "row": 0.07, "pair": 2.7, "gather": 365, "masked": 1.2},
        "edges": {"start": 10, "degree": 100, "edge": 1, "gathered": 30},
        # guards, block lists and a launch; a block of 128 queries, 132 of them at once
        "flex": {
            **{"host": 31, "call": 4, "row": 0.01, "pair": 1.3, "masked": 3.5},
            **{"reorder": 590, "merge": 350},
        },
        "triton": {"host": 21, "call": 4, "row": 0.013, "pair": 1.53, "masked": 3.3, "merge": 235},
        # a pair is 256 operations, half as fast as in a tile: states are written and read
        "sums": {"call": 4, "pair": 2},
    },
}
"""What the units of each kind of kernel weigh on a type of device.

Those of a CPU were measured with two threads. Calls, rows and pairs of `torch`, `flex` and `triton`
are set by hand, from the times of windows, causal and strided graphs on an NVIDIA H200. The others
are derived for that class of GPU from what is published of it: a fused kernel of the second
generation reaches 350 TFLOP/s at heads of 128, taken for 300 at heads of 64, where a pair is 256
operations; memory gives 3.3 TB/s, of which plain operations reach 2.5.
"""


def weighed(kind: str, units: Units, device: str = "cpu", copies: int = 1) -> Amounts:
    """How much of each rate units of a kind of kernel are, for one of `copies` heads of a call."""
    weights = WEIGHTS["cpu" if device == "cpu" else "cuda"][kind]
    seconds = dict.fromkeys(NAMES, 0.0)
    for name, count in units.items():
        seconds[UNITS[name]] += count * weights[name] / (copies if name in SHARED else 1)
    return seconds


def work_amounts(kind: str, work: Work, **units: float) -> Amounts:
    """The same for a head of a work."""
    return weighed(kind, units, work.device, work.copies)


def together(*parts: Amounts) -> Amounts:
    """What several works take, one after the other."""
    return {name: sum(part[name] for part in parts) for name in NAMES}


def seconds_for(amounts: Amounts, device: str = "cpu") -> float:
    """Seconds for one head of size 64, forward."""
    return current(device).seconds(amounts)


def work_seconds(kind: str, work: Work, **units: float) -> float:
    """Seconds of so many units for a head of a work."""
    return seconds_for(work_amounts(kind, work, **units), work.device)


def dense_seconds(work: Work) -> float:
    """Seconds of torch's dense attention, without a mask, for one head of size 64, forward: what
    every other way is measured against."""
    return work_seconds("torch", work, call=1, pair=work.n_q * work.n_k)


class Weighed:
    """A backend whose estimate is that of the amounts that it says a work takes."""

    amounts: Callable[[Work], Amounts]

    def cost(self, work: Work) -> float:
        return seconds_for(self.amounts(work), work.device)


@dataclass(frozen=True)
class Calibration:
    """Rates as they were measured on a machine, described in general terms."""

    rates: Rates
    threads: int
    torch: str
    machine: Mapping[str, object]

    def data(self) -> dict[str, object]:
        """What the file holds."""
        return {"format": FORMAT, **asdict(self)}


class RatesError(Exception):
    """Rates that cannot be measured, or a file that is not as `attnspec calibrate` writes it."""


def shipped(device: str = "cpu") -> Rates:
    """The rates of a type of device where nothing was measured."""
    return SHIPPED["cpu" if device == "cpu" else "cuda"]


def current(device: str) -> Rates:
    """The rates that estimates for a type of device use: this machine's, or those that ship."""
    fitted = calibration(device)
    return shipped(device) if fitted is None else fitted.rates


def origin(device: str) -> str:
    """Whose rates these are, as a plan says it."""
    fitted = calibration(device)
    if fitted is None:
        whose = "two CPU threads" if device == "cpu" else "NVIDIA H200"
        return f"by default rates ({whose})"
    if device == "cpu":
        return f"by this machine's rates ({fitted.threads} CPU thread{'s' * (fitted.threads != 1)})"
    return f"by this machine's rates ({fitted.machine.get('accelerator')})"


@cache
def calibration(device: str) -> Calibration | None:
    """What was measured on this machine, None where nothing was; the file is read once.

    Warns of a file that cannot be used: the default rates are used then.
    """
    path = rates_path(device)
    if path is None or device not in SHIPPED:
        return None
    try:
        return read(path)
    except RatesError as error:
        reason = str(error)
    except FileNotFoundError:
        if not os.environ.get(VARIABLE) or device != "cpu":
            return None
        reason = f"{VARIABLE} names this file, which does not exist"
    except (OSError, ValueError) as error:
        # a ValueError is a name that no file can have
        reason = str(getattr(error, "strerror", None) or error).lower()
    warnings.warn(
        f"the default rates are used for estimates, not the file {path}: {reason}; {cures(device)}",
        stacklevel=2,
    )
    return None


def cures(device: str) -> str:
    """What helps where a file of rates is damaged."""
    asked = "" if device == "cpu" else f" --device {device}"
    return (
        f"`attnspec calibrate{asked}` writes the file anew, `attnspec calibrate{asked} --reset`"
        " removes the file"
    )


def rates_path(device: str = "cpu") -> str | None:
    """The file of this machine's rates for a device, which need not exist; None without a place."""
    path = os.environ.get(VARIABLE)
    if path is None:
        folder = os.environ.get("XDG_CONFIG_HOME", "")
        if sys.platform == "win32":
            folder = os.environ.get("APPDATA", "")
        elif not os.path.isabs(folder):
            # the specification of these folders says to ignore a relative one
            mac = sys.platform == "darwin"
            home = ("Library", "Application Support") if mac else (".config",)
            folder = os.path.expanduser(os.path.join("~", *home))
        path = os.path.join(folder, "attnspec", "rates.json") if os.path.isabs(folder) else ""
    if not path or device == "cpu":
        return path or None
    start, ending = os.path.splitext(path)
    return f"{start}-{device}{ending}"


def read(path: str) -> Calibration:
    """The calibration in a file; raises OSError, or RatesError for another file."""
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
    rates, threads, torch, machine = map(data.get, ("rates", "threads", "torch", "machine"))
    if not isinstance(rates, dict) or set(rates) != set(NAMES):
        raise RatesError("its rates were measured by another version of attnspec")
    for name, value in rates.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise RatesError(f"`{name}` must be a number of seconds above 0, found {value!r:.40}")
    if type(threads) is not int or not isinstance(torch, str) or not isinstance(machine, dict):
        raise RatesError("it is damaged, it does not say where it was measured")
    return Calibration(Rates(**rates), threads, torch, machine)
