"""Scalars, token sets and graphs as places in the language ask for them, within their limits."""

from __future__ import annotations

import math
import re
from typing import NoReturn

from attnspec.elaborate.names import ARTICLES, INPUTS, Kind, Value, kind_of, type_of
from attnspec.elaborate.scope import Scope, Work, meaning
from attnspec.grammar import nodes
from attnspec.graphs.relation import DataDependent, chosen_text
from attnspec.ir.program import (
    ArgumentValue,
    Compound,
    InputRef,
    Leaf,
    Term,
    TokenCompound,
    TokenTerm,
    leaves,
)
from attnspec.ir.scalars import SCORE, Apply, Scalar, ScalarError, Symbol, checked, fold, symbols
from attnspec.limits import LIMITS
from attnspec.text.source import Span

CALL = 32
"""What a call of a named graph, or a copy for one head, costs beside its result, in that unit."""


# --- what places ask for ------------------------------------------------------------------------


def require(value: Value, kind: Kind, span: Span, scope: Scope, what: str = "") -> None:
    """Fail unless something is of the kind that is needed."""
    got = kind_of(value)
    if got == kind:
        return
    advice = None
    if isinstance(value, InputRef) and value.kind != "tokens":
        advice = read_by(value, scope)
    elif kind == "graph" and got in ("tokens", "input"):
        advice = "a set T makes the graphs `columns(T)`, `rows(T)` and `global(T)`, which is both"
    elif kind == "graph" and got == "mechanism":
        advice = "write `attend MECHANISM` or `attend GRAPH + MECHANISM`"
    elif kind == "graph" and got == "scalar":
        advice = "`full` and `window(radius = 3)` are graphs"
    elif kind == "tokens" and got in ("scalar", "list"):
        advice = "`first(c)`, `last(c)`, `every(step)` and `positions(0, 5)` are token sets"
    subject = f"{what} must be {ARTICLES[kind]}" if what else f"{ARTICLES[kind]} is needed here"
    scope.fail("A310", f"{subject}, got {described(value)}", span, help=advice)


def described(value: Value) -> str:
    """What something is, in words: of inputs those that are token sets, of numbers comparisons."""
    if isinstance(value, InputRef):
        return "a token set" if value.kind == "tokens" else f"an input of kind `{value.kind}`"
    kind = kind_of(value)
    is_boolean = kind == "scalar" and type_of(value) == "boolean"  # type: ignore[arg-type]
    return "a comparison" if is_boolean else ARTICLES[kind]


def read_by(given: InputRef, scope: Scope) -> str:
    """What reads an input here, with its name written in."""
    _, _, readers = INPUTS[given.kind][0].rpartition(": ")
    fits = " in `" in readers
    if scope.score and not fits:
        return f"`score` cannot read an input of kind `{given.kind}`"
    if scope.score:
        readers = readers.rpartition(", or ")[2].partition(" in `")[0]
    start = "write " if fits or not scope.predicate else "in place of `where` write "
    return start + re.sub(r"\bx\b", given.name, readers)


def scalar(node: nodes.Expression, scope: Scope, what: str = "") -> Scalar:
    """A scalar, with its constant parts computed."""
    value = meaning(node, scope)
    require(value, "scalar", node.span, scope, what)
    return folded(value, node.span, scope)  # type: ignore[arg-type]


def integer(node: nodes.Expression, scope: Scope, what: str) -> Scalar:
    """An integer scalar."""
    value = scalar(node, scope, what)
    kind = type_of(value)
    if kind != "integer":
        shown = str(value) if isinstance(value, float) else f"a {kind}"
        advice = "`a // b` and `floor(a / b)` round down to an integer" if kind == "real" else None
        if isinstance(value, float):
            around = dict.fromkeys((math.floor(value), math.ceil(value)))
            advice = f"write {' or '.join(f'`{number}`' for number in around)}"
        elif SCORE in symbols(value):
            advice = f"the score `{SCORE}` is a real number and cannot be converted to an integer"
        scope.fail("A305", f"{what} must be an integer, got {shown}", node.span, help=advice)
    return value


def known(node: nodes.Expression, scope: Scope, what: str) -> int:
    """An integer that does not depend on n."""
    value = integer(node, scope, what)
    if not isinstance(value, int):
        not_fixed(what, value, node.span, scope)
    return value


def not_fixed(what: str, value: ArgumentValue, span: Span, scope: Scope) -> NoReturn:
    """Fail because something depends on what only a call knows."""
    names = ", ".join(f"`{name}`" for name in sorted(symbols(value)))  # type: ignore[arg-type]
    advice = "`n`, the length of the sequence, is known only in a call" if "`n`" in names else None
    scope.fail("A315", f"{what} must be a fixed number, without {names}", span, help=advice)


def empty_range(low: int, high: int, span: Span, scope: Scope) -> NoReturn:
    """Fail because a range has its ends in the wrong order."""
    advice = f"the lower end comes first: `{high}..{low}`"
    scope.fail("A307", f"the range {low}..{high} is empty", span, help=advice)


