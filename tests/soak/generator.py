"""Random specs, from a seed: all static patterns, operators, scopes, scores, mechanisms, claims."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from oracle.tree import Attention, Claim, Input, Named, Node, Scope, Statement, name, number

from soak.terms import Maker

INPUTS = (
    Input("mark", "tokens"),
    Input("few", "tokens", 5),
    Input("doc", "ids"),
    Input("size", "length"),
)

CAUSAL_FORMS = ("linear", "taylor", "favor", "rbf")


def mechanism(make: Maker, causal: bool, beside: bool) -> Node:
    """A mechanism, `beside` a graph or alone."""
    kinds = CAUSAL_FORMS if causal or beside else (*CAUSAL_FORMS, "efficient", "fourier")
    kind = make.pick(*kinds)
    options: dict[str, Node] = {}
    if kind == "linear":
        maps = ("elu1", "relu", "squared_relu", "exp")
        if make.chance(0.7):
            options["feature"] = name(make.pick(*maps))
        if not beside and make.chance(0.1):
            options["normalize"] = name("none")
    elif kind == "taylor":
        options["order"] = number(make.random.randint(1, 2))
    elif kind in ("favor", "rbf"):
        options["features"] = number(make.random.randint(1, 24))
        options["seed"] = number(make.random.randint(0, 99))
        if kind == "favor":
            options["kind"] = name(make.pick("positive", "hyperbolic", "relu"))
            options["orthogonal"] = number(make.chance(0.5))
        else:
            options["sigma"] = number(make.random.choice((1, 2, 0.5)))
    return Node("mechanism", (kind, *(Node("arg", each) for each in options.items())))


def spec_of(seed: str) -> Attention:
    """The spec of a seed."""
    make = Maker(random.Random(seed))
    causal, kind = make.chance(0.45), make.random.random()
    layers = make.random.choice((None, None, None, 1, 2, 3))
    heads = make.random.choice((None, None, 1, 2, 3, 4))
    make.heads, make.layers = heads is not None, layers is not None
    if make.chance(0.25):
        make.inputs = make.random.sample(INPUTS, make.random.randint(1, 2))
    grid = _grid(make) if make.chance(0.14) else ()
    make.grid = len(grid)
    fixed = all(each.kind == "number" for each in grid)
    make.extra = make.random.randint(1, 3) if make.chance(0.1) and fixed else 0
    parameters, overrides = _parameters(make)
    named = _graphs(make) if make.chance(0.15) else ()
    lets = _lets(make) if make.chance(0.25) else ()
    body = _formulas(make, causal) if kind < 0.15 else _body(make, layers, heads)
    spec = Attention(
        body=tuple(body),
        parameters=tuple(parameters),
        overrides=tuple(overrides),
        graphs=tuple(named),
        lets=tuple(lets),
        inputs=tuple(make.inputs),
        causal=causal,
        layers=layers,
        heads=heads,
        grid=grid,
        extra_tokens=make.extra,
        claims=tuple(claims(make, grid) if make.chance(0.3) else ()),
    )
    return _with_used_inputs(spec)


def _grid(make: Maker) -> tuple[Node, ...]:
    if make.chance(0.25):
        width = make.random.randint(2, 5)
        return (number(width), Node("//", (name("n"), number(width))))
    return tuple(
        number(make.random.randint(1, 6 - axes))
        for axes in [make.random.choice((2, 3))]
        for _ in range(axes)
    )


def _parameters(make: Maker) -> tuple[list[tuple[str, Node]], list[tuple[str, int]]]:
    found: list[tuple[str, Node]] = []
    overrides = []
    for called in ("r", "w")[: make.random.choice((0, 0, 1, 2))]:
        value = make.count(1, 8) if make.chance(0.2) else number(make.random.randint(1, 8))
        asked = {str(each.parts[0]) for each in value.walk() if each.kind == "name"}
        if asked & {"head", "layer"}:
            value = number(3)
        found.append((called, value))
        if make.chance(0.3):
            overrides.append((called, make.random.randint(1, 9)))
        make.numbers.append(called)
    return found, overrides


def _graphs(make: Maker) -> list[Named]:
    """Named graphs, which see their own parameters and nothing else."""
    found: list[Named] = []
    for called in ("near", "other")[: make.random.randint(1, 2)]:
        inner = Maker(make.random, heads=make.heads, layers=make.layers)
        inner.numbers, inner.sets = ["span"], ["chosen"]
        parameters = ("span", "chosen")
        inner.named = list(found)
        used = inner.graph(2)
        asked = {str(each.parts[0]) for each in used.walk() if each.kind in ("name", "tokens")}
        used_parameters = tuple(each for each in parameters if each in asked)
        found.append(Named(called, used_parameters, used))
    make.named = found
    return found


def _lets(make: Maker) -> list[tuple[str, Node]]:
    found: list[tuple[str, Node]] = [("s", make.count(1, 7))]
    make.numbers.append("s")
    if make.chance(0.5):
        found.append(("t", make.tokens(1)))
        make.sets.append("t")
    if make.chance(0.5):
        found.append(("g", make.graph(1)))
        make.graphs.append("g")
    return found


def _formulas(make: Maker, causal: bool) -> list[Statement]:
    """An attention of mechanisms, alone or beside graphs."""
    beside = make.chance(0.5)
    inner = mechanism(make, causal, beside)
    return [Node("attend", (Node("g+", (make.graph(2), inner)) if beside else inner,))]


def _body(make: Maker, layers: int | None, heads: int | None) -> list[Statement]:
    body: list[Statement] = [Node("attend", (make.graph(3),)), *make.settings()]
    which = [each for each, number in (("layer", layers), ("head", heads)) if number]
    if which and make.chance(0.6):
        first = make.random.choice(which)
        counts = {"layer": layers or 1, "head": heads or 1}
        for members, written in _sets(make, counts[first]):
            inner: list[Statement] = [Node("attend", (make.graph(2),)), *make.settings()]
            other = "head" if first == "layer" else "layer"
            if other in which and make.chance(0.4):
                deep, said = _sets(make, counts[other])[0]
                statement = Node("attend", (make.graph(1),))
                inner.append(Scope(other, deep, said, (statement,)))
            body.append(Scope(first, members, written, tuple(inner)))
    return body


def _sets(make: Maker, total: int) -> list[tuple[tuple[int, ...], str]]:
    """Scopes of some of the layers or heads; rarely two that meet."""
    if make.chance(0.25):
        odd = total > 1 and make.chance(0.5)
        members = tuple(range(1 if odd else 0, total, 2))
        return [(members, "odd" if odd else "even")]
    if make.chance(0.1):
        return [(tuple(range(total)), "all")]
    cut = make.random.randint(0, total - 1)
    first = (tuple(range(cut + 1)), f"0..{cut}" if make.chance(0.5) else _listed(range(cut + 1)))
    if cut + 1 == total or make.chance(0.5):
        return [first]
    start = cut if make.chance(0.05) else cut + 1
    rest = range(start, total)
    return [first, (tuple(rest), _listed(rest))]


def _listed(members: range) -> str:
    return ", ".join(map(str, members))


def _with_used_inputs(spec: Attention) -> Attention:
    """Without inputs that nothing reads."""
    asked = set()
    for top in spec.expressions():
        asked |= {str(e.parts[0]) for e in top.walk() if e.kind in ("name", "tokens")}
    return replace(spec, inputs=tuple(each for each in spec.inputs if each.name in asked))


# --- claims --------------------------------------------------------------------------------------


def claims(make: Maker, grid: tuple[Node, ...]) -> list[Claim]:
    """Claims of which some hold."""
    return [
        Claim(_claim(make), _lengths(make, grid)) for _ in range(make.random.choice((1, 1, 2, 3)))
    ]


def _lengths(make: Maker, grid: tuple[Node, ...]) -> tuple[int, ...]:
    if make.chance(0.15):
        return ()
    if grid and make.chance(0.9):
        rows = [int(each.parts[0]) if each.kind == "number" else 3 for each in grid]  # type: ignore[arg-type]
        return (math.prod(rows) + make.extra,)
    return tuple(sorted(make.random.randint(1, 24) for _ in range(make.random.randint(1, 2))))


def _claim(make: Maker) -> Node:
    kind = make.random.random()
    if kind < 0.3:
        return Node("flag", (make.pick("causal", "rows_nonempty", "symmetric", "stable"),))
    if kind < 0.4:
        return Node("reach", (number(make.random.randint(1, 4)),))
    if kind < 0.65:
        graphs = make.graph(2), make.graph(2)
        if make.chance(0.5):
            # one that holds
            graphs = graphs[0], Node("g|", (graphs[1], graphs[0]))
        return Node(make.pick("subset", "subset", "same"), graphs)
    figure = make.pick(*"edges density degree degree depth diameter path_length".split())
    compare = make.pick("<", "<=", ">", ">=", "==", "!=")
    return Node("figure", (figure, compare, _bound(make, figure)))


def _bound(make: Maker, figure: str) -> Node:
    if figure == "density":
        return number(make.random.choice((0.1, 0.3, 0.5, 1.0)))
    if figure == "edges":
        return Node("*", (number(make.random.randint(1, 12)), name("n")))
    if figure == "degree" and make.chance(0.3):
        return make.count(1, 9)
    return number(make.random.randint(0, 9))
