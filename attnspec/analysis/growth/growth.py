"""How fast the edges of a graph grow with n, from how it is written.

Growth is n**a log(n)**b, written (a, b). Sizes that depend on n have a growth, and each pattern
turns those of its arguments into one of its edges. Of a term a lower and an upper growth are
known; where they are equal the order is derived, not measured.
"""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

from attnspec.analysis.growth.size_growth import (
    CONSTANT,
    LINEAR,
    QUADRATIC,
    Growth,
    Range,
    exactly,
    size_growth,
)
from attnspec.analysis.growth.where_growth import predicate_growth
from attnspec.graphs.forms.prelude import predicate_of_leaf
from attnspec.graphs.forms.properties import is_symmetric
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.mechanisms import MechanismDeclaration
from attnspec.ir.program import Attend, Compound, Leaf, Term
from attnspec.ir.scalars import Apply, Scalar, Symbol

BEHIND = Apply("<=", (Symbol("k"), Symbol("q")))
"""The predicate of keys up to the query."""


def attend_growth(attend: Attend, causal: bool) -> Range:
    """The growth of what one head computes: its edges, and the operations of its mechanism."""
    parts = []
    if attend.graph is not None:
        parts.append(causal_growth_of(attend.graph) if causal else growth_of(attend.graph))
    if attend.mechanism is not None:
        parts.append(exactly(_growth(MECHANISMS[attend.mechanism.name])))
    return Range(max(part.low for part in parts), max(part.high for part in parts))


def _growth(declaration: type[MechanismDeclaration]) -> Growth:
    """The growth of a mechanism's operations."""
    power, logs = declaration.growth
    return Fraction(power), Fraction(logs)


def growth_of(term: Term) -> Range:
    """The growth of the edges of a term."""
    if isinstance(term, Leaf):
        return _leaf(term)
    parts = [growth_of(child) for child in term.terms]
    match term.op:
        case "|":
            return Range(max(part.low for part in parts), max(part.high for part in parts))
        case "&":
            return Range(CONSTANT, min(part.high for part in parts))
        case "~":
            return Range(QUADRATIC if parts[0].high < QUADRATIC else CONSTANT, QUADRATIC)
        case "shift":
            # pairs that stand all along the rows are lost at the ends alone
            (leaf,) = term.terms
            along = isinstance(leaf, Leaf) and not BY_NAME[leaf.pattern].anchored
            low = parts[0].low if along and isinstance(term.by, int) else CONSTANT
            return Range(low, parts[0].high)
        case _:
            return parts[0]


def causal_growth_of(term: Term) -> Range:
    """The growth of the edges with k <= q of a term."""
    predicate = predicate_of_leaf(term) if isinstance(term, Leaf) else None
    if predicate is not None and not is_symmetric(term):
        return predicate_growth(Apply("and", (predicate, BEHIND)))
    found = growth_of(term)
    if isinstance(term, Compound) and term.op == "|":
        parts = [causal_growth_of(child) for child in term.terms]
        return Range(max(part.low for part in parts), max(part.high for part in parts))
    if is_symmetric(term) or (isinstance(term, Leaf) and _draws_causally(term)):
        # half of the pairs at least
        return found
    return Range(CONSTANT, found.high)


def _leaf(leaf: Leaf) -> Range:
    predicate = predicate_of_leaf(leaf)
    if predicate is not None:
        return predicate_growth(predicate)
    given = dict(leaf.arguments)
    if "tokens" in given:
        # every token of an input has a row, or a column, of pairs
        return Range(LINEAR, QUADRATIC)
    order = order_of(leaf)
    found = None if order is None else size_growth(order)
    return Range(CONSTANT, QUADRATIC) if found is None else exactly(found)


def order_of(leaf: Leaf) -> Scalar | None:
    """How many pairs a pattern says that it has, but for a constant factor."""
    return BY_NAME[leaf.pattern].order(arguments_of(leaf))


def arguments_of(leaf: Leaf) -> dict[str, Any]:
    """What is written, and the defaults of what is not."""
    entries = fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
    return {entry.name: entry.default for entry in entries} | dict(leaf.arguments)


def _draws_causally(leaf: Leaf) -> bool:
    """Whether a pattern draws among the keys up to the query in a causal spec."""
    changes = BY_NAME[leaf.pattern].changes
    return changes is not None and not changes.under_causal
