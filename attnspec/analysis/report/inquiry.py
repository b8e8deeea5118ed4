"""What is asked of a spec at one length, and what has been found of it: each thing once.

Figures are found by functions of an inquiry; those that build on the pairs of heads, on the steps
of a plan or on other figures take them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from attnspec.analysis.counting.figures import HeadCounts, head_counts
from attnspec.analysis.quality import Figure, Unknown
from attnspec.elaborate import Elaborated
from attnspec.graphs.bind import bind_attended, extents_of, situation_of, stand_ins
from attnspec.graphs.relation import DataDependent, Relation, decided_in
from attnspec.graphs.stack import (
    Bound,
    Sample,
    Stack,
    TooMuch,
    any_pair,
    blamed,
    decides,
    has_mechanism,
    influence,
)
from attnspec.ir.api_checks import length_of
from attnspec.ir.crossing import crossed
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Crossing
from attnspec.limits import LIMITS
from attnspec.lower.work import ONE, Shape

if TYPE_CHECKING:
    from attnspec.analysis.cost.cost import StepCost


REACH = ("depth", "diameter", "path_length")
SPECTRUM = ("spectral_gap",)
CHOICES = ("choice", "scoring_flops")
"""The figures of what tensors decide."""

GRAPH_HEADS = ("graph_edges", "graph_density", "graph_degree", "graph_min_degree")
"""The figures of graph heads, which say nothing new where every head has a graph."""

ONE_SEQUENCE = (
    *("causal", *REACH, *SPECTRUM),
    *("scoring_flops", "kv_cache", "kv_cache_bytes", "eviction"),
)
"""The figures of one sequence: of what is read through others, of later tokens, of what is drawn of
queries and keys alike."""

APART = "queries and keys are two sequences"

T = TypeVar("T")


class Entry(Generic[T]):
    """A figure as an attribute of a report: its value, None where it is not known.

    `title` and `group` say where it is printed, `kind` how. `of` finds it, or raises Unknown with a
    reason where it is not known. One that is `promised` at every length raises the error of the
    limit that it lies beyond.
    """

    def __init__(
        self,
        title: str,
        group: str,
        of: Callable[[Inquiry], Figure[Any]],
        kind: str = "number",
        promised: bool = False,
    ) -> None:
        self.title, self.group, self.of, self.kind = title, group, of, kind
        self.promised = promised

    def __set_name__(self, owner: type[Inquiry], name: str) -> None:
        self.name = name
        owner.entries[name] = self

    @overload
    def __get__(self, report: None, owner: type) -> Entry[T]: ...

    @overload
    def __get__(self, report: Inquiry, owner: type) -> T | None: ...

    def __get__(self, report: Inquiry | None, owner: type) -> Entry[T] | T | None:
        if report is None:
            return self
        figure = report.figure(self.name)
        if not isinstance(figure, Unknown):
            value: T = figure.value
            return value
        if self.promised and figure.limit is not None:
            raise figure.limit
        return None


class Inquiry:
    """A spec at n positions; with `inputs`, one sample of its run-time inputs, the figures of that
    sample.

    `entries` are the figures by name, in the order in which they are printed. Costs are those of
    the plan for a `shape`, in numbers of `element` bytes. `known` has the pairs of layers and heads
    that tensors decided. Between two sequences n are the keys and m the queries, and `length`
    positions hold both, as `Crossing` says. `influence` has the graphs that mechanisms, and what
    tensors have yet to decide, are taken for where reach is asked for.
    """

    entries: ClassVar[dict[str, Entry[Any]]] = {}

    def __init__(
        self,
        elaborated: Elaborated,
        n: int,
        inputs: Sample | None = None,
        known: Mapping[tuple[int, int], Relation] | None = None,
        *,
        m: int | None = None,
        shape: Shape = ONE,
        element: int = 4,
    ) -> None:
        self.elaborated = elaborated
        self.program, self.length = crossed(elaborated.program, n, m)
        self.n = length_of(n)
        self.shape = replace(shape, heads=shape.heads_of(self.program))
        self.element = element
        self.stack = Stack(self.program, inputs, known)
        self.influence = self.stack
        if has_mechanism(self.program) or self.undecided:
            felt = any_pair(self.program) if self.undecided else self.program
            self.influence = Stack(influence(felt), inputs, known)
        self._figures: dict[str, Figure[Any] | Unknown] = {}
        # a length that the grid does not have is an error, not an unknown figure
        extents_of(self.program, self.length)
        if self.stack.unknown is None:
            self.stack.bound_or_too_much(self.length)

    def figure(self, name: str) -> Figure[Any] | Unknown:
        """A figure with its quality, or why it is not known; KeyError for another name."""
        if name not in self._figures:
            try:
                if self.program.cross and name in ONE_SEQUENCE:
                    raise Unknown(APART)
                with blamed(self.stack, self.length):
                    self._figures[name] = self.entries[name].of(self)
            except Unknown as unknown:
                self._figures[name] = unknown
            except TooMuch as error:
                self._figures[name] = Unknown(str(error), error)
        return self._figures[name]

    @property
    def m(self) -> int | None:
        """How many queries there are, of a spec that says `cross`."""
        return None if self.program.crossing is None else self.program.crossing.queries

    @property
    def lengths(self) -> str:
        """Both numbers, in words."""
        return f"n = {self.n:,}" if self.m is None else f"m = {self.m:,}, n = {self.n:,}"

    @property
    def queries(self) -> int:
        """How many queries there are, of any spec."""
        return self.n if self.m is None else self.m

    @property
    def empty(self) -> bool:
        """Whether there is no query, or no key."""
        return (self.program.crossing or Crossing(self.n, self.n)).empty

    @property
    def default_names(self) -> tuple[str, ...]:
        """The figures that are printed without being asked for: those that are soon found, and say
        something of this spec."""
        left_out: tuple[str, ...] = () if self.choices else CHOICES
        if self.program.cross:
            left_out += ONE_SEQUENCE
        if not has_mechanism(self.program) or not self.graph_slots:
            left_out += GRAPH_HEADS
        left_out += self.on_request
        return tuple(name for name in self.entries if name not in left_out)

    @property
    def on_request(self) -> tuple[str, ...]:
        """The figures that take long at this length, and are printed where they are asked for."""
        late: tuple[str, ...] = REACH if self.length > LIMITS.reach_printed else ()
        late += SPECTRUM if self.length > LIMITS.matrix else ()
        return tuple(name for name in late if not (self.program.cross and name in ONE_SEQUENCE))

    # --- what tensors decide ---------------------------------------------------------------------

    @cached_property
    def choices(self) -> dict[tuple[int, int], tuple[DataDependent, ...]]:
        """What tensors decide in each layer and head, where there is something."""
        choices = {slot: decided_in(relation) for slot, relation in self.unbound.items()}
        return {slot: leaves for slot, leaves in choices.items() if leaves}

    @cached_property
    def unbound(self) -> dict[tuple[int, int], Relation]:
        """The graph of each layer and head, with what stands for tensors, where it has a value and
        tensors decide something."""
        relations: dict[tuple[int, int], Relation] = {}
        made: dict[int, Relation] = {}
        for layer, row in enumerate(self.program.slots):
            for head, index in enumerate(row):
                graph = self.program.attends[index].graph
                if graph is None or not decides(graph):
                    continue
                if index not in made or self.stack.differs(index):
                    inputs = stand_ins(self.program)
                    at = situation_of(self.program, self.length, layer, head, inputs=inputs)
                    made[index] = bind_attended(graph, at)
                relations[layer, head] = made[index]
        return relations

    @property
    def undecided(self) -> bool:
        """Whether tensors have yet to decide pairs."""
        return self.stack.unknown is not None and any(map(decides, self.program.graphs))

    # --- the pairs of heads ----------------------------------------------------------------------

    @property
    def graphs(self) -> tuple[tuple[int, int, Relation], ...]:
        """Each different graph with the first layer and head that have it; raises Unknown."""
        if self.stack.unknown is not None:
            raise Unknown(self.stack.unknown)
        return self.stack.bound(self.length).found

    @cached_property
    def per_graph(self) -> tuple[HeadCounts, ...]:
        """The counts of each different graph, as `Stack.bound` numbers them; raises Unknown."""
        return tuple(self._counts(relation) for _, _, relation in self.graphs)

    @cached_property
    def graph_slots(self) -> tuple[tuple[int, int], ...]:
        """The layers and heads without a mechanism."""
        return tuple(
            (layer, head)
            for layer, row in enumerate(self.program.slots)
            for head, index in enumerate(row)
            if self.program.attends[index].mechanism is None
            and not (self.undecided and self.choices.get((layer, head)))
        )

    @cached_property
    def bound_of_graph_heads(self) -> Bound:
        """The graphs of these heads; raises Unknown, TooMuch."""
        if self.influence.unknown is not None:
            raise Unknown(self.influence.unknown)
        if not self.graph_slots:
            raise Unknown(self.stack.unknown or "no head has a graph")
        wanted = frozenset(self.graph_slots)
        return self.influence.bound(self.length).only(lambda *slot: slot in wanted)

    @property
    def indices(self) -> dict[tuple[int, int], int]:
        """The graph of each of these heads, as that bound numbers them."""
        slots = chain.from_iterable(self.bound_of_graph_heads.slots)
        return dict(zip(self.graph_slots, slots, strict=False))

    @cached_property
    def counts_by_head(self) -> dict[tuple[int, int], HeadCounts]:
        """The counts of each of these heads; raises Unknown where they are not known, TooMuch where
        they are too many."""
        graphs = self.bound_of_graph_heads.found
        if has_mechanism(self.program):
            counts = tuple(self._counts(relation) for _, _, relation in graphs)
        else:
            counts = self.per_graph
        return {slot: counts[index] for slot, index in self.indices.items()}

    def _counts(self, relation: Relation) -> HeadCounts:
        try:
            return head_counts(relation, self.length, self.program.crossing)
        except RelationError as error:
            raise Unknown(error.message) from None

    # --- costs -----------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[StepCost, ...]:
        """What each step of the chosen plan costs; raises Unknown."""
        from attnspec.analysis.cost import cost

        if self.empty:
            return ()
        try:
            return cost.steps_of(self.stack, self.length, self.shape, self.element)
        except cost.NotBuilt as error:
            raise Unknown(str(error)) from None
