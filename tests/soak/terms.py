"""Random expressions: scalars, token sets, predicates, graphs, what is said of scores."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from oracle.tree import Input, Named, Node, Statement, name, number, pattern


@dataclass
class Maker:
    """Makes one spec; holds what may be named where it is."""

    random: random.Random
    numbers: list[str] = field(default_factory=list)
    """Scalars that are known when the spec is compiled."""
    graphs: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    heads: bool = False
    layers: bool = False
    grid: int = 0
    extra: int = 0

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def pick(self, *given: str) -> str:
        return self.random.choice(given)

    # --- scalars -------------------------------------------------------------------------------

    def count(self, low: int, high: int) -> Node:
        """A count that is mostly between two bounds."""
        value = number(self.random.randint(low, high))
        kind = self.random.random()
        if kind < 0.72:
            return value
        if kind < 0.80:
            return self._of_length(low)
        if kind < 0.90 and self.numbers:
            return Node("+", (name(self.random.choice(self.numbers)), number(low)))
        if kind < 0.94 and (self.heads or self.layers):
            which = name(self.pick(*["head"] * self.heads, *["layer"] * self.layers))
            return Node("+", (which, value)) if self.chance(0.6) else self._powered(which, low)
        if kind < 0.97:
            small = self.random.randint(1, 4)
            return Node("//", (Node("*", (value, number(small))), number(small)))
        return Node("call", ("max", number(low), value))

    def _of_length(self, low: int) -> Node:
        n = name("n")
        root = Node("call", ("isqrt", n))
        if self.chance(0.5):
            return Node("call", ("max", number(low), root)) if low > 1 or self.chance(0.5) else root
        share = Node("//", (n, number(self.random.randint(2, 5))))
        if self.chance(0.3):
            wide = Node("call", ("sqrt", n))
            share = Node("call", (self.pick("floor", "ceil"), wide))
        return Node("call", ("max", number(max(1, low)), share)) if self.chance(0.8) else share

    def _powered(self, which: Node, low: int) -> Node:
        two = Node("**", (number(2), which))
        return Node("+", (two, number(low))) if self.chance(0.5) else two

    # --- token sets ----------------------------------------------------------------------------

    def tokens(self, depth: int = 2) -> Node:
        kind = self.random.random()
        if depth and kind < 0.3:
            first, second = self.tokens(depth - 1), self.tokens(depth - 1)
            return Node(self.pick("t|", "t|", "t&", "t-"), (first, second))
        if depth and kind < 0.36:
            return Node("t~", (self.tokens(depth - 1),))
        marks = [each.name for each in self.inputs if each.kind == "tokens"]
        if kind < 0.52 and (marks or self.sets):
            return Node("tokens", (self.random.choice(marks + self.sets),))
        if kind < 0.66:
            return Node("first", (self.count(0, 4),))
        if kind < 0.76:
            return Node("last", (self.count(0, 4),))
        if kind < 0.88:
            offset = (self.count(0, 5),) if self.chance(0.4) else ()
            return Node("every", (self.count(1, 9), *offset))
        return Node("positions", tuple(self._positions()))

    def _positions(self) -> list[Node]:
        found = []
        for _ in range(self.random.randint(1, 3)):
            low = self.random.randint(0, 30)
            high = low + self.random.randint(0, 8)
            wide = Node("range", (number(low), number(high)))
            found.append(wide if self.chance(0.5) else number(low))
        return found

    # --- predicates ----------------------------------------------------------------------------

    def predicate(self, depth: int = 2) -> Node:
        kind = self.random.random()
        if depth and kind < 0.3:
            both = (self.predicate(depth - 1), self.predicate(depth - 1))
            return Node(self.pick("and", "or"), both)
        if depth and kind < 0.36:
            return Node("not", (self.predicate(depth - 1),))
        if kind < 0.46:
            low = self.random.randint(-6, 6)
            high = number(low + self.random.randint(0, 8))
            return Node("in_range", (self._term(), number(low), high))
        if kind < 0.54:
            members = [
                number(self.random.randint(-4, 12)) for _ in range(1, self.random.randint(2, 5))
            ]
            return Node("in_set", (self._term(), *members))
        if kind < 0.62:
            first, second = self.pick("<", "<="), self.pick("<", "<=")
            ends = self._term(0), self._term(0)
            return Node("chain", (ends[0], first, self._term(), second, ends[1]))
        if kind < 0.70 and self.grid:
            return self._cells()
        compare = self.pick("==", "!=", "<", "<=", ">", ">=")
        if self.chance(0.35):
            size = self.count(1, 9)
            return Node(compare, tuple(Node("//", (name(each), size)) for each in "qk"))
        return Node(compare, (self._term(), self._term(1)))

    def _cells(self) -> Node:
        axis = self.pick(*("time", "row", "col")[-self.grid :])
        q, k = name(f"q.{axis}"), name(f"k.{axis}")
        if self.chance(0.4):
            return Node(self.pick("==", "<=", ">"), (q, k))
        apart = Node("call", ("abs", Node("-", (q, k))))
        return Node("<=", (apart, number(self.random.randint(0, 2))))

    def _term(self, depth: int = 2) -> Node:
        kind = self.random.random()
        if depth == 0 or kind < 0.2:
            place = self.random.random()
            if place < 0.7:
                return name(self.pick("q", "k"))
            return name("n") if place < 0.8 else self.count(0, 20)
        if kind < 0.5:
            return Node("-", (name("q"), name("k"))) if self.chance(0.7) else self._sum(depth)
        if kind < 0.7:
            operator = self.pick("%", "%", "//")
            return Node(operator, (self._term(depth - 1), number(self.random.randint(1, 12))))
        if kind < 0.78:
            apart = Node("-", (name("q"), name("k")))
            return Node("call", ("abs", apart))
        if kind < 0.86:
            return Node("*", (self._term(depth - 1), number(self.random.randint(-3, 4))))
        if kind < 0.9:
            return Node("neg", (self._term(depth - 1),))
        if kind < 0.95:
            both = self._term(depth - 1), self._term(depth - 1)
            return Node("call", (self.pick("min", "max"), *both))
        return self._sum(depth)

    def _sum(self, depth: int) -> Node:
        return Node(self.pick("+", "-"), (self._term(depth - 1), self._term(depth - 1)))

    # --- graphs --------------------------------------------------------------------------------

    def graph(self, depth: int) -> Node:
        kind = self.random.random()
        if depth == 0 or kind < 0.25:
            return self.leaf()
        if kind < 0.93:
            operator = self.pick("g|", "g|", "g|", "g|", "g&", "g&", "g-")
            if kind < 0.75:
                return Node(operator, (self.graph(depth - 1), self.graph(depth - 1)))
            if kind < 0.82:
                return Node("g~", (self.graph(depth - 1),))
            if kind < 0.87:
                return Node("transpose", (self.graph(depth - 1),))
            return Node("shift", (self.graph(depth - 1), number(self.random.randint(-9, 9))))
        return self._use()

    def _use(self) -> Node:
        if self.graphs and self.chance(0.5):
            return Node("graph", (self.random.choice(self.graphs),))
        if not self.named:
            return self.leaf()
        chosen = self.random.choice(self.named)
        arguments = []
        for parameter in chosen.parameters:
            given = self.tokens(1) if parameter == "chosen" else self.count(1, 9)
            arguments.append(Node("arg", (parameter if self.chance(0.5) else "", given)))
        # an argument without a name stands before those with one
        bare = next((i for i, each in enumerate(arguments) if each.parts[0]), len(arguments))
        arguments[bare:] = [
            Node("arg", (parameter, each.nodes[0]))
            for parameter, each in zip(chosen.parameters[bare:], arguments[bare:], strict=True)
        ]
        return Node("graph", (chosen.name, *arguments))

    def leaf(self) -> Node:
        kinds = (
            "full self causal powers window window between dilated residue strided block".split()
        )
        kinds += "block summary fixed global rows columns random random_blocks expander".split()
        kinds += "prefix where where".split()
        kinds += ["axial", "neighborhood", "neighborhood"] if self.grid else []
        kinds += ["same", "same"] if any(each.kind == "ids" for each in self.inputs) else []
        return self._leaf(self.random.choice(kinds))

    def _leaf(self, kind: str) -> Node:
        match kind:
            case "full" | "self" | "causal" | "axial":
                return pattern(kind)
            case "powers":
                return pattern(kind) if self.chance(0.3) else pattern(kind, base=self.count(2, 4))
            case "window":
                return pattern(kind, radius=self.count(0, 9))
            case "between":
                return pattern("window", before=self.count(0, 9), after=self.count(0, 5))
            case "dilated":
                return pattern(kind, radius=self.count(0, 20), step=self.count(1, 5))
            case "residue":
                return pattern(kind, step=self.count(1, 9))
            case "strided":
                return pattern(kind, stride=self.count(1, 9))
            case "summary" | "fixed":
                return pattern(kind, stride=self.count(1, 9), cells=self.count(1, 3))
            case "block":
                more = {each: self.count(0, 2) for each in ("before", "after") if self.chance(0.5)}
                return pattern(kind, size=self.count(1, 9), **more)
            case "global" | "rows" | "columns":
                return pattern(kind, self.tokens())
            case "where":
                return pattern(kind, self.predicate())
            case "same":
                return pattern(kind, name("doc"))
            case "prefix":
                given = any(each.kind == "length" for each in self.inputs) and self.chance(0.6)
                return pattern(kind, name("size") if given else self.count(0, 12))
            case "neighborhood":
                extents = (number(self.random.choice((1, 3, 3, 5))) for _ in range(self.grid))
                return pattern(kind, *extents)
        return self._drawn(kind)

    def _drawn(self, kind: str) -> Node:
        more = {"seed": number(self.random.randint(0, 2**40))} if self.chance(0.7) else {}
        if self.chance(0.2):
            more["per_head"] = number(self.chance(0.5))
        if kind == "random":
            return pattern(kind, keys=self.count(0, 5), **more)
        if kind == "expander":
            return pattern(kind, degree=self.random.choice((2, 2, 4)), **more)
        return pattern(kind, size=self.count(1, 9), blocks=self.count(0, 3), **more)

    # --- statements ----------------------------------------------------------------------------

    def changes(self) -> list[Node]:
        """Statements on scores, at most one `bias`, for each has a table of its own."""
        found = []
        for kind in self.random.sample(("softcap", "alibi", "bias"), self.random.randint(1, 2)):
            if kind == "softcap":
                cap = Node("arg", ("cap", number(self.random.choice((2, 5.5, 30)))))
                found.append(Node("score", (kind, cap)))
            elif kind == "alibi":
                found.append(Node("score", (kind,)))
            elif self.heads:
                buckets, far = self.random.choice(((8, 16), (32, 128), (6, 20)))
                sizes = {"buckets": number(buckets), "max_distance": number(far)}
                entries = [Node("arg", (key, value)) for key, value in sizes.items()]
                found.append(Node("score", (kind, *entries)))
        return found

    def settings(self) -> list[Statement]:
        """What is said of scores beside an `attend`."""
        found: list[Statement] = []
        if self.chance(0.15):
            factor = number(self.random.choice((1, 0.25, 0.5)))
            found.append(Node("scale", (factor,)))
        if self.chance(0.25):
            found += self.changes()
        if self.chance(0.25):
            found.append(Node("normalize", (self.pick("softmax", "relu", "sigmoid", "softmax1"),)))
        return found
