"""What a graph is for every n, as a union of conjunctions, so that graphs can be compared by form.

This form is finer than the normal one: patterns are taken apart into conditions, and conditions on
the distance q - k are computed with. It serves proofs alone: True is a proof, False says nothing.

    q - k <= b, abs(q - k) <= r    ->  bounds of the distance; named patterns are their predicates
    global                         ->  the rows and columns of which it is the union
    a - b, ~(a & b), transpose(a)  ->  `~` and `transpose` at the patterns
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from attnspec.graphs.forms.conditions import (
    Condition,
    Conjunction,
    Form,
    Held,
    TooMany,
    Within,
    complement,
    crossed,
    joined,
    merged,
    plus,
)
from attnspec.graphs.forms.prelude import predicate_of_leaf
from attnspec.graphs.forms.properties import is_symmetric
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.linear import K, N, Q, asks_positions, combination, minus
from attnspec.ir.normal_form import normal_term, substitute
from attnspec.ir.program import (
    ArgumentValue,
    Compound,
    Leaf,
    Program,
    Term,
    TokenCompound,
    Tokens,
)
from attnspec.ir.scalars import Apply, Scalar, ScalarError, Symbol, is_whole


@dataclass(frozen=True)
class Place:
    """Where a graph stands; `numbers` are the values of `layer`, `head`, `layers`, `heads`."""

    causal: bool = False
    grid: tuple[Scalar, ...] = ()
    extra_tokens: int = 0
    numbers: tuple[tuple[str, int], ...] = ()

    @property
    def context(self) -> Mapping[str, object]:
        """The values of the fields that patterns fill in from their surroundings."""
        return {
            "causal": self.causal,
            "grid": self.grid,
            "extra_tokens": self.extra_tokens,
            **dict(self.numbers),
        }


def place_of(program: Program, layer: int | None = 0, head: int | None = 0) -> Place:
    """Where the graphs of a layer and head of a program stand; None is any of them."""
    numbers = [("layers", program.layer_count)]
    numbers += [(what, at) for what, at in (("layer", layer), ("head", head)) if at is not None]
    if program.heads is not None:
        numbers.append(("heads", program.heads))
    return Place(program.causal, program.grid or (), program.extra_tokens, tuple(numbers))


def form_of(graph: Term, place: Place) -> Form | None:
    """The form of an attended graph, `causal` included; None where it would be too large."""
    try:
        term = substitute(normal_term(graph), dict(place.numbers))
        found = _term(term, place, True, False)
        if place.causal:
            found = crossed([found, _union(Within(0, True))])
    except (ScalarError, TooMany):
        return None
    return merged(found)


# --- terms ----------------------------------------------------------------------------------------


def _term(term: Term, place: Place, wanted: bool, turned: bool) -> Form:
    """The form of a term, of its complement, of the reversed pairs."""
    if isinstance(term, Leaf):
        return _leaf(term, place, wanted, turned)
    match term.op:
        case "~":
            return _term(term.terms[0], place, not wanted, turned)
        case "transpose":
            return _term(term.terms[0], place, wanted, not turned)
        case "|" | "&":
            parts = [_term(child, place, wanted, turned) for child in term.terms]
            return joined(parts) if (term.op == "|") == wanted else crossed(parts)
        case _:
            # pairs are lost at the ends, the transpose loses the same
            kept = _turned(term.terms[0]) if turned else term.terms[0]
            return _held(Compound(term.op, (kept,), term.by), place, wanted)


def _turned(term: Term) -> Term:
    return normal_term(Compound("transpose", (term,)))


def _leaf(leaf: Leaf, place: Place, wanted: bool, turned: bool) -> Form:
    given = dict(leaf.arguments)
    match leaf.pattern:
        case "global" | "rows" | "columns":
            sides = ("rows", "columns") if leaf.pattern == "global" else (leaf.pattern,)
            found = joined([_tokens(side, given["tokens"], place, True) for side in sides])
        case "residue" if given["step"] == 1:
            found = frozenset([frozenset()])
        case "block" if given["size"] == 1:
            found = _natural(_between(given["before"], given["after"]))  # type: ignore[arg-type]
        case "block" | "residue" | "summary":
            return _turned_leaf(leaf, place, wanted, turned)
        case _:
            predicate = predicate_of_leaf(leaf, limited=False)
            if predicate is None:
                return _turned_leaf(leaf, place, wanted, turned)
            found = _predicate(predicate, place, True)
            if leaf.pattern != "where":
                found = _natural(found)
    if turned:
        found = joined([_reversed(conjunction, place) for conjunction in found])
    return found if wanted else complement(found)


def _natural(form: Form) -> Form:
    """The same where the sizes are those of a pattern: never below zero."""
    return frozenset(
        frozenset(replace(one, natural=True) if isinstance(one, Within) else one for one in each)
        for each in form
    )


def _turned_leaf(leaf: Leaf, place: Place, wanted: bool, turned: bool) -> Form:
    given = dict(leaf.arguments)
    if turned and leaf.pattern == "block":
        sizes = {**given, "before": given["after"], "after": given["before"]}
        return _held(Leaf("block", tuple(sorted(sizes.items()))), place, wanted)
    if turned and not is_symmetric(leaf):
        return _held(Compound("transpose", (leaf,)), place, wanted)
    return _held(leaf, place, wanted)


def _reversed(conjunction: Conjunction, place: Place) -> Form:
    """The reversed pairs of a conjunction."""
    sides = {"rows": "columns", "columns": "rows"}
    parts: list[Form] = [frozenset([frozenset()])]
    for one in conjunction:
        if isinstance(one, Within):
            parts.append(_union(Within(one.most, not one.later)))
        elif isinstance(one.term, Leaf) and one.term.pattern in sides:
            other = Leaf(sides[one.term.pattern], one.term.arguments)
            parts.append(_held(other, place, one.wanted))
        elif isinstance(one.term, Leaf):
            parts.append(_turned_leaf(one.term, place, one.wanted, True))
        else:
            parts.append(_held(_turned(one.term), place, one.wanted))
    return crossed(parts)


def _tokens(side: str, tokens: ArgumentValue, place: Place, wanted: bool) -> Form:
    """Rows or columns of a token set; its operators are those of the graphs."""
    if isinstance(tokens, TokenCompound):
        first, *others = tokens.terms
        if tokens.op == "~":
            return _tokens(side, first, place, not wanted)
        minus = tokens.op == "-"
        parts = [_tokens(side, first, place, wanted)]
        parts += [_tokens(side, other, place, wanted != minus) for other in others]
        return joined(parts) if (tokens.op == "|") == wanted else crossed(parts)
    return _held(Leaf(side, (("tokens", tokens),)), place, wanted)


def _held(term: Term, place: Place, wanted: bool) -> Form:
    asked = [
        entry.metadata["parameter"].context
        for leaf in ([term] if isinstance(term, Leaf) else _leaves(term))
        for entry in fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
    ]
    surroundings = place.context
    context = tuple(surroundings.get(name) for name in dict.fromkeys(filter(None, asked)))
    return _union(Held(term, context, wanted))


def _leaves(term: Term) -> Iterator[Leaf]:
    if isinstance(term, Leaf):
        yield term
        return
    for child in term.terms:
        yield from _leaves(child)


# --- predicates -----------------------------------------------------------------------------------

_NOT = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def _predicate(predicate: ArgumentValue, place: Place, wanted: bool) -> Form:
    if isinstance(predicate, bool):
        return frozenset([frozenset()]) if predicate == wanted else frozenset()
    if isinstance(predicate, Apply):
        op, args = predicate.op, predicate.args
        if op == "not":
            return _predicate(args[0], place, not wanted)
        if op in ("and", "or"):
            parts = [_predicate(part, place, wanted) for part in args]
            return joined(parts) if (op == "or") == wanted else crossed(parts)
        if op == "within":
            place_of, first, last = args
            ends = Apply(">=", (place_of, first)), Apply("<=", (place_of, last))
            return _predicate(Apply("and", ends), place, wanted)
        if op in _NOT:
            found = _comparison(op if wanted else _NOT[op], args[0], args[1], place)
            if found is not None:
                return found
    return _held(Leaf("where", (("predicate", predicate),)), place, wanted)


def _comparison(op: str, left: Scalar, right: Scalar, place: Place) -> Form | None:
    """A comparison of the distance q - k with a number, of blocks, or of residues."""
    if op in ("==", "!="):
        leaf = _pattern_of(left, right)
        if leaf is not None:
            return _leaf(leaf, place, op == "==", False)
    one_sided = _tokens_of(op, left, right)
    if one_sided is not None:
        return _held(one_sided[0], place, one_sided[1])
    if isinstance(left, Apply) and left.op == "abs" and is_whole(right):
        inner, most = _distance(left.args[0]), plus(right, -(op in ("<", ">=")))
        if inner is None or asks_positions(right) or op in ("==", "!="):
            return None
        times, offset = inner
        # -most <= times * (q - k) + offset <= most
        ends = minus(most, offset), minus(most, minus(0, offset))
        near = _between(*ends[::times])
        return near if op in ("<", "<=") else complement(near)
    difference = _distance(Apply("-", (left, right)))
    if difference is None:
        return None
    # times * (q - k) is compared with most
    times, most = difference[0], minus(0, difference[1])
    if op in (">", ">="):
        times, most, op = -times, minus(0, most), "<" if op == ">" else "<="
    if op in ("<", "<="):
        return _union(Within(plus(most, -(op == "<")), times < 0))
    same = _between(*(most, minus(0, most))[::times])
    return same if op == "==" else complement(same)


def _pattern_of(left: Scalar, right: Scalar) -> Leaf | None:
    """`block` for q // b == k // b; `residue` for q % s == k % s and (q - k) % s == 0."""
    if not isinstance(left, Apply) or left.op not in ("//", "%"):
        return None
    size = left.args[1]
    if asks_positions(size) or not is_whole(size) or (isinstance(size, int) and size < 1):
        return None
    if isinstance(right, Apply) and right.op == left.op and right.args[1] == size:
        if {left.args[0], right.args[0]} != {Symbol("q"), Symbol("k")}:
            return None
        if left.op == "//":
            return Leaf("block", (("after", 0), ("before", 0), ("size", size)))
        return Leaf("residue", (("step", size),))
    if left.op == "%" and right == 0 and _distance(left.args[0]) in ((1, 0), (-1, 0)):
        return Leaf("residue", (("step", size),))
    return None


