"""Claims about two graphs, `A subset B` and `A == B`: proven by their forms, else counted."""

from __future__ import annotations

from collections.abc import Sequence

from attnspec.analysis.counting.differences import only_in, row_text
from attnspec.graphs.bind import Situation, bind_attended
from attnspec.graphs.forms.conditions import contained
from attnspec.graphs.forms.dnf import Place, form_of, place_of
from attnspec.graphs.relation import Relation
from attnspec.ir.program import Claim, Program


def proven(claim: Claim, program: Program, places: Sequence[tuple[int, int]]) -> bool:
    """Whether the claim follows from the forms of its graphs, for every n and every input: in every
    layer and head at once, or else in each of the places, if these are all."""
    if _proven(claim, place_of(program, None, None)):
        return True
    each = [place_of(program, layer, head) for layer, head in places]
    return bool(each) and all(_proven(claim, place) for place in each)


def _proven(claim: Claim, place: Place) -> bool:
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
