"""All layers and heads of a spec at the lengths that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from attnspec.bind import Situation
from attnspec.diagnostics import AttnSpecError
from attnspec.ir import Program, inputs_of, leaves, symbols_of
from attnspec.patterns import BY_NAME
from attnspec.probes import probes
from attnspec.relations import Relation

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from attnspec.spec import Sample, Spec


MOST_RELATIONS = 1024
"""The most different graphs of one spec that are looked into."""

MOST_POSITIONS = 1 << 22
"""The longest sequence that is looked into."""

MOST_WORK = 1 << 31
"""The most pairs, counted for every pattern of a graph, that are looked at for one length."""

MOST_AT_ONCE = 1 << 28
"""The same for a single graph, whose patterns are written out beside each other."""


class TooMuch(AttnSpecError):
    """A spec, or a length, is larger than what is looked into."""


@dataclass(frozen=True)
class Bound:
    """The different relations of a spec at one length.

    `found` has each with the first layer and head that have it; `rows` says for each layer how many
    heads have which, by index in `found`; `slots` says which each head of each layer has.
    """

    found: tuple[tuple[int, int, Relation], ...]
    rows: tuple[Mapping[int, int], ...]
    slots: tuple[tuple[int, ...], ...]


class Stack:
    """The relations of all layers and heads of a spec, at the lengths that are asked for.

    With `inputs`, one sample of the run-time inputs, they are those of that sample.
    """

    def __init__(self, spec: Spec, inputs: Sample | None = None) -> None:
        self.spec = spec
        self.inputs = inputs
        self.program: Program = spec.program
        self._bound: dict[int, Bound] = {}
        self._union: tuple[tuple[int, frozenset[int]], csr_array] | None = None

    @property
    def unknown(self) -> str | None:
        """Why the pairs are not known before run time, or None."""
        for attend in self.program.attends:
            if attend.mechanism is not None:
                return f"`{attend.mechanism.name}` is a mechanism"
            if attend.graph is None:
                continue
            if inputs_of(attend.graph) - set(self.inputs or ()):
                return "its pairs depend on run-time inputs"
            for leaf in leaves(attend.graph):
                if getattr(BY_NAME[leaf.pattern], "data_dependent", False):
                    return f"`{leaf.pattern}` is decided by the data"
        return None

    def situation(self, n: int, layer: int = 0, head: int = 0) -> Situation:
        """What terms and scalars of the spec mean at n positions."""
        program = self.program
        return Situation(
            n=n,
            patterns=BY_NAME,
            layer=layer,
            head=head,
            layers=self.spec.layers,
            heads=program.heads,
            causal=program.causal,
            grid=self.spec.grid(n),
            extra_tokens=program.extra_tokens,
        )

    def lengths(self, wanted: tuple[int, ...]) -> list[int]:
        """The lengths among those wanted that the spec has; for a fixed grid its own."""
        fixed = self.fixed_length()
        return [n for n in (wanted if fixed is None else (fixed,)) if self._exists(n)]

    def fixed_length(self) -> int | None:
        """The one length of a spec on a grid of constant extents."""
        return self.program.fixed_length

    def _exists(self, n: int) -> bool:
        try:
            self.bound(n)
        except TooMuch:
            return True
        except AttnSpecError:
            return False
        return True

    def bound(self, n: int) -> Bound:
        """The different relations at n positions; raises TooMuch, or as `Spec.relation` does."""
        if n not in self._bound:
            self._bound[n] = self._bind(n)
        return self._bound[n]

    def bound_or_too_much(self, n: int) -> None:
        """Raise what is wrong with the spec at n positions, but not TooMuch."""
        try:
            self.bound(n)
        except TooMuch:
            return

    def _bind(self, n: int) -> Bound:
        if n > MOST_POSITIONS:
            raise TooMuch(f"lengths above {MOST_POSITIONS:,} are not looked into, got n = {n:,}")
        found: dict[Relation, tuple[int, int, int]] = {}
        everywhere: dict[int, int] = {}
        rows, chosen = [], []
        for layer, slots in enumerate(self.program.slots):
            row: dict[int, int] = {}
            indices = []
            for head, attend in enumerate(slots):
                index = everywhere.get(attend)
                if index is None:
                    relation = self.spec.relation(n, layer, head, self.inputs)
                    index = found.setdefault(relation, (len(found), layer, head))[0]
                    if not self.differs(attend):
                        everywhere[attend] = index
                if len(found) > MOST_RELATIONS:
                    raise TooMuch(f"more than {MOST_RELATIONS:,} graphs are not looked into")
                row[index] = row.get(index, 0) + 1
                indices.append(index)
            rows.append(row)
            chosen.append(tuple(indices))
        return Bound(
            tuple((layer, head, relation) for relation, (_, layer, head) in found.items()),
            tuple(rows),
            tuple(chosen),
        )

    def differs(self, attend: int) -> bool:
        """Whether an attend may have other pairs in another layer or head."""
        graph = self.program.attends[attend].graph
        if graph is None:
            return False
        asked = {
            entry.metadata["parameter"].context
            for leaf in leaves(graph)
            for entry in fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
        }
        return bool({"layer", "head"} & (asked | symbols_of(graph)))

    def require_affordable(self, n: int) -> None:
        """Raise TooMuch where looking at every pair at n positions takes too long."""
        work = 0
        sample = probes(n, 3)
        for layer, head, relation in self.bound(n).found:
            graph = self.program.attend(layer, head).graph
            patterns = 0 if graph is None else sum(1 for _ in leaves(graph))
            closed = relation.progressions(sample, n) is not None
            pairs = patterns * n * (1 if closed else n)
            work += pairs
            if pairs > MOST_AT_ONCE or work > MOST_WORK:
                raise TooMuch(f"so many pairs are not looked at, n = {n:,}")

    def relations(self, n: int) -> Iterator[tuple[int, int, Relation]]:
        """Every distinct relation of the spec at n with the first layer and head that have it.

        Raises TooMuch where looking into them takes too long.
        """
        self.require_affordable(n)
        yield from self.bound(n).found

    def layer(self, n: int, layer: int) -> csr_array:
        """The union of a layer's heads, as int8 so that sums do not wrap."""
        return self._union_of(n, frozenset(self.bound(n).rows[layer]))

    def union(self, n: int) -> csr_array:
        """The union of all layers and heads, as int8."""
        return self._union_of(n, frozenset(range(len(self.bound(n).found))))

    def _union_of(self, n: int, members: frozenset[int]) -> csr_array:
        if self._union is None or self._union[0] != (n, members):
            self.require_affordable(n)
            total = None
            for index in sorted(members):
                layer, head, _ = self.bound(n).found[index]
                part = self.spec.adjacency(n, layer, head, self.inputs).astype(np.int8)
                total = part if total is None else (total + part).minimum(1)
            if total is None:
                raise AttnSpecError("a layer needs a head")
            self._union = (n, members), total
        return self._union[1]
