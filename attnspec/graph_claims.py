"""Claims about two graphs, `A subset B` and `A == B`: proven by their forms, else counted."""

from __future__ import annotations

from attnspec.analysis.differences import only_in, row_text
from attnspec.bind import Situation, bind_attended
from attnspec.conditions import contained
from attnspec.forms import form_of, place_of
from attnspec.ir import Claim, Program
from attnspec.relations import Relation


def proven(claim: Claim, program: Program) -> bool:
    """Whether the claim follows from the forms of its graphs, for every n and every input."""
    place = place_of(program)
    first, second = (form_of(term, place) for term in claim.terms)
    if first is None or second is None:
        return False
    return contained(first, second) and (claim.kind == "subset" or contained(second, first))


def relations(claim: Claim, at: Situation) -> tuple[Relation, Relation]:
    """The two graphs at one length, `causal` included; raises BindError for a size."""
    first, second = (bind_attended(term, at) for term in claim.terms)
    return first, second


def counterexample(claim: Claim, at: Situation) -> str | None:
    """Against a claim at one length: the first pair that only one of its graphs has, with its
    row. Raises TooMuch where the pairs are too many to look at, BindError for a size."""
    first, second = relations(claim, at)
    sides = [("first", first, second)]
    if claim.kind == "==":
        sides.append(("second", second, first))
    for name, here, there in sides:
        missing = only_in(here, there, at.n)
        if missing:
            (query, key), *_ = missing.examples
            rows = _rows(first, second, query, at.n)
            return f"({query}, {key}) is only in the {name} graph: {rows}"
    return None


def _rows(first: Relation, second: Relation, query: int, n: int) -> str:
    rows = [row_text(relation, query, n) for relation in (first, second)]
    return f"query {query} reads {rows[0]} in the first, {rows[1]} in the second"
