"""What a predicate of `where` says of (k, q), and of (q, q), as far as that is plain from its text.

Each rule is sound and none is complete: True is a proof for every n, False says nothing.
"""

from __future__ import annotations

import numpy as np

from attnspec.ir.intervals import bounds
from attnspec.ir.scalars import TURNED, Apply, Scalar, ScalarError, Symbol, fold, symbols

_COMMUTING = frozenset("+ * == != and or min max".split())
_COMPARED = frozenset(("<", "<=", ">", ">="))
_HELD_BY_EQUALS = frozenset(("==", "<=", ">="))


def asks_coordinates(predicate: Scalar) -> bool:
    """Whether a predicate asks where on a grid a position is."""
    return any("." in name for name in symbols(predicate))


def says_the_same_turned(predicate: Scalar) -> bool:
    """Whether a predicate holds for (k, q) wherever it holds for (q, k)."""
    return _ordered(predicate) == _ordered(turned(predicate))


def turned(predicate: Scalar) -> Scalar:
    """The predicate that holds for (k, q) where this one holds for (q, k)."""
    return _renamed(predicate, {"q": "k", "k": "q"})


def holds_for_itself(predicate: Scalar) -> bool:
    """Whether a predicate holds for every pair (q, q) of positions whose coordinates it has."""
    return _reduced(_renamed(predicate, {"k": "q"})) is True


def _renamed(scalar: Scalar, sides: dict[str, str]) -> Scalar:
    """The scalar with `q`, `q.row` and so on as those of other positions."""
    match scalar:
        case Symbol(name):
            side, dot, axis = name.partition(".")
            return Symbol(sides.get(side, side) + dot + axis)
        case Apply(op, args):
            return Apply(op, tuple(_renamed(arg, sides) for arg in args))
        case _:
            return scalar


def _ordered(scalar: Scalar) -> Scalar:
    """The same scalar with what may stand in any order in one order."""
    if not isinstance(scalar, Apply):
        return scalar
    op, args = scalar.op, tuple(_ordered(arg) for arg in scalar.args)
    if op in TURNED:
        op, args = TURNED[op], args[::-1]
    if op == "abs":
        args = (_of_either_sign(args[0]),)
    if op == "**" and isinstance(args[1], int) and args[1] % 2 == 0:
        args = (_of_either_sign(args[0]), args[1])
    if op in ("==", "!=") and 0 in args:
        args = tuple(_divided(arg) for arg in args)
    if op in _COMMUTING:
        args = tuple(sorted(args, key=repr))
    return Apply(op, args)


def _of_either_sign(scalar: Scalar) -> Scalar:
    """A difference with its sides in one order, where its sign makes no difference."""
    if isinstance(scalar, Apply) and scalar.op == "-":
        return Apply("-", tuple(sorted(scalar.args, key=repr)))
    return scalar


def _divided(scalar: Scalar) -> Scalar:
    """A remainder that is compared with 0: a number leaves none where its negative leaves none."""
    if isinstance(scalar, Apply) and scalar.op == "%":
        return Apply("%", (_of_either_sign(scalar.args[0]), scalar.args[1]))
    return scalar


def _reduced(scalar: Scalar) -> Scalar:
    """The scalar with what follows from two equal sides computed."""
    if not isinstance(scalar, Apply):
        return scalar
    args = tuple(_reduced(arg) for arg in scalar.args)
    match scalar.op, args:
        case ("-", (first, second)) if first == second:
            return 0
        case ("%", (0, _)):
            return 0
        case (op, (first, second)) if op in _HELD_BY_EQUALS and first == second:
            return True
        case ("!=" | "<" | ">", (first, second)) if first == second:
            return False
        case ("and", _) if all(arg is True for arg in args):
            return True
        case ("or", _) if any(arg is True for arg in args):
            return True
        case (op, _) if op in _COMPARED and _always(Apply(op, args)):
            return True
        case _:
            pass
    try:
        return fold(Apply(scalar.op, args), {})
    except ScalarError:
        # no value here is none for the whole
        return Apply(scalar.op, args)


def _always(comparison: Scalar) -> bool:
    """Whether a comparison holds whatever its symbols are: n from 1 on, all others from 0."""
    ends = {
        name: (np.asarray(float(name == "n")), np.asarray(np.inf)) for name in symbols(comparison)
    }
    return bool(bounds(comparison, ends)[0] == 1)
