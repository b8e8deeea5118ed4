"""The pairs for which a comparison of run-time inputs holds: `where(time(k) <= time(q))`.

Edges: what the inputs make of it; tiles are decided by the least and greatest values in them.
Source: none; equal labels are `same`, marked tokens `rows` and `columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from attnspec.graphs.predicates.asked import OfPredicate, at_length
from attnspec.graphs.predicates.inputs import (
    evaluated,
    inputs_read,
    is_real,
    no_number,
    reading,
    reads_inputs,
    real_remainder,
    require_exact,
    wide,
)
from attnspec.graphs.relation import SOME, Elementwise, Tiles, values_of
from attnspec.graphs.token_sets import Data
from attnspec.ir.intervals import Bounds, bounds
from attnspec.ir.parameters import RelationError, argument, context
from attnspec.ir.program import Compound, InputRef, Leaf, Term
from attnspec.ir.scalars import Apply, Scalar, ScalarError, symbols


@dataclass(frozen=True)
class WhereInputs(OfPredicate):
    """The pairs for which a predicate holds that reads inputs at q and at k. `inputs` are theirs,
    integers or reals of the last axis n, in the order of their names."""

    predicate: Scalar = argument("predicate", "a comparison of inputs at q and k", positional=True)
    inputs: tuple[Data, ...] = argument("inputs", "the inputs that it reads")
    extents: tuple[int, ...] = context("grid")
    extra_tokens: int = context("extra_tokens")

    name: ClassVar = "where_inputs"
    word: ClassVar = "where"

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        values: dict[str, Elementwise] = {}
        allowed: Elementwise = True
        for name, data in self._read_at(""):
            values[reading(name, "").name] = wide(data.values)
        for side, position in (("q", q), ("k", k)):
            values[side] = position
            if self._asks(side):
                grid = self._grid
                axes = zip(grid.axes, grid.coordinates(position), strict=True)
                allowed = allowed & grid.inside(position)
                values.update({f"{side}.{axis}": at for axis, at in axes})
            for name, data in self._read_at(side):
                values[reading(name, side).name] = wide(data.values[..., position])
        self._require_whole({name for name, data in self._read.items() if is_real(data.values)})
        self._require_exact(n)
        number: object = n
        if isinstance(number, int):
            predicate = at_length(self.predicate, n)
        else:
            # a symbol of a trace, whose operations are those of tensors
            predicate, values["n"] = self.predicate, q.new_full((1, 1), n)
        try:
            mask = evaluated(predicate, values)
        except ScalarError as error:
            raise RelationError(f"the condition of `where` has no value: {error}") from None
        return mask & allowed & (q == q) & (k == k)

    def cover(self, q: Tiles, k: Tiles, n: int) -> np.ndarray:
        self._require_whole({name for name, data in self._read.items() if is_real(data.values)})
        self._require_exact(n)
        ranges, exact = self.ranges(q, k), np.ones((), bool)
        for name, data in self._read_at(""):
            ranges[reading(name, "").name] = _outward(np.asarray(data.values).reshape(1)[0])
        for side, tiles in (("q", q), ("k", k)):
            for name, data in self._read_at(side):
                low, high, finite = _range(data, tiles, n)
                ranges[reading(name, side).name] = low, high
                exact = exact & finite
        predicate = at_length(self.predicate, n)
        exact = exact & ~no_number(predicate, ranges)
        # what is not a number, or comes of what is infinite, has no bounds
        answer = np.where(exact, self._cover(bounds(predicate, ranges), q, k), SOME)
        return answer.astype(np.uint8)

    def classes(self, n: int) -> np.ndarray | None:
        sides = {reading(name, side) for name in self._read for side in "qk"}
        match at_length(self.predicate, n):
            case Apply("==", args) if len(self.inputs) == 1 and set(args) == sides:
                return np.asarray(self.inputs[0].values).reshape(-1)[:n]
        return None

    def _require_whole(self, real: set[str]) -> None:
        """Raise RelationError where the predicate divides what is real and must be whole."""
        op = real_remainder(self.predicate, real)
        if op is not None:
            names = ", ".join(f"`{name}`" for name in sorted(real or self._read))
            raise RelationError(
                f"`{op}` divides integers, and the values of {names} are real: write `floor(…)`"
                " around them, or pass integers"
            )

    def _require_exact(self, n: int) -> None:
        """Raise RelationError where whole numbers in arrays may not be exact; of the tensors of a
        call whoever calls asks once."""
        arrays = (data.values for data in self.inputs)
        if self.inputs and all(
            isinstance(values, np.ndarray | np.integer | int) for values in arrays
        ):
            _exact(self, n)

    @cached_property
    def _read(self) -> dict[str, Data]:
        """The inputs by their names."""
        return dict(zip(inputs_read(self.predicate), self.inputs, strict=True))

    def _read_at(self, side: str) -> list[tuple[str, Data]]:
        """The inputs that are read at the query, at the key, or at neither, with their names."""
        asked = symbols(self.predicate)
        return [entry for entry in self._read.items() if reading(entry[0], side).name in asked]

    @classmethod
    def anchors(cls, given: Mapping[str, Any]) -> bool:
        # a length counts from the first position
        return any(not name.endswith(("(q)", "(k)")) for name in symbols(given["predicate"]))


@lru_cache(maxsize=16)
def _exact(relation: WhereInputs, n: int) -> None:
    """As `require_exact`, of inputs that are arrays of one sample."""
    arrays = {name: np.asarray(data.values) for name, data in relation._read.items()}
    whole = {
        name: (int(x.min()), int(x.max()))
        for name, x in arrays.items()
        if x.size and not is_real(x)
    }
    require_exact(at_length(relation.predicate, n), n, whole)


_EXACT = 2.0**53
"""Whole numbers below this are exact in float64."""


def _range(data: Data, tiles: Tiles, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The least and the greatest value of an input in each tile, and whether all are finite."""
    values = wide(np.asarray(data.values)).reshape(-1)[:n]
    numbers, which = values_of(tiles, values.astype(float))
    low, high = numbers.min(-1), numbers.max(-1)
    if not is_real(values):
        low, high = _outward(low)[0], _outward(high)[1]
    return low[which], high[which], np.isfinite(numbers).all(-1)[which]


