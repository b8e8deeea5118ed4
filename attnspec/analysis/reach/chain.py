"""The layers that information passes: graphs by number, the last repeated as often as is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from attnspec.analysis.counting.neighbours import Neighbours, neighbours
from attnspec.graphs.operators import transpose_of
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Stack


@dataclass(frozen=True, eq=False)
class Chain:
    """Graphs of the layers 0, 1, … of a stack at n positions, each the union of its heads.

    `layers` are sets of relations; a chain goes on with the last. `causal` says which pairs are
    allowed: those with k <= q, or all. Graphs are made when they are first asked for, and kept.
    """

    n: int
    layers: tuple[frozenset[Relation], ...]
    causal: bool
    _graphs: dict[frozenset[Relation], Neighbours] = field(default_factory=dict, repr=False)

    @property
    def distinct(self) -> int:
        """Layers up to the first that only repeats."""
        return len(self.layers)

    def at(self, layer: int) -> frozenset[Relation]:
        """The relations of a layer, whatever its number."""
        return self.layers[min(layer, len(self.layers) - 1)]

    def graph(self, layer: int) -> Neighbours:
        """The graph of a layer; raises TooMuch where it cannot be examined."""
        relations = self.at(layer)
        if relations not in self._graphs:
            self._graphs[relations] = neighbours(sorted(relations, key=repr), self.n)
        return self._graphs[relations]

    def allowed(self, query: int) -> int:
        """How many keys a query may read."""
        return query + 1 if self.causal else self.n

    def reversed(self) -> Chain:
        """The same layers, every pair the other way."""
        turned = (frozenset(map(transpose_of, relations)) for relations in self.layers)
        return Chain(self.n, tuple(turned), self.causal)

    @property
    def pairs(self) -> int:
        """How many pairs are allowed."""
        return self.n * (self.n + 1) // 2 if self.causal else self.n * self.n


@lru_cache(maxsize=4)
def layers_of(stack: Stack, n: int) -> Chain:
    """The layers of a stack in their order. Raises as `Stack.bound` does."""
    bound = stack.bound(n)
    every = [frozenset(bound.found[index][2] for index in row) for row in bound.rows]
    while len(every) > 1 and every[-1] == every[-2]:
        every.pop()
    return Chain(n, tuple(every), stack.program.causal)


@lru_cache(maxsize=4)
def union_of(stack: Stack, n: int) -> Chain:
    """The union of all layers and heads, again and again: shortest paths in one graph."""
    layers = layers_of(stack, n)
    every = frozenset(relation for _, _, relation in stack.bound(n).found)
    return layers if layers.layers == (every,) else Chain(n, (every,), layers.causal)
