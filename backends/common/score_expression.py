"""`score EXPR` in tensor operations: a number made of the score so far, positions and inputs.

What reads neither the score nor reals is computed in int64, the rest in the type of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from attnspec.ir.scalars import NEGATED, OPERATIONS, Apply, Scalar, Symbol

Number = Any
"""A number of Python, or a tensor of integers, booleans or of the type of the scores."""

_REAL = frozenset(("/", "sqrt", "log2", "tanh", "exp", "log"))
"""What makes reals of whole numbers."""

_LOGIC = frozenset(("and", "or", "not"))


def _item(index: torch.Tensor, *items: Number) -> torch.Tensor:
    if index.is_floating_point():
        raise ValueError("a list in `score` is read by whole numbers")
    count = len(items)
    # a place of another pair, which no mask has to tell: it is never read
    outside = (index < 0) | (index >= count)
    found = reduce(
        lambda rest, at: torch.where(index == at, items[at], rest), range(1, count), items[0]
    )
    return torch.where(outside, float("nan"), found)


def _whole(x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return rounded(x).long() if x.is_floating_point() else x


def _isqrt(x: torch.Tensor) -> torch.Tensor:
    root = x.double().sqrt().floor().long()
    root = root - (root * root > x).long()
    return root + ((root + 1) * (root + 1) <= x).long()


_TENSORS: dict[str, Callable[..., Number]] = {
    "//": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "%": torch.remainder,
    "**": torch.pow,
    "not": torch.logical_not,
    "and": lambda *values: reduce(torch.logical_and, values),
    "or": lambda *values: reduce(torch.logical_or, values),
    "within": lambda x, first, last: (first <= x) & (x <= last),
    "one_of": lambda x, *members: reduce(torch.logical_or, [x == each for each in members], x != x),
    "item": _item,
    "isqrt": _isqrt,
    "sqrt": torch.sqrt,
    "log2": torch.log2,
    "ceil": lambda x: _whole(x, torch.ceil),
    "floor": lambda x: _whole(x, torch.floor),
    "min": lambda *values: reduce(torch.minimum, values),
    "max": lambda *values: reduce(torch.maximum, values),
    "abs": torch.abs,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
}
"""What operations are for tensors, where they are not those of Python's operators."""


def evaluate(scalar: Scalar, values: Mapping[str, Number], like: torch.Tensor) -> Number:
    """The value of a score's expression, broadcastable to the scores `like`, in their type where
    it is real. `values` are tensors by the names of its symbols."""
    match scalar:
        case Symbol(name):
            return values[name]
        case Apply(op, args):
            parts = [evaluate(each, values, like) for each in args]
            if op in _LOGIC:
                return _TENSORS[op](*(_tensor(x, like) for x in parts))
            tensors = [_counted(_tensor(x, like)) for x in parts]
            if op in _REAL or any(x.is_floating_point() for x in tensors):
                skip = 1 if op == "item" else 0
                tensors[skip:] = [x.to(like.dtype) for x in tensors[skip:]]
            work = _TENSORS.get(op)
            if work is None:
                work = OPERATIONS[op] if op in ("+", "-", "*", "neg", *NEGATED) else torch.div
            return work(*tensors)
        case _:
            return scalar


def _tensor(value: Number, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    kind = like.dtype if isinstance(value, float) else None
    return torch.tensor(value, dtype=kind, device=like.device)


def _counted(value: torch.Tensor) -> torch.Tensor:
    """A comparison counts 1 or 0."""
    return value.long() if value.dtype == torch.bool else value
