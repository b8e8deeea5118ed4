"""Lists of numbers and what an index takes of them, and run-time inputs that a predicate reads."""

from __future__ import annotations

from attnspec.elaborate import terms
from attnspec.elaborate.names import ARTICLES, POSITIONS, Numbers, kind_of, type_of
from attnspec.elaborate.scope import Scope, each, meaning
from attnspec.grammar import nodes
from attnspec.graphs.predicates.inputs import (
    INEXACT,
    READ,
    pair_reading,
    reading,
    reads_inputs,
)
from attnspec.ir.linear import asks_positions
from attnspec.ir.program import InputRef
from attnspec.ir.scalars import Apply, Scalar, Symbol

# --- lists ----------------------------------------------------------------------------------------


@meaning.register(nodes.List)
def listed(node: nodes.List, scope: Scope) -> Numbers:
    """What `[8, 16, 32]` stands for."""

    def one(part: nodes.Expression) -> Scalar:
        value = terms.scalar(part, scope, "what stands in a list")
        terms.typed(value, "number", "[…]", part.span, scope)
        return value

    return Numbers(tuple(each(node.items, one)))


@meaning.register(nodes.Index)
def indexed(node: nodes.Index, scope: Scope) -> Scalar:
    """What `radii[head]` stands for."""
    index = node.index.name if isinstance(node.index, nodes.Name) else ""
    if index in POSITIONS or (index and scope.predicate and index not in scope.names):
        _read_by_position(node, scope)
    base = meaning(node.base, scope)
    if not isinstance(base, Numbers):
        message = f"`[…]` stands behind a list, got {ARTICLES[kind_of(base)]}"
        advice = "a list is written `[8, 16, 32]`"
        if isinstance(base, InputRef):
            advice = readings(base)
        scope.fail("A310", message, node.base.span, help=advice)
    place = terms.integer(node.index, scope, "the index of a list")
    count = len(base.items)
    if isinstance(place, int) and not 0 <= place < count:
        message = f"a list of {count} has no item {place}"
        note = f"they count from 0, to {count - 1}"
        scope.fail("A306", message, node.index.span, notes=(note,))
    if isinstance(place, int):
        return base.items[place]
    return terms.folded(Apply("item", (place, *base.items)), node.span, scope)


def _read_by_position(node: nodes.Index, scope: Scope) -> None:
    """Refuse `doc[q]`, which other languages mean for what an input has at a position."""
    name = node.base.name if isinstance(node.base, nodes.Name) else ""
    if not name or name in ("n", *POSITIONS) or isinstance(scope.names.get(name), Numbers):
        return
    value = scope.names.get(name)
    if isinstance(value, InputRef):
        advice = readings(value)
    elif name in scope.names:
        return
    else:
        advice = (
            f"declare `input {name}: ids`, and write `same({name})` for equal labels, or"
            f" `{name}(q)` and `{name}(k)` in `where(…)`"
        )
    message = f"what an input has at a position is read in round brackets, not as `{name}[…]`"
    scope.fail("A310", message, node.span, help=advice)


def readings(given: InputRef) -> str:
    """How a predicate reads an input, or that none does."""
    name = given.name
    if given.kind == "ids":
        return (
            f"write `same({name})` for equal labels, or `{name}(q)` and `{name}(k)` in `where(…)`"
        )
    if given.kind in READ:
        return f"write `{name}(q)` and `{name}(k)` in `where(…)`"
    return {
        "tokens": f"`rows({name})` are the pairs whose query is marked, `columns({name})` those"
        " whose key is",
        "pairs": f"write `{name}(q, k)` in `score`",
        "length": f"`prefix({name})` are the pairs whose key lies before it; in `where(…)`"
        f" `{name}` is a number",
    }.get(given.kind, f"`{name}` is an input of kind `{given.kind}`, which no predicate reads")


# --- inputs at positions --------------------------------------------------------------------------


def input_read(node: nodes.Call, given: InputRef, scope: Scope) -> Symbol:
    """What `time(q)` stands for in a predicate."""
    name = node.name
    sides = [x.value.name for x in node.arguments if isinstance(x.value, nodes.Name) and not x.name]
    if given.kind == "pairs" and scope.score:
        if sides != [*POSITIONS]:
            scope.fail("A303", f"an input of pairs is read as `{name}(q, k)`", node.span)
        scope.used.add(name)
        return pair_reading(given.name)
    if given.kind not in READ:
        message = f"a predicate reads inputs of kind {' and '.join(READ)}, got `{given.kind}`"
        scope.fail("A313", message, node.span, help=readings(given))
    if not scope.predicate:
        message = f"`{name}(…)` has a meaning only inside `where(…)`"
        scope.fail("A205", message, node.span)
    if len(node.arguments) != 1 or len(sides) != 1 or sides[0] not in POSITIONS:
        message = f"an input is read at the query or the key: `{name}(q)`, `{name}(k)`"
        scope.fail("A303", message, node.span)
    scope.used.add(name)
    return reading(given.name, sides[0])


def require_free(node: nodes.Name | nodes.Call, scope: Scope) -> None:
    """Refuse another meaning of a word that `score` has one for."""
    if node.name in scope.names:
        message = f"`{node.name}` has a meaning of its own inside `score`, and is a name here, too"
        span = node.name_span if isinstance(node, nodes.Call) else node.span
        scope.fail("A204", message, span, help="call the parameter, local name or input otherwise")


def require_exact(value: Scalar, node: nodes.Expression, scope: Scope) -> None:
    """Refuse what a predicate cannot do with what it reads: it would not be the same everywhere."""
    if not isinstance(value, Apply) or not reads_inputs(value):
        return
    op, args = value.op, value.args
    if op in ("and", "or", "not"):
        for part in args:
            require_exact(part, node, scope)
        return
    problem = _inexact(value)
    if problem is not None:
        help = "compute it before, and hand it in as the input"
        scope.fail("A312", f"where an input is read, {problem}", node.span, help=help)


def _inexact(value: Scalar) -> str | None:
    """What a comparison of inputs, or a part of it, does that numpy and torch may not do alike."""
    if not isinstance(value, Apply):
        return None
    op, args = value.op, value.args
    if not (reads_inputs(value) or asks_positions(value)):
        # known before any pair is examined
        return None
    if op in INEXACT:
        return f"`{op}` may differ in its last bit from one machine to the next"
    if op in ("//", "%") and (reads_inputs(args[1]) or asks_positions(args[1])):
        return f"`{op}` needs a divisor without q, k and inputs"
    if op in ("//", "%") and type_of(args[1]) != "integer":
        return f"`{op}` needs a whole number as divisor"
    if op == "**" and not (isinstance(args[1], int) and 0 <= args[1] <= 8):
        return "a power needs an exponent from 0 to 8"
    if op == "item":
        return "a list takes an index of `layer`, `head` and `n`"
    return next((reason for part in args if (reason := _inexact(part))), None)
