"""What scores become in tensor operations: `score` statements for the heads of a kernel.

What reads neither the score nor reals is computed in int64, the rest in the type of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.masks import by_key_head
from attnspec.ir.scalars import OPERATIONS, PAIR, SCORE, Apply, Scalar, Symbol, fold, symbols
from attnspec.ir.scores import HEAD, TABLE, Scores
from attnspec.lower.work import Call, Work

Number = Any
"""A tensor of integers, booleans or of the type of the scores; by its name a function of an index
where it is a list or a table."""

_LOGIC = frozenset(("and", "or", "not"))


class ScoreFunction:
    """What scores become for some heads in a sequence of a length. In its expressions symbols stand
    for numbers: tensors [], [heads] of what reads the head alone, or lists [m], on a device."""

    def __init__(
        self, scores: Scores, heads: Sequence[int], length: int, device: torch.device
    ) -> None:
        self.heads, self.length, self.device = heads, length, device
        self.everywhere = scores.everywhere
        self.constants: dict[str, Tensor] = {}
        self.statements = tuple(map(self._lifted, scores.statements))
        self.added = None if scores.added is None else self._lifted(scores.added)

    def _symbol(self, kind: str, values: object) -> Symbol:
        """What stands for numbers: "#" for one, "@" for one of each head, "*" for a list."""
        name = f"{kind}{len(self.constants)}"
        self.constants[name] = torch.from_numpy(np.array(values)).to(self.device)
        return Symbol(name)

    def _lifted(self, value: Scalar) -> Scalar:
        """An expression without numbers."""
        if set(symbols(value)) == {HEAD.name}:
            return self._symbol("@", [fold(value, {HEAD.name: head}) for head in self.heads])
        match value:
            case Symbol():
                return value
            case Apply("steps", (far, *least)):
                # distances end with the sequence
                last = max(0, min(self.length - 1, max(cast("list[int]", least), default=0)))
                count = np.searchsorted(np.array(least, np.int64), np.arange(last + 1), "right")
                near = Apply("min", (far, last))
                return Apply("entry", (self._symbol("*", count), self._lifted(near)))
            case Apply("item", (index, *items)) if not any(map(symbols, items)):
                listed = self._symbol("*", np.array(items, np.float64))
                return Apply("item", (self._lifted(index), listed, self._symbol("#", len(items))))
            case Apply(op, args):
                return Apply(op, tuple(map(self._lifted, args)))
            case _:
                return self._symbol("#", value)

    def of_heads(self, places: Sequence[int]) -> ScoreFunction:
        """The function of some of the heads, by their places among them."""
        some, at = copy(self), list(places)
        some.constants = {x: y[at] if x[0] == "@" else y for x, y in self.constants.items()}
        return some

    def values(
        self,
        given: Mapping[str, Number],
        tables: Mapping[str, Tensor],
        heads: Tensor | None,
        by_key_head: Sequence[int] = (),
    ) -> dict[str, Number]:
        """All values by their names: of some heads, or of all by key head where they are None."""
        values = dict(given)
        for name, x in self.constants.items():
            if name[0] == "@":
                x = x.view(*by_key_head, 1, 1, 1) if heads is None else x[heads]
            values[name] = x.__getitem__ if name[0] == "*" else x
        for name, table in tables.items():
            values[name + TABLE] = _entries(table, heads, by_key_head)
        return values

    def __call__(
        self,
        scores: Tensor,
        given: Mapping[str, Number],
        tables: Mapping[str, Tensor],
        heads: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> Tensor:
        """What scores [B, K, R, G, h, w] become; of any shape where `heads`, int64, broadcasts to
        it and says which head each of them is of. `given` are positions q and k, broadcastable to
        [G, h, w], and inputs by their symbols; `tables` [heads, m] what is learned; `pairs`, bool,
        which scores are those of pairs."""
        values = self.values(given, tables, heads, scores.shape[1:3])
        return changed(self.statements, scores, values, None if self.everywhere else pairs)

    def added_to(
        self,
        kind: torch.dtype,
        given: Mapping[str, Number],
        tables: Mapping[str, Tensor],
        heads: Tensor,
    ) -> Tensor:
        """What is added to all scores, of a type, broadcastable to them."""
        values = self.values(given, tables, heads)
        return value_of(cast(Scalar, self.added), values, kind).to(kind)


def _entries(
    table: Tensor, heads: Tensor | None, by_key_head: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Reads a table [heads, m] by an index [h, w] or [G, h, w]."""
    if heads is None:
        alike = (1,) * 3
        return lambda index: table[:, index].view(*by_key_head, *alike[index.dim() :], *index.shape)
    return lambda index: table[heads, index]


