"""From a program to works: what each group of heads of a layer computes at one length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

from attnspec.graphs.bind import (
    BindError,
    Situation,
    bind_argument,
    bind_attended,
    extents_of,
    situation_of,
    stand_ins,
)
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import DataDependent, takes_tensors
from attnspec.graphs.stack import patterns_in
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import (
    EXPRESSION,
    Attend,
    Crossing,
    Leaf,
    Program,
    Score,
    Term,
    inputs_of,
    leaves,
    scalars_of,
)
from attnspec.ir.scalars import Apply, Scalar, ScalarError, Symbol, fold, symbols
from attnspec.ir.scores import HEAD, NAMED, Scores, alibi_slopes, bias
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.mechanism_sizes import bind_mechanism, symbols_in
from attnspec.lower.work import BackendError, Heads, Work, Works
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError
from attnspec.text.source import Span


def decided_leaves(program: Program) -> list[Leaf]:
    """The data-dependent patterns of a program."""
    return [leaf for leaf in program.leaves if BY_NAME[leaf.pattern].data_dependent]


def shares_keys(graph: Term | None) -> bool:
    """Whether keys are the queries, scored at unit length, in what is attended."""
    return any(pattern.shares_keys(arguments) for pattern, arguments in _governing(graph))


def _governing(graph: Term | None) -> Iterator[tuple[type[DataDependent], dict[str, Any]]]:
    """The patterns of a data-dependent graph, with their arguments."""
    for leaf in () if graph is None else leaves(graph):
        pattern = BY_NAME[leaf.pattern]
        if issubclass(pattern, DataDependent):
            yield pattern, dict(leaf.arguments)


def require_built(program: Program) -> None:
    """Raise SpecError naming every graph of a program that is too large to be planned."""
    sizes = {(patterns_in(attend.graph), attend.span) for attend in program.attends}
    large = [
        Diagnostic(
            "A196",
            f"a graph that is planned or compiled may have at most {LIMITS.patterns} patterns,"
            f" this one has {size:,}",
            span,
            help="one `where` may hold many conditions, joined by `or` and `and`",
        )
        for size, span in sizes
        if size > LIMITS.patterns
    ]
    if large:
        raise SpecError(large)


def bias_tables(program: Program) -> dict[tuple[int, Score], str]:
    """The learned tables of a program: their names by place among the scores and by the score.

    Layers and heads with the same score in the same place share a table, each with its own rows.
    """
    tables = dict.fromkeys(
        entry
        for attend in program.attends
        for entry in enumerate(attend.scores)
        if entry[1].name == "bias"
    )
    return {entry: f"bias_{index}" for index, entry in enumerate(tables)}


def pair_inputs(program: Program) -> tuple[str, ...]:
    """The inputs of a program that have a number of each pair, which has a gradient."""
    return tuple(entry.name for entry in program.inputs if entry.kind == "pairs")


def buckets_of(score: Score) -> int:
    """How many numbers a learned table has for each head."""
    return int(dict(score.arguments)["buckets"])  # type: ignore[arg-type]


_REAL = Parameter("real", "")


class Binder:
    """Binds a program at any length; works are kept, once for all lengths if they ask for none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs = stand_ins(program)
        self._tables = bias_tables(program)
        self._decides = bool(decided_leaves(program))
        self._asks = [_asks(attend) for attend in program.attends]
        self._kept: Cache[tuple[int, ...], Work] = Cache(LIMITS.answers)
        self._alike: dict[int, int] = {}

    def alike(self, layer: int) -> int:
        """The first layer that computes the same as this one, but for its learned tables."""
        if layer not in self._alike:
            row = self.program.row(layer)
            drawn = any("layer" in self._asks[index] for index in row)
            self._alike[layer] = layer if drawn else self.program.slots.index(row)
        return self._alike[layer]

    def works(self, layer: int, heads: int, n_q: int, n_k: int, query_start: int = 0) -> Works:
        """The distinct works of a layer with the heads that share each.

        Between two sequences the n_q queries are those from `query_start` on, and of a program
        whose lengths are settled both are these; a graph's work has as many keys as the positions
        that hold both.

        Raises ValueError where a size has no admissible value at n_k positions.
        """
        crossing = self.crossing(n_q, n_k, query_start)
        if crossing is not None:
            n_q, n_k = crossing.queries, crossing.keys
        grid = extents_of(self.program, n_k)
        slots: dict[tuple[int, int], list[int]] = {}
        for head in range(heads):
            index = self.program.number(layer, head)
            slots.setdefault((index, head if "head" in self._asks[index] else 0), []).append(head)
        groups: dict[Work, list[int]] = {}
        program = replace(self.program, crossing=crossing)
        for (index, own), members in slots.items():
            at = situation_of(program, n_k, layer, members[0], grid=grid, inputs=self.inputs)
            bound = partial(_work, program.attends[index], at, heads, self._tables)
            if crossing is None:
                asks = self._asks[index]
                size = n_k if "n" in asks or (grid and "grid" in asks) else 0
                key = index, layer if "layer" in asks else 0, own, heads, size
                work = self._kept.get(key, bound)
            else:
                work = bound()
            mechanism = work.mechanism
            if mechanism is not None and n_k > (mechanism.longest or n_k):
                raise BindError(
                    f"`{mechanism.name}` is learned for at most max_length = {mechanism.longest}"
                    f" positions, got n = {n_k}",
                    program.attends[index].span,
                )
            length = n_k if crossing is None or mechanism is not None else crossing.length
            groups.setdefault(replace(work, n_q=n_q, n_k=length), []).extend(members)
        return [(work, tuple(sorted(members))) for work, members in groups.items()]

    def open_works(self, layer: int, heads: int) -> Works:
        """The works of a layer, of no length, whose pairs tensors of positions tell at every
        length. Raises BackendError, with the reason, where some do not."""
        if self.program.cross or self.program.grid is not None:
            raise BackendError(
                f"the layout of {'`cross`' if self.program.cross else 'a grid'} depends on n"
            )
        for attend in self.program.attends_of(layer):
            if attend.mechanism is not None:
                raise BackendError(f"`{attend.mechanism.name}` takes steps that depend on n")
            if "n" in _asks(attend, predicates=False):
                raise BackendError("a size, `scale` or `score` depends on n")
        works = self.works(layer, heads, 1, 1)
        for work, _ in works:
            if work.decided:
                raise BackendError(f"`{work.decided[0].name}` chooses its pairs by values")
            if not takes_tensors(work.relation):
                raise BackendError("its pairs are computed by NumPy, not by operations of torch")
        return works

    def crossing(self, n_q: int, n_k: int, query_start: int = 0) -> Crossing | None:
        """How two sequences of a call are laid out as one, None where there is one: queries are
        the last positions. Where tensors decide, no query is the padding of a key's position, so
        that they stand behind all keys.
        """
        if not self.program.cross:
            return None
        crossing = self.program.crossing or Crossing(n_q, n_k, query_start)
        first = crossing.keys if self._decides else max(0, crossing.keys - crossing.queries)
        return replace(crossing, first=first)


