"""Whether claims hold at a length, else a counterexample, in words.

Each check answers None where the claim holds at n and words for a counterexample where it does not.
It raises TooMuch where neither is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TypeAlias

import numpy as np

from attnspec.analysis.counting.differences import only_in, row_text
from attnspec.analysis.growth.growth import growth_of
from attnspec.analysis.growth.order import counted
from attnspec.analysis.growth.size_growth import divisor_growth
from attnspec.analysis.growth.stable import difference, unsteady_choices
from attnspec.analysis.quality import Figure
from attnspec.analysis.reach import reach
from attnspec.analysis.reach.leaks import leak
from attnspec.analysis.reach.reach import Steps
from attnspec.check.places import Place, relations, values
from attnspec.graphs.across import reads_m
from attnspec.graphs.bind import Situation
from attnspec.graphs.forms.conditions import contained
from attnspec.graphs.forms.dnf import Place as FormPlace
from attnspec.graphs.forms.dnf import form_of, place_of
from attnspec.graphs.forms.written import written
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Claim, Program
from attnspec.ir.scalars import Scalar, ScalarError, evaluate
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError, count_of, ranges, three_digits

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}

Distance: TypeAlias = "Figure[int | None] | Figure[float | None]"

LONGEST_DRAWN = 4
"""The most steps of a path that a message draws."""


def causal(stack: Stack, n: int) -> str | None:
    """Against `causal`: a position that learns of a later one."""
    figure = leak(stack, n)
    if figure.value is None:
        if figure.quality != "exact":
            raise TooMuch(figure.note)
        return None
    layer, head, key = figure.value.steps[0]
    where = f", {figure.value.where}" if figure.value.where else ""
    place = slot_text(stack, layer, head)
    if figure.value.choice:
        return (
            f"no later key is read, but the choice of position {figure.value.query}{place} may"
            f" change with the later position {key}, because {figure.value.choice}"
        )
    return f"position {figure.value.query} reads the later position {key}{place}{where}"


def stable(stack: Stack, n: int) -> str | None:
    """Against `stable`: a query that reads a key at one of two lengths up to n alone."""
    choice = unsteady_choices(stack.program, n) if n > 1 else None
    if choice is not None:
        layer, head, fault = choice
        return f"choices change with n{slot_text(stack, layer, head)}; {fault}"
    change = difference(stack.program, n)
    if change is None:
        return None
    return f"{change.what}{slot_text(stack, change.layer, change.head)}; {change.fault}"


def reaches(stack: Stack, n: int, layers: int) -> str | None:
    """Against `reach(layers = L)`: the first query and key that are not joined, and their path."""
    spread = reach.spread_in_layers(stack, n, layers)
    missing, pair = spread.after(layers)
    if pair is None:
        if spread.sampled:
            raise TooMuch(
                f"{spread.sampled} queries have read all their keys, the others were not counted"
            )
        return None
    query, key = pair
    count = f" ({missing:,} such pairs)" if missing > 1 and not spread.sampled else ""
    steps = reach.path(stack, n, query, key)
    how = "it never reads this key, not even through other positions and more layers"
    if steps is not None:
        how = f"reading it takes {count_of(steps[0][0] + 1, 'layer')}: {drawn(stack, query, steps)}"
    return f"after {count_of(layers, 'layer')} query {query} has not read key {key}{count}; {how}"


def compared(stack: Stack, n: int, name: str, compare: str, value: float) -> str | None:
    """Against a comparison of `depth`, `diameter` or `path_length`: what it is, and a pair."""
    distance: Distance = _FIGURES[name](stack, n)
    if distance.value is None:
        return f"{distance.note}, not even through other positions and more layers"
    if distance.quality == "estimate":
        return _by_estimate(stack, n, name, compare, value, distance.value, distance.note)
    if COMPARE[compare](distance.value, value):
        return None
    pair = _pair(stack, n, name, compare, value, distance.value)
    return missed(name, distance.value, compare, value, pair)


def missed(
    figure: str, found: float, compare: str, value: float, example: str, least: bool = False
) -> str:
    """What a figure is and must be, `least` if it may be more, with an example that shows it."""
    of = "the number of " if figure in ("edges", "flops", "bytes") else ""
    text = f"{of}{figure} is {'at least ' * least}{shown(found)}, must be {compare} {shown(value)}"
    return f"{text}; for example {example}" if example else text


def _by_estimate(
    stack: Stack, n: int, name: str, compare: str, value: float, found: float, note: str
) -> str | None:
    """What follows where a figure is only known not to be less than what was found."""
    if name != "path_length":
        more = found >= value if compare == "<" else found > value
        if compare in (">", ">=") and COMPARE[compare](found, value):
            return None
        if compare in ("<", "<=", "==") and more:
            pair = _pair(stack, n, name, compare, value, found)
            return missed(name, found, compare, value, pair, least=True)
    estimated = f"above n = {LIMITS.every_pair:,} `{name}` is only estimated, not proven"
    raise TooMuch(f"{estimated}: {shown(found)} at n = {n:,}, {note}")


def _pair(stack: Stack, n: int, name: str, compare: str, value: float, found: float) -> str:
    """A pair that takes as many steps as were found, more than a claim allows, with its path."""
    if name == "path_length" or compare not in ("<", "<=", "==") or found < value:
        return ""
    before = max(0, int(found) - 1)
    if name == "depth":
        _, pair = reach.spread_in_layers(stack, n).after(before)
        steps = None if pair is None else reach.path(stack, n, *pair)
    else:
        _, pair = reach.spread_in_union(stack, n).after(before)
        steps = None if pair is None else reach.path_in_union(stack, n, *pair)
    if pair is None or not steps:
        return ""
    takes = count_of(int(found), "layer" if name == "depth" else "step")
    path = drawn(stack, pair[0], steps, name == "depth")
    return f"query {pair[0]} takes {takes} to read key {pair[1]}: {path}"


def drawn(stack: Stack, query: int, steps: Steps, layered: bool = True) -> str:
    """A path as `900 -> 640 (layer 1) -> 3 (layer 0, head 2)`, the middle of long ones left out,
    and, if `layered`, the layers without a step; layers are named where the spec has several."""
    several, shown_steps = stack.program.layer_count > 1, []
    idle = {*range(steps[0][0] + 1)} - {layer for layer, *_ in steps} if layered else set()
    for layer, head, key in steps:
        names = [f"layer {layer}"] * several + [f"head {head}"] * (stack.program.heads is not None)
        shown_steps.append(f"{key} ({', '.join(names)})" if names else f"{key}")
    if len(steps) > LONGEST_DRAWN:
        shown_steps[LONGEST_DRAWN - 2 : -1] = [f"… {len(steps) - LONGEST_DRAWN + 1} more …"]
    layers = f"layer{'s' * (len(idle) > 1)} {ranges(idle)}"
    stays = f"; in {layers} the path stays at its position" if idle else ""
    return " -> ".join([str(query), *shown_steps]) + stays


def slot_text(stack: Stack, layer: int, head: int) -> str:
    """Where a head stands, as far as the spec tells layers and heads apart: ` in layer 1`."""
    several = stack.program.layer_count > 1
    place = Place(layer if several else None, None if stack.program.heads is None else head)
    return place.text


def shown(number: float) -> str:
    """A figure in a message."""
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


_FIGURES = {"depth": reach.depth, "diameter": reach.diameter, "path_length": reach.path_length}


# --- two graphs: proven by their forms, else counted ----------------------------------------------


def graphs_proven(claim: Claim, program: Program, places: Sequence[tuple[int, int]]) -> bool:
    """Whether the claim follows from the forms of its graphs, for every n and every input: in every
    layer and head at once, or else in each of the places, if these are all."""
    if _proven(claim, place_of(program, None, None)):
        return True
    each = [place_of(program, layer, head) for layer, head in places]
    return bool(each) and all(_proven(claim, place) for place in each)


def _proven(claim: Claim, place: FormPlace) -> bool:
    first, second = (form_of(term, place) for term in claim.terms)
    if first is None or second is None:
        return False
    return contained(first, second) and (claim.kind == "subset" or contained(second, first))


def of_graphs(claim: Claim, at: Situation) -> str | None:
    """Against a claim at one length: the first pair that only one of its graphs has, with its
    row. Raises TooMuch where the pairs are too many to look at, BindError for a size."""
    names = (f"`{written(term)}`" for term in claim.terms)
    sides = [*zip(names, relations(claim, at), strict=True)]
    for (name, here), (elsewhere, there) in (sides, sides[::-1])[: 1 + (claim.kind == "==")]:
        missing = only_in(here, there, at.n)
        if missing:
            (query, key), *_ = missing.examples
            rows = [row_text(relation, query, at.n) for relation in (here, there)]
            return (
                f"query {query} reads key {key} in {name} (it reads {rows[0]}) but not in"
                f" {elsewhere} ({rows[1]})"
            )
    return None


# --- how fast edges grow: proven from how the spec is written, else counted -----------------------


COUNTED = 3
"""Lengths, each four times the one before, at which edges are compared with a bound."""


def order(claim: Claim, stack: Stack, unknown: str | None, examined: list[int]) -> str | None:
    """Words against `order <= EXPR`, or None; edges over the bound may not grow from length to
    length. `examined` gets the lengths at which edges were counted.

    Raises TooMuch where nothing is known, with the reason `unknown` where pairs are, and
    AttnSpecError or ScalarError where a bound has no value.
    """
    if stack.program.grid is not None:
        raise TooMuch("the length of a grid is fixed, so the number of edges does not grow")
    most = growth_of(stack.program)
    open_bounds: dict[Scalar, Place] = {}
    for bound, place in values(claim, stack).items():
        allowed = divisor_growth(bound)
        if allowed is None or most > allowed:
            open_bounds[bound] = place
    if open_bounds and unknown is not None:
        raise TooMuch(unknown)
    return _by_counting(stack, open_bounds, examined) if open_bounds else None


def _by_counting(stack: Stack, bounds: dict[Scalar, Place], examined: list[int]) -> str | None:
    counts = counted(stack)
    lengths = sorted(counts)[-1 : -1 - 2 * COUNTED : -2][::-1]
    if len(lengths) < 2:
        raise TooMuch("too few lengths can be counted")
    examined.extend(lengths)
    for bound, place in bounds.items():
        most = [float(evaluate(bound, stack.situation(n).values)) for n in lengths]
        if not all(most):
            raise ScalarError(f"the bound must be above 0, and it is 0{place.text}")
        parts = [counts[n] / value for n, value in zip(lengths, most, strict=True)]
        if parts[-1] > 1.1 * parts[-2]:
            figures = "; ".join(
                f"{three_digits(part)} at n = {n:,}" for part, n in zip(parts, lengths, strict=True)
            )
            bound_text = f"the bound{place.text.replace(' in ', ' for ')}"
            return f"the number of all edges divided by {bound_text} grows with n: {figures}"
    return None


# --- between two sequences ------------------------------------------------------------------------


QUERIES = range(1, 17)
KEYS = (1, 2, 5, 16)
"""The numbers of queries, and of keys, at which a query is looked for that changes."""


def against_stable(program: Program) -> str | None:
    """A row that is another one where more queries come after it, None where none is found."""
    change = next(_changed(program), None) if reads_m(program) else None
    if change is None:
        return None
    m, n, query, key, reads, slot = change
    (at, other), keys = (m + 1, m) if reads else (m, m + 1), count_of(n, "key")
    return (
        f"with {count_of(at, 'query', 'queries')} and {keys}, query {query} reads key"
        f" {key}{slot}; with {count_of(other, 'query', 'queries')} and {keys}, it does not"
    )


def _changed(program: Program) -> Iterator[tuple[int, int, int, int, bool, str]]:
    """Numbers of queries and keys, and the first pair that one query more makes or takes away, the
    fewest queries first, and in which layer and head."""
    slots = {
        index: (layer, head)
        for layer, row in reversed([*enumerate(program.slots)])
        for head, index in reversed([*enumerate(row)])
    }
    for m, n, (layer, head) in product(QUERIES, KEYS, sorted(slots.values())):
        few, more = (_mask(program, n, queries, layer, head) for queries in (m, m + 1))
        if few is not None and more is not None and (few != more[:m]).any():
            query, key = np.argwhere(few != more[:m])[0].tolist()
            yield m, n, query, key, bool(more[query, key]), slot_text(Stack(program), layer, head)


def _mask(program: Program, n: int, m: int, layer: int, head: int) -> np.ndarray | None:
    lengths, length = crossed(program, n, m)
    stack = Stack(lengths)
    try:
        return stack.mask(length, layer, head)[stack.queries(length), :n]
    except AttnSpecError:
        # a size has no value at these lengths, or inputs decide
        return None
