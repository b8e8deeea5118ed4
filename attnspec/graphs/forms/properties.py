"""Properties that follow from how a term is written, for every n and every input.

Each rule is sound and none is complete: True is a proof, False says nothing.
"""

from __future__ import annotations

from attnspec.graphs.forms.prelude import predicate_of_leaf
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.predicates.symmetry import (
    asks_coordinates,
    holds_for_itself,
    says_the_same_turned,
)
from attnspec.ir.linear import combination
from attnspec.ir.program import Leaf, Term
from attnspec.ir.scalars import TURNED, Apply


def reads_itself(term: Term, reads: bool = True) -> bool:
    """Every query reads its own position, so no row is empty; `& causal` keeps it so. Unless
    `reads`, that none does."""
    if isinstance(term, Leaf):
        predicate = predicate_of_leaf(term)
        if predicate is None:
            return reads and BY_NAME[term.pattern].reads_itself
        return holds_for_itself(predicate if reads else Apply("not", (predicate,)))
    match term.op:
        case "|" | "&":
            some = any if (term.op == "|") == reads else all
            return some(reads_itself(child, reads) for child in term.terms)
        case "transpose" | "~":
            return reads_itself(term.terms[0], reads == (term.op == "transpose"))
        case _:
            return False


def asks_for_cells(leaf: Leaf) -> bool:
    """Whether a pattern holds for cells of a grid alone, and so not for tokens before it."""
    predicate = dict(leaf.arguments).get("predicate")
    if predicate is not None:
        return asks_coordinates(predicate)  # type: ignore[arg-type]
    return BY_NAME[leaf.pattern].needs_grid


def is_symmetric(term: Term) -> bool:
    """(q, k) implies (k, q)."""
    if isinstance(term, Leaf):
        predicate = predicate_of_leaf(term)
        if predicate is not None:
            return says_the_same_turned(predicate)
        return BY_NAME[term.pattern].symmetric
    return all(is_symmetric(child) for child in term.terms)


def never_reads_later(term: Term) -> bool:
    """k <= q for every pair."""
    if isinstance(term, Leaf):
        return keeps_order(predicate_of_leaf(term))
    match term.op:
        case "|" | "shift":
            return all(never_reads_later(child) for child in term.terms)
        case "&":
            return any(never_reads_later(child) for child in term.terms)
        case _:
            return False


def moves_along(term: Term) -> bool:
    """Whether it shows that the pairs of a part of a sequence, taken by itself, are those that the
    whole has between its positions: they depend on q - k and on labels, not on where they stand. A
    size that reads n is another matter."""
    if isinstance(term, Leaf):
        pattern = BY_NAME[term.pattern]
        return not (pattern.anchored or pattern.data_dependent or pattern.needs_grid)
    # a shifted pair is one of positions that the part may not have
    return term.op != "shift" and all(moves_along(part) for part in term.terms)


def keeps_order(predicate: object) -> bool:
    """Whether a predicate holds for pairs with k <= q only, by one of its comparisons."""
    if not isinstance(predicate, Apply):
        return False
    if predicate.op in ("and", "or"):
        some = any if predicate.op == "and" else all
        return some(keeps_order(part) for part in predicate.args)
    op, sides = predicate.op, predicate.args
    if op in TURNED:
        op, sides = TURNED[op], sides[::-1]
    if op not in ("<", "<=", "=="):
        return False
    # k - q <= 0, or less, however it is written
    linear = combination(Apply("-", sides))
    factor = None if linear is None else linear.distance
    if linear is None or factor not in (1, -1) or not isinstance(linear.plain.rest, int):
        return False
    return linear.plain.rest >= 0 if factor == -1 else op == "==" and linear.plain.rest <= 0
