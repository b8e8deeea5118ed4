"""What a graph is for every n, as a union of conjunctions, so that graphs can be compared by form.

This form is finer than the normal one: patterns are taken apart into conditions, as their
predicates say, and conditions on the distance q - k are computed with. It serves proofs alone: True
is a proof, False says nothing.

    q - k <= b, abs(q - k) <= r    ->  bounds of the distance, likewise q // s - k // s <= b
    (q - k) % s == 0               ->  a multiple
    a set of tokens, k % s >= c    ->  what the query, or the key, is among
    a - b, ~(a & b), transpose(a)  ->  `~` and `transpose` at the conditions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from attnspec.graphs.forms.conditions import (
    EVERY_PAIR,
    Among,
    Condition,
    Conjunction,
    Ends,
    Form,
    Held,
    Multiple,
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
    leaves,
)
from attnspec.ir.scalars import NEGATED, Apply, Scalar, ScalarError, is_whole


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
        form = _term(term, place, True, False)
        if place.causal:
            form = crossed([form, _union(Within(0, True))])
    except (ScalarError, TooMany):
        return None
    return merged(form)


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
    tokens = dict(leaf.arguments).get("tokens")
    if tokens is not None:
        form = joined([_tokens(side, tokens, True) for side in BY_NAME[leaf.pattern].sides])
    else:
        predicate = predicate_of_leaf(leaf, limited=False)
        if predicate is None:
            return _opaque(leaf, place, wanted, turned)
        form = _predicate(predicate, place, True)
        if leaf.pattern != "where":
            form = _natural(form)
    if turned:
        form = joined([_reversed(conjunction, place) for conjunction in form])
    return form if wanted else complement(form)


def _natural(form: Form) -> Form:
    """The same where the sizes are those of a pattern: never below zero."""
    return frozenset(
        frozenset(replace(one, natural=True) if isinstance(one, Within) else one for one in each)
        for each in form
    )


def _opaque(term: Term, place: Place, wanted: bool, turned: bool) -> Form:
    """What is not taken apart, or its reversed pairs."""
    if turned and not (isinstance(term, Leaf) and is_symmetric(term)):
        term = _turned(term)
    return _held(term, place, wanted)


def _reversed(conjunction: Conjunction, place: Place) -> Form:
    """The reversed pairs of a conjunction."""
    parts: list[Form] = [EVERY_PAIR]
    for one in conjunction:
        match one:
            case Within():
                parts.append(_union(replace(one, later=not one.later)))
            case Among():
                parts.append(_union(replace(one, side="k" if one.side == "q" else "q")))
            case Held():
                parts.append(_opaque(one.term, place, one.wanted, True))
            case _:
                parts.append(_union(one))
    return crossed(parts)


def _tokens(side: str, tokens: ArgumentValue, wanted: bool) -> Form:
    """The pairs whose query or key is in a token set; its operators are those of the graphs."""
    if isinstance(tokens, TokenCompound):
        first, *others = tokens.terms
        if tokens.op == "~":
            return _tokens(side, first, not wanted)
        minus = tokens.op == "-"
        parts = [_tokens(side, first, wanted)]
        parts += [_tokens(side, other, wanted != minus) for other in others]
        return joined(parts) if (tokens.op == "|") == wanted else crossed(parts)
    return _union(Among(side, tokens, wanted))


def _held(term: Term, place: Place, wanted: bool) -> Form:
    asked = [
        entry.metadata["parameter"].context
        for leaf in leaves(term)
        for entry in fields(BY_NAME[leaf.pattern])  # type: ignore[arg-type]
    ]
    surroundings = place.context
    context = tuple(surroundings.get(name) for name in dict.fromkeys(filter(None, asked)))
    return _union(Held(term, context, wanted))


# --- predicates -----------------------------------------------------------------------------------


def _predicate(predicate: ArgumentValue, place: Place, wanted: bool) -> Form:
    if isinstance(predicate, bool):
        return EVERY_PAIR if predicate == wanted else frozenset()
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
        if op in NEGATED:
            form = _comparison(op if wanted else NEGATED[op], args[0], args[1], place)
            if form is not None:
                return form
    return _held(Leaf("where", (("predicate", predicate),)), place, wanted)


def _comparison(op: str, left: Scalar, right: Scalar, place: Place) -> Form | None:
    """A comparison of the distance q - k with a number, of blocks, of residues, or of one side."""
    if op in ("==", "!="):
        step = _step_of(left, right)
        if step is not None:
            every = EVERY_PAIR if step == 1 else _union(Multiple(step))
            return every if op == "==" else complement(every)
    one_sided = _among(op, left, right)
    if one_sided is not None:
        return _union(one_sided)
    if isinstance(left, Apply) and left.op == "abs" and is_whole(right):
        inner, most = _distance(left.args[0]), plus(right, -(op in ("<", ">=")))
        if inner is None or asks_positions(right) or op in ("==", "!="):
            return None
        times, offset, size = inner
        # -most <= times * (q - k) + offset <= most
        before, after = (minus(most, offset), minus(most, minus(0, offset)))[::times]
        near = band(before, after, size)
        return near if op in ("<", "<=") else complement(near)
    difference = _distance(Apply("-", (left, right)))
    if difference is None:
        return None
    # times * (q - k) is compared with most
    times, most, size = difference[0], minus(0, difference[1]), difference[2]
    if op in (">", ">="):
        times, most, op = -times, minus(0, most), "<" if op == ">" else "<="
    if op in ("<", "<="):
        return _union(Within(plus(most, -(op == "<")), times < 0, size))
    before, after = (most, minus(0, most))[::times]
    same = band(before, after, size)
    return same if op == "==" else complement(same)


def _step_of(left: Scalar, right: Scalar) -> Scalar | None:
    """The s of q % s == k % s and of (q - k) % s == 0."""
    if not isinstance(left, Apply) or left.op != "%" or not _is_size(left.args[1]):
        return None
    position, step = left.args
    if isinstance(right, Apply) and right.op == "%" and right.args[1] == step:
        return step if {position, right.args[0]} == {Q, K} else None
    return step if right == 0 and _distance(position) in ((1, 0, 1), (-1, 0, 1)) else None


def _is_size(size: Scalar) -> bool:
    """Whether positions may be counted in steps or blocks of a size."""
    return not asks_positions(size) and is_whole(size) and not (isinstance(size, int) and size < 1)


def _among(op: str, left: Scalar, right: Scalar) -> Among | None:
    """A comparison of one side, as what it says that the query, or the key, is among."""
    if isinstance(left, Apply) and left.op == "%":
        return _residues(op, left, right)
    linear = combination(Apply("-", (left, right)))
    if linear is None or op not in ("<", "<=", ">", ">="):
        return None
    factors = dict(linear.factors)
    length = factors.pop(N, 0)
    if len(factors) != 1 or not isinstance(linear.rest, int):
        return None
    ((position, factor),) = factors.items()
    if position not in (Q, K) or factor not in (1, -1) or length not in (0, -factor):
        return None
    # the position, or the position less n, is at most so much, or more
    most = -linear.rest * factor - (op in ("<", ">=") if factor == 1 else op in ("<=", ">"))
    wanted = (op in ("<", "<=")) == (factor == 1)
    count, kind = (-1 - most, "last") if length else (most + 1, "first")
    if count < 0:
        return None
    return Among("q" if position == Q else "k", Tokens(kind, (count,)), wanted != bool(length))


def _residues(op: str, left: Apply, right: Scalar) -> Among | None:
    """The ends of strides for k % s >= s - c, every s-th position for k % s == 0."""
    position, step = left.args
    if position not in (Q, K) or asks_positions(step) or asks_positions(right):
        return None
    side = "q" if position == Q else "k"
    if op in ("==", "!=") and right == 0:
        return Among(side, Tokens("every", (step, 0)), op == "==")
    cells = minus(step, right)
    if op not in (">=", "<") or (isinstance(cells, int) and cells < 1):
        return None
    return Among(side, Ends(step, cells), op == ">=")


def _distance(scalar: Scalar) -> tuple[int, Scalar, Scalar] | None:
    """(t, c, s) where a whole number is t * (q // s - k // s) + c, with t one or minus one."""
    linear = combination(scalar) if is_whole(scalar) else None
    if linear is None:
        return None
    factors = dict(linear.plain.factors)
    sizes = [each.args[1] for each in factors if isinstance(each, Apply)]
    size = sizes[0] if sizes else 1
    first, last = (Apply("//", (end, size)) if sizes else end for end in (Q, K))
    times = factors.get(first, 0)
    separable = times in (1, -1) and factors == {first: times, last: -times} and _is_size(size)
    return (times, linear.plain.rest, size) if separable else None


def _union(*conditions: Condition) -> Form:
    return frozenset(frozenset([one]) for one in conditions)


def band(before: Scalar, after: Scalar, size: Scalar = 1) -> Form:
    """The pairs with -after <= q // size - k // size <= before."""
    return frozenset([frozenset([Within(before, False, size), Within(after, True, size)])])