def layers_of(
    program: Program, heads: int, n: int, layers: Iterable[int] | None = None
) -> dict[tuple[Work, Heads], list[int]]:
    """The works of some layers, or all, at n positions, with their heads, and the layers that share
    each, but for their draws."""
    binder, groups = Binder(program), dict[tuple[Work, Heads], list[int]]()
    for layer in range(program.layer_count) if layers is None else layers:
        for work, members in binder.works(layer, heads, n, n):
            groups.setdefault((replace(work, layer=0), members), []).append(layer)
    return groups


def _asks(attend: Attend, predicates: bool = True) -> set[str]:
    """What the work of an attend depends on: `n`, `grid`, `layer`, `head` and other symbols, those
    of its `predicates` as well."""
    names = set(symbols(attend.scale or 0))
    for score in attend.scores:
        read = symbols_in(score)
        # an expression has a number of each head
        names |= read - {"head"} if score.name == EXPRESSION else read
    if attend.mechanism is not None:
        names |= symbols_in(attend.mechanism)
        if MECHANISMS_BY_NAME[attend.mechanism.name].drawn:
            names.add("layer")
    if attend.graph is not None:
        for _, argument, scalar in scalars_of(attend.graph):
            if predicates or argument != "predicate":
                names.update(symbols(scalar))
    for leaf in attend.leaves:
        entries = fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
        names.update(entry.metadata["parameter"].context for entry in entries)
    return names


