"""Claims on reach and on causality: whether they hold at a length, else a counterexample.

Each check answers None where the claim holds at n and words for a counterexample where it does not.
It raises TooMuch where neither is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeAlias

from attnspec.analysis.growth.stable import difference, unsteady_choices
from attnspec.analysis.quality import Figure
from attnspec.analysis.reach import reach
from attnspec.analysis.reach.leaks import leak
from attnspec.analysis.reach.reach import Steps
from attnspec.graphs.stack import Stack, TooMuch

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
    where = f", where {figure.value.where}" if figure.value.where else ""
    place = slot_text(stack, layer, head)
    if figure.value.choice:
        return (
            f"pairs: yes, choice: no: the choice of position {figure.value.query}{place} may change"
            f" with the later position {key}, for {figure.value.choice}"
        )
    return f"position {figure.value.query} reads the later position {key}{place}{where}"


def stable(stack: Stack, n: int) -> str | None:
    """Against `stable`: a query that reads a key at one of two lengths up to n alone."""
    choice = unsteady_choices(stack.program, n) if n > 1 else None
    if choice is not None:
        layer, head, fault = choice
        return f"the same tokens are chosen otherwise{slot_text(stack, layer, head)}; {fault}"
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
                f"{spread.sampled} queries have read all they may, the others are unknown"
            )
        return None
    query, key = pair
    count = f" ({missing:,} such pairs)" if not spread.sampled else ""
    steps = reach.path(stack, n, query, key)
    how = "no layer ever joins them"
    if steps is not None:
        how = f"that takes {steps[0][0] + 1}, {drawn(stack, query, steps)}"
    unit = "layer" if layers == 1 else "layers"
    return f"after {layers} {unit} query {query} has not read {key}{count}; {how}"


def compared(stack: Stack, n: int, name: str, compare: str, value: float) -> str | None:
    """Against a comparison of `depth`, `diameter` or `path_length`: what it is, and a pair."""
    distance: Distance = _FIGURES[name](stack, n)
    if distance.value is None:
        return f"{distance.note}, through any number of layers"
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
    verb = "are" if figure in ("edges", "flops", "bytes") else "is"
    least_of = "at least " if least else ""
    text = f"{figure} {verb} {least_of}{shown(found)}, must be {compare} {shown(value)}"
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
    raise TooMuch(f"it is estimated, {shown(found)}: {note}")


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
    count, unit = int(found), "layer" if name == "depth" else "step"
    takes = f"{count:,} {unit}{'' if count == 1 else 's'}"
    return f"{pair[0]} -> {pair[1]} takes {takes}: {drawn(stack, pair[0], steps)}"


def drawn(stack: Stack, query: int, steps: Steps) -> str:
    """A path as `900 -> 640 (layer 1) -> 3 (layer 0, head 2)`, the middle of long ones left out."""
    heads = stack.program.heads is not None
    shown_steps = [
        f"{key} (layer {layer}{f', head {head}' if heads else ''})" for layer, head, key in steps
    ]
    if len(steps) > LONGEST_DRAWN:
        left = len(steps) - LONGEST_DRAWN + 1
        shown_steps[LONGEST_DRAWN - 2 : -1] = [f"… {left} more …"]
    return " -> ".join([str(query), *shown_steps])


def slot_text(stack: Stack, layer: int, head: int) -> str:
    """Where a head stands, as far as the spec tells layers and heads apart: ` in layer 1`."""
    parts = []
    if stack.program.layer_count > 1:
        parts.append(f"layer {layer}")
    if stack.program.heads is not None:
        parts.append(f"head {head}")
    return f" in {', '.join(parts)}" if parts else ""


def shown(number: float) -> str:
    """A figure in a message."""
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


_FIGURES = {
    "depth": reach.depth,
    "diameter": reach.diameter,
    "path_length": reach.path_length,
}
