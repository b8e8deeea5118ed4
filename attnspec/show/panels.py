"""Which heads are drawn, and what is said above and below the pictures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy.typing as npt

from attnspec.analysis.counting.graph_heads import slots_words
from attnspec.elaborate import Elaborated
from attnspec.graphs.bind import extents_of
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack
from attnspec.ir.program import Program
from attnspec.show.tally import Tally
from attnspec.text.diagnostics import from_to, ranges

Slot = tuple[int, int]
"""A layer and a head, from 0."""


def places(slots: Iterable[Slot], every: Collection[Slot]) -> str:
    """`layer 0..3 head 1; layer 4`: some of the layers and heads; "" where there is one in all."""
    meant = set(slots)
    if len(every) == 1:
        return ""
    if len(meant) == len(every):
        return "every head"
    layers, heads = (sorted({slot[side] for slot in every}) for side in (0, 1))
    return slots_words([[(layer, head) in meant for head in heads] for layer in layers])


Sample = Mapping[str, "npt.ArrayLike"]
Known = Mapping[tuple[int, int], Relation]


@dataclass(frozen=True)
class Group:
    """The layers and heads that have the same pairs, and the same formula beside them if any."""

    relation: Relation
    formula: str | None
    slots: tuple[Slot, ...]


def grouped(
    spec: Elaborated,
    n: int,
    layers: Iterable[int],
    head: int | None,
    inputs: Sample,
    known: Known | None = None,
) -> tuple[list[Group], dict[str, list[Slot]]]:
    """What differs among the heads of some layers, and those of each mechanism that stands alone.

    Raises SpecError where none has pairs.
    """
    groups: dict[tuple[Relation, str | None], list[Slot]] = {}
    without: dict[str, list[Slot]] = {}
    program = spec.program
    # relations with run-time inputs are compared by the identity of those
    stack, bound = Stack(program, inputs, known), dict[int, Relation]()
    for layer in layers:
        for one in range(program.head_count) if head is None else [head]:
            attend = program.attend(layer, one)
            formula = None if attend.mechanism is None else attend.mechanism.name
            if attend.graph is None and formula is not None:
                without.setdefault(formula, []).append((layer, one))
                continue
            number = program.number(layer, one)
            if number not in bound or stack.differs(number):
                bound[number] = stack.relation(n, layer, one)
            groups.setdefault((bound[number], formula), []).append((layer, one))
    if not groups:
        first = next(iter(without.values()))[0]
        # says what a mechanism lacks, with its place in the text
        stack.relation(n, *first)
    members = [Group(relation, name, tuple(slots)) for (relation, name), slots in groups.items()]
    return members, without


def header(spec: Elaborated, n: int, layer: int | None, head: int | None) -> tuple[str, str]:
    """The name with its parameters, and the length, the grid and the layers and heads shown."""
    values = ", ".join(f"{name} = {value}" for name, value in spec.parameters.items())
    sides = spec.program.crossing
    where = [f"n = {n:,}"] if sides is None else [f"m = {sides.queries:,}", f"n = {sides.keys:,}"]
    grid = extents_of(spec.program, n) if n else ()
    if grid:
        where.append(f"grid {' × '.join(str(extent) for extent in grid)}")
    layers, heads = spec.program.layer_count, spec.program.heads
    if layers > 1:
        where.append(f"{layers} layers" if layer is None else f"layer {layer} of {layers}")
    if heads is not None:
        where.append(f"{heads} heads" if head is None else f"head {head} of {heads}")
    return (f"{spec.program.name}({values})" if values else spec.program.name, " · ".join(where))


def facts(counted: Tally) -> list[str]:
    """`540 of 4,096 pairs (13.2 %)` and `1 to 9 keys per query`."""
    most = counted.queries * counted.n
    if most == 0:
        return ["0 pairs"]
    text = f"{counted.edges:,}"
    if counted.sampled:
        text = f"≈ {min(most, int(float(f'{counted.edges:.3g}'))):,}"
    pairs = f"{text} of {most:,} pairs ({_percent(counted.edges / most)})"
    keys = from_to(counted.least, counted.most)
    keys = f"{keys} {'key' if keys == '1' else 'keys'} per query"
    return [pairs, keys + (f", from {counted.sampled:,} rows" if counted.sampled else "")]


def _percent(share: float) -> str:
    if share == 0 or share == 1:
        return f"{share:.0%}".replace("%", " %")
    return f"{100 * share:.3g} %" if share < 0.9995 else "> 99.9 %"


def other_layers(spec: Elaborated, layer: int) -> Iterable[str]:
    """Layers that the spec states otherwise than this one."""
    slots = spec.program.slots
    others = [other for other, row in enumerate(slots) if row != slots[min(layer, len(slots) - 1)]]
    drawn = [other for other in others if has_graph(spec.program, other)]
    if drawn:
        yield f"layer {ranges(drawn)} differs; --layer {drawn[0]} shows it"
    formulas = [other for other in others if other not in drawn]
    if formulas:
        yield f"layer {ranges(formulas)}: formulas alone, without pairs"


def has_graph(program: Program, layer: int) -> bool:
    """Whether a head of a layer has pairs that can be drawn."""
    return any(attend.graph is not None for attend in program.attends_of(layer))


def first_drawn(program: Program) -> int:
    """The first layer that has pairs, or else the first."""
    layers = range(program.layers or 1)
    return next((layer for layer in layers if has_graph(program, layer)), 0)
