"""All layers and heads of a spec at the lengths that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnspec.diagnostics import AttnSpecError
from attnspec.ir import Program, inputs_of, leaves
from attnspec.patterns import BY_NAME
from attnspec.relations import Relation

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from attnspec.spec import Spec


class Stack:
    """The relations of all layers and heads of a spec, at the lengths that are asked for."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.program: Program = spec.program

    @property
    def unknown(self) -> str | None:
        """Why the pairs are not known before run time, or None."""
        for attend in self.program.attends:
            if attend.mechanism is not None:
                return f"`{attend.mechanism.name}` is a mechanism"
            if attend.graph is None:
                continue
            if inputs_of(attend.graph):
                return "its pairs depend on run-time inputs"
            for leaf in leaves(attend.graph):
                if getattr(BY_NAME[leaf.pattern], "data_dependent", False):
                    return f"`{leaf.pattern}` is decided by the data"
        return None

    def lengths(self, wanted: tuple[int, ...]) -> list[int]:
        """The lengths among those wanted that the spec has; for a fixed grid its own."""
        fixed = self.fixed_length()
        return [fixed] if fixed is not None else [n for n in wanted if self._exists(n)]

    def fixed_length(self) -> int | None:
        """The one length of a spec on a grid of constant extents."""
        grid = self.program.grid
        if grid is None or not all(isinstance(extent, int) for extent in grid):
            return None
        cells = 1
        for extent in grid:
            cells *= int(extent)  # type: ignore[arg-type]
        return cells + self.program.extra_tokens

    def _exists(self, n: int) -> bool:
        try:
            self.slots(n)
        except AttnSpecError:
            return False
        return True

    def slots(self, n: int) -> list[list[tuple[int, int]]]:
        """For each layer the (layer, head) pairs whose relations differ."""
        rows = []
        for layer in range(self.spec.layers):
            seen: dict[Relation, tuple[int, int]] = {}
            for head in range(self.spec.heads or 1):
                seen.setdefault(self.spec.relation(n, layer, head), (layer, head))
            rows.append(list(seen.values()))
        return rows

    def relations(self, n: int) -> Iterator[tuple[int, int, Relation]]:
        """Every distinct relation of the spec at n with the first layer and head that have it."""
        seen: set[Relation] = set()
        for row in self.slots(n):
            for layer, head in row:
                relation = self.spec.relation(n, layer, head)
                if relation not in seen:
                    seen.add(relation)
                    yield layer, head, relation

    def layer(self, n: int, layer: int) -> csr_array:
        """The union of a layer's heads, as int8 so that sums do not wrap."""
        total = None
        for at_layer, head in self.slots(n)[layer]:
            part = self.spec.adjacency(n, at_layer, head).astype(np.int8)
            total = part if total is None else (total + part).minimum(1)
        if total is None:
            raise AttnSpecError("a layer needs a head")
        return total
