"""What the number of edges of a relation depends on, from how the relation is made.

A pattern whose sizes do not depend on n compares q - k, q, k, n - q and n - k with constants, and
asks for residues and quotients by constants. These constants are its shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from attnspec.algebra import Complement, Intersection, Shift, Transpose, Union
from attnspec.patterns.block import Block
from attnspec.patterns.causal import Causal
from attnspec.patterns.columns import Columns
from attnspec.patterns.dilated import Dilated
from attnspec.patterns.fixed import Fixed
from attnspec.patterns.full import Full
from attnspec.patterns.global_ import Global
from attnspec.patterns.prefix import Prefix
from attnspec.patterns.residue import Residue
from attnspec.patterns.rows import Rows
from attnspec.patterns.self import Self
from attnspec.patterns.strided import Strided
from attnspec.patterns.summary import Summary
from attnspec.patterns.where import Where
from attnspec.patterns.window import Window
from attnspec.relations import Relation
from attnspec.scalars import Apply, Scalar, symbols
from attnspec.tokens import (
    Every,
    First,
    Last,
    Positions,
    TokenComplement,
    TokenIntersection,
    TokenSet,
    TokenUnion,
)


@dataclass(frozen=True)
class Shape:
    """What a relation's count depends on: residues modulo `moduli`, constants up to `reach`.

    `proven` is False where the polygons may have corners that are not integral.
    """

    moduli: frozenset[int] = frozenset()
    reach: int = 0
    proven: bool = True

    @property
    def period(self) -> int:
        """What residues of n the count depends on."""
        return lcm(*self.moduli)

    @property
    def settled(self) -> int:
        """A length from which on the count is a quasi-polynomial."""
        return 3 * self.reach + 4 * self.period + 4

    def joined(self, *others: Shape) -> Shape:
        """The shape of a combination."""
        every = (self, *others)
        return Shape(
            frozenset().union(*(shape.moduli for shape in every)),
            max(shape.reach for shape in every),
            all(shape.proven for shape in every),
        )


def grows_by_rows(relation: Relation) -> bool:
    """Whether the keys of a query are the same at every length that has it."""
    if not isinstance(relation, Intersection) or Causal() not in relation.terms:
        return False
    return all(_keeps_rows(term) for term in relation.terms)


def _keeps_rows(relation: Relation) -> bool:
    """Whether the keys up to the query are the same at every length."""
    match relation:
        case Union(terms) | Intersection(terms):
            return all(_keeps_rows(term) for term in terms)
        case Complement(term):
            return _keeps_rows(term)
        case Global() | Columns() | Rows():
            return isinstance(relation.tokens, First | Every | Positions)
        case Where():
            return "n" not in symbols(relation.predicate)
        case _:
            return _shape(relation) is not None and not isinstance(relation, Shift | Transpose)


def shape_of(relation: Relation) -> Shape | None:
    """The shape of a relation; None where its count is no quasi-polynomial, or may be none."""
    found = _shape(relation)
    return None if found is None else replace(found, moduli=found.moduli - {1})


def _shape(relation: Relation) -> Shape | None:
    match relation:
        case Union(terms) | Intersection(terms):
            shapes = [_shape(term) for term in terms]
            known = [shape for shape in shapes if shape is not None]
            return Shape().joined(*known) if len(known) == len(shapes) else None
        case Complement(term) | Transpose(term):
            return _shape(term)
        case Shift(term, by):
            inner = _shape(term)
            if inner is None:
                return None
            return Shape(inner.moduli, inner.reach + abs(by), inner.proven)
        case Full() | Causal() | Self():
            return Shape()
        case Window():
            return Shape(reach=max(relation.reach))
        case Dilated():
            return Shape(frozenset({relation.step}), relation.radius)
        case Residue():
            return Shape(frozenset({relation.step}), relation.step)
        case Strided() | Summary() | Fixed():
            return Shape(frozenset({relation.stride}), relation.stride)
        case Block():
            farthest = max(relation.before, relation.after) + 1
            return Shape(frozenset({relation.size}), relation.size * farthest)
        case Global() | Columns() | Rows():
            return _tokens(relation.tokens)
        case Prefix(length) if isinstance(length, int):
            return Shape(reach=length)
        case Where():
            return _predicate(relation.predicate)
        case _:
            return None


def _tokens(tokens: TokenSet) -> Shape | None:
    match tokens:
        case First(count) | Last(count):
            return Shape(reach=count)
        case Every(step, offset):
            return Shape(frozenset({step}), offset + step)
        case Positions(ranges):
            return Shape(reach=max((last + 1 for _, last in ranges), default=0))
        case TokenUnion(terms) | TokenIntersection(terms):
            shapes = [_tokens(term) for term in terms]
            known = [shape for shape in shapes if shape is not None]
            return Shape().joined(*known) if len(known) == len(shapes) else None
        case TokenComplement(term):
            return _tokens(term)
        case _:
            return None


_LINEAR = frozenset("+ - neg == != < <= > >= and or not within one_of abs min max // % *".split())


def _predicate(predicate: Scalar) -> Shape | None:
    """The shape of a predicate that is linear in q, k and n but for quotients by constants and
    residues of them; what the corners of its polygons are is not looked into."""
    moduli: set[int] = set()
    numbers: list[int] = [0]

    def visit(scalar: Scalar) -> bool:
        if isinstance(scalar, Apply):
            if scalar.op not in _LINEAR:
                return False
            if scalar.op in ("//", "%"):
                divisor = scalar.args[1]
                if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
                    return False
                moduli.add(divisor)
            if scalar.op == "*" and all(any(symbols(arg)) for arg in scalar.args):
                return False
            return all(visit(arg) for arg in scalar.args)
        if isinstance(scalar, int):
            numbers.append(abs(scalar))
        return not isinstance(scalar, float) and "." not in getattr(scalar, "name", "")

    if not visit(predicate):
        return None
    reach = max(numbers) * max((*moduli, 1))
    return Shape(frozenset(moduli), reach, proven=False)
