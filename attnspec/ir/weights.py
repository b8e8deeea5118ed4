"""How large terms are with names written out, so that names cannot multiply them without end."""

from __future__ import annotations

from typing import NamedTuple

from attnspec.ir.program import Compound, Leaf, TokenCompound, Tokens
from attnspec.ir.scalars import Apply


class Weight(NamedTuple):
    """Operators and patterns in all, and how many stand inside one another."""

    size: int
    depth: int


class Weights:
    """The weights of terms, token sets and scalars, remembered for each object."""

    def __init__(self) -> None:
        # the object is kept beside its weight, so that no other gets its identity
        self._known: dict[int, tuple[object, Weight]] = {}

    def of(self, item: object) -> Weight:
        """The weight of a term, a token set, a scalar or an argument; constants weigh nothing."""
        if isinstance(item, tuple):
            return _sum([self.of(part) for part in item])
        if not isinstance(item, Apply | Compound | Leaf | Tokens | TokenCompound):
            return Weight(0, 0)
        known = self._known.get(id(item))
        if known is not None:
            return known[1]
        parts = _sum([self.of(part) for part in _parts(item)])
        weight = Weight(parts.size + 1, parts.depth + 1)
        self._known[id(item)] = (item, weight)
        return weight


def _parts(item: Apply | Compound | Leaf | Tokens | TokenCompound) -> tuple[object, ...]:
    match item:
        case Apply(_, args):
            return args
        case Leaf(_, arguments):
            return tuple(value for _, value in arguments)
        case Tokens(_, values):
            return values
        case Compound(_, terms, by):
            return (*terms, by)
        case TokenCompound(_, members):
            return members


def _sum(weights: list[Weight]) -> Weight:
    return Weight(
        sum(weight.size for weight in weights), max((weight.depth for weight in weights), default=0)
    )
