"""What a spec that says `cross` cannot say: what has a meaning within one sequence alone."""

from __future__ import annotations

from typing import NoReturn

from attnspec.elaborate.names import Hybrid, Value
from attnspec.elaborate.scope import Scope
from attnspec.grammar import nodes
from attnspec.graphs.across import sided
from attnspec.ir.program import Compound, InputRef, Leaf, Mechanism, Term, TokenCompound, leaves
from attnspec.text.source import Span

_STATEMENTS = {
    "causal": "the keys of another sequence are neither earlier nor later than a query",
    "sequence": "a grid lays out one sequence, and `cross` has two",
    "extra_tokens": "extra tokens come before one sequence, and `cross` has two",
}
"""Statements about one sequence, and why they have no meaning between two."""

_CLAIMS = frozenset("causal reach depth diameter path_length spectral_gap".split())
"""Claims about one sequence: what a key has read is a matter of its own."""

_DISTANT = ("alibi", "bias")
"""Changes to scores by the distance of query and key."""


def cross_of(attention: nodes.Attention) -> Span | None:
    """Where an attention says that queries and keys are two sequences."""
    settings = (each for each in attention.body if isinstance(each, nodes.Setting))
    return next((each.keyword_span for each in settings if each.keyword == "cross"), None)


def require_one_sequence(statement: nodes.Setting, scope: Scope) -> None:
    """Refuse a statement about the whole attention that is about one sequence."""
    why = _STATEMENTS.get(statement.keyword)
    if why is not None:
        message = f"`{statement.keyword}` and `cross` exclude each other: {why}"
        _refuse(message, statement.span, scope)


def require_claim(kind: str, span: Span, scope: Scope) -> None:
    """Refuse a claim about what is read through several layers."""
    if scope.work.cross is not None and kind in _CLAIMS:
        message = f"`{kind}` cannot be claimed with `cross`: it is about positions of one sequence"
        advice = "remove the claim here, and write it in the self-attention spec of each sequence"
        _refuse(message, span, scope, advice)


def require_score(name: str, span: Span, scope: Scope) -> None:
    """Refuse a change to scores by distances."""
    if scope.work.cross is not None and name in _DISTANT:
        message = (
            f"`score {name}` uses the distance q - k, and positions of two sequences have none"
        )
        _refuse(message, span, scope)


def require_keys(name: str, span: Span, scope: Scope) -> None:
    """Refuse an input that a score reads at the query."""
    _refuse(_for_queries(name), span, scope, f"write `{name}(k)`")


def _for_queries(name: str) -> str:
    return (
        f"the input `{name}` is read at a query here, and with `cross` it has values only for keys"
    )


def require_across(value: Value, span: Span, scope: Scope) -> None:
    """Refuse what has no meaning between two sequences; of other values nothing is asked."""
    if scope.work.cross is None:
        return
    match value:
        case Hybrid():
            message = "`GRAPH + MECHANISM` is defined for one sequence, not with `cross`"
            _refuse(message, span, scope, "give some heads the graph and others the mechanism")
        case Mechanism():
            why = scope.work.mechanisms[value.name].one_sequence
            if why:
                message = f"`{value.name}` cannot be used with `cross`: {why}"
                _refuse(message, value.span or span, scope)
        case Leaf() | Compound():
            _require_graph(value, span, scope)


def _require_graph(graph: Term, span: Span, scope: Scope) -> None:
    patterns = scope.work.patterns
    for leaf in leaves(graph):
        why = patterns[leaf.pattern].not_across(dict(leaf.arguments))
        if why:
            message = f"`{leaf.pattern}` cannot be used with `cross`: it {why}"
            _refuse(message, leaf.span or span, scope)
    for leaf, name, value, sides in sided(graph, patterns):
        read = sorted(_of_keys(value)) if "q" in sides else []
        if read:
            length = getattr(value, "kind", "") == "length"
            how = "`prefix({})`" if length else "a condition on `{}(k)` alone"
            if _marks(value):
                how = "`columns({})` for the marked keys"
            advice = f"write {how.format(read[0])}, or remove `cross` if both are one sequence"
            place = leaf.place(name) or span
            of_keys = f"{read[0]}(k)" in place.text and f"{read[0]}(q)" not in place.text
            if of_keys or patterns[leaf.pattern].sides == "k":
                advice = "`transpose` swaps q and k: write the graph without it"
            _refuse(_for_queries(read[0]), place, scope, advice)


def _of_keys(value: object) -> set[str]:
    """The inputs about keys that an argument reads."""
    if isinstance(value, TokenCompound):
        return set().union(*map(_of_keys, value.terms))
    kinds = ("tokens", "ids", "length")
    return {value.name} if isinstance(value, InputRef) and value.kind in kinds else set()


def _marks(value: object) -> bool:
    return isinstance(value, TokenCompound) or getattr(value, "kind", "") == "tokens"


def _refuse(message: str, span: Span, scope: Scope, advice: str | None = None) -> NoReturn:
    related = (("here the spec says that queries and keys are two sequences", scope.work.cross),)
    advice = advice or "remove `cross` if queries and keys are one sequence"
    scope.fail("A420", message, span, related=related, help=advice)
