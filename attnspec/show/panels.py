"""Which heads of a layer are drawn, and what is said above and below the pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy.typing as npt

from attnspec.elaborate.coverage import ranges
from attnspec.relations import Relation
from attnspec.show.tally import Tally, tally
from attnspec.show.terminal import Panel, room_for, side_for
from attnspec.spec import Spec
from attnspec.stack import Stack

MOST_PANELS = 4
"""The most heads that are drawn when none is named; the others are listed."""

MOST_CELLS = 96
"""The most cells along a side where a sequence is drawn in cells: more would be taller than use."""

Sample = Mapping[str, "npt.ArrayLike"]


@dataclass(frozen=True)
class Sheet:
    """The pictures of one layer with the lines above and below them."""

    header: tuple[str, str]
    panels: tuple[Panel, ...]
    footer: tuple[str, ...]


def sheet(spec: Spec, n: int, *, layer: int, head: int | None, inputs: Sample, width: int) -> Sheet:
    """The pictures of a layer at n positions: of one head, or of all that differ from each other.

    `width` is what a picture may take, in columns. Raises SpecError where a head has no pairs.
    """
    groups, without = _groups(spec, n, layer, head, inputs)
    room = room_for(n, width)
    side = side_for(n, room if n <= room else min(room, MOST_CELLS))
    drawn = list(groups.items())[:MOST_PANELS]
    causal = spec.program.causal
    several = spec.heads is not None and (len(groups) > 1 or bool(without))
    grid = spec.grid(n) if n else ()
    period = grid[-1] if grid and not spec.program.extra_tokens else None
    panels = []
    for relation, heads in drawn:
        counted = tally(relation, n, side, causal)
        title = [f"head {ranges(heads)}"] if several else []
        title += _facts(counted) if several else [", ".join(_facts(counted))]
        formula = spec.program.attend(layer, heads[0]).mechanism
        if formula is not None:
            title.append(f"`{formula.name}` on all other pairs{' of the past' if causal else ''}")
        panels.append(Panel(tuple(title), counted, period))
    footer = [
        f"head {ranges(heads)}: `{name}` is a formula and has no pairs"
        for name, heads in without.items()
    ]
    rest = [head for heads in list(groups.values())[MOST_PANELS:] for head in heads]
    if rest:
        footer.append(f"not drawn: head {ranges(rest)}; --head chooses one")
    footer.extend(_other_layers(spec, layer))
    return Sheet(_header(spec, n, layer, head), tuple(panels), tuple(footer))


def _groups(
    spec: Spec, n: int, layer: int, head: int | None, inputs: Sample
) -> tuple[dict[Relation, list[int]], dict[str, list[int]]]:
    """The heads of each distinct relation, and those of each mechanism that stands alone."""
    groups: dict[Relation, list[int]] = {}
    without: dict[str, list[int]] = {}
    # relations with run-time inputs are compared by the identity of those
    stack, bound = Stack(spec), dict[int, Relation]()
    slots = spec.program.slots[0 if spec.program.layers is None else layer]
    for one in range(spec.heads or 1) if head is None else [head]:
        attend = spec.program.attend(layer, one)
        if attend.graph is None and attend.mechanism is not None:
            without.setdefault(attend.mechanism.name, []).append(one)
        else:
            slot = slots[0 if spec.program.heads is None else one]
            if slot not in bound or stack.differs(slot):
                bound[slot] = spec.relation(n, layer, one, inputs)
            groups.setdefault(bound[slot], []).append(one)
    if not groups:
        first = next(iter(without.values()))[0]
        # says what a mechanism lacks, with its place in the text
        spec.relation(n, layer, first, inputs)
    return groups, without


def _header(spec: Spec, n: int, layer: int, head: int | None) -> tuple[str, str]:
    values = ", ".join(f"{name} = {value}" for name, value in spec.parameters.items())
    where = [f"n = {n:,}"]
    grid = spec.grid(n) if n else ()
    if grid:
        where.append(f"grid {' × '.join(str(extent) for extent in grid)}")
    if spec.layers > 1:
        where.append(f"layer {layer} of {spec.layers}")
    if spec.heads is not None:
        where.append(f"{spec.heads} heads" if head is None else f"head {head} of {spec.heads}")
    return (f"{spec.name}({values})" if values else spec.name, " · ".join(where))


def _facts(counted: Tally) -> list[str]:
    """`540 of 4,096 pairs (13.2 %)` and `1 to 9 keys a query`."""
    n = counted.n
    if n == 0:
        return ["0 pairs"]
    found = f"{counted.edges:,}"
    if counted.sampled:
        found = f"≈ {min(n * n, int(float(f'{counted.edges:.3g}'))):,}"
    pairs = f"{found} of {n * n:,} pairs ({_percent(counted.edges / (n * n))})"
    keys = f"{counted.least:,}"
    if counted.most != counted.least:
        keys = f"{counted.least:,} to {counted.most:,}"
    keys = f"{keys} {'key' if keys == '1' else 'keys'} a query"
    return [pairs, keys + (f", from {counted.sampled:,} rows" if counted.sampled else "")]


def _percent(share: float) -> str:
    if share == 0 or share == 1:
        return f"{share:.0%}".replace("%", " %")
    return f"{100 * share:.3g} %" if share < 0.9995 else "> 99.9 %"


def _other_layers(spec: Spec, layer: int) -> Iterable[str]:
    """Layers that the spec states otherwise than this one."""
    slots = spec.program.slots
    others = [other for other, row in enumerate(slots) if row != slots[min(layer, len(slots) - 1)]]
    drawn = [other for other in others if has_graph(spec, other)]
    if drawn:
        yield f"layer {ranges(drawn)} differs; --layer {drawn[0]} shows it"
    formulas = [other for other in others if other not in drawn]
    if formulas:
        yield f"layer {ranges(formulas)}: formulas alone, without pairs"


def has_graph(spec: Spec, layer: int) -> bool:
    """Whether a head of a layer has pairs that can be drawn."""
    program = spec.program
    row = program.slots[0 if program.layers is None else layer]
    return any(program.attends[slot].graph is not None for slot in row)