def _outward(number: np.ndarray) -> Bounds:
    """Reals that a whole number lies between, which is rounded where it is large."""
    real = number.astype(float)
    large = np.abs(real) >= _EXACT
    low, high = (np.where(large, np.nextafter(real, end), real) for end in (-np.inf, np.inf))
    return low, high


def parted(predicate: Scalar, inputs: Mapping[str, InputRef], whole: bool, where: Leaf) -> Term:
    """A predicate of `where` that reads inputs, as operators of its parts: those that read none
    stay the pattern `where`, of which more is known. With `whole` it stays in one piece."""
    if not reads_inputs(predicate):
        return replace(where, arguments=(("predicate", predicate),))
    if not whole and isinstance(predicate, Apply) and predicate.op in ("and", "or", "not"):
        op, args = predicate.op, predicate.args
        if op == "not":
            return Compound("~", (parted(args[0], inputs, whole, where),), span=where.span)
        still = tuple(each for each in args if not reads_inputs(each))
        terms = [parted(each, inputs, whole, where) for each in args if reads_inputs(each)]
        if still:
            joined = still[0] if len(still) == 1 else Apply(op, still)
            terms.append(parted(joined, inputs, whole, where))
        return Compound("&" if op == "and" else "|", tuple(terms), span=where.span)
    read = tuple(inputs[name] for name in inputs_read(predicate))
    arguments = (("inputs", read), ("predicate", predicate))
    return Leaf(WhereInputs.name, arguments, where.span, where.spans)
