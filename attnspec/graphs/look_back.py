"""How far back the queries of a graph read, at every length: what generation has to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnspec.graphs.forms.prelude import predicate_of
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.predicates.distance_bounds import extent_of
from attnspec.graphs.relation import Relation
from attnspec.graphs.token_sets import (
    Every,
    First,
    InputTokens,
    Positions,
    StandIn,
    TokenComplement,
    TokenIntersection,
    TokenSet,
    TokenUnion,
    reads_data,
)
from attnspec.ir.scalars import Apply, symbols


@dataclass(frozen=True)
class LookBack:
    """Every key that a causal graph reads is one of the `first`, lies at most `before` positions
    before its query, or is in a set of `marked`, tokens of inputs that promise how many they are;
    this holds at every length, and so do the pairs."""

    first: int
    before: int
    marked: tuple[TokenSet, ...] = ()

    @property
    def _order(self) -> tuple[int, int]:
        return len(self.marked), self.first + self.before


def look_back(relation: Relation, promised: frozenset[str] = frozenset()) -> LookBack | None:
    """How far back a graph reads that is intersected with k <= q, where the inputs `promised` mark
    a bounded number of tokens; None where it has no bound that shows in how it is written."""
    if isinstance(relation, Union):
        return _of_all([look_back(term, promised) for term in relation.terms])
    if isinstance(relation, Intersection):
        # the pairs of all terms must hold at every length, one of them bounds them
        bounds = [look_back(term, promised) for term in relation.terms]
        others = [t for t, f in zip(relation.terms, bounds, strict=True) if f is None]
        bounded = [part for part in bounds if part is not None]
        if not bounded or any(not is_steady(term) for term in others):
            return None
        return min(bounded, key=lambda part: part._order)
    if isinstance(relation, Shift):
        inner = look_back(relation.term, promised)
        if inner is None or relation.by < 0 or inner.marked:
            return None
        return LookBack(inner.first + relation.by, inner.before)
    inside = relation.term if isinstance(relation, Complement) else relation
    predicate = predicate_of(inside)
    if predicate is not None:
        wanted = predicate if inside is relation else Apply("not", (predicate,))
        extent = extent_of(wanted) if is_steady(inside) else None
        return None if extent is None else LookBack(*extent)
    tokens = vars(relation).get("tokens")
    bound = _of_columns(tokens, promised) if isinstance(tokens, TokenSet) else None
    # a query among the tokens reads every key up to its own
    return None if bound is None or ("q" in relation.sides and bound.marked) else bound


def _of_all(parts: Sequence[LookBack | None]) -> LookBack | None:
    """How far back a union reads, None where a part has no bound."""
    bounded = [part for part in parts if part is not None]
    if len(bounded) < len(parts):
        return None
    return LookBack(
        max((part.first for part in bounded), default=0),
        max((part.before for part in bounded), default=0),
        tuple(dict.fromkeys(tokens for part in bounded for tokens in part.marked)),
    )


def lag_of_data(relation: Relation) -> int:
    """How many positions before a query or a key the run-time inputs of a graph are read."""
    if not reads_data(relation):
        return 0
    match relation:
        case Union(terms) | Intersection(terms):
            return max(lag_of_data(term) for term in terms)
        case Complement(term) | Transpose(term):
            return lag_of_data(term)
        case Shift(term, by):
            return lag_of_data(term) + by
        case _:
            return 0


def _of_columns(tokens: TokenSet, promised: frozenset[str]) -> LookBack | None:
    """The keys of a token set, where they are few at every length."""
    match tokens:
        case First(count):
            return LookBack(count, 0)
        case Positions(ranges):
            return LookBack(max((last + 1 for _, last in ranges), default=0), 0)
        case InputTokens(StandIn() as data) if data.name in promised:
            return LookBack(0, 0, (tokens,))
        case TokenUnion(terms):
            return _of_all([_of_columns(term, promised) for term in terms])
        case TokenIntersection(terms) if _are_steady(tokens):
            bounds = [_of_columns(term, promised) for term in terms]
            return min((part for part in bounds if part), key=lambda x: x._order, default=None)
        case _:
            return None


def _are_steady(tokens: TokenSet) -> bool:
    """Whether it is plain that a token of the set is one at every length."""
    match tokens:
        case TokenUnion(terms) | TokenIntersection(terms):
            return all(_are_steady(term) for term in terms)
        case TokenComplement(term):
            return _are_steady(term)
        case _:
            return isinstance(tokens, First | Positions | Every | InputTokens)


def is_steady(relation: Relation) -> bool:
    """Whether it is plain that a pair does not depend on the length of the sequence."""
    if isinstance(relation, Union | Intersection):
        return all(map(is_steady, relation.terms))
    if isinstance(relation, Complement | Transpose):
        return is_steady(relation.term)
    if isinstance(relation, Shift):
        return relation.by >= 0 and is_steady(relation.term)
    predicate = predicate_of(relation) or vars(relation).get("predicate")
    if predicate is not None:
        return all(name in ("q", "k") or name.endswith(")") for name in symbols(predicate))
    tokens = vars(relation).get("tokens")
    if isinstance(tokens, TokenSet):
        return _are_steady(tokens)
    return relation.changing(bool(vars(relation).get("causal"))) is None
