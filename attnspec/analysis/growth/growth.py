"""At most how fast the edges of a graph grow with n, from how it is written.

Growth is n**a log(n)**b, written (a, b). Sizes that depend on n have a growth, and each pattern
turns those of its arguments into a bound of its edges.
"""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

from attnspec.analysis.growth.size_growth import QUADRATIC, Growth, size_growth
from attnspec.analysis.growth.where_growth import predicate_growth
from attnspec.graphs.forms.prelude import BEHIND, predicate_of_leaf
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.program import Attend, Leaf, Program, Term
from attnspec.ir.scalars import Apply


def growth_of(program: Program) -> Growth:
    """The growth that what all heads compute does not exceed: their edges, and the operations of
    their mechanisms."""
    used = {index for row in program.slots for index in row}
    return max(_attend(program.attends[index], program.causal) for index in sorted(used))


def _attend(attend: Attend, causal: bool) -> Growth:
    parts = []
    if attend.graph is not None:
        parts.append(_term(attend.graph, causal))
    if attend.mechanism is not None:
        power, logs = MECHANISMS[attend.mechanism.name].growth
        parts.append((Fraction(power), Fraction(logs)))
    return max(parts)


def _term(term: Term, causal: bool) -> Growth:
    """The growth of the edges of a term, with `causal` of those with k <= q."""
    if isinstance(term, Leaf):
        return min(_leaf(term, causal), QUADRATIC)
    inside = causal and term.op in ("|", "&", "-")
    parts = [_term(child, inside) for child in term.terms]
    match term.op:
        case "|":
            return max(parts)
        case "&":
            return min(parts)
        case "~":
            return QUADRATIC
        case _:
            return parts[0]


def _leaf(leaf: Leaf, causal: bool) -> Growth:
    predicate = predicate_of_leaf(leaf)
    if predicate is not None:
        return predicate_growth(Apply("and", (predicate, BEHIND)) if causal else predicate)
    order = BY_NAME[leaf.pattern].order(arguments_of(leaf))
    growth = None if order is None or "tokens" in dict(leaf.arguments) else size_growth(order)
    return QUADRATIC if growth is None else growth


def arguments_of(leaf: Leaf) -> dict[str, Any]:
    """What is written, and the defaults of what is not."""
    entries = fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
    return {entry.name: entry.default for entry in entries} | dict(leaf.arguments)
