"""Conditions of run-time inputs: what they compute of each side at once, and of both in the mask.

A relation is asked whether it holds of positions that note what becomes of them. What comes of
queries alone, or of keys alone, is a number for each place, computed on the device; only what
compares the two is left to the mask, as a shape of operations that is the same whatever the numbers
are. The same shape answers for whole blocks, by the least and the greatest number of each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from attnspec.backends.common.masks import with_data
from attnspec.backends.flex.block_lists import BLOCK, EVERYTHING, NOTHING
from attnspec.graphs.relation import Relation

Shape: TypeAlias = "tuple[Any, ...]"
"""An operation and the shapes of its operands; or `q`, `k` or `one` and the number of a tensor, a
number for each place of queries or of keys, or one alone; or `part` and the number of a part."""

Ends: TypeAlias = "tuple[Any, Any]"
"""The least and the greatest value in each block, tensors that broadcast to [samples, q blocks, k
blocks]; of a truth value whether it always holds there, and whether it may."""

UNDECIDED: Ends = (False, True)

NEITHER, BOTH = "neither", "both"


class Condition(NamedTuple):
    """What a mask computes: its shape, and the numbers in it, int64, float64 or bool [samples or 1,
    places], or one alone."""

    shape: Shape
    numbers: tuple[torch.Tensor, ...]


def _noting(op: Callable[..., Any], turned: bool = False) -> Callable[..., Noted]:
    def noted(*operands: Any) -> Noted:
        return _noted(op, *(operands[::-1] if turned else operands))

    return noted


class Noted:
    """What has come of positions of the side `q` or `k`, of `neither`, or of `both`.

    `values` are those of one side [samples or 1, places], of neither [samples, 1 or n], and of both
    none, but of their type; `shape` is then the operation and its operands.
    """

    __array_ufunc__ = None  # numbers of numpy leave the operation to it

    def __init__(self, side: str, values: torch.Tensor, shape: Shape = ()) -> None:
        self.side, self.values, self.shape = side, values, shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def part(self, number: int) -> Noted:
        """Whether the pair is in a part."""
        return Noted(BOTH, self.values.new_empty(0, dtype=torch.bool), ("part", number))

    def double(self) -> Noted:
        return self if self.dtype == torch.float64 else _noted(_doubled, self)

    def long(self) -> Noted:
        return self if self.dtype == torch.int64 else _noted(_whole, self)

    def __getitem__(self, index: tuple[object, Noted]) -> Noted:
        """An input at positions, `x[..., q]`."""
        at = index[1]
        return Noted(at.side, self.values[:, at.values[0]])

    def __eq__(self, other: object) -> Any:
        if other is self and not self.dtype.is_floating_point:
            return True
        return _noted(operator.eq, self, other)

    def __ne__(self, other: object) -> Any:
        return self.__eq__(other) ^ True

    __hash__ = object.__hash__

    def __and__(self, other: object) -> Any:
        if isinstance(other, bool):
            return self if other else False
        return _noted(operator.and_, self, other)

    def __or__(self, other: object) -> Any:
        if isinstance(other, bool):
            return other or self
        return _noted(operator.or_, self, other)

    __rand__, __ror__ = __and__, __or__

    def __xor__(self, other: object) -> Noted:
        if other is not True:
            raise ValueError("of truth values the opposite alone is asked for")
        return _noted(operator.invert, self)

    __lt__, __le__ = _noting(operator.lt), _noting(operator.le)
    __gt__, __ge__ = _noting(operator.gt), _noting(operator.ge)
    __add__, __radd__ = _noting(operator.add), _noting(operator.add, turned=True)
    __sub__, __rsub__ = _noting(operator.sub), _noting(operator.sub, turned=True)
    __mul__, __rmul__ = _noting(operator.mul), _noting(operator.mul, turned=True)
    __mod__, __rmod__ = _noting(operator.mod), _noting(operator.mod, turned=True)
    __floordiv__ = _noting(operator.floordiv)
    __rfloordiv__ = _noting(operator.floordiv, turned=True)
    __truediv__, __rtruediv__ = _noting(operator.truediv), _noting(operator.truediv, turned=True)
    __neg__, __abs__ = _noting(operator.neg), _noting(operator.abs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> Noted:
        return _noted(func, *args)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.long()


def _noted(op: Callable[..., Any], *operands: Any) -> Noted:
    """What an operation makes: numbers of one side at once, of both a note of it."""
    sides = {x.side for x in operands if isinstance(x, Noted)} - {NEITHER}
    if len(sides) > 1 or BOTH in sides:
        kinds = [x.values.flatten()[:0] if isinstance(x, Noted) else x for x in operands]
        return Noted(BOTH, op(*kinds), (op, *operands))
    values = op(*(x.values if isinstance(x, Noted) else x for x in operands))
    return Noted(min(sides, default=NEITHER), values)


def condition_of(
    relation: Relation,
    data: Mapping[str, torch.Tensor],
    q_at: torch.Tensor,
    k_at: torch.Tensor,
    n: int,
) -> Condition:
    """What a relation that reads inputs asks of queries and keys at these positions of n, int64
    [places] each. Nothing waits for the device."""
    given = {name: Noted(NEITHER, values.flatten(1)) for name, values in data.items()}
    asked = with_data(relation, given)
    held = asked.holds(Noted("q", q_at[None]), Noted("k", k_at[None]), n)
    numbers: list[torch.Tensor] = []
    return Condition(_shape(held, numbers, q_at), tuple(numbers))


def _shape(held: Any, numbers: list[torch.Tensor], like: torch.Tensor) -> Shape:
    """How something came about, its numbers listed; one of neither side is one of every key."""
    if not isinstance(held, Noted):
        kind = torch.float64 if isinstance(held, float) else None
        numbers.append(
            like.new_full((), held, dtype=torch.bool if held is True or held is False else kind)
        )
        return "one", len(numbers) - 1
    if held.side == BOTH:
        op, *operands = held.shape
        if op == "part":
            return held.shape
        return op, *(_shape(each, numbers, like) for each in operands)
    values = held.values
    # a type more is a compilation more
    whole = values.dtype == torch.bool or values.is_floating_point()
    numbers.append(values if whole else values.long())
    return "k" if held.side == NEITHER else held.side, len(numbers) - 1


# --- blocks --------------------------------------------------------------------------------------


def in_blocks(condition: Condition, parts: Sequence[torch.Tensor]) -> Ends:
    """Whether a condition always holds in a block, and whether it may; of parts the numbers of
    their masks [q blocks, k blocks] are given."""
    return _ends(condition.shape, condition.numbers, parts) or UNDECIDED


def _ends(
    shape: Shape, numbers: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> Ends | None:
    """None where nothing is known of a number."""
    op, *operands = shape
    if op == "part":
        (mask,) = (parts[number] for number in operands)
        return mask == EVERYTHING, mask != NOTHING
    if op == "one":
        return numbers[operands[0]], numbers[operands[0]]
    if op in ("q", "k"):
        low, high = _ends_of_places(numbers[operands[0]])
        return (low[:, :, None], high[:, :, None]) if op == "q" else (low[:, None], high[:, None])
    found = [_ends(each, numbers, parts) for each in operands]
    known = [each for each in found if each is not None]
    if op not in RULES or len(known) < len(found):
        return UNDECIDED if op in TRUTHS else None
    return RULES[op](*known)


def _ends_of_places(x: torch.Tensor) -> Ends:
    """The least and greatest number of every block, [samples or 1, blocks]."""
    blocks = torch.unflatten(x, 1, (-1, BLOCK))
    if x.dtype == torch.bool:
        return blocks.all(-1), blocks.any(-1)
    low, high = blocks.amin(-1), blocks.amax(-1)
    if not x.is_floating_point():
        return low, high
    # of what is no number, or infinite, nothing is known
    known = blocks.isfinite().all(-1)
    return torch.where(known, low, -math.inf), torch.where(known, high, math.inf)


def _outward(low: torch.Tensor, high: torch.Tensor) -> Ends:
    """Ends where infinities may have met."""
    if not low.is_floating_point():
        return low, high
    return low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(
        math.inf, math.inf, -math.inf
    )


def _equal(a: Ends, b: Ends) -> Ends:
    single = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return single, (a[0] <= b[1]) & (b[0] <= a[1])


def _absolute(a: Ends) -> Ends:
    least = torch.maximum(a[0], -a[1]).clamp(min=0)
    return least, torch.maximum(-a[0], a[1])


RULES: Mapping[Callable[..., Any], Callable[..., Ends]] = {
    operator.and_: lambda a, b: (a[0] & b[0], a[1] & b[1]),
    operator.or_: lambda a, b: (a[0] | b[0], a[1] | b[1]),
    operator.invert: lambda a: (a[1] ^ True, a[0] ^ True),
    operator.eq: _equal,
    operator.lt: lambda a, b: (a[1] < b[0], a[0] < b[1]),
    operator.le: lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    operator.gt: lambda a, b: (a[0] > b[1], a[1] > b[0]),
    operator.ge: lambda a, b: (a[0] >= b[1], a[1] >= b[0]),
    operator.add: lambda a, b: _outward(a[0] + b[0], a[1] + b[1]),
    operator.sub: lambda a, b: _outward(a[0] - b[1], a[1] - b[0]),
    operator.neg: lambda a: (-a[1], -a[0]),
    operator.abs: _absolute,
    _doubled: lambda a: (a[0].double(), a[1].double()),
}
"""The ends of what an operation makes. Rounding keeps the order of numbers, so that they hold for
what the mask computes to the last bit."""

TRUTHS = {getattr(operator, name) for name in "and_ or_ invert eq lt le gt ge".split()}
"""Operations that make truth values."""
