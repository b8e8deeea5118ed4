"""One strategy of specs over the oracle's syntax tree: all static patterns, operators, scopes,
changes of scores, mechanisms and claims. What is drawn first of several is the simplest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from oracle.tree import (
    Attention,
    Claim,
    Input,
    Named,
    Node,
    Scope,
    Statement,
    name,
    number,
    pattern,
)

from attnspec.graphs.patterns import PATTERNS

INPUTS = (
    Input("mark", "tokens"),
    Input("few", "tokens", 5),
    Input("doc", "ids"),
    Input("size", "length"),
    Input("time", "numbers"),
)
STATIC = [
    each
    for each in PATTERNS
    if not each.data_dependent and each.name not in ("where_inputs", "chosen")
]
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def _numbers(*values: float) -> st.SearchStrategy[Node]:
    return st.sampled_from([number(value) for value in values])


def _names(*words: str) -> st.SearchStrategy[Node]:
    return st.sampled_from([name(word) for word in words])


_DRAWN = {"features": st.integers(1, 24).map(number), "seed": st.integers(0, 99).map(number)}
MECHANISMS: dict[str, dict[str, st.SearchStrategy[Node]]] = {
    "linear": {"feature": _names("elu1", "relu", "squared_relu", "exp")},
    "taylor": {"order": _numbers(1, 2)},
    "rbf": {**_DRAWN, "sigma": _numbers(1, 2, 0.5)},
    "favor": {
        **_DRAWN,
        "kind": _names("positive", "hyperbolic", "relu"),
        "orthogonal": _numbers(True, False),
    },
    "efficient": {},
    "fourier": {},
}
"""Those whose formulas the oracle has; the last two are not causal and stand alone."""


# to make a strategy takes longer than to draw from it
_between = cache(st.integers)


@dataclass
class Maker:
    """Draws expressions, and holds what may be named where they stand."""

    draw: st.DrawFn
    numbers: list[str] = field(default_factory=list)
    """Scalars that are known when the spec is compiled."""
    graphs: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    inputs: tuple[Input, ...] = ()
    named: list[Named] = field(default_factory=list)
    scopes: tuple[str, ...] = ()
    """Which of `head` and `layer` are declared."""
    grid: int = 0
    """Axes."""

    def pick(self, *options: Any) -> Any:
        return options[self.between(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.between(0, 99) >= 100 - percent

    def between(self, low: int, high: int) -> int:
        return self.draw(_between(low, high))

    def of_kind(self, kind: str) -> list[str]:
        return [entry.name for entry in self.inputs if entry.kind == kind]

    # --- scalars ---------------------------------------------------------------------------------

    def count(self, low: int, high: int) -> Node:
        """A count that is mostly between two bounds."""
        value, least, n = number(self.between(low, high)), number(low), name("n")
        match self.pick(*["number"] * 14, *"root share real name name place product max".split()):
            case "root":
                return Node("call", ("max", least, Node("call", ("isqrt", n))))
            case "share":
                share = Node("//", (n, number(self.between(2, 5))))
                return Node("call", ("max", least, share)) if self.chance(80) else share
            case "real":
                rounded = self.pick("floor", "ceil"), Node("call", ("sqrt", n))
                return Node("call", ("max", least, Node("call", rounded)))
            case "name" if self.numbers:
                return Node("+", (name(self.pick(*self.numbers)), least))
            case "place" if self.scopes:
                which = name(self.pick(*self.scopes))
                powered = Node("**", (number(2), which))
                return Node("+", (powered if self.chance(40) else which, value))
            case "product":
                times = number(self.between(1, 4))
                return Node("//", (Node("*", (value, times)), times))
            case "max":
                return Node("call", ("max", least, value))
        return value

    # --- token sets and predicates ---------------------------------------------------------------

    def tokens(self, depth: int = 2) -> Node:
        known = [*self.of_kind("tokens"), *self.sets]
        match self.pick(
            "first", "last", "every", "at", "name", *["join", "join", "t~"] * (depth > 0)
        ):
            case "join":
                operands = self.tokens(depth - 1), self.tokens(depth - 1)
                return Node(self.pick("t|", "t|", "t&", "t-"), operands)
            case "t~":
                return Node("t~", (self.tokens(depth - 1),))
            case "name" if known:
                return Node("tokens", (self.pick(*known),))
            case "last":
                return Node("last", (self.count(0, 4),))
            case "every":
                return Node("every", (self.count(1, 9), *[self.count(0, 5)] * self.chance(40)))
            case "at":
                lows = [self.between(0, 30) for _ in range(self.between(1, 3))]
                ranges = (Node("range", (number(x), number(x + self.between(0, 8)))) for x in lows)
                return Node("positions", tuple(ranges))
        return Node("first", (self.count(0, 4),))

    def predicate(self, depth: int = 2) -> Node:
        kinds = ["compare", "compare", "blocks", "range", "set", "chain", "cells", "times"]
        match self.pick(*kinds, *["and", "or", "not"] * (depth > 0)):
            case "not":
                return Node("not", (self.predicate(depth - 1),))
            case ("and" | "or") as op:
                return Node(op, (self.predicate(depth - 1), self.predicate(depth - 1)))
            case "range":
                low = self.between(-6, 6)
                ends = number(low), number(low + self.between(0, 8))
                return Node("in_range", (self.term(), *ends))
            case "set":
                members = [number(self.between(-4, 12)) for _ in range(self.between(1, 3))]
                return Node("in_set", (self.term(), *members))
            case "chain":
                low, high = self.pick("<", "<="), self.pick("<", "<=")
                return Node("chain", (self.term(0), low, self.term(), high, self.term(0)))
            case "cells" if self.grid:
                axis = self.pick(*("time", "row", "col")[-self.grid :])
                return self._apart(name(f"q.{axis}"), name(f"k.{axis}"))
            case "times" if self.of_kind("numbers"):
                return self._apart(name("time(q)"), name("time(k)"))
            case "blocks":
                size = self.count(1, 9)
                sides = tuple(Node("//", (name(side), size)) for side in "qk")
                return Node(self.pick(*COMPARISONS), sides)
        return Node(self.pick(*COMPARISONS), (self.term(), self.term(1)))

    def _apart(self, q: Node, k: Node) -> Node:
        if self.chance(60):
            gap = Node("call", ("abs", Node("-", (q, k))))
            return Node("<=", (gap, number(self.between(0, 2))))
        return Node(self.pick("==", "<=", ">"), (q, k))

    def term(self, depth: int = 2) -> Node:
        """A number of a pair."""
        inner = "gap gap gap rest rest // abs * neg extreme + -".split()
        match self.pick("place", "place", *inner * (depth > 0)):
            case "gap":
                return Node("-", (name("q"), name("k")))
            case "abs":
                return Node("call", ("abs", Node("-", (name("q"), name("k")))))
            case ("rest" | "//") as op:
                divisor = number(self.between(1, 12))
                return Node("%" if op == "rest" else op, (self.term(depth - 1), divisor))
            case "*":
                return Node("*", (self.term(depth - 1), number(self.between(-3, 4))))
            case "neg":
                return Node("neg", (self.term(depth - 1),))
            case "extreme":
                both = self.term(depth - 1), self.term(depth - 1)
                return Node("call", (self.pick("min", "max"), *both))
            case ("+" | "-") as op:
                return Node(op, (self.term(depth - 1), self.term(depth - 1)))
        kind = self.pick(*"qkqkqkqk", "n", "count")
        return self.count(0, 20) if kind == "count" else name(kind)

    # --- graphs ----------------------------------------------------------------------------------

    def graph(self, depth: int = 3) -> Node:
        inner = "g| g| g| g| g& g& g- g~ transpose shift".split()
        match self.pick("leaf", "leaf", "use", *inner * (depth > 0)):
            case ("g~" | "transpose") as op:
                return Node(op, (self.graph(depth - 1),))
            case "shift":
                return Node("shift", (self.graph(depth - 1), number(self.between(-9, 9))))
            case ("g|" | "g&" | "g-") as op:
                return Node(op, (self.graph(depth - 1), self.graph(depth - 1)))
            case "use" if self.graphs and self.chance(50):
                return Node("graph", (self.pick(*self.graphs),))
            case "use" if self.named:
                return self._called(self.pick(*self.named))
        return self.leaf()

    def _called(self, graph: Named) -> Node:
        """A use of a named graph: arguments without a name stand before those with one."""
        bare, arguments = True, []
        for parameter in graph.parameters:
            value = self.tokens(1) if parameter == "chosen" else self.count(1, 9)
            bare = bare and not self.chance(50)
            arguments.append(Node("arg", ("" if bare else parameter, value)))
        return Node("graph", (graph.name, *arguments))

    def leaf(self) -> Node:
        """A pattern, with arguments of the kinds that it declares."""
        skipped = {"same"} if not self.of_kind("ids") else set()
        skipped |= set() if self.grid else {"axial", "neighborhood"}
        known = [each for each in STATIC if each.name not in skipped]
        each = self.pick(*known, *(x for x in known if x.name in ("window", "where", "global")))
        match each.name:
            case "same":
                return pattern("same", name("doc"))
            case "prefix" if self.of_kind("length") and self.chance(60):
                return pattern("prefix", name("size"))
            case "prefix":
                return pattern("prefix", self.count(0, 12))
            case "neighborhood":
                return pattern(
                    "neighborhood", *(number(self.pick(1, 3, 5)) for _ in range(self.grid))
                )
        declared = {x.name: x.metadata["parameter"] for x in fields(each)}
        left_out = {x.name for x in fields(each) if x.default is not None and self.chance(20)}
        if each.name == "window":
            left_out = {"before", "after"} if self.chance(50) else {"radius"}
        positional, named = [], {}
        for called, parameter in declared.items():
            optional = called in left_out and (each.name == "window" or called in OPTIONAL)
            if parameter.kind == "tokens":
                positional.append(self.tokens())
            elif parameter.kind == "predicate":
                positional.append(self.predicate())
            elif parameter.context or optional:
                continue
            elif parameter.kind == "boolean":
                named[called] = number(self.chance(50))
            elif called == "seed":
                named[called] = number(self.between(0, 2**62))
            else:
                most = {"radius": 20, "keys": 5, "blocks": 3, "cells": 3, "base": 4}.get(called, 9)
                wanted = self.count(parameter.least or 0, most)
                named[called] = number(self.pick(2, 4)) if parameter.even else wanted
        return pattern(each.name, *positional, **named)

    # --- statements ------------------------------------------------------------------------------

    def settings(self) -> Iterator[Statement]:
        """What is said of scores beside an `attend`."""
        if self.chance(15):
            yield Node("scale", (number(self.pick(1, 0.25, 0.5)),))
        if self.chance(10):
            yield Node("score", ("softcap", Node("arg", ("cap", number(self.pick(2, 5.5, 30))))))
        if self.chance(10):
            yield Node("score", ("alibi",))
        if "head" in self.scopes and self.chance(10):
            # each has a table of its own
            sizes = {"buckets": self.pick(8, 32, 6), "max_distance": self.pick(40, 128)}.items()
            yield Node("score", ("bias", *(Node("arg", (key, number(x))) for key, x in sizes)))
        if self.chance(25):
            yield Node("normalize", (self.pick("softmax", "relu", "sigmoid", "softmax1"),))

    def mechanism(self, causal: bool, beside: bool) -> Node:
        called = self.pick(*[*MECHANISMS][: 4 if causal or beside else None])
        arguments = [
            Node("arg", (key, self.draw(value)))
            for key, value in MECHANISMS[called].items()
            if self.chance(80)
        ]
        if called == "linear" and not beside and self.chance(10):
            arguments.append(Node("arg", ("normalize", name("none"))))
        return Node("mechanism", (called, *arguments))

    def body(self, counts: dict[str, int]) -> tuple[Statement, ...]:
        found: list[Statement] = [Node("attend", (self.graph(3),)), *self.settings()]
        if counts and self.chance(60):
            first = self.pick(*counts)
            for members, written in self._sets(counts[first]):
                inner: list[Statement] = [Node("attend", (self.graph(2),)), *self.settings()]
                for other in counts.keys() - {first}:
                    if self.chance(40):
                        deep, said = self._sets(counts[other])[0]
                        inner.append(Scope(other, deep, said, (Node("attend", (self.graph(1),)),)))
                found.append(Scope(first, members, written, tuple(inner)))
        return tuple(found)

    def _sets(self, total: int) -> list[tuple[tuple[int, ...], str]]:
        """Scopes of some of the layers or heads; rarely two that meet."""
        match self.pick("cut", "cut", "even", "all"):
            case "all":
                return [(tuple(range(total)), "all")]
            case "even":
                first = int(total > 1 and self.chance(50))
                return [(tuple(range(first, total, 2)), ("even", "odd")[first])]
        cut = self.between(1, total)
        start = cut - 1 if self.chance(5) else cut
        parts = [range(cut), *[range(start, total)] * (cut < total and self.chance(50))]
        return [(tuple(part), ", ".join(map(str, part))) for part in parts]

    # --- claims ----------------------------------------------------------------------------------

    def claim(self, lengths: tuple[int, ...]) -> Claim:
        """A claim, at so many positions where the grid has one length."""
        some = st.lists(st.integers(1, 24), min_size=1, max_size=2, unique=True).map(sorted)
        at = () if self.chance(15) else lengths or tuple(self.draw(some))
        match self.pick("flag", "figure", "subset", "same", "reach"):
            case "flag":
                word = self.pick("causal", "rows_nonempty", "symmetric", "stable")
                return Claim(Node("flag", (word,)), at)
            case "reach":
                return Claim(Node("reach", (number(self.between(1, 4)),)), at)
            case ("subset" | "same") as kind:
                one, other = self.graph(2), self.graph(2)
                # every second one holds
                other = Node("g|", (other, one)) if self.chance(50) else other
                return Claim(Node(kind, (one, other)), at)
        figure = self.pick(*"edges density degree degree depth diameter path_length".split())
        bound = number(self.between(0, 9))
        if figure == "density":
            bound = number(self.pick(0.1, 0.3, 0.5, 1.0))
        elif figure == "edges":
            bound = Node("*", (number(self.between(1, 12)), name("n")))
        elif figure == "degree" and self.chance(30):
            bound = self.count(1, 9)
        return Claim(Node("figure", (figure, self.pick(*COMPARISONS), bound)), at)


OPTIONAL = {"before", "after", "base", "seed", "per_head"}
"""Arguments that have a default."""


@st.composite
def specs(draw: st.DrawFn, claims: bool = True, mechanisms: bool = True) -> Attention:
    """Attentions, a few of which have no meaning at any length."""
    make = Maker(draw)
    causal, layers, heads = make.chance(45), make.pick(None, 1, 2, 3), make.pick(None, 1, 2, 3, 4)
    counts = {key: x for key, x in (("layer", layers), ("head", heads)) if x is not None}
    make.scopes = tuple(counts)
    if make.chance(25):
        make.inputs = tuple(make.pick(*INPUTS) for _ in range(2))
        make.inputs = tuple(dict.fromkeys(make.inputs))
    grid, cells = _grid(make) if make.chance(14) else ((), 0)
    make.grid = len(grid)
    extra = make.between(1, 3) if cells and make.chance(70) else 0
    parameters, overrides = _parameters(make)
    graphs = _graphs(make) if make.chance(15) else ()
    lets = _lets(make) if make.chance(25) else []
    if mechanisms and make.chance(15):
        beside = make.chance(50)
        formula = make.mechanism(causal, beside)
        both = Node("g+", (make.graph(2), formula)) if beside else formula
        body: tuple[Statement, ...] = (Node("attend", (both,)),)
    else:
        body = make.body(counts)
    many = make.between(1, 3) if claims and make.chance(30) else 0
    lengths = (cells + extra,) if cells else (6,) if grid else ()
    spec = Attention(
        body=body,
        parameters=tuple(parameters),
        overrides=tuple(overrides),
        graphs=tuple(graphs),
        lets=tuple(lets),
        inputs=make.inputs,
        causal=causal,
        layers=layers,
        heads=heads,
        grid=grid,
        extra_tokens=extra,
        claims=tuple(make.claim(lengths) for _ in range(many)),
    )
    asked = _asked(*spec.expressions())
    return replace(spec, inputs=tuple(each for each in spec.inputs if each.name in asked))


def _asked(*expressions: Node) -> set[str]:
    """The names in expressions; of `time(q)` that of the input."""
    parts = (each for top in expressions for each in top.walk() if each.kind in ("name", "tokens"))
    return {str(each.parts[0]).partition("(")[0] for each in parts}


def _grid(make: Maker) -> tuple[tuple[Node, ...], int]:
    """The extents, and how many cells they have, 0 where the length says it."""
    if make.chance(25):
        width = number(make.pick(2, 3))
        return (width, Node("//", (name("n"), width))), 0
    extents = [make.between(1, 4) for _ in range(make.pick(2, 3))]
    return tuple(map(number, extents)), math.prod(extents)


def _parameters(make: Maker) -> tuple[list[tuple[str, Node]], list[tuple[str, int]]]:
    found: list[tuple[str, Node]] = []
    overrides = []
    for called in ("r", "w")[: make.pick(0, 0, 1, 2)]:
        value = make.count(1, 8)
        # no layer and no head is known there
        found.append((called, number(3) if _asked(value) & {"head", "layer"} else value))
        if make.chance(30):
            overrides.append((called, make.between(1, 9)))
        make.numbers.append(called)
    return found, overrides


def _graphs(make: Maker) -> list[Named]:
    """Named graphs, which see their own parameters and nothing else."""
    for called in ("near", "other")[: make.pick(1, 2)]:
        inner = Maker(make.draw, ["span"], [], ["chosen"], named=[*make.named], scopes=make.scopes)
        body = inner.graph(2)
        used = _asked(body)
        parameters = tuple(each for each in ("span", "chosen") if each in used)
        make.named.append(Named(called, parameters, body))
    return make.named


def _lets(make: Maker) -> list[tuple[str, Node]]:
    found: list[tuple[str, Node]] = [("s", make.count(1, 7))]
    make.numbers.append("s")
    if make.chance(50):
        found.append(("t", make.tokens(1)))
        make.sets.append("t")
    if make.chance(50):
        found.append(("g", make.graph(1)))
        make.graphs.append("g")
    return found


def part_of(draw: Callable[[Maker], Node]) -> st.SearchStrategy[Node]:
    """A strategy of what a method of `Maker` draws, where nothing is named."""
    return st.composite(lambda drawn: draw(Maker(drawn)))()


graphs = part_of(Maker.graph)
predicates = part_of(Maker.predicate)
token_sets = part_of(Maker.tokens)


def ten(test: Callable[..., None], number: int, *of: st.SearchStrategy[Any]) -> None:
    """A test of ten examples of a seed: after so many Hypothesis turns to variations of them."""
    few = settings(
        max_examples=10,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    seed(number)(few(given(*of)(test)))()


def drawn(count: int, number: int = 0, of: st.SearchStrategy[Any] | None = None) -> list[Any]:
    """So many of a strategy, of specs if none is named: the same for the same number."""
    found: dict[Any, None] = {}
    while len(found) < count:
        ten(lambda value: found.setdefault(value), number, specs() if of is None else of)
        number += 1
    return [*found][:count]
