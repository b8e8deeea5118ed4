"""The layers and heads that a claim is made of.

A claim that mentions `layer` or `head`, in a number or in a graph, is made of each of them, and
holds where it holds for each. `edges`, `degree` and `density` then are those of that layer or head,
`flops` and `bytes` those of that layer; all other figures are about the whole stack, and are
compared with the number of each layer or head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from attnspec.analysis.counting.figures import COSTS, COUNTS
from attnspec.graphs.bind import BindError, Situation, bind_attended
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Part, Stack, TooMuch, asks_for
from attnspec.ir.program import Claim, symbols_of
from attnspec.ir.scalars import Scalar, ScalarError, evaluate, fold, symbols
from attnspec.limits import LIMITS

GRAPHS = frozenset({"subset", "=="})
"""The kinds of claims about graphs."""

_OWN = {
    **dict.fromkeys(COUNTS, frozenset({"layer", "head"})),
    **dict.fromkeys(COSTS, frozenset({"layer"})),
}
"""The figures that a single layer, or a single head, has of its own."""

_HARDEST: dict[str, tuple[Callable[[Iterable[float]], float], ...]] = {
    "<": (min,),
    "<=": (min,),
    ">": (max,),
    ">=": (max,),
    "==": (min, max),
}
"""The numbers by which a figure is compared with all of them."""


@dataclass(frozen=True)
class Place:
    """A layer and a head that a claim is made of; None is all of them together."""

    layer: int | None = None
    head: int | None = None

    def only(self, names: Container[str]) -> Place:
        """The same without what is not among the names."""
        layer = self.layer if "layer" in names else None
        return Place(layer, self.head if "head" in names else None)

    @property
    def text(self) -> str:
        """Where it stands: ` in layer 1, head 3`."""
        named = (("layer", self.layer), ("head", self.head))
        parts = [f"{what} {number}" for what, number in named if number is not None]
        return f" in {', '.join(parts)}" if parts else ""


EVERYWHERE = Place()

HEADS = "and the spec does not say how many heads there are"


def places(claim: Claim, stack: Stack) -> Iterator[Place]:
    """Every layer and head that a claim is made of; raises TooMuch."""
    asked = _named(claim).union(*(asks_for(term) for term in claim.terms))
    layers = range(stack.program.layer_count) if "layer" in asked else (None,)
    heads = range(stack.program.head_count) if "head" in asked else (None,)
    if len(layers) * len(heads) > LIMITS.places:
        raise TooMuch(
            "the claim has a number for each layer and head, and at most"
            f" {LIMITS.places:,} of them can be compared"
        )
    yield from (Place(layer, head) for layer in layers for head in heads)


def few_places(claim: Claim, stack: Stack) -> list[tuple[int, int]]:
    """The layer and head of each place that a claim is made of; none where they are not known, or
    too many for proofs."""
    if without_end(claim, stack) is not None:
        return []
    try:
        few = list(islice(places(claim, stack), LIMITS.proofs + 1))
    except TooMuch:
        return []
    return [(each.layer or 0, each.head or 0) for each in few] if len(few) <= LIMITS.proofs else []


def reads_by_head(stack: Stack) -> str | None:
    """Why it is not known what all heads of a spec read, or None."""
    program = stack.program
    if program.heads is None and any("head" in symbols_of(graph) for graph in program.graphs):
        return f"the pairs depend on `head`, {HEADS}"
    return None


def without_end(claim: Claim, stack: Stack) -> str | None:
    """Why it is not known how many heads a claim is made of, or None."""
    if stack.program.heads is None and "head" in _named(claim):
        return f"the claim depends on `head`, {HEADS}"
    return None


def values(claim: Claim, stack: Stack) -> dict[Scalar, Place]:
    """The different sizes, which may depend on n, that a claim compares with, each with the first
    place that has it; raises TooMuch, ScalarError."""
    unknown = without_end(claim, stack)
    if unknown is not None:
        raise TooMuch(unknown)
    found: dict[Scalar, Place] = {}
    for place in places(claim, stack):
        numbers = {"layer": place.layer or 0, "head": place.head or 0}
        with _located(place):
            found.setdefault(fold(claim.value or 0, numbers), place)
    return found


def cases(claim: Claim, stack: Stack, n: int) -> Iterator[tuple[Place, Claim, Stack]]:
    """What there is to judge at n positions: a claim about numbers, and the part of the stack that
    it is about. Raises TooMuch, BindError, ScalarError."""
    if claim.kind in GRAPHS:
        yield from _of_graphs(claim, stack, n)
    elif not _named(claim):
        yield EVERYWHERE, claim, stack
    else:
        yield from _of_figures(claim, stack, n)


def hardest(claim: Claim, numbers: Iterable[float]) -> list[float]:
    """Those of the numbers that a figure is compared with that decide."""
    lengths = set(numbers)
    # a claim without a comparison is `reach`, which more layers only make easier
    choose = _HARDEST.get(claim.compare or "<=")
    return sorted({one(lengths) for one in choose} if choose else lengths)


def relations(claim: Claim, at: Situation) -> tuple[Relation, Relation]:
    """The two graphs of a claim at one length, `causal` included; raises BindError for a size."""
    first, second = (bind_attended(term, at) for term in claim.terms)
    return first, second


def _named(claim: Claim) -> set[str]:
    """Which of `layer` and `head` stand in a claim."""
    named = set(symbols(claim.value or 0)).union(*(symbols_of(term) for term in claim.terms))
    return {"layer", "head"} & named


@contextmanager
def _located(place: Place) -> Iterator[None]:
    """Say of a number without a value where it has none."""
    try:
        yield
    except ScalarError as error:
        raise ScalarError(f"{error}{place.text}") from None
    except BindError as error:
        raise BindError(f"{error.message}{place.text}", error.span) from None


def _of_graphs(claim: Claim, stack: Stack, n: int) -> Iterator[tuple[Place, Claim, Stack]]:
    seen = set()
    for place in places(claim, stack):
        part = Part(stack, place.layer, place.head)
        with _located(place):
            graphs = relations(claim, part.situation(n))
        if graphs not in seen:
            seen.add(graphs)
            if len(seen) > LIMITS.graphs_compared:
                raise TooMuch(
                    f"more than {LIMITS.graphs_compared} different graphs are not compared"
                )
            yield place, claim, part


def _of_figures(claim: Claim, stack: Stack, n: int) -> Iterator[tuple[Place, Claim, Stack]]:
    figures = _OWN.get(claim.kind, frozenset())
    alike: dict[object, dict[float, Place]] = {}
    for place in places(claim, stack):
        at = stack.situation(n, place.layer or 0, place.head or 0)
        with _located(place):
            value = evaluate(claim.value or 0, at.values)
        number = value.item() if isinstance(value, np.ndarray) else value
        pairs = figures and _pairs(claim, stack, place.only(figures), n)
        alike.setdefault(pairs, {}).setdefault(number, place)
    for numbers in alike.values():
        for number in hardest(claim, numbers):
            part = numbers[number].only(figures)
            about = Part(stack, part.layer, part.head) if figures else stack
            yield numbers[number], replace(claim, value=number), about


def _pairs(claim: Claim, stack: Stack, part: Place, n: int) -> object:
    """What the figure of a part of a stack follows from: how many heads have which graph."""
    if claim.kind in COSTS:
        return part
    slots = stack.bound(n).slots
    rows = slots if part.layer is None else slots[part.layer : part.layer + 1]
    if part.head is None:
        return frozenset(Counter(index for row in rows for index in row).items())
    return frozenset(Counter(row[part.head] for row in rows).items())
