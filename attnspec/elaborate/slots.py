"""What each head of each layer does, once all statements are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from attnspec.bind import check_value
from attnspec.elaborate.collect import Collector
from attnspec.elaborate.coverage import Ruling, Where, ranges, resolve
from attnspec.elaborate.statements import Attended, Statements
from attnspec.grammar import nodes
from attnspec.ir import Attend, Compound, Leaf, Mechanism, Score, leaves, symbols_of
from attnspec.normalise import substitute
from attnspec.relations import Parameter
from attnspec.scalars import Scalar, ScalarError, Value, fold, symbols
from attnspec.source import Span

Place = dict[str, int]


def slots_of(
    work: Statements, attention: nodes.Attention, collector: Collector
) -> list[list[Attend]]:
    """One entry for each layer and head; nothing if there are errors."""
    layers = 1 if work.layers is None else work.layers
    heads = 1 if work.heads is None else work.heads
    if collector.has_errors():
        return []
    attends = resolve(work.attends, layers, heads, "attend", collector)
    scales = resolve(work.scales, layers, heads, "scale", collector)
    normalizers = resolve(work.normalizers, layers, heads, "normalize", collector)
    groups: dict[Where, list[Ruling[Score]]] = {}
    for ruling in work.scores:
        groups.setdefault(ruling.where, []).append(ruling)
    stacked = [
        Ruling(tuple(r.value for r in group), where, group[0].span)
        for where, group in groups.items()
    ]
    scores = resolve(stacked, layers, heads, "score", collector)
    _uncovered(attends, work, attention, collector)
    if collector.has_errors():
        return []
    slot = _Slot(work, collector)
    rows: list[list[Attend]] = []
    for layer in range(layers):
        row: list[Attend] = []
        for head, attended in enumerate(attends[layer]):
            if attended is not None:
                place = {
                    **({} if work.layers is None else {"layer": layer}),
                    **({} if work.heads is None else {"head": head}),
                }
                scale, normal = scales[layer][head], normalizers[layer][head]
                row.append(slot.attend(place, attended, scale, normal, scores[layer][head]))
        rows.append(row)
    return rows


class _Slot:
    """Fills in layer and head, for every combination of statements once."""

    def __init__(self, work: Statements, collector: Collector) -> None:
        self._work = work
        self._collector = collector
        self._asked: dict[int, frozenset[str]] = {}
        self._made: dict[tuple[object, ...], Attend] = {}

    def attend(
        self,
        place: Place,
        ruling: Ruling[Attended],
        scale: Ruling[Scalar] | None,
        normal: Ruling[str] | None,
        scores: Ruling[tuple[Score, ...]] | None,
    ) -> Attend:
        """What one head does by the statements that rule it."""
        asked = self._symbols(ruling, ruling.value[0])
        if scale is not None:
            asked = asked | self._symbols(scale, scale.value)
        matters = {name: number for name, number in place.items() if name in asked}
        rulings = (ruling, scale, normal, scores)
        key = (*(id(one) for one in rulings), *matters.items())
        if key not in self._made:
            self._made[key] = self._attend(matters, *rulings)
        return self._made[key]

    def _symbols(self, ruling: Ruling[Attended] | Ruling[Scalar], value: object) -> frozenset[str]:
        if id(ruling) not in self._asked:
            found: set[str] = set()
            if isinstance(value, Leaf | Compound):
                found = symbols_of(value)
            elif value is not None:
                found = set(symbols(value))  # type: ignore[arg-type]
            self._asked[id(ruling)] = frozenset(found)
        return self._asked[id(ruling)]

    def _attend(
        self,
        place: Place,
        ruling: Ruling[Attended],
        scale: Ruling[Scalar] | None,
        normal: Ruling[str] | None,
        scores: Ruling[tuple[Score, ...]] | None,
    ) -> Attend:
        graph, mechanism = ruling.value
        factor = None if scale is None else scale.value
        changes = () if scores is None else scores.value
        where = ", ".join(f"{name} {number}" for name, number in place.items())
        values: Mapping[str, Value] = dict(place)
        try:
            if graph is not None and place:
                self._work.copied(graph, ruling.span)
                graph = substitute(graph, dict(place))
                for leaf in leaves(graph):
                    self._check(leaf, where)
            if factor is not None:
                factor = fold(factor, values)
        except ScalarError as error:
            message = f"an expression has no value at {where}: {error}"
            self._collector.add("A308", message, ruling.span)
        if mechanism is not None:
            if graph is None:
                self._without_scores(mechanism, changes, normal)
            elif normal is not None and normal.value != "softmax":
                self._misplaced(
                    mechanism,
                    f"beside `{mechanism.name}` the weights of a graph are those of a softmax,"
                    f" not of `normalize {normal.value}`",
                    normal.span,
                )
            if factor is not None and scale is not None:
                self._scaled(mechanism, graph is None, factor, scale.span)
        return Attend(
            graph=graph,
            mechanism=mechanism,
            scale=factor,
            scores=changes,
            normalize=normal.value if normal else "softmax",
            span=ruling.span,
        )

    def _misplaced(self, mechanism: Mechanism, message: str, span: Span | None) -> None:
        related = () if mechanism.span is None else (("the mechanism", mechanism.span),)
        self._collector.add("A705", message, span or mechanism.span, related=related)

    def _without_scores(
        self, mechanism: Mechanism, scores: tuple[Score, ...], normal: Ruling[str] | None
    ) -> None:
        message = f"changes the scores of a graph; `{mechanism.name}` has none"
        if scores:
            self._misplaced(mechanism, f"`score` {message}", scores[0].span)
        elif normal is not None:
            self._misplaced(mechanism, f"`normalize` {message}", normal.span)

    def _scaled(self, mechanism: Mechanism, alone: bool, factor: Scalar, span: Span | None) -> None:
        declaration = self._work.mechanisms[mechanism.name]
        takes = declaration.takes_scale(dict(mechanism.arguments))
        if alone and not takes:
            message = f"the formula of `{mechanism.name}` takes no `scale`"
            self._misplaced(mechanism, message, span)
        elif takes and isinstance(factor, int | float) and factor <= 0:
            message = f"`{mechanism.name}` takes the root of `scale`, which is {factor:g}"
            self._misplaced(mechanism, message, span)

    def _check(self, leaf: Leaf, where: str) -> None:
        """Ranges of arguments that layer and head have made known."""
        given = dict(leaf.arguments)
        for entry in fields(self._work.patterns[leaf.pattern]):  # type: ignore[arg-type]
            parameter: Parameter = entry.metadata["parameter"]
            value = given.get(entry.name)
            if isinstance(value, int | float):
                wrong = check_value(parameter, entry.name, value)
                if wrong:
                    self._collector.add("A306", f"{wrong} at {where}", leaf.place(entry.name))


def _uncovered(
    table: list[list[Ruling[Attended] | None]],
    work: Statements,
    attention: nodes.Attention,
    collector: Collector,
) -> None:
    missing: dict[str, list[int]] = {}
    for layer, row in enumerate(table):
        heads = [head for head, ruling in enumerate(row) if ruling is None]
        if heads:
            missing.setdefault(ranges(heads), []).append(layer)
    for heads_text, layers in missing.items():
        which = []
        if work.layers is not None:
            which.append(f"layer {ranges(layers)}")
        if work.heads is not None:
            which.append(f"head {heads_text}")
        collector.add(
            "A408",
            f"nothing is attended in {', '.join(which)}" if which else "nothing is attended",
            attention.name_span,
            help="add an `attend` that covers it",
        )
