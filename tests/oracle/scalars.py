"""What scalars, predicates and token sets mean, from the language's contract alone.

`Invalid` says that a size has no admissible value, or a spec no meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oracle.tree import Attention, Node


class Invalid(Exception):
    """No meaning: what is required and what was found."""


@dataclass(frozen=True)
class Closure:
    """An expression, and where its names stand for something."""

    node: Node
    place: Place


@dataclass(frozen=True)
class Place:
    """Where an expression is evaluated."""

    spec: Attention
    n: int
    layer: int = 0
    head: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, Closure] = field(default_factory=dict)
    pair: tuple[np.ndarray, np.ndarray] | None = None
    """q [n, 1] and k [1, n], inside `where`."""
    sample: Any = None
    """The tensors of a call, where they decide pairs."""

    @property
    def grid(self) -> tuple[int, ...]:
        extents = tuple(
            count(each, replace(self, names=lets_of(self.spec)), 1) for each in self.spec.grid
        )
        if extents and math.prod(extents) + self.spec.extra_tokens != self.n:
            raise Invalid(f"a grid of {extents} has not {self.n} positions")
        return extents

    def given(self, called: str) -> Any:
        """The input of a name."""
        if called not in self.inputs:
            raise Invalid(f"no input {called}")
        return self.inputs[called]

    def require_length(self) -> None:
        """`Invalid` at a length that the grid does not have."""
        assert self.grid is not None


def place_of(
    spec: Attention,
    n: int,
    layer: int = 0,
    head: int = 0,
    inputs: Mapping[str, Any] | None = None,
    sample: Any = None,
) -> Place:
    """Where the statements of an attention stand."""
    return Place(spec, n, layer, head, inputs or {}, lets_of(spec), sample=sample)


def lets_of(spec: Attention) -> dict[str, Closure]:
    bare = Place(spec, 0)
    set_ = dict(spec.overrides)
    names: dict[str, Closure] = {}
    for called, value in spec.parameters:
        node = Node("number", (set_[called],)) if called in set_ else value
        names[called] = Closure(node, replace(bare, names=dict(names)))
    for called, value in spec.lets:
        names[called] = Closure(value, replace(bare, names=dict(names)))
    return names


def scalar(node: Node, at: Place) -> Any:
    """A number, or inside `where` an array of them."""
    match node.kind:
        case "number":
            return node.parts[0]
        case "name":
            return _name(str(node.parts[0]), at)
        case "neg":
            return -scalar(node.nodes[0], at)
        case "call":
            return _function(str(node.parts[0]), [scalar(each, at) for each in node.nodes])
        case "and" | "or" | "not" | "in_range" | "in_set" | "chain":
            return predicate(node, at)
        case kind if kind in _COMPARE:
            return predicate(node, at)
        case _:
            return _operation(node.kind, *(scalar(each, at) for each in node.nodes))


def _name(called: str, at: Place) -> Any:
    if called in at.names:
        bound = at.names[called]
        moved = replace(at, names=bound.place.names, pair=None)
        return scalar(bound.node, moved)
    if called in ("q", "k") and at.pair is not None:
        return at.pair["qk".index(called)]
    if called.endswith(")"):
        given, side = called[:-1].split("(")
        return _reading(given, side, at)
    if "." in called and at.pair is not None:
        return _coordinate(called, at)
    known = {
        "n": at.n,
        "layer": at.layer,
        "head": at.head,
        "layers": at.spec.layers or 1,
        "heads": at.spec.heads,
    }
    if known.get(called) is None:
        raise Invalid(f"no name {called}")
    return known[called]


def _reading(called: str, side: str, at: Place) -> Any:
    """What an input has at the query or the key; a length is one number."""
    values = np.asarray(at.given(called))
    return values[at.pair["qk".index(side)]] if side and at.pair is not None else values[()]


def _coordinate(called: str, at: Place) -> np.ndarray:
    assert at.pair is not None
    side, axis = called.split(".")
    axes = ("time", "row", "col")[-len(at.grid) :]
    if axis not in axes:
        raise Invalid(f"the grid has no {axis}")
    cell = at.pair["qk".index(side)] - at.spec.extra_tokens
    after = math.prod(at.grid[axes.index(axis) + 1 :])
    return cell // after % at.grid[axes.index(axis)]


def _function(called: str, given: list[Any]) -> Any:
    x = given[0]
    if isinstance(x, np.ndarray) and called in ("isqrt", "sqrt", "log2", "floor", "ceil"):
        flat = [_function(called, [each]) for each in x.ravel().tolist()]
        return np.array(flat).reshape(x.shape)
    match called:
        case "min" | "max":
            pick = np.minimum if called == "min" else np.maximum
            if any(isinstance(each, np.ndarray) for each in given):
                found = given[0]
                for each in given[1:]:
                    found = pick(found, each)
                return found
            return min(given) if called == "min" else max(given)
        case "abs":
            return abs(x)
        case "item":
            return np.choose(x, given[1:]) if isinstance(x, np.ndarray) else given[1 + x]
        case "isqrt":
            if x < 0:
                raise Invalid("isqrt of a negative number")
            return math.isqrt(x)
        case "sqrt" | "log2":
            if x < 0 or (x == 0 and called == "log2"):
                raise Invalid(f"{called} of {x}")
            return math.sqrt(x) if called == "sqrt" else math.log2(x)
        case _:
            return math.floor(x) if called == "floor" else math.ceil(x)


def _operation(kind: str, a: Any, b: Any) -> Any:
    if kind in ("/", "//", "%") and np.any(np.asarray(b) == 0):
        raise Invalid("division by zero")
    return _ARITHMETIC[kind](a, b)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
}


def count(node: Node, at: Place, least: float = 0) -> int:
    """An integer of at least so much."""
    value = scalar(node, at)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise Invalid(f"a count must be an integer, got {value!r}")
    if value < least:
        raise Invalid(f"must be at least {least}, got {value}")
    return int(value)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def predicate(node: Node, at: Place) -> Any:
    """Whether it holds, for every pair."""
    match node.kind:
        case "number":
            return bool(node.parts[0])
        case "and" | "or":
            a, b = (predicate(each, at) for each in node.nodes)
            return np.logical_and(a, b) if node.kind == "and" else np.logical_or(a, b)
        case "not":
            return np.logical_not(predicate(node.nodes[0], at))
        case "in_range":
            x, low, high = (scalar(each, at) for each in node.nodes)
            return np.logical_and(x >= low, x <= high)
        case "in_set":
            x, *members = (scalar(each, at) for each in node.nodes)
            found = np.zeros((), bool)
            for member in members:
                found = np.logical_or(found, x == member)
            return found
        case "chain":
            a, b, c = (scalar(each, at) for each in node.nodes)
            first, second = (str(part) for part in node.parts if isinstance(part, str))
            return np.logical_and(_COMPARE[first](a, b), _COMPARE[second](b, c))
        case _:
            a, b = (scalar(each, at) for each in node.nodes)
            return _COMPARE[node.kind](a, b)


def pairs_where(node: Node, at: Place) -> np.ndarray:
    positions = np.arange(at.n)
    inside = replace(at, pair=(positions[:, None], positions[None, :]))
    held = np.broadcast_to(np.asarray(predicate(node, inside), bool), (at.n, at.n)).copy()
    # a position that is not a cell of the grid has no coordinates
    cells = positions >= at.spec.extra_tokens
    asked = {str(each.parts[0]) for each in node.walk() if each.kind == "name"}
    if any(each.startswith("q.") for each in asked):
        held &= cells[:, None]
    if any(each.startswith("k.") for each in asked):
        held &= cells[None, :]
    return held


def tokens(node: Node, at: Place) -> np.ndarray:
    """bool [n]."""
    i = np.arange(at.n)
    match node.kind:
        case "first":
            return np.asarray(i < count(node.nodes[0], at))
        case "last":
            return np.asarray(i >= at.n - count(node.nodes[0], at))
        case "every":
            step = count(node.nodes[0], at, 1)
            offset = count(node.nodes[1], at) if len(node.nodes) > 1 else 0
            return np.asarray((i >= offset) & ((i - offset) % step == 0))
        case "positions":
            held = np.zeros(at.n, bool)
            for each in node.nodes:
                ends = each.nodes if each.kind == "range" else (each, each)
                low, high = (count(end, at) for end in ends)
                if high < low:
                    raise Invalid("an empty range")
                held |= (i >= low) & (i <= high)
            return held
        case "tokens":
            called = str(node.parts[0])
            if called in at.names:
                bound = at.names[called]
                return tokens(bound.node, replace(at, names=bound.place.names))
            return np.asarray(at.given(called), bool)
        case "t~":
            return np.asarray(~tokens(node.nodes[0], at))
        case _:
            a, b = (tokens(each, at) for each in node.nodes)
            return combined(node.kind, a, b)


def combined(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Union, intersection or difference."""
    return np.asarray({"|": a | b, "&": a & b, "-": a & ~b}[kind[1]])
