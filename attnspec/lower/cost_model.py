"""What each unit of work is estimated to cost: the rates of the cost model.

Every type of device has its own. The rates of a CPU that ship were measured on one machine, those
of a GPU are derived from published figures; `attnspec calibrate` measures them on another machine
and writes a file for the type of device, which is read once, when the first estimate is made.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import overload

from attnspec.lower.rates import GpuRates, Rates
from attnspec.lower.work import Work

FORMAT = 1
"""Of the file."""

VARIABLE = "ATTNSPEC_RATES"
"""The environment variable that names another file, of the CPU's rates, with those of other devices
beside it; empty, no file is read."""

MEASURED = ("cpu", "cuda")
"""The types of device whose rates are known, by measurement or by published figures."""

LARGEST = 1 << 16
"""Bytes of a file that are read at most; it has about two thousand."""


def shipped(device: str = "cpu") -> Rates | GpuRates:
    """The rates of a type of device where nothing was measured."""
    return Rates() if device == "cpu" else GpuRates()


@dataclass(frozen=True)
class Calibration:
    """Rates as they were measured on a machine, described in general terms."""

    rates: Rates | GpuRates
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
            "rates": asdict(self.rates),
        }


class RatesError(Exception):
    """A file of rates that is not as `attnspec calibrate` writes it."""


@overload
def current() -> Rates: ...


@overload
def current(device: str) -> Rates | GpuRates: ...


def current(device: str = "cpu") -> Rates | GpuRates:
    """The rates that estimates for a type of device are made with: this machine's, or those that
    ship."""
    found = calibration(device)
    return shipped(device) if found is None else found.rates


def origin(device: str) -> str:
    """Whose rates these are, as a plan says it."""
    found = calibration(device)
    if found is None:
        return (
            "by default rates (two CPU threads)"
            if device == "cpu"
            else "by default rates (NVIDIA H200)"
        )
    if device == "cpu":
        return f"by this machine's rates ({found.threads} CPU thread{'s' * (found.threads != 1)})"
    return f"by this machine's rates ({found.machine.get('accelerator')})"


@cache
def calibration(device: str) -> Calibration | None:
    """What was measured on this machine, None where nothing was; the file is read once.

    Warns of a file that cannot be used: the default rates are used then.
    """
    path = rates_path(device)
    if path is None or device not in MEASURED:
        return None
    try:
        return read(path, device)
    except RatesError as error:
        reason = str(error)
    except FileNotFoundError:
        if not os.environ.get(VARIABLE) or device != "cpu":
            return None
        reason = f"{VARIABLE} names it, and it is not there"
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
        f"`attnspec calibrate{asked}` writes it anew,"
        f" `attnspec calibrate{asked} --reset` removes it"
    )


def rates_path(device: str = "cpu") -> str | None:
    """The file of this machine's rates for a type of device, which need not exist; None where there
    is no place."""
    path = _path()
    if path is None or device == "cpu":
        return path
    start, ending = os.path.splitext(path)
    return f"{start}-{device}{ending}"


def _path() -> str | None:
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


def read(path: str, device: str = "cpu") -> Calibration:
    """The calibration of a type of device in a file; raises OSError, or RatesError where it is not
    one."""
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
    kind = type(shipped(device))
    known = asdict(kind())
    rates, threads = data.get("rates"), data.get("threads")
    torch, machine = data.get("torch"), data.get("machine")
    if not isinstance(rates, dict) or set(rates) != set(known):
        raise RatesError("it was measured by another version, its rates are not those of this one")
    for name, value in rates.items():
        if value is None and known[name] is None:
            # it was not measured
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise RatesError(f"`{name}` must be a number of seconds above 0, found {value!r:.40}")
    if type(threads) is not int or not isinstance(torch, str) or not isinstance(machine, dict):
        raise RatesError("it is damaged, it does not say where it was measured")
    return Calibration(kind(**rates), threads, torch, machine)


def dense_seconds(work: Work) -> float:
    """Seconds of torch's dense attention, without a mask, for one head of size 64, forward: what
    every other way is measured against."""
    amounts = {"torch_call": 1, "torch_pair": work.n_q * work.n_k}
    return current(work.device).seconds(amounts, work.copies)