def _tokens_of(op: str, left: Scalar, right: Scalar) -> tuple[Leaf, bool] | None:
    """A comparison of one side as the rows or columns of a token set, or as `summary`, and whether
    they are those or all others."""
    if isinstance(left, Apply) and left.op == "%":
        return _residues(op, left, right)
    found = combination(Apply("-", (left, right)))
    if found is None or op not in ("<", "<=", ">", ">="):
        return None
    factors = dict(found.factors)
    length = factors.pop(N, 0)
    if len(factors) != 1 or not isinstance(found.rest, int):
        return None
    ((position, factor),) = factors.items()
    if position not in (Q, K) or factor not in (1, -1) or length not in (0, -factor):
        return None
    side = "rows" if position == Q else "columns"
    # the position, or the position less n, is at most so much, or more
    most = -found.rest * factor - (op in ("<", ">=") if factor == 1 else op in ("<=", ">"))
    wanted = (op in ("<", "<=")) == (factor == 1)
    count, kind = (-1 - most, "last") if length else (most + 1, "first")
    if count < 0:
        return None
    tokens = Tokens(kind, (count,))
    return Leaf(side, (("tokens", tokens),)), wanted != bool(length)


def _residues(op: str, left: Apply, right: Scalar) -> tuple[Leaf, bool] | None:
    """`summary` for k % s >= s - c, `every` for k % s == 0."""
    position, step = left.args
    if position not in (Q, K) or asks_positions(step) or asks_positions(right):
        return None
    if op in ("==", "!=") and right == 0:
        side = "rows" if position == Q else "columns"
        tokens = Tokens("every", (step, 0))
        return Leaf(side, (("tokens", tokens),)), op == "=="
    cells = minus(step, right)
    if op not in (">=", "<") or position == Q or (isinstance(cells, int) and cells < 1):
        return None
    return Leaf("summary", (("cells", cells), ("stride", step))), op == ">="


def _distance(scalar: Scalar) -> tuple[int, Scalar] | None:
    """(t, c) where a whole number is t * (q - k) + c, with t one or minus one."""
    found = combination(scalar) if is_whole(scalar) else None
    factor = None if found is None else found.distance
    return (factor, found.plain.rest) if found is not None and factor in (1, -1) else None


def _union(*conditions: Condition) -> Form:
    return frozenset(frozenset([one]) for one in conditions)


def _between(before: Scalar, after: Scalar) -> Form:
    return frozenset([frozenset([Within(before, False), Within(after, True)])])
