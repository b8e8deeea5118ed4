"""How far back the queries of a graph read, at every length: what generation has to keep."""

from __future__ import annotations

from dataclasses import dataclass

from attnspec.algebra import Complement, Intersection, Shift, Union
from attnspec.relations import Relation
from attnspec.tokens import First, Positions, TokenSet, TokenUnion

_STEADY = ("causal", "full", "residue", "strided", "fixed", "summary", "powers")
"""Patterns whose pairs are the same at every length."""


@dataclass(frozen=True)
class LookBack:
    """Every key that a causal graph reads is one of the `first`, or lies at most `before` positions
    before its query; this holds at every length, and so do the pairs."""

    first: int
    before: int


def look_back(relation: Relation) -> LookBack | None:
    """How far back a graph reads that is intersected with k <= q; None where it has no bound that
    shows in how it is written."""
    if isinstance(relation, Union):
        parts = [look_back(term) for term in relation.terms]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return LookBack(
            max((part.first for part in known), default=0),
            max((part.before for part in known), default=0),
        )
    if isinstance(relation, Intersection):
        # the pairs of all terms must hold at every length, one of them bounds them
        found = [look_back(term) for term in relation.terms]
        others = [t for t, f in zip(relation.terms, found, strict=True) if f is None]
        known = [part for part in found if part is not None]
        if not known or any(not _is_steady(term) for term in others):
            return None
        return min(known, key=lambda part: part.first + part.before)
    if isinstance(relation, Shift):
        inner = look_back(relation.term)
        if inner is None or relation.by < 0:
            return None
        return LookBack(inner.first + relation.by, inner.before)
    return _of_pattern(relation)


def _of_pattern(relation: Relation) -> LookBack | None:
    given = vars(relation)
    match relation.name:
        case "self":
            return LookBack(0, 0)
        case "window":
            return LookBack(0, int(relation.reach[0]))  # type: ignore[attr-defined]
        case "dilated":
            return LookBack(0, int(given["radius"]))
        case "block":
            return LookBack(0, int(given["size"]) * (int(given["before"]) + 1) - 1)
        case "columns" | "rows" | "global":
            count = _first(given["tokens"])
            return None if count is None else LookBack(count, 0)
        case _:
            return None


def _first(tokens: TokenSet) -> int | None:
    """The least c such that all tokens of a set are below c, at every length."""
    match tokens:
        case First(count):
            return count
        case Positions(ranges):
            return max((last + 1 for _, last in ranges), default=0)
        case TokenUnion(terms):
            parts = [_first(term) for term in terms]
            known = [part for part in parts if part is not None]
            return max(known, default=0) if len(known) == len(parts) else None
        case _:
            return None


def _is_steady(relation: Relation) -> bool:
    """Whether it is plain that a pair does not depend on the length of the sequence."""
    if isinstance(relation, Union | Intersection):
        return all(_is_steady(term) for term in relation.terms)
    if isinstance(relation, Complement):
        return _is_steady(relation.term)
    return relation.name in _STEADY or _of_pattern(relation) is not None
