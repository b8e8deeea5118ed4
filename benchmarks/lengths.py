"""New lengths: the first call at one beside later calls, and another length for each call.

The first call lays out what the later ones find again. It is timed in a module that has run at
other lengths, so that nothing is loaded for the first time. Another length for each call is what
buckets and packing bring to training: steps of training at the largest shape that people use, and
forward calls at the least, one sample, where what is laid out anew weighs most.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from attnspec.elaborate import attention_names
from attnspec.spec import Spec, load
from attnspec.text.decoding import read_source
from benchmarks.cases import HEADS, SHAPE_PATTERNS, SHAPES, Case, Settings
from benchmarks.efficiency import Attention, both, forward
from benchmarks.measuring import Json

TIMES, MORE = 3.0, 5e-3
"""The target: the first call takes at most so many times a later one and so many seconds more, in
the median over the zoo."""

CHANGED = 1.2
"""The target: with a length drawn for each call, so many times the later calls at these lengths."""

WARM = 61
"""The length at which a module has run before."""

AGAIN = 3
"""Later calls, of which the quickest counts."""


Entry = TypeVar("Entry")

FILES = tuple(sorted(Path(__file__).resolve().parent.parent.joinpath("examples").glob("*.attn")))


@cache
def static_zoo() -> list[tuple[str, Spec]]:
    """The specs of the zoo whose pairs are known before run time, with their names."""
    found = []
    for path in FILES:
        for name in attention_names(read_source(path)):
            spec = load(path, name=name)
            if spec.stack().unknown is None:
                found.append((name, spec))
    return found


def spread(zoo: Sequence[Entry], count: int | None) -> Sequence[Entry]:
    """Some of the zoo at even distances, all of it without a count."""
    if count is None or count >= len(zoo):
        return zoo
    return [zoo[place * len(zoo) // count] for place in range(count)]


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call."""
    start = perf_counter()
    call()
    return perf_counter() - start


def first_and_later(spec: Spec, n: int) -> tuple[float, float]:
    """The seconds of the first call at n, and of a later one."""
    module = spec.compile()
    forward(module, WARM)()
    call = forward(module, n)
    return seconds_of(call), min(seconds_of(call) for _ in range(AGAIN))


def step(attention: Attention, n: int) -> Callable[[], object]:
    """A call with the gradients of q, k and v, of as many samples and heads as the largest of the
    shapes that people use."""
    largest = SHAPES[-1]
    return both(attention, n, largest.batch, largest.heads)


MODES = {"forward": (forward, 1), "training": (step, 5)}
"""What is called, and how many times fewer calls, since each takes so much longer."""


def changing(spec: Spec, mode: str, calls: int, longest: int) -> dict[str, Json]:
    """A module called at lengths that are drawn for each call: their seconds, and those of one
    later call at each."""
    module, drawn, (subject, fewer) = spec.compile(), random.Random(0), MODES[mode]
    subject(module, WARM)()
    whole, steady, seen = 0.0, 0.0, set[int]()
    for _ in range(calls := -(-calls // fewer)):
        n = drawn.randint(1, longest)
        seen.add(n)
        call = subject(module, n)
        whole += seconds_of(call)
        steady += min(seconds_of(call) for _ in range(2))
    return {"mode": mode, "calls": calls, "lengths": len(seen), "whole": whole, "steady": steady}


def measure(settings: Settings) -> dict[str, Json]:
    """A row for each static spec of the zoo and length, and one for each of a few specs whose
    length changes."""
    rows: list[Json] = []
    excess = []
    zoo = [
        (name, spec)
        for name, spec in static_zoo()
        if spec.program.heads in (None, HEADS)
        and spec.stack().lengths((WARM, *settings.first)) == [WARM, *settings.first]
    ]
    for name, spec in spread(zoo, settings.first_zoo):
        for n in settings.first:
            first, later = first_and_later(spec, n)
            excess.append(first - TIMES * later - MORE)
            rows.append({"name": name, "n": n, "first": first, "later": later})
    changed: list[Json] = []
    for name, body in SHAPE_PATTERNS.items():
        longest = max(settings.first)
        spec = Case(name, body).spec(longest)
        for mode in MODES:
            found = changing(spec, mode, settings.changing, longest)
            changed.append({"name": name, **found})
    summary: dict[str, Json] = {
        "met": sum(each <= 0 for each in excess),
        "rows": len(excess),
        "excess": statistics.median(excess),
    }
    return {"rows": rows, "changing": changed, "summary": summary}
