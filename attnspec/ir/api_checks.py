"""Checks of what callers hand in: lengths, parameters and samples of inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from attnspec.ir.program import Input, ParameterValue
from attnspec.text.diagnostics import AttnSpecError


def sampled(
    entry: Input, given: Mapping[str, npt.ArrayLike], queries: int, n: int, owner: str
) -> object:
    """One input of a sample, checked: bool, int or float64 [n], an int, or what queries choose."""
    if entry.name not in given:
        raise AttnSpecError(f"`{owner}` needs its input `{entry.name}` ({entry.kind})")
    try:
        values = np.asarray(given[entry.name])
    except ValueError as error:
        raise AttnSpecError(f"`{entry.name}` must be an array: {error}") from None
    if entry.kind == "length":
        if values.shape != () or values.dtype.kind not in "iu":
            raise AttnSpecError(f"`{entry.name}` is a length: one integer is needed")
        # as in a call, whose values nobody waits for: k < x has no pair
        return max(0, int(values))
    if entry.kind == "choices":
        return _choices(entry, values, queries, n)
    if entry.kind in ("scores", "buckets"):
        if values.ndim != 3:
            raise AttnSpecError(
                f"`{entry.name}` must have three axes, of which the first is heads, got"
                f" {list(values.shape)}"
            )
        return values
    if entry.kind == "tokens" and values.dtype.kind in "iu":
        values = _marked(entry.name, values, n)
    wanted, kind = _TYPES[entry.kind]
    if values.shape != (n,) or values.dtype.kind not in wanted:
        raise AttnSpecError(
            f"`{entry.name}` must be {kind} [{n}], got {values.dtype} {list(values.shape)}"
        )
    if entry.at_most is not None and int(values.sum()) > entry.at_most:
        raise AttnSpecError(
            f"`{entry.name}` may mark at most {entry.at_most} tokens, got {int(values.sum())}"
        )
    if values.dtype.kind == "u" and values.size and values.max() >= 2**63:
        raise AttnSpecError(f"`{entry.name}` must hold whole numbers below 2**63")
    # of any width, they are compared in one
    return values if entry.kind == "tokens" else values.astype(_WIDE[values.dtype.kind])


_TYPES = {"tokens": ("b", "bool"), "ids": ("iu", "int"), "numbers": ("iuf", "int or real")}
_WIDE = {"i": np.int64, "u": np.int64, "f": np.float64}


def _choices(
    entry: Input, values: npt.NDArray[np.integer], queries: int, n: int
) -> npt.NDArray[np.integer]:
    """Choices of one sample, int [H or H_kv or 1, n_q, c], of blocks that there are, or -1."""
    blocks = -(-n // entry.size)
    if values.ndim != 3 or values.shape[1] != queries or values.dtype.kind != "i":
        raise AttnSpecError(
            f"`{entry.name}` must be integers [H or H_kv or 1, {queries}, choices], got"
            f" {values.dtype} with the shape {list(values.shape)}"
        )
    wrong = values[(values < -1) | (values >= blocks)]
    if len(wrong):
        raise AttnSpecError(
            f"`{entry.name}` must hold indices of blocks, at least 0 and below {blocks}, or -1 for"
            f" no block, got {wrong[0]} (there are {n} keys, up to {entry.size} in a block)"
        )
    return values


def of_head(name: str, values: np.ndarray, head: int, heads: int | None) -> np.ndarray:
    """What an input [H or H_kv or 1, …] has for a head; `heads` None where a spec declares none."""
    count = len(values)
    if heads is not None and count and heads % count:
        raise AttnSpecError(f"the number of heads of `{name}` must divide {heads}, got {count}")
    index = 0 if count == 1 else head if heads is None else head // (heads // count)
    if not index < count:
        raise AttnSpecError(f"`{name}` has {count} heads, and head {head} is asked for")
    row: np.ndarray = values[index]
    return row


def _marked(name: str, values: npt.NDArray[np.integer], n: int) -> npt.NDArray[np.bool_]:
    """Tokens given by their positions, or by a count of first tokens, as bool [n]."""
    if values.shape == (n,) and n > 1:
        raise AttnSpecError(
            f"`{name}` must be bool [{n}]: {n} integers could be positions or marks"
        )
    least, most = (0, n) if values.ndim == 0 else (0, n - 1)
    if values.size and not (least <= values.min() and values.max() <= most):
        what = "a count" if values.ndim == 0 else "positions"
        raise AttnSpecError(f"`{name}` must be {what} between {least} and {most} at n = {n:,}")
    if values.ndim == 0:
        return np.arange(n) < int(values)
    return np.isin(np.arange(n), values)


def index_of(what: str, value: int) -> int:
    """An integer by `__index__`; TypeError for a boolean and anything else."""
    # a tuple, because the tracer of torch 2.9 knows no unions
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} must be an integer, got a boolean")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {type(value).__name__}") from None


def length_of(n: int, name: str = "n", least: int = 0) -> int:
    """A length or a size as a Python integer, from `least` to 2**31 - 1."""
    value = index_of(name, n)
    if not least <= value <= 2**31 - 1:
        raise AttnSpecError(f"{name} must be between {least} and 2**31 - 1, got {value}")
    return value


def parameter_of(name: str, value: object) -> ParameterValue:
    """The value of a parameter: a number, a boolean or the text of an expression; of a list or
    tuple of numbers its text."""
    if isinstance(value, list | tuple | np.ndarray) and np.ndim(value) == 1:
        return f"[{', '.join(_digits(name, item) for item in value)}]"
    if isinstance(value, bool | float | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.floating):
        return float(value)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"the parameter `{name}` must be a number, a list of numbers or an expression, got"
            f" {type(value).__name__}"
        ) from None


def joined_parameters(
    parameters: Mapping[str, ParameterValue] | None, more: Mapping[str, ParameterValue]
) -> dict[str, ParameterValue]:
    """The parameters that are set by `parameters={…}` and those set by keywords."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise TypeError(f"`parameters` maps names to values, got {type(parameters).__name__}")
    twice = set(parameters or ()) & set(more)
    if twice:
        raise TypeError(f"the parameter `{min(twice)}` is set twice: by a keyword and `parameters`")
    return {**(parameters or {}), **more}


def _digits(name: str, item: object) -> str:
    """A number of a list as the language writes it."""
    number = parameter_of(name, item)
    if isinstance(number, str | bool):
        raise TypeError(f"the list `{name}` must hold numbers, got {type(item).__name__}")
    if not math.isfinite(number):
        raise AttnSpecError(f"the list `{name}` must hold finite numbers, got {number}")
    return repr(number)
