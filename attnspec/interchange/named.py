"""The shortest way to write a graph: a pattern by name where it is proven to be the same.

Candidates are the static patterns with the numbers that stand in a predicate, and their neighbours.
Each is compared by form, so that what is written has the same pairs for every n.
"""

from __future__ import annotations

import re
from functools import lru_cache

from attnspec.elaborate import elaborate
from attnspec.graphs.forms.conditions import Form, equal
from attnspec.graphs.forms.dnf import Place, form_of
from attnspec.graphs.forms.written import written
from attnspec.interchange.traced import constants
from attnspec.ir.program import Compound, Leaf, Term
from attnspec.ir.scalars import Apply
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import SpecError

MOST_NUMBERS = 32
"""Numbers that candidates of one are made of at most."""

MOST_OF_TWO = 9
"""Numbers that candidates of two are made of at most."""

_PLAIN = ("full", "self", "causal")

_ONE = (
    "window(radius = {})",
    "window(before = {}, after = 0)",
    "window(before = 0, after = {})",
    "residue(step = {})",
    "strided(stride = {})",
    "block(size = {})",
    "columns(first({}))",
    "rows(first({}))",
    "global(first({}))",
    "columns(every({}))",
)
"""Patterns of one number."""

_TWO = (
    "window(before = {}, after = {})",
    "dilated(radius = {}, step = {})",
    "block(size = {}, before = {})",
    "block(size = {0}, before = {1}, after = {1})",
    "summary(stride = {}, cells = {})",
    "fixed(stride = {}, cells = {})",
)
"""Patterns of two."""


def named(term: Term) -> tuple[str, bool]:
    """A graph as short as was found, and whether the statement `causal` stands beside it."""
    texts = sorted(_candidates(term), key=lambda text: (len(text), text))
    meant = form_of(term, Place())
    for causal in (False, True) if meant is not None else ():
        for text in texts:
            form = _form(text, causal)
            if form is not None and equal(form, meant):  # type: ignore[arg-type]
                return text, causal
    rest, causal = _less_causal(term)
    forms = {_form(text, False): text for text in reversed(texts)}
    if causal:
        # a graph with no pair of k > q says more than one that is cut by the statement
        for text in sorted(texts, key=lambda text: _form(text, False) != _form(text, True)):
            forms.setdefault(_form(text, True), text)
    return _parts(rest, forms, 0, causal), causal


def _parts(term: Term, candidates: dict[Form | None, str], level: int, causal: bool) -> str:
    """The text of a graph whose parts, of unions and intersections, are written by name where that
    is known, under the statement `causal` where their pairs of k <= q are; in brackets below the
    level 1 of `|`, 2 of `&` and 3 of `~`."""
    for place in (Place(), Place(causal=True)) if causal else (Place(),):
        meant = form_of(term, place)
        if meant is not None and meant in candidates:
            return candidates[meant]
    op, parts = _apart(term)
    texts = [_parts(part, candidates, _LEVELS[op], causal) for part in parts]
    by_name = any(text != written(part) for text, part in zip(texts, parts, strict=True))
    shorter = _global(texts) if op == "|" else texts
    if len(shorter) == 1 and op == "|":
        return shorter[0]
    if not by_name and shorter == texts:
        text = written(term)
        loose = isinstance(term, Compound) and _LEVELS.get(term.op, 9) < level
    else:
        text = f"~{texts[0]}" if op == "~" else f" {op} ".join(shorter)
        loose = _LEVELS[op] < level
    return f"({text})" if loose else text


def _global(texts: list[str]) -> list[str]:
    """The operands of a union, the rows and columns of one token set as `global`."""
    groups = list(texts)
    for text in texts:
        inner = text.removeprefix("rows")
        if inner != text and f"columns{inner}" in groups:
            groups[groups.index(text)] = f"global{inner}"
            groups.remove(f"columns{inner}")
    return groups


_LEVELS = {"|": 1, "&": 2, "~": 3, "": 0}


def _apart(term: Term) -> tuple[str, list[Term]]:
    """The operator of a graph, or of its predicate, and its parts; none of anything else."""
    if isinstance(term, Compound) and term.op in ("|", "&", "~"):
        return term.op, [part for inner in term.terms for part in _operands(inner, term.op)]
    if isinstance(term, Leaf) and term.pattern == "where":
        predicate = dict(term.arguments)["predicate"]
        if isinstance(predicate, Apply) and predicate.op in ("or", "and"):
            parts: list[Term] = [Leaf("where", (("predicate", x),)) for x in predicate.args]
            return ("|" if predicate.op == "or" else "&"), parts
    return "", []


def _operands(term: Term, op: str) -> list[Term]:
    """The operands of a chain of one operator."""
    operand, parts = _apart(term)
    return parts if operand == op != "~" else [term]


def _less_causal(term: Term) -> tuple[Term, bool]:
    """A graph without the k <= q that it is an intersection with, and whether it was there."""
    op, parts = _apart(term)
    if op != "&":
        return term, False
    causal = _form("causal", False)
    rest = [
        part
        for part in parts
        if (form := form_of(part, Place())) is None or causal is None or not equal(form, causal)
    ]
    if not rest or len(rest) == len(parts):
        return term, False
    return (rest[0] if len(rest) == 1 else Compound("&", tuple(rest))), True


def _candidates(term: Term) -> list[str]:
    """Patterns with the numbers of a graph and their neighbours."""
    values = {number for number in constants(term) if number < 2**31 - 1}
    near = sorted(values) + sorted({c + move for c in values for move in (-1, 1)} - values)
    numbers = [number for number in near if number > 0][:MOST_NUMBERS]
    texts = [*_PLAIN, *(text.format(number) for text in _ONE for number in numbers)]
    few = numbers[:MOST_OF_TWO]
    texts += [text.format(one, other) for text in _TWO for one in few for other in few]
    # blocks of one position are a window, which is what people call them
    return [text for text in texts if "block(size = 1," not in text]


@lru_cache(maxsize=4096)
def _graph(text: str) -> Term | None:
    """The graph that is written so, None where it is none."""
    # with its numbers as parameters, so that a pattern is parsed once
    numbers = {f"x{index}": int(each) for index, each in enumerate(re.findall(r"\d+", text))}
    attend = re.sub(r"\d+", "{}", text).format(*numbers)
    declared = ", ".join(f"{name} = 1" for name in numbers)
    source = source_of(f"attention a({declared}) {{ attend {attend} }}")
    try:
        return elaborate(source, overrides=numbers).program.attends[0].graph
    except SpecError:
        return None


@lru_cache(maxsize=8192)
def _form(text: str, causal: bool) -> Form | None:
    """The form of a graph that is written so; None where it is not a graph, or too large."""
    graph = _graph(text)
    return None if graph is None else form_of(graph, Place(causal=causal))
