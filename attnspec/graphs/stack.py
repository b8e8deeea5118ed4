"""All layers and heads of a spec at the lengths that are asked for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnspec.graphs.bind import Situation, bind_attended, extents_of, located, situation_of
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.predicates.inputs import READ
from attnspec.graphs.relation import DataDependent, Relation, chosen_text, probes
from attnspec.graphs.token_sets import Data
from attnspec.ir.api_checks import index_of, length_of, of_head, sampled
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import (
    Attend,
    Compound,
    Crossing,
    Leaf,
    Program,
    Term,
    inputs_of,
    leaves,
    symbols_of,
)
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError, did_you_mean

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Sample = Mapping[str, npt.ArrayLike]
"""One sample of the run-time inputs: arrays of length n, or a count."""


class TooMuch(AttnSpecError):
    """A spec, or a length, is larger than what is supported."""


def require_supported(n: int, graphs: int = 0) -> None:
    """Raises TooMuch for a length, or a number of different graphs, above what is supported."""
    if n > LIMITS.positions:
        raise TooMuch(f"this analysis supports n <= {LIMITS.positions:,}, got n = {n:,}")
    if graphs > LIMITS.graphs:
        raise TooMuch(f"the layers and heads have more than {LIMITS.graphs:,} different graphs")


@dataclass(frozen=True)
class Bound:
    """The different relations of a spec at one length.

    `found` has each with the first layer and head that have it; `rows` says for each layer how many
    heads have which, by index in `found`; `slots` says which each head of each layer has. At no
    positions all three are empty: there is no pair, whatever the sizes are worth.
    """

    found: tuple[tuple[int, int, Relation], ...]
    rows: tuple[Mapping[int, int], ...]
    slots: tuple[tuple[int, ...], ...]

    def part(self, layer: int | None, head: int | None) -> Bound:
        """The relations of one layer, of one head in all layers, or of one of both; None is all."""
        return self.only(lambda one, other: layer in (None, one) and head in (None, other))

    def only(self, meant: Callable[[int, int], bool]) -> Bound:
        """The relations of some layers and heads, without layers of which there is none."""
        first: dict[int, tuple[int, int]] = {}
        slots = []
        for layer, row in enumerate(self.slots):
            kept = tuple(head for head in range(len(row)) if meant(layer, head))
            for head in kept:
                first.setdefault(row[head], (layer, head))
            if kept:
                slots.append(tuple(row[head] for head in kept))
        place = {index: at for at, index in enumerate(first)}
        chosen = tuple(tuple(place[index] for index in row) for row in slots)
        return Bound(
            tuple((*where, self.found[index][2]) for index, where in first.items()),
            tuple(Counter(row) for row in chosen),
            chosen,
        )


def asks_for(term: Term) -> set[str]:
    """What a graph may differ by from place to place: `layer`, `head`, in sizes or in draws."""
    asked = {
        entry.metadata["parameter"].context
        for leaf in leaves(term)
        for entry in fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
    }
    return {"layer", "head"} & (asked | symbols_of(term))


def unread_text(names: Collection[str]) -> str:
    """Why pairs that depend on inputs are not known, "" where no names are given."""
    listed = ", ".join(f"`{name}`" for name in sorted(names))
    which = "input" if len(names) == 1 else "inputs"
    return listed and f"the pairs depend on the {which} {listed}, known only in a call"


def patterns_in(graph: Term | None) -> int:
    """How many patterns a graph is written with."""
    return 0 if graph is None else sum(1 for _ in leaves(graph))


def require_few_patterns(graph: Term | None) -> None:
    """Raise TooMuch where looking at a single pair takes too long."""
    size = patterns_in(graph)
    if size > LIMITS.patterns:
        raise TooMuch(
            f"this analysis supports graphs of at most {LIMITS.patterns} patterns, got {size:,}"
        )


class Stack:
    """The relations of all layers and heads of a program, at the lengths that are asked for.

    With `inputs`, one sample of the run-time inputs, they are those of that sample. `known` has
    those of layers and heads that tensors decided.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sample | None = None,
        known: Mapping[tuple[int, int], Relation] | None = None,
    ) -> None:
        if inputs is not None and not isinstance(inputs, Mapping):
            raise TypeError(f"inputs must map names to arrays, got {type(inputs).__name__}")
        self.program = program
        self.inputs = inputs
        self.known = known or {}
        self.declared = {entry.name: entry for entry in program.inputs}
        for name in inputs or ():
            if name not in self.declared:
                hint = did_you_mean(str(name), self.declared)
                raise AttnSpecError(
                    f"`{program.name}` declares no input `{name}`, its inputs are"
                    f" {', '.join(self.declared) or 'none'}" + (f": {hint}" if hint else "")
                )
        self._bound: dict[int, Bound | str] = {}

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.program.layer_count)

    @property
    def unknown(self) -> str | None:
        """Why the pairs are not known before run time, or None."""
        slots = {self.program.slots[layer][head] for layer, head in self.known}
        for index, attend in enumerate(self.program.attends):
            if attend.mechanism is not None:
                return f"`{attend.mechanism.name}` is a mechanism, which has no pairs"
            if attend.graph is None or index in slots:
                continue
            unread = unread_text(inputs_of(attend.graph) - set(self.inputs or ()))
            if unread:
                return unread
            for leaf in leaves(attend.graph):
                if self.decides_later(leaf):
                    return chosen_text(leaf.pattern)
        return None

    def queries(self, n: int) -> slice:
        """Which of n positions are queries: all, but where they hold two sequences."""
        return slice(n if self.program.crossing is None else self.program.crossing.queries)

    def situation(self, n: int, layer: int = 0, head: int = 0) -> Situation:
        """What terms and scalars of the program mean at n positions."""
        return situation_of(self.program, n, layer, head)

    # --- one head ------------------------------------------------------------------------------

    def relation(self, n: int, layer: int = 0, head: int = 0) -> Relation:
        """The relation of one head of one layer at n positions, `causal` included.

        Raises SpecError where the head has none before run time, or a size no value at n.
        """
        n = length_of(n)
        layer, head = self._slot(layer, head)
        if (layer, head) in self.known:
            return self.known[layer, head]
        attend = self.program.attend(layer, head)
        if attend.graph is None and attend.mechanism is not None:
            raise SpecError(
                Diagnostic(
                    "A707",
                    f"`{attend.mechanism.name}` is a formula, not a graph: it has no pairs",
                    attend.mechanism.span,
                )
            )
        if attend.graph is None:
            raise SpecError(Diagnostic("A408", "nothing is attended", attend.span))
        for leaf in leaves(attend.graph):
            if self.decides_later(leaf):
                raise SpecError(
                    Diagnostic(
                        "A706",
                        chosen_text(leaf.pattern),
                        leaf.span,
                        help="compile the spec, and call `module.pairs(q, k)` of the module",
                    )
                )
        lengths = self.program.crossing or Crossing(n, n)
        names = sorted(inputs_of(attend.graph))
        inputs = {name: self._sampled(name, lengths, head) for name in names}
        with located(attend.span):
            at = situation_of(self.program, n, layer, head, inputs=inputs)
            return bind_attended(attend.graph, at)

    def pairs(
        self, n: int, layer: int = 0, head: int = 0
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The pairs (q, k) of one head in the order of queries, some rows at a time."""
        n = length_of(n)
        layer, head = self._slot(layer, head)
        if n == 0:
            extents_of(self.program, n)
            return
        relation = self.relation(n, layer, head)
        with located(self.program.attend(layer, head).span):
            for first, last in relation.chunks(n):
                yield relation.rows(first, last, n)

    def mask(self, n: int, layer: int = 0, head: int = 0) -> npt.NDArray[np.bool_]:
        """bool [n, n]: True where the query of the row reads the key of the column.

        Raises AttnSpecError above n = `LIMITS.mask`.
        """
        n = length_of(n)
        if n > LIMITS.mask:
            raise AttnSpecError(
                f"a dense mask is built up to n = {LIMITS.mask:,}, got {n:,}: use `adjacency`"
            )
        mask = np.zeros((n, n), dtype=bool)
        for q, k in self.pairs(n, layer, head):
            mask[q, k] = True
        return mask

    def adjacency(self, n: int, layer: int = 0, head: int = 0) -> csr_array:
        """scipy.sparse.csr_array [n, n] of bool with sorted indices; never dense on the way.

        Raises AttnSpecError above `LIMITS.edges` edges and above n = `LIMITS.positions_listed`.
        """
        from scipy.sparse import csr_array

        n = length_of(n)
        if n > LIMITS.positions_listed:
            raise AttnSpecError(
                f"an adjacency is built up to n = {LIMITS.positions_listed:,}, got {n:,}"
            )
        layer, head = self._slot(layer, head)
        if n == 0:
            extents_of(self.program, n)
            return csr_array((0, 0), dtype=bool)
        relation = self.relation(n, layer, head)
        pointers = np.zeros(n + 1, np.int64)
        span = self.program.attend(layer, head).span
        with located(span):
            np.cumsum(relation.degrees(n), out=pointers[1:])
        edges = int(pointers[-1])
        if edges > LIMITS.edges:
            raise AttnSpecError(
                f"an adjacency is built up to {LIMITS.edges:,} edges, this one has {edges:,}"
            )
        keys = np.empty(edges, np.int32)
        with located(span):
            for first, last in relation.chunks(n):
                keys[pointers[first] : pointers[last]] = relation.row_keys(first, last, n)
        return csr_array(
            (np.ones(edges, bool), keys, pointers.astype(np.int32)), shape=(n, n), copy=False
        )

    def decides_later(self, leaf: Leaf) -> bool:
        """Whether relations say nothing of the pairs of a pattern before a call: it chooses them,
        or inputs that are missing list them."""
        pattern = BY_NAME[leaf.pattern]
        deferred = issubclass(pattern, DataDependent) and pattern.by_inputs
        return pattern.data_dependent and not (
            deferred and inputs_of(leaf) <= set(self.inputs or ())
        )

    def _sampled(self, name: str, lengths: Crossing, head: int) -> Data:
        entry = self.declared[name]
        sizes = lengths.queries, lengths.keys
        values = sampled(entry, self.inputs or {}, *sizes, self.program.name)
        if entry.kind == "choices":
            values = of_head(name, np.asarray(values), head, self.program.heads)
        if entry.kind in READ and lengths.m > lengths.keys:
            # what holds both sequences has positions behind the keys, which nothing reads
            values = np.pad(np.asarray(values), (0, lengths.m - lengths.keys))
        return Data(values, entry.size)

    def _slot(self, layer: int, head: int) -> tuple[int, int]:
        layer, head = index_of("layer", layer), index_of("head", head)
        for what, number, count in (
            ("layer", layer, self.program.layers),
            ("head", head, self.program.heads),
        ):
            if number < 0 or (count is not None and number >= count):
                allowed = f"between 0 and {count - 1}" if count is not None else "at least 0"
                raise AttnSpecError(f"`{what}` must be {allowed}, got {number}")
        return layer, head

    # --- all of them ---------------------------------------------------------------------------

    def lengths(self, wanted: tuple[int, ...]) -> list[int]:
        """The lengths among those wanted that the spec has; for a fixed grid its own."""
        fixed = self.program.fixed_length
        return [n for n in (wanted if fixed is None else (fixed,)) if self._exists(n)]

    def _exists(self, n: int) -> bool:
        try:
            self.bound(n)
        except TooMuch:
            return True
        except AttnSpecError:
            return False
        return True

    def bound(self, n: int) -> Bound:
        """The different relations at n positions; raises TooMuch, or as `relation` does."""
        if n not in self._bound:
            try:
                self._bound[n] = self._bind(n)
            except TooMuch as error:
                # that, too, is found once; the error itself would keep all that led to it
                self._bound[n] = str(error)
        relations = self._bound[n]
        if isinstance(relations, str):
            raise TooMuch(relations)
        return relations

    def bound_or_too_much(self, n: int) -> None:
        """Raise what is wrong with the spec at n positions, but not TooMuch."""
        try:
            self.bound(n)
        except TooMuch:
            return

    def _bind(self, n: int) -> Bound:
        require_supported(n)
        if n == 0 or (self.program.crossing is not None and self.program.crossing.empty):
            extents_of(self.program, n)
            return Bound((), (), ())
        bound: dict[Relation, tuple[int, int, int]] = {}
        everywhere: dict[int, int] = {}
        # of layers that say the same, unless it asks which layer it is
        alike: dict[tuple[int, ...], tuple[int, ...]] = {}
        chosen = []
        for layer, slots in enumerate(self.program.slots):
            if slots in alike:
                chosen.append(alike[slots])
                continue
            indices = []
            for head, attend in enumerate(slots):
                require_few_patterns(self.program.attends[attend].graph)
                index = everywhere.get(attend)
                if index is None:
                    relation = self.relation(n, layer, head)
                    index = bound.setdefault(relation, (len(bound), layer, head))[0]
                    if not self.differs(attend):
                        everywhere[attend] = index
                require_supported(n, len(bound))
                indices.append(index)
            chosen.append(tuple(indices))
            if everywhere.keys() >= set(slots):
                alike[slots] = chosen[-1]
        counted = {indices: dict(Counter(indices)) for indices in set(chosen)}
        return Bound(
            tuple((layer, head, relation) for relation, (_, layer, head) in bound.items()),
            tuple(counted[indices] for indices in chosen),
            tuple(chosen),
        )

    def differs(self, attend: int) -> bool:
        """Whether an attend may have other pairs in another layer or head."""
        graph = self.program.attends[attend].graph
        if any(self.program.slots[layer][head] == attend for layer, head in self.known):
            return True
        if graph is None:
            return False
        listed = any(self.declared[name].kind == "choices" for name in inputs_of(graph))
        return listed or bool(asks_for(graph))

    def require_affordable(self, n: int) -> None:
        """Raise TooMuch where looking at every pair at n positions takes too long."""
        work = 0
        sample = probes(n, 3)
        for layer, head, relation in self.bound(n).found:
            graph = self.program.attend(layer, head).graph
            patterns = patterns_in(graph)
            try:
                closed = relation.progressions(sample, n) is not None
            except RelationError:
                # whoever reads the pairs says what is wrong with them
                closed = False
            pairs = patterns * n * (1 if closed else n)
            work += pairs
            if pairs > LIMITS.pairs_evaluated or work > LIMITS.pairs_passed:
                raise TooMuch(f"to list the graph at n = {n:,} too many pairs must be tested")

    def relations(self, n: int) -> Iterator[tuple[int, int, Relation]]:
        """Every distinct relation of the spec at n with the first layer and head that have it.

        Raises TooMuch where looking into them takes too long.
        """
        self.require_affordable(n)
        yield from self.bound(n).found


@contextmanager
def blamed(stack: Stack, n: int) -> Iterator[None]:
    """As `located`, for work on all layers and heads at n positions: what has no place of its own
    is put on the first `attend` whose pairs have no value."""
    program = stack.program
    spans = {attend.span for attend in program.attends}
    try:
        with located(next(iter(spans)) if len(spans) == 1 else None):
            yield
    except SpecError as error:
        if any(diagnostic.span is not None for diagnostic in error.diagnostics):
            raise
        inputs = frozenset(stack.inputs or ())
        for layer, row in enumerate(program.slots):
            for head, index in enumerate(row):
                graph = program.attends[index].graph
                if graph is not None and inputs_of(graph) <= inputs:
                    # pairs that have no value say so with their place
                    deque(stack.pairs(n, layer, head), 0)
        raise


class Part(Stack):
    """The relations of one layer, of one head in all layers, or of one of both; None is all."""

    def __init__(self, whole: Stack, layer: int | None, head: int | None) -> None:
        super().__init__(whole.program, whole.inputs, whole.known)
        self._whole, self.only_layer, self.only_head = whole, layer, head

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        layer = self.only_layer
        return super().layers if layer is None else range(layer, layer + 1)

    def situation(self, n: int, layer: int | None = None, head: int | None = None) -> Situation:
        """What terms and scalars mean in this part, in its first layer and head unless said."""
        layer = self.only_layer if layer is None else layer
        head = self.only_head if head is None else head
        return super().situation(n, layer or 0, head or 0)

    def _bind(self, n: int) -> Bound:
        return self._whole.bound(n).part(self.only_layer, self.only_head)


def has_mechanism(program: Program) -> bool:
    """Whether a head computes a mechanism."""
    return bool(program.mechanisms)


def influence(program: Program) -> Program:
    """The same layers and heads with the graph of what each mechanism lets through in its place."""
    if not has_mechanism(program):
        return program
    attends = (
        each
        if each.mechanism is None
        else Attend(Leaf("full", (), span=each.mechanism.span), span=each.span)
        for each in program.attends
    )
    return replace(program, attends=tuple(attends))


def any_pair(program: Program) -> Program:
    """The same layers and heads with `full` for what tensors decide: all that may be read."""
    attends = (
        each
        if each.graph is None or each.mechanism is not None
        else replace(each, graph=undecided(each.graph))
        for each in program.attends
    )
    return replace(program, attends=tuple(attends))


def decides(graph: Term) -> bool:
    """Whether tensors decide pairs of a graph."""
    return any(BY_NAME[leaf.pattern].data_dependent for leaf in leaves(graph))


def undecided(graph: Term) -> Term:
    """The graph with `full` in place of data-dependent choices."""
    if isinstance(graph, Compound):
        return replace(graph, terms=tuple(undecided(term) for term in graph.terms))
    return Leaf("full", ()) if BY_NAME[graph.pattern].data_dependent else graph
