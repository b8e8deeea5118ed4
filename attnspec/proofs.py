"""Properties that follow from how a term is written, for every n and every input.

Each rule is sound and none is complete: True is a proof, False says nothing.
"""

from __future__ import annotations

from attnspec.ir import Compound, Leaf, Term
from attnspec.scalars import Apply, Scalar, Symbol
from attnspec.sides import asks_coordinates, holds_for_itself, says_the_same_turned

_READS_ITSELF = frozenset(
    "self full causal window dilated residue strided block fixed powers neighborhood axial"
    " same".split()
)
_SYMMETRIC = frozenset(
    "self full dilated residue strided global powers expander axial same".split()
)


def reads_itself(term: Term) -> bool:
    """Every query reads its own position, so no row is empty; `& causal` keeps it so."""
    if isinstance(term, Leaf):
        if term.pattern == "where":
            return holds_for_itself(_predicate(term))
        return term.pattern in _READS_ITSELF
    match term.op:
        case "|":
            return any(reads_itself(child) for child in term.terms)
        case "&":
            return all(reads_itself(child) for child in term.terms)
        case "transpose":
            return reads_itself(term.terms[0])
        case _:
            return False


def asks_for_cells(leaf: Leaf) -> bool:
    """Whether a pattern holds for cells of a grid alone, and so not for tokens before it."""
    if leaf.pattern == "where":
        return asks_coordinates(_predicate(leaf))
    return leaf.pattern in ("neighborhood", "axial")


def is_symmetric(term: Term) -> bool:
    """(q, k) implies (k, q)."""
    if isinstance(term, Leaf):
        given = dict(term.arguments)
        if term.pattern == "window":
            return "radius" in given or given["before"] == given["after"]
        if term.pattern == "block":
            return given["before"] == given["after"]
        if term.pattern == "where":
            return says_the_same_turned(_predicate(term))
        return term.pattern in _SYMMETRIC
    return all(is_symmetric(child) for child in term.terms)


def never_reads_later(term: Term) -> bool:
    """k <= q for every pair."""
    if isinstance(term, Leaf):
        given = dict(term.arguments)
        if term.pattern == "where":
            return _keeps_order(given["predicate"])
        return term.pattern in ("causal", "self") or (
            term.pattern == "window" and given.get("after") == 0
        )
    match term.op:
        case "|" | "shift":
            return all(never_reads_later(child) for child in term.terms)
        case "&" | "-":
            return any(never_reads_later(child) for child in _kept(term))
        case _:
            return False


def _predicate(term: Leaf) -> Scalar:
    """The predicate of a `where`."""
    return dict(term.arguments)["predicate"]  # type: ignore[return-value]


_EARLIER = {(op, "k", "q") for op in ("<", "<=", "==")}
_EARLIER |= {(op, "q", "k") for op in (">", ">=", "==")}


def _keeps_order(predicate: object) -> bool:
    """Whether a predicate holds for pairs with k <= q only, by one of its comparisons."""
    if not isinstance(predicate, Apply):
        return False
    if predicate.op in ("and", "or"):
        some = any if predicate.op == "and" else all
        return some(_keeps_order(part) for part in predicate.args)
    sides = [part.name for part in predicate.args if isinstance(part, Symbol)]
    return (predicate.op, *sides) in _EARLIER


def _kept(term: Compound) -> tuple[Term, ...]:
    return term.terms[:1] if term.op == "-" else term.terms
