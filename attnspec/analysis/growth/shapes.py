"""What the number of edges of a relation depends on, from how the relation is made.

A pattern whose sizes do not depend on n compares q - k, q, k, n - q and n - k with constants, and
asks for residues and quotients by constants. These constants are its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from attnspec.graphs.forms.prelude import predicate_of
from attnspec.graphs.forms.properties import keeps_order
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.predicates.periods import comparisons, movement
from attnspec.graphs.relation import Relation
from attnspec.ir.intervals import bounds
from attnspec.ir.scalars import NEGATED, Apply, Scalar, is_whole, symbols


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
    if not isinstance(relation, Intersection) or not _keeps_rows(relation):
        return False
    return any(keeps_order(predicate_of(term)) for term in relation.terms)


def _keeps_rows(relation: Relation) -> bool:
    """Whether the keys up to the query are the same at every length."""
    match relation:
        case Union(terms) | Intersection(terms):
            return all(_keeps_rows(term) for term in terms)
        case Complement(term):
            return _keeps_rows(term)
        case Shift() | Transpose():
            return False
        case _:
            predicate = predicate_of(relation)
            return predicate is not None and "n" not in symbols(predicate)


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
        case _:
            predicate = predicate_of(relation)
            return None if predicate is None else _predicate(predicate)


_LINEAR = frozenset("+ - neg == != < <= > >= and or not within one_of abs min max // % *".split())


def _predicate(predicate: Scalar) -> Shape | None:
    """The shape of a predicate: proven where every comparison is one of q - k, q, k, n - q or n - k
    with a number, or one of such once all of them move by whole periods."""
    shapes = [_compared(each) or _looked(each) for each in comparisons(predicate)]
    known = [shape for shape in shapes if shape is not None]
    return Shape().joined(*known) if len(known) == len(shapes) else None


def _compared(predicate: Scalar) -> Shape | None:
    """The shape of a comparison whose polygons have integral corners, None where they may not."""
    if not isinstance(predicate, Apply):
        return Shape()
    op, args = predicate.op, predicate.args
    if op in ("within", "one_of") and len(args) > 1:
        pairs = [(args[0], other) for other in args[1:]]
    elif op in NEGATED:
        pairs = [(args[0], args[1])]
    else:
        return None
    shapes = [
        _apart(Apply("-", (left, right)))
        for first, second in pairs
        for left in _choices(first)
        for right in _choices(second)
    ]
    known = [shape for shape in shapes if shape is not None]
    return Shape().joined(*known) if len(known) == len(shapes) else None


def _choices(scalar: Scalar) -> tuple[Scalar, ...]:
    """Scalars of which one is the value, and all of which decide comparisons of it."""
    if isinstance(scalar, Apply) and scalar.op == "abs":
        return scalar.args[0], Apply("neg", scalar.args)
    if isinstance(scalar, Apply) and scalar.op in ("min", "max"):
        return scalar.args
    return (scalar,)


def _apart(difference: Scalar) -> Shape | None:
    """The shape of a number that is compared with 0."""
    moved = movement(difference) if is_whole(difference) else None
    if moved is None:
        return None
    step, by = moved
    some = [each for each in by if each]
    if len(some) > 2 or (len(some) == 2 and some[0] != -some[1]):
        return None
    if not some:
        return Shape(frozenset({step}))
    once = np.asarray(0.0), np.asarray(step - 1.0)
    most = max(abs(float(end)) for end in bounds(difference, dict.fromkeys("qkn", once)))
    return Shape(frozenset({step}), step * math.ceil(most / min(map(abs, some))))


def _looked(predicate: Scalar) -> Shape | None:
    """The shape of a comparison that is linear in q, k and n but for quotients by constants and
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
