"""Whether a position can learn of a later one, through layers, global tokens, inputs, mechanisms.

A walk from a query to a later key has a step that reads a later key, and that step alone is a walk,
since the residual stream carries a position through the other layers. So a stack leaks exactly
when a head of some layer reads a later key, or chooses among earlier keys by later ones, and the
shortest leaking path is one step.

What depends on run-time inputs or data is tried, not proven: a leak is exact, because the
sample that shows it is admissible; no leak is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from attnspec.analysis.counting.differences import only_in
from attnspec.analysis.growth.stable import places
from attnspec.analysis.quality import Figure
from attnspec.analysis.reach.reach import Steps
from attnspec.graphs.bind import Situation, bind_attended
from attnspec.graphs.forms.prelude import BEHIND
from attnspec.graphs.forms.properties import never_reads_later
from attnspec.graphs.forms.stability import FAR, bound_choice
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.relation import Relation, chosen_text, evaluate_pairs
from attnspec.graphs.stack import (
    Stack,
    TooMuch,
    decides,
    require_few_patterns,
    require_supported,
    undecided,
    unread_text,
)
from attnspec.graphs.token_sets import Data
from attnspec.ir.api_checks import sampled
from attnspec.ir.program import Input, Program, inputs_of, leaves
from attnspec.limits import LIMITS

FIRST = 64
"""Positions that are examined in sequences too long to be counted."""


@dataclass(frozen=True)
class Leak:
    """A position that learns of a later one, the steps by which it does, and under which
    conditions, as `when …` or `where …`: "" where it always does. Where it reads no later key, but
    its `choice` of earlier ones may change with one, that says why."""

    query: int
    steps: Steps
    where: str = ""
    choice: str = ""

    @property
    def key(self) -> int:
        """The later position."""
        return self.steps[-1][2]


def leak(stack: Stack, n: int) -> Figure[Leak | None]:
    """The first layer and head, and there the first query, that read a later key, else the first
    that choose by one, or None; with a note on choices where there are some.

    Raises TooMuch where that means looking at too many pairs, BindError where a size has no value.
    """
    figure = Figure[Leak | None](None) if stack.program.causal else _by_pairs(stack, n)
    if figure.value is not None:
        return figure
    ahead, words = _by_choice(stack, n)
    if ahead is not None:
        return Figure(ahead)
    notes = [words, figure.note] if figure.quality == "exact" else [figure.note]
    return replace(figure, note="; ".join(note for note in notes if note))


def looks_ahead(program: Program) -> Leak | None:
    """The first layer and head that reads no later key, but at some length chooses by them."""
    try:
        return _by_choice(Stack(program), FAR)[0]
    except TooMuch:
        # more graphs than are supported
        return None


def _by_choice(stack: Stack, n: int) -> tuple[Leak | None, str]:
    """The first layer and head whose choice of earlier keys may change with a later one; if there
    is none, what is to be said of choices."""
    words: set[str] = set()
    if not any(map(decides, stack.program.graphs)):
        return None, ""
    for layer, head in places(stack.program):
        graph = stack.program.attend(layer, head).graph
        if graph is None or not (stack.program.causal or never_reads_later(graph)):
            continue
        for leaf in leaves(graph):
            if not BY_NAME[leaf.pattern].data_dependent:
                continue
            bound = bound_choice(stack.program, leaf, n, layer, head)
            ahead = None if bound is None else bound.ahead(n)
            if ahead is not None:
                why = f"in `{leaf.pattern}` {ahead.why}"
                return Leak(ahead.query, ((layer, head, ahead.token),), choice=why), ""
            if bound is not None:
                words.add("given" if bound.given_choice else "yes")
    return None, f"pairs: yes, choice: {' and '.join(sorted(words))}" if words else ""


def _by_pairs(stack: Stack, n: int) -> Figure[Leak | None]:
    """The first layer and head, and there the first query, that read a later key."""
    doubt = ""
    for layer, head in places(stack.program):
        attend = stack.program.attend(layer, head)
        if attend.mechanism is not None:
            if n > 1:
                name = attend.mechanism.name
                return Figure(Leak(0, ((layer, head, 1),), f"where `{name}` mixes all positions"))
            continue
        if attend.graph is None or never_reads_later(attend.graph):
            continue
        require_few_patterns(attend.graph)
        if (layer, head) in stack.known:
            pair = later_pair(stack.known[layer, head], n)
            if pair is not None:
                return Figure(Leak(pair[0], ((layer, head, pair[1]),)))
            continue
        names = inputs_of(attend.graph) - set(stack.inputs or ())
        patterns = [leaf.pattern for leaf in leaves(attend.graph)]
        decided = [name for name in patterns if BY_NAME[name].data_dependent]
        at = _situation(stack, n, layer, head)
        # a data-dependent choice may hold for any one pair, but perhaps not two of them together
        graph = undecided(attend.graph)
        # those that only decide, as choices and scores do, say nothing of the rest
        names &= inputs_of(graph)
        samples = _samples([stack.declared[name] for name in sorted(names)], n)
        for data, words in samples if len(decided) < 2 else ():
            relation = bind_attended(graph, replace(at, inputs={**at.inputs, **data}))
            pair = later_pair(relation, n)
            if pair is not None:
                words += [f"`{name}` chooses this pair" for name in decided]
                where = f"when {' and '.join(words)}" if words else ""
                return Figure(Leak(pair[0], ((layer, head, pair[1]),), where))
        if names or decided:
            doubt = chosen_text(decided[0]) if decided else unread_text(names)
    return Figure(None, "estimate", doubt) if doubt else Figure(None)


@lru_cache(maxsize=8)
def later_pair(relation: Relation, n: int) -> tuple[int, int] | None:
    """The first query of a relation that reads a later key, with the first such key; beyond
    `LIMITS.positions` some of the first queries and keys, and TooMuch where they show none."""
    if n > LIMITS.positions:
        first = np.arange(FIRST)
        later = np.triu(evaluate_pairs(relation, first[:, None], first[None], n), 1)
        if later.any():
            query, key = divmod(int(later.argmax()), FIRST)
            return query, key
        require_supported(n)
    return next(iter(only_in(relation, Where(BEHIND), n).examples), None)


def _situation(stack: Stack, n: int, layer: int, head: int) -> Situation:
    inputs = {
        name: Data(sampled(entry, stack.inputs or {}, n, n, stack.program.name), entry.size)
        for name, entry in stack.declared.items()
        if name in (stack.inputs or {})
    }
    return replace(stack.situation(n, layer, head), inputs=inputs)


def _samples(inputs: list[Input], n: int) -> Iterator[tuple[Mapping[str, Data], list[str]]]:
    """Samples that show what inputs can do, each with its description: as much as can be, as
    little as can be, and token sets of one end."""
    if not inputs:
        yield {}, []
        return
    for marks in ("all", "none", "first", "last"):
        data, words = {}, []
        for entry in inputs:
            data[entry.name], description = _sample(entry, marks, n)
            words.append(f"`{entry.name}` {description}")
        yield data, words


def _sample(entry: Input, marks: str, n: int) -> tuple[Data, str]:
    little = marks == "none"
    if entry.kind == "ids":
        ids = np.arange(n) if little else np.zeros(n, np.int64)
        return Data(ids), "has a label for each token" if little else "has one label for all tokens"
    if entry.kind == "numbers":
        rising = {"none": 1, "first": -1}.get(marks, 0)
        words = {1: "grows with each token", -1: "falls with each token"}
        return Data(np.arange(n) * rising), words.get(rising, "is one number for all tokens")
    if entry.kind == "length":
        length = 0 if little else n
        return Data(np.int64(length)), f"is {length}"
    marked = np.zeros(n, bool)
    most = n if entry.at_most is None else min(entry.at_most, n)
    if marks == "all":
        marked[:most] = True
        return Data(marked), "marks every token" if most == n else f"marks the first {most} tokens"
    if little or most == 0:
        return Data(marked), "marks no token"
    marked[0 if marks == "first" else n - 1] = True
    return Data(marked), f"marks token {0 if marks == 'first' else n - 1}"
