"""What a picture shows, wherever it is drawn: the pairs of heads that differ, by their terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnspec.elaborate import Elaborated
from attnspec.graphs.bind import extents_of, located
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.relation import Relation
from attnspec.graphs.written_pairs import WrittenPairs
from attnspec.ir.program import Leaf, Term
from attnspec.show.panels import Group, Known, Sample, facts, grouped, header, other_layers, places
from attnspec.show.tally import Tally, room_for, side_for, tally
from attnspec.text.diagnostics import InternalError

MOST_PAIRS = 256
"""The longest sequence that is drawn pair by pair."""

MOST_CELLS = 128
"""The most cells along a side where a sequence is drawn in cells of several positions."""

MOST_PANELS, MOST_LINES = 4, 96
"""In a terminal the most plots, and the most cells along a side where a sequence is drawn in cells:
more would be taller than use."""

MOST_TERMS = 32
"""The most terms of a union that are told apart."""

MOST_PLOTS = 12
"""The most plots in one file; the other heads are listed."""


@dataclass(frozen=True)
class Plot:
    """The pairs of some layers and heads.

    `terms`: what the graph is a union of, by number in `Figure.terms`. `having` [rows, cells,
    terms]: which of them have pairs in a cell. `leading` [rows, cells]: the number of the term
    with the most of a cell's pairs, the first of several; -1 where there are none. `formula`: the
    mechanism on all other pairs.
    """

    where: str
    lines: tuple[str, ...]
    tally: Tally
    terms: tuple[int, ...]
    having: npt.NDArray[np.bool_]
    leading: npt.NDArray[np.int64]
    formula: str | None
    period: int | None


@dataclass(frozen=True)
class Figure:
    """Plots with what is said above and below them; `terms` are what graphs are unions of."""

    name: str
    about: str
    terms: tuple[str, ...]
    plots: tuple[Plot, ...]
    grid: tuple[int, ...]
    footer: tuple[str, ...]


def figure(
    spec: Elaborated,
    n: int,
    layer: int | None,
    head: int | None,
    inputs: Sample,
    known: Known,
    width: int | None = None,
) -> Figure:
    """The pictures of a spec at n positions: of all layers and heads that differ from each other,
    or of one layer, one head; `known` are samples of what tensors decide. For a terminal of `width`
    columns terms are not told apart.

    Raises SpecError where none of them has pairs, TooMuch where they would take too long.
    """
    layers = range(spec.program.layer_count) if layer is None else [layer]
    groups, without = grouped(spec, n, layers, head, inputs, known)
    most = MOST_PLOTS if width is None else MOST_PANELS
    drawn = groups[:most]
    slots = [slot for group in groups for slot in group.slots]
    every = [*slots, *(slot for formula in without.values() for slot in formula)]
    if width is None:
        side = 1 if n <= MOST_PAIRS else side_for(n, MOST_CELLS)
        united = [_terms(spec, group) for group in drawn]
    else:
        room = room_for(n, width)
        side = side_for(n, room if n <= room else min(room, MOST_LINES))
        united = [[("", group.relation)] for group in drawn]
    terms = tuple(dict.fromkeys(text for texts in united for text, _ in texts))
    grid = extents_of(spec.program, n) if n and not spec.program.extra_tokens else ()
    plots = []
    for group, texts in zip(drawn, united, strict=True):
        where = "" if len(group.slots) == len(every) else places(group.slots, every)
        with located(spec.program.attend(*group.slots[0]).span):
            plots.append(_plot(spec, n, side, group, texts, terms, where, grid))
    footer = []
    for name, formulas in without.items():
        where = places(formulas, every)
        footer.append(f"{where}{': ' * bool(where)}`{name}` is a formula and has no pairs")
    rest = [slot for group in groups[most:] for slot in group.slots]
    if rest:
        how = "--layer and --head choose" if layer is None else "--head chooses one"
        footer.append(f"not drawn: {places(rest, every)}; {how}")
    if any(isinstance(group.relation, WrittenPairs) for group in groups):
        footer.append("a sample: pairs that random queries and keys choose, the same each time")
    if layer is not None:
        footer.extend(other_layers(spec, layer))
    name, about = header(spec, n, layer, head)
    if rest:
        about += f" · {len(groups)} different graphs, {most} of them drawn"
    return Figure(name, about, terms, tuple(plots), grid, tuple(footer))


def _plot(
    spec: Elaborated,
    n: int,
    side: int,
    group: Group,
    found: Sequence[tuple[str, Relation]],
    terms: Sequence[str],
    where: str,
    grid: tuple[int, ...],
) -> Plot:
    changes = spec.program.causal, spec.program.crossing
    whole = tally(group.relation, n, side, *changes)
    own = list(dict.fromkeys(text for text, _ in found))
    shares = np.zeros((*whole.density.shape, len(own)))
    for text, relation in found:
        counted = whole if len(found) == 1 else tally(relation, n, side, *changes)
        shares[..., own.index(text)] += counted.density
    numbers = np.array([terms.index(text) for text in own])
    leading = np.where(whole.density > 0, numbers[shares.argmax(axis=-1)], -1)
    lines, past = facts(whole), " of the past" if spec.program.causal else ""
    if group.formula is not None:
        lines.append(f"`{group.formula}` on all other pairs{past}")
    return Plot(
        where=where,
        lines=tuple(lines),
        tally=whole,
        terms=tuple(numbers.tolist()),
        having=shares > 0,
        leading=leading,
        formula=group.formula,
        period=grid[-1] if grid else None,
    )


def _terms(spec: Elaborated, group: Group) -> list[tuple[str, Relation]]:
    """The terms that a graph is the union of, as they were written and in the order of the text."""
    graph = spec.program.attend(*group.slots[0]).graph
    if graph is None:
        raise InternalError("a head without a graph has no pairs")
    if isinstance(group.relation, WrittenPairs):
        return [(_written(graph), group.relation)]
    if isinstance(graph, Leaf) or graph.op != "|" or len(graph.terms) > MOST_TERMS:
        return [(_written(graph), group.relation)]
    relation, past = group.relation, None
    if isinstance(relation, Intersection) and spec.program.causal:
        relation, past = relation.terms
    if not isinstance(relation, Union):
        raise InternalError("a union is bound to something else")
    pairs = zip(graph.terms, relation.terms, strict=True)
    return [
        (_written(term), one if past is None else Intersection((one, past)))
        for term, one in sorted(pairs, key=lambda pair: _place(pair[0], graph))
    ]


def _place(term: Term, graph: Term) -> tuple[bool, int]:
    """Terms of definitions, which stand elsewhere, come last."""
    if term.span is None or graph.span is None:
        return True, 0
    inside = graph.span.start <= term.span.start < graph.span.end
    return not inside or term.span.source is not graph.span.source, term.span.start


def _written(term: Term) -> str:
    if term.span is not None:
        return " ".join(term.span.text.split())
    return term.pattern if isinstance(term, Leaf) else term.op
