"""Which statements rule each layer and head, and what that head then does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from attnspec.elaborate.scope import Collector, Work
from attnspec.elaborate.terms import CALL, spend
from attnspec.grammar import nodes
from attnspec.graphs.bind import check_value
from attnspec.ir.normal_form import substitute
from attnspec.ir.program import Attend, Leaf, Mechanism, Score, Term, leaves, symbols_of
from attnspec.ir.scalars import Scalar, ScalarError, fold, symbols
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import ranges
from attnspec.text.source import Span

V = TypeVar("V")


@dataclass(frozen=True)
class Where:
    """The layers and heads that a scope covers, how deep it is nested, and where it stands."""

    layers: frozenset[int]
    heads: frozenset[int]
    depth: int = 0
    block: Span | None = None


@dataclass(frozen=True)
class Ruling(Generic[V]):
    """A value with the scope it holds in and the statement that says so."""

    value: V
    where: Where
    span: Span


Attended = tuple[Term | None, Mechanism | None]


@dataclass
class Rulings:
    """What the statements of an attention say of heads, in the order of the text."""

    attends: list[Ruling[Attended]] = field(default_factory=list)
    scales: list[Ruling[Scalar]] = field(default_factory=list)
    scores: list[Ruling[Score]] = field(default_factory=list)
    normalizers: list[Ruling[str]] = field(default_factory=list)


def slots_of(rulings: Rulings, attention: nodes.Attention, work: Work) -> list[tuple[Attend, ...]]:
    """One entry for each layer and head, one and the same row for layers that are ruled alike;
    nothing if there are errors."""
    collector, shape = work.collector, (work.layers or 1, work.heads or 1)
    if collector.has_errors():
        return []
    groups: dict[Where, list[Ruling[Score]]] = {}
    for ruling in rulings.scores:
        groups.setdefault(ruling.where, []).append(ruling)
    stacked = [
        Ruling(tuple(one.value for one in group), where, group[0].span)
        for where, group in groups.items()
    ]
    attends = resolve(rulings.attends, *shape, "attend", collector)
    scales = resolve(rulings.scales, *shape, "scale", collector)
    normalizers = resolve(rulings.normalizers, *shape, "normalize", collector)
    scores = resolve(stacked, *shape, "score", collector)
    _require_covered(attends, attention, work)
    if collector.has_errors():
        return []
    made: dict[tuple[object, ...], Attend] = {}
    rows: dict[tuple[object, ...], tuple[Attend, ...]] = {}
    asked = {id(one): _symbols(one.value[0]) for one in rulings.attends}
    asked |= {id(one): _symbols(one.value) for one in rulings.scales} | {id(None): set()}
    by_layer = any("layer" in names for names in asked.values())

    def attend_at(layer: int, head: int, ruling: Ruling[Attended]) -> Attend:
        """What a head does, computed once for all that the same statements rule alike."""
        scale = scales[layer][head]
        rest = scale, normalizers[layer][head], scores[layer][head]
        names = asked[id(ruling)] | asked[id(scale)]
        place = {} if work.layers is None else {"layer": layer}
        place |= {} if work.heads is None else {"head": head}
        where = ", ".join(f"{name} {number}" for name, number in place.items())
        place = {name: number for name, number in place.items() if name in names}
        key = (id(ruling), *map(id, rest), *place.items())
        if key not in made:
            made[key] = _attend(place, where, work, ruling, *rest)
        return made[key]

    def row_of(layer: int) -> tuple[Attend, ...]:
        """What the heads of a layer do, computed once for all layers that are ruled alike."""
        ruled = (attends[layer], scales[layer], normalizers[layer], scores[layer])
        key = (layer if by_layer else None, *map(id, chain(*ruled)))
        if key not in rows:
            heads = enumerate(attends[layer])
            rows[key] = tuple(attend_at(layer, at, one) for at, one in heads if one is not None)
        return rows[key]

    return [row_of(layer) for layer in range(len(attends))]


# --- who rules where -----------------------------------------------------------------------------


def resolve(
    rulings: list[Ruling[V]], layers: int, heads: int, what: str, collector: Collector
) -> list[list[Ruling[V] | None]]:
    """The ruling of each layer and head, None where there is none."""
    # number of the ruling that holds, -1 for none; outer scopes first, so that inner ones win
    table = np.full((layers, heads), -1)
    clashes = 0
    for number, ruling in sorted(enumerate(rulings), key=lambda pair: pair[1].where.depth):
        rows, columns = sorted(ruling.where.layers), sorted(ruling.where.heads)
        cells = np.ix_(rows, columns)
        for other in np.unique(table[cells]).tolist() if clashes < LIMITS.clashes else []:
            if other >= 0 and rulings[other].where.depth == ruling.where.depth:
                row, column = np.argwhere(table[cells] == other)[0]
                slot = [f"layer {rows[row]}"] * (layers > 1)
                slot += [f"head {columns[column]}"] * (heads > 1)
                first = "join them by `|`" if what == "attend" else "remove one"
                collector.add(
                    "A404",
                    f"two `{what}` apply to {', '.join(slot) or 'the same heads'}",
                    ruling.span,
                    related=((f"the other `{what}` is here", rulings[other].span),),
                    help=f"{first}, or move one into a block inside the other's: the inner wins",
                )
                clashes += 1
        table[cells] = number
    candidates = [*rulings, None]
    return [[candidates[number] for number in row] for row in table.tolist()]


def _require_covered(
    table: list[list[Ruling[Attended] | None]], attention: nodes.Attention, work: Work
) -> None:
    missing: dict[str, list[int]] = {}
    for layer, row in enumerate(table):
        heads = [head for head, ruling in enumerate(row) if ruling is None]
        if heads:
            missing.setdefault(ranges(heads), []).append(layer)
    for heads_text, layers in missing.items():
        which = [] if work.heads is None else [("head", heads_text)]
        which += [] if work.layers is None else [("layer", ranges(layers))]
        named = [f"{kind}{'' if text.isdecimal() else 's'} {text}" for kind, text in which]
        where = f" in {' of '.join(named)}" if which else ""
        more = " outside of `layer` and `head` blocks: it is for all that have none of their own"
        help = f"add the statement `attend …`{more if which else ''}"
        work.collector.add("A408", f"there is no `attend`{where}", attention.name_span, help=help)


# --- what a head does ----------------------------------------------------------------------------


def _symbols(value: Term | Scalar | None) -> set[str]:
    if value is None:
        return set()
    return set(symbols_of(value) if isinstance(value, Term) else symbols(value))


def _attend(
    place: Mapping[str, int],
    where: str,
    work: Work,
    ruling: Ruling[Attended],
    scale: Ruling[Scalar] | None,
    normal: Ruling[str] | None,
    scores: Ruling[tuple[Score, ...]] | None,
) -> Attend:
    """What one head does by the statements that rule it, with layer and head filled in as far as
    it reads them; `where` names the first that does so."""
    graph, mechanism = ruling.value
    factor, span = None if scale is None else scale.value, ruling.span
    try:
        if graph is not None and place:
            spend(work.weights.of(graph).size + CALL, ruling.span, work)
            graph = substitute(graph, dict(place))
            for leaf in leaves(graph):
                _check(leaf, where, work)
        if factor is not None and scale is not None:
            span = scale.span
            factor = fold(factor, dict(place))
    except ScalarError as error:
        diagnostics = work.collector.diagnostics
        if not any(one.code == "A308" and one.span == span for one in diagnostics):
            # once, for the first layer and head
            message = f"this cannot be computed in {where}: {error}"
            work.collector.add("A308", message, span)
    if graph is not None:
        _check_governed(graph, work, scale)
    changes = () if scores is None else scores.value
    if mechanism is not None:
        _check_beside(mechanism, work, graph is None, changes, normal)
        if factor is not None and scale is not None:
            _check_scale(mechanism, work, graph is None, factor, scale.span, where if place else "")
    return Attend(
        graph=graph,
        mechanism=mechanism,
        scale=factor,
        scores=changes,
        normalize=normal.value if normal else "softmax",
        span=ruling.span,
    )


def _check_governed(graph: Term, work: Work, scale: Ruling[Scalar] | None) -> None:
    """Of graphs that govern all that is attended: one scale, one kind of keys."""
    governed = [
        leaf for leaf in leaves(graph) if getattr(work.patterns[leaf.pattern], "governs", ())
    ]
    if not governed:
        return
    first, name = governed[0], governed[0].pattern
    related = ((f"`{name}` is here", first.span),) if first.span else ()
    if scale is not None:
        message = (
            f"`{name}` sets the factor of scores itself, so the statement `scale` cannot be used"
        )
        advice = f"remove it: the factor is 1 / sqrt(d), or 1 with `{name}(scale = unit)`"
        work.collector.add("A708", message, scale.span, related=related, help=advice)
    mean = [leaf for leaf in governed if dict(leaf.arguments)["combine"] == "mean"]
    if len(mean) > 1:
        have = f"{len(mean)} `{name}` have it"
        message = f"`combine = mean` averages the rounds of one `{name}`, and {have}"
        advice = f"write `combine = union`, or give each `{name}` heads of its own"
        work.collector.add("A708", message, mean[1].place("combine"), help=advice)
    related = ((f"the other `{name}` is here", first.span),) if first.span else ()
    for argument in work.patterns[name].governs:  # type: ignore[attr-defined]
        for other in governed[1:]:
            if dict(other.arguments)[argument] != dict(first.arguments)[argument]:
                message = f"all `{name}` of one `attend` must have the same `{argument}`"
                work.collector.add("A708", message, other.place(argument), related=related)


def _check(leaf: Leaf, where: str, work: Work) -> None:
    """Ranges of arguments that layer and head have made known."""
    arguments = dict(leaf.arguments)
    for entry in fields(work.patterns[leaf.pattern]):  # type: ignore[arg-type]
        value = arguments.get(entry.name)
        if isinstance(value, int | float):
            wrong = check_value(entry.metadata["parameter"], entry.name, value)
            if wrong:
                work.collector.add("A306", f"{wrong} in {where}", leaf.place(entry.name))


def _misplaced(
    mechanism: Mechanism, work: Work, message: str, span: Span | None, advice: str = ""
) -> None:
    advice = (
        advice or "remove the statement, or give it only to heads whose `attend` has no mechanism"
    )
    related = () if mechanism.span is None else (("the mechanism", mechanism.span),)
    work.collector.add("A705", message, span or mechanism.span, related=related, help=advice)


def _check_beside(
    mechanism: Mechanism,
    work: Work,
    alone: bool,
    scores: tuple[Score, ...],
    normal: Ruling[str] | None,
) -> None:
    """What changes the scores of a graph has no meaning for a mechanism."""
    without = f"uses the scores of pairs, and `{mechanism.name}` computes no scores"
    if alone and scores:
        _misplaced(mechanism, work, f"`score` {without}", scores[0].span)
    elif alone and normal is not None:
        _misplaced(mechanism, work, f"`normalize` {without}", normal.span)
    elif normal is not None and normal.value != "softmax":
        message = (
            f"a graph with `{mechanism.name}` added has the weights of a softmax, not of"
            f" `normalize {normal.value}`"
        )
        _misplaced(mechanism, work, message, normal.span)


def _check_scale(
    mechanism: Mechanism, work: Work, alone: bool, factor: Scalar, span: Span | None, where: str
) -> None:
    declaration = work.mechanisms[mechanism.name]
    takes = declaration.takes_scale(dict(mechanism.arguments))
    if alone and not takes:
        message = f"the formula of `{mechanism.name}` takes no `scale`"
        _misplaced(mechanism, work, message, span)
    elif takes and isinstance(factor, int | float) and factor <= 0:
        message = f"the formula of `{mechanism.name}` needs a `scale` above 0, got {factor:g}"
        message += f" in {where}" if where else ""
        _misplaced(mechanism, work, message, span, "write a `scale` above 0")