def _work(
    attend: Attend, at: Situation, heads: int, tables: Mapping[tuple[int, Score], str]
) -> Work:
    mechanism = None if attend.mechanism is None else bind_mechanism(attend.mechanism, at)
    # of a mechanism alone the pairs that it weighs
    graph = attend.graph or Leaf("causal" if at.causal else "full", ())
    try:
        # a mechanism takes queries and keys as they are
        relation = bind_attended(graph, at if mechanism is None else replace(at, crossing=None))
        scales = (pattern.own_scale(arguments) for pattern, arguments in _governing(graph))
        scale = None if attend.scale is None else _number(attend.scale, at, "scale", attend.span)
        return Work(
            relation=relation,
            n_q=0,
            n_k=0,
            scale=next((factor for factor in scales if factor is not None), scale),
            unit_keys=shares_keys(graph),
            changes=Scores(
                tuple(
                    _statement(score, at, heads, tables.get((place, score), ""))
                    for place, score in enumerate(attend.scores)
                )
            ),
            normalize=attend.normalize,
            reads=tuple(sorted(inputs_of(graph))),
            mechanism=mechanism,
            hybrid=mechanism is not None and attend.graph is not None,
            causal=mechanism is not None and at.causal,
            layer=at.layer if mechanism is not None and mechanism.drawn else 0,
        )
    except RelationError as error:
        raise BindError(f"{error.message} at n = {at.n:,}", attend.span) from None


def require_numbers(attend: Attend, at: Situation) -> None:
    """Raise BindError where a number of an attend beside its graph has no admissible value."""
    if attend.mechanism is not None:
        bind_mechanism(attend.mechanism, at)
    if attend.scale is not None:
        _number(attend.scale, at, "scale", attend.span)
    for score in attend.scores:
        _statement(score, at, at.heads or 1, "")


def numbers_of(attend: Attend) -> dict[str, Scalar]:
    """The numbers of an attend beside its graph that depend on where it stands, by name."""
    beside: list[tuple[str, object]] = [("scale", attend.scale)]
    for part in (attend.mechanism, *attend.scores):
        # what a score's expression is worth is a matter of pairs
        beside += () if part is None or part.name == EXPRESSION else part.arguments
    return {name: value for name, value in beside if isinstance(value, Symbol | Apply)}


def _statement(score: Score, at: Situation, heads: int, table: str) -> Scalar:
    if score.name == EXPRESSION:
        expression = dict(score.arguments)["value"]
        try:
            fold(expression, at.values)
            return fold(expression, {name: x for name, x in at.values.items() if name != "head"})
        except ScalarError as error:
            message = f"`score` has no value at {at.shown(expression)}: {error}"
            raise BindError(message, score.span) from None
    values: dict[str, Any] = {
        name: _number(value, at, f"{name}` of `{score.name}", score.span)
        for name, value in score.arguments
    }
    match score.name:
        case "softcap" if not values["cap"] > 0:
            message = f"`cap` must be above 0, got {values['cap']} at n = {at.n:,}"
            raise BindError(message, score.span)
        case "alibi":
            values["slope"] = Apply("item", (HEAD, *(score.slopes or alibi_slopes(heads))))
        case "bias":
            sizes = int(values["buckets"]), int(values["max_distance"])
            values["bias"] = bias(*sizes, not at.causal, table)
    return fold(NAMED[score.name], values)


def _number(scalar: Scalar, at: Situation, name: str, span: Span | None) -> float:
    return float(cast(float, bind_argument(_REAL, name, scalar, at, span)))


def device_of(device: object) -> str:
    """The name of a device, given by it or as a torch.device; "cuda:1" has the type cuda.

    Raises TypeError for anything else, AttnSpecError for a name that torch does not know.
    """
    if not isinstance(device, str) and type(device).__module__.partition(".")[0] != "torch":
        raise TypeError(
            "the device must be a torch.device or its name, for example 'cpu' or 'cuda',"
            f" got {type(device).__name__}"
        )
    name = str(device)
    if name not in ("cpu", "cuda"):
        import torch

        try:
            torch.device(name)
        except RuntimeError:
            raise AttnSpecError(
                "the device must be one that torch knows, for example 'cpu' or 'cuda',"
                f" got {name!r:.60}"
            ) from None
    return name