def count(node: nodes.Expression, scope: Scope, what: str, least: int, most: int) -> int:
    """One between two bounds."""
    value = known(node, scope, what)
    if not least <= value <= most:
        code = "A194" if value > most else "A306"
        message = f"{what} must be between {least} and {most:,}, got {value:,}"
        scope.fail(code, message, node.span)
    return value


def graph(node: nodes.Expression, scope: Scope) -> Term:
    """A graph."""
    value = meaning(node, scope)
    require(value, "graph", node.span, scope)
    return value  # type: ignore[return-value]


def as_tokens(value: Value, span: Span, scope: Scope) -> TokenTerm:
    """The token set that something stands for; an input of kind `tokens` is one."""
    if not isinstance(value, InputRef):
        require(value, "tokens", span, scope)
    elif value.kind != "tokens":
        message = f"a token set is needed, got an input of kind `{value.kind}`"
        advice = f"declare it as `input {value.name}: tokens`, or {read_by(value, scope)}"
        scope.fail("A313", message, span, help=advice)
    return value  # type: ignore[return-value]


def typed(value: Scalar, wanted: str, operator: str, span: Span, scope: Scope) -> None:
    """Fail unless a scalar is a number, or a comparison, as an operator wants it."""
    is_boolean = type_of(value) == "boolean"
    if scope.score and wanted == "number":
        # there a comparison counts 1 or 0
        return
    if is_boolean != (wanted == "boolean"):
        got, needed = ("comparison", "number") if is_boolean else ("number", "comparison")
        message = f"`{operator}` needs {needed}s, got a {got}"
        if operator in ("==", "!="):
            # its first side says which of the two it compares
            message = f"`{operator}` cannot compare a {needed} with a {got}"
        scope.fail("A314", message, span)


def known_now(term: Term, span: Span, scope: Scope, where: str, by_inputs: bool = False) -> None:
    """Fail if a part of a term is data-dependent; with `by_inputs` inputs alone may."""
    for leaf in leaves(term):
        pattern = scope.work.patterns[leaf.pattern]
        if issubclass(pattern, DataDependent) and not (by_inputs and pattern.by_inputs):
            message = f"{chosen_text(leaf.pattern)}, so `{leaf.pattern}` cannot be used {where}"
            advice = "use a graph of fixed pairs, such as `window(radius = 3)`"
            scope.fail("A703", message, span, help=advice)


# --- what is built -------------------------------------------------------------------------------


def folded(value: Scalar, span: Span | None, scope: Scope) -> Scalar:
    """The scalar, computed if it is constant; its arguments are folded already."""
    try:
        if isinstance(value, Apply) and not any(isinstance(x, Symbol | Apply) for x in value.args):
            value = fold(value, {})
        if isinstance(value, int):
            checked(value)
    except ScalarError as error:
        scope.fail("A308", f"this expression has no value: {error}", span)
    _limit(value, LIMITS.operations, "operations of one expression", span, scope)
    return value


def token_compound(op: str, terms: tuple[TokenTerm, ...], span: Span, scope: Scope) -> TokenTerm:
    """A compound token set."""
    compound = TokenCompound(op, terms)
    _limit(compound, LIMITS.operations, "parts of one token set", span, scope)
    return compound


def compound(
    op: str, terms: tuple[Term, ...], span: Span, scope: Scope, by: Scalar | None = None
) -> Term:
    """A compound term, flattened where an operator repeats, without repeated operands."""
    whole = Compound(op, terms, by, span=span)
    # before anything walks the term
    _limit(whole, LIMITS.term_size, "patterns and operators of one graph", span, scope)
    if op not in ("|", "&"):
        return whole
    flat: dict[Term, None] = {}
    for term in terms:
        inner = term.terms if isinstance(term, Compound) and term.op == op else (term,)
        flat.update(dict.fromkeys(inner))
    return next(iter(flat)) if len(flat) == 1 else Compound(op, tuple(flat), span=span)


def leaf(
    name: str, arguments: dict[str, ArgumentValue], spans: dict[str, Span], span: Span, scope: Scope
) -> Leaf:
    """A pattern with its arguments."""
    places = tuple(sorted(spans.items(), key=lambda pair: pair[0]))
    result = Leaf(name, tuple(sorted(arguments.items())), span, places)
    _limit(result, LIMITS.term_size, "patterns and operators of one graph", span, scope)
    return result


def spend(size: int, span: Span | None, work: Work) -> None:
    """Count what is built against the limit, so that names cannot multiply it without end."""
    work.spent += size
    if work.spent > LIMITS.term_work:
        message = "this spec is too large when its names are replaced by their definitions"
        work.collector.stop("A196", message, span)


def _limit(item: object, most: int, what: str, span: Span | None, scope: Scope) -> None:
    weight, stop = scope.work.weights.of(item), scope.work.collector.stop
    if weight.size > most:
        message = f"at most {most:,} {what} are allowed, got {weight.size:,} with names replaced"
        stop("A196", message, span)
    if weight.depth > LIMITS.term_depth:
        message = f"operators and patterns may be nested at most {LIMITS.term_depth} deep"
        stop("A197", f"{message}, with names replaced", span)
    spend(weight.size, span, scope.work)
