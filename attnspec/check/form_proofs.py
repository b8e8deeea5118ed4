"""Reach that follows from how a spec is written, for every n and every input.

Of each layer the form of its heads together is known (see `forms`). Three rules bound the layers
after which all allowed pairs are joined; each is sound, and none is complete.

1. A layer that has every allowed pair joins them all.
2. Two layers do, the upper one going from the query to a position in between, the lower one on to
   the key:
   - columns(T) above rows(T), for a token set T that is never empty (not under `causal`)
   - residue(step = s) and window(radius = s - 1), in either order: q and k are joined by way of the
     position congruent to q (or k) that is nearest to k (or q) on the side of the other
   - under `causal`, summary(stride = s) of one cell at least above block(size = s): by way of the
     last cell of k's block
3. A window of radius 1 in every layer joins all pairs after n - 1 of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnspec.check.places import values
from attnspec.graphs.forms.conditions import (
    EVERY_PAIR,
    Among,
    Condition,
    Ends,
    Form,
    Multiple,
    TooMany,
    Within,
    contained,
    crossed,
    joined,
    merged,
    plus,
)
from attnspec.graphs.forms.dnf import band, form_of, place_of
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.ir.intervals import bounds
from attnspec.ir.program import Claim, Program, Tokens
from attnspec.ir.scalars import Apply, Scalar, ScalarError, Symbol, symbols
from attnspec.limits import LIMITS

LINE = "n - 1"
"""A bound by the length of the sequence, where no number is known."""

Bound = int | str | None
"""A number of layers, LINE, or None where nothing is known."""


def proven(claim: Claim, stack: Stack) -> bool:
    """Whether a claim on reach follows from the form of the spec."""
    if claim.kind == "reach":
        compare = "<="
    elif claim.kind in ("depth", "diameter", "path_length") and claim.compare in ("<", "<="):
        compare = claim.compare
    else:
        return False
    try:
        layers = layer_forms(stack)
        if claim.kind in ("diameter", "path_length"):
            # the union of all layers and heads, again and again; no mean is above the longest
            layers = [merged(joined(layers))]
        bound = bound_of(layers, stack.program)
        return all(_below(bound, compare, value) for value in values(claim, stack))
    except (TooMany, TooMuch, ScalarError):
        return False


def _below(bound: Bound, compare: str, value: Scalar) -> bool:
    if isinstance(bound, int):
        if not isinstance(value, int | float):
            return False
        return bound <= value if compare == "<=" else bound < value
    if bound is None:
        return False
    if value == Symbol("n"):
        return True
    return compare == "<=" and value == Apply("-", (Symbol("n"), 1))


def layer_forms(stack: Stack) -> list[Form]:
    """The form of each layer up to the last that is not a repetition; raises TooMany.

    A mechanism is left out: it only adds to what is joined.
    """
    program = stack.program
    forms: dict[tuple[object, ...], Form] = {}
    layers: list[Form] = []
    for layer, row in enumerate(program.slots):
        parts: dict[Form, None] = {}
        for head, number in enumerate(row):
            graph = program.attends[number].graph
            if graph is None:
                continue
            slot = (layer, head) if stack.differs(number) else None
            if (number, slot) not in forms:
                if len(forms) == LIMITS.proofs:
                    raise TooMany
                form = form_of(graph, place_of(program, layer, head))
                # of a form that is not known no pair is used
                forms[number, slot] = frozenset() if form is None else form
            parts[forms[number, slot]] = None
        layers.append(merged(joined(list(parts))))
    while len(layers) > 1 and layers[-1] == layers[-2]:
        layers.pop()
    return layers


def bound_of(layers: list[Form], program: Program) -> Bound:
    """Layers after which all allowed pairs are joined, as far as the rules say."""
    allowed = frozenset([frozenset([Within(0, True)])]) if program.causal else EVERY_PAIR

    def has(layer: Form, wanted: Form) -> bool:
        return contained(crossed([wanted, allowed]), layer)

    # the last layer may stand above itself
    every = [*layers, layers[-1]]
    for number, layer in enumerate(every):
        if has(layer, EVERY_PAIR):
            return number + 1
        below = every[:number]
        for low in below:
            if any(has(layer, a) and has(low, b) for a, b in _steps(layer, low, program.causal)):
                return number + 1
    return LINE if all(has(layer, band(1, 1)) for layer in layers) else None


def _steps(upper: Form, lower: Form, causal: bool) -> Iterator[tuple[Form, Form]]:
    """Two graphs, one for the upper and one for the lower layer, that join all pairs in two
    steps; for the conditions that occur in these layers."""
    for one in _conditions(upper):
        itself = frozenset([frozenset([one])])
        match one:
            case Among("k", members, True) if not causal and _never_empty(members):
                yield itself, frozenset([frozenset([Among("q", members)])])
            case Among("k", Ends(stride, cells), True) if causal and _is_least(cells, 1):
                yield itself, band(0, 0, stride)
            case Multiple(step, True) if _is_least(step, 0):
                yield itself, band(plus(step, -1), plus(step, -1))
            case _:
                pass
    for one in _conditions(lower):
        if isinstance(one, Multiple) and one.wanted and _is_least(one.step, 0):
            yield band(plus(one.step, -1), plus(one.step, -1)), frozenset([frozenset([one])])


def _conditions(form: Form) -> set[Condition]:
    return {one for conjunction in form for one in conjunction}


def _is_least(size: Scalar, least: int) -> bool:
    """Whether it is plain that a size is at no n below a number; what is divided by is never 0."""
    if not {"n"}.issuperset(symbols(size)):
        return False
    low, _ = bounds(size, {"n": (np.asarray(1.0), np.asarray(np.inf))})
    return bool(low >= least)


def _never_empty(tokens: object) -> bool:
    """Whether a token set has a member in every sequence that has a position."""
    if not isinstance(tokens, Tokens):
        return False
    count = tokens.values[-1]
    if tokens.kind in ("first", "last"):
        return isinstance(count, int) and count >= 1
    return tokens.kind == "every" and count == 0