def inputs_read(
    work: Work, call: Call, n_q: int, rows: slice | Tensor, keys: int
) -> dict[str, Tensor]:
    """What scores read of inputs for some of the last n_q queries, by their symbols, broadcastable
    to [B, K, R, 1, rows, n_k], for K key heads; of positions where the work says that queries and
    keys stand."""
    found = {}
    for name in work.changes.symbols:
        called, brackets, sides = name.partition("(")
        if name.endswith(PAIR):
            table = call.tables[called].transpose(0, 1)[:, :, rows]
            found[name] = by_key_head(table, keys)
        elif brackets:
            x = call.data[called]
            x = x.reshape(len(x), 1, 1, 1, -1)
            if work.standing is not None and sides != ")":
                side = work.standing.queries if sides == "q)" else work.standing.keys
                x = x[..., torch.from_numpy(side).to(x.device)]
            # of positions those of the last queries, of a length the one number
            x = x[..., x.shape[-1] - n_q :][..., rows] if sides == "q)" else x
            found[name] = x[..., None, :] if sides == "k)" else x[..., None]
    return found


def changed(
    statements: Sequence[Scalar], scores: Tensor, values: Mapping[str, Number], pairs: Tensor | None
) -> Tensor:
    """What scores become by statements, one after the other. Where `pairs`, bool, are none they may
    be anything, and no gradient comes of it: 0 times a derivative that is infinite is NaN."""

    def read(x: Tensor) -> Tensor:
        return x if pairs is None else torch.where(pairs, x, 0.0)

    values = {name: read(x) if name.endswith(PAIR) else x for name, x in values.items()}
    for statement in statements:
        # an input may have another type
        found = value_of(statement, {**values, SCORE: read(scores)}, scores.dtype).to(scores.dtype)
        # a number that reads no pair is that of each
        scores = found if found.shape == scores.shape else torch.zeros_like(scores) + found
    return scores


def value_of(statement: Scalar, values: Mapping[str, Number], kind: torch.dtype) -> Tensor:
    """The value of a statement as `evaluate` has it, NaN where a list is read outside."""
    outside: list[Tensor] = []
    found: Tensor = evaluate(statement, {**values, _OUTSIDE: outside}, kind)
    for places in outside:
        # a place of another pair, which no mask has to tell: no gradient comes of it
        found = torch.where(places, float("nan"), found)
    return found


def masked(scores: Tensor, bias: Tensor | None, changes: Scores) -> Tensor:
    """Changed scores with what a mask adds; places of no pair may hold anything."""
    if bias is None:
        return scores
    return scores + bias if changes.everywhere else torch.where(bias < 0, bias, scores)


_OUTSIDE = ""
"""The name of the list of places where a list is read outside."""


def _item(outside: list[Tensor], index: Tensor, *items: Number) -> Tensor:
    if index.is_floating_point():
        raise ValueError("a list in `score` is read by whole numbers")
    listed = callable(items[0])
    count = items[1] if listed else len(items)
    outside.append((index < 0) | (index >= count))
    if listed:
        return cast(Tensor, items[0](torch.where(outside[-1], 0, index)))
    found: Tensor = reduce(
        lambda rest, at: torch.where(index == at, items[at], rest), range(1, count), items[0]
    )
    return found


def _whole(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    return rounded(x).long() if x.is_floating_point() else x


def isqrt(x: Tensor) -> Tensor:
    """The root of whole numbers, rounded down."""
    root = torch.sqrt(x.double()).long()
    root = root - (root * root > x).long()
    return root + ((root + 1) * (root + 1) <= x).long()


_REAL = ("sqrt", "log2", "tanh", "exp", "log")
"""What makes reals of whole numbers, beside `/`."""

_TENSORS: dict[str, Callable[..., Number]] = {
    **OPERATIONS,
    **{name: getattr(torch, name) for name in _REAL},
    "/": torch.div,
    "//": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "%": torch.remainder,
    "**": torch.pow,
    "one_of": lambda x, *members: reduce(torch.logical_or, [x == each for each in members], x != x),
    "isqrt": isqrt,
    "ceil": lambda x: _whole(x, torch.ceil),
    "floor": lambda x: _whole(x, torch.floor),
    "min": lambda *values: reduce(torch.minimum, values),
    "max": lambda *values: reduce(torch.maximum, values),
}
"""What operations are for tensors."""


def evaluate(scalar: Scalar, values: Mapping[str, Number], kind: torch.dtype) -> Number:
    """The value of an expression without numbers, in a type where it is real. `values` are tensors
    by the names of its symbols."""
    match scalar:
        case Symbol(name):
            return values[name]
        case Apply("entry", (Symbol(name), index)):
            return values[name](evaluate(index, values, kind))
        case Apply(op, args):
            parts = [evaluate(each, values, kind) for each in args]
            if op in _LOGIC:
                return _TENSORS[op](*parts)
            tensors = [x.long() if getattr(x, "dtype", None) == torch.bool else x for x in parts]
            if op == "item":
                return _item(values[_OUTSIDE], *tensors).to(kind)
            if op in ("/", *_REAL) or any(x.is_floating_point() for x in tensors):
                tensors = [x.to(kind) for x in tensors]
            return _TENSORS[op](*tensors)
        case _:
            raise TypeError("the numbers of an expression are tensors")
