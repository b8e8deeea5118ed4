"""Mechanisms with their sizes, and what a program learns for them; known without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from attnspec.graphs.bind import BindError, Situation, bind, filled, situation_of
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import DataDependent
from attnspec.graphs.token_sets import Data
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part
from attnspec.ir.program import Leaf, Mechanism, Program, Score, inputs_of
from attnspec.ir.scalars import symbols

TRIED = (256, 1024)
"""Lengths at which what is learned must have one shape."""


def bind_mechanism(mechanism: Mechanism, at: Situation) -> MechanismDeclaration:
    """The mechanism with its arguments; raises BindError for one that has no admissible value."""
    return filled(MECHANISMS_BY_NAME[mechanism.name], mechanism, at)


def longest_of(program: Program) -> int | None:
    """The longest sequence that all mechanisms of a program are for, None where any length is."""
    lengths = []
    for learner, layer, head in _learners(program):
        if isinstance(learner, Leaf):
            continue
        # the spec may not have this length
        with suppress(BindError):
            at = situation_of(program, 1, layer, head, grid=())
            lengths.append(bind_mechanism(learner, at).longest)
    return min((length for length in lengths if length is not None), default=None)


def symbols_in(term: Mechanism | Score) -> set[str]:
    """The names of all symbols in the arguments of a mechanism or a score."""
    return {name for _, value in term.arguments for name in symbols(value)}  # type: ignore[arg-type]


def learned_parts(program: Program) -> dict[tuple[str, Part], str]:
    """What the mechanisms of a program learn, by mechanism and part, with the parameters' names.

    Layers and heads with equal parts share a parameter, each with its own rows; unequal parts of
    one name are numbered. Raises BindError where the shape of a part depends on n.
    """
    names: dict[str, dict[tuple[str, Part], None]] = {}
    for learner, layer, head in _learners(program):
        name = learner.name if isinstance(learner, Mechanism) else learner.pattern
        seen = set()
        for n in TRIED:
            # the spec may not have this length
            with suppress(BindError):
                at = situation_of(program, n, layer, head, grid=())
                seen.add(_parts_at(learner, at))
        if len(seen) > 1:
            raise BindError(
                f"what `{name}` learns must have one shape at every length, and the arguments of"
                f" `{name}` change with n",
                learner.span,
            )
        for parts in seen:
            for part in parts:
                names.setdefault(f"{name}_{part.name}", {})[name, part] = None
    return {
        entry: name if len(entries) == 1 else f"{name}_{number}"
        for name, entries in names.items()
        for number, entry in enumerate(entries)
    }


def _parts_at(learner: Mechanism | Leaf, at: Situation) -> tuple[Part, ...]:
    """What a mechanism, or a data-dependent graph, learns."""
    if isinstance(learner, Mechanism):
        return bind_mechanism(learner, at).parts()
    inputs = {name: Data(None) for name in inputs_of(learner)}
    bound = bind(learner, replace(at, inputs=inputs))
    return bound.learned if isinstance(bound, DataDependent) else ()


def _learners(program: Program) -> Iterator[tuple[Mechanism | Leaf, int, int]]:
    """Every mechanism, and every data-dependent graph, with each layer and head."""
    slots = [
        (program.attends[slot], layer, head)
        for layer, row in enumerate(program.slots)
        for head, slot in enumerate(row)
    ]
    for attend, layer, head in slots:
        if attend.mechanism is not None:
            yield attend.mechanism, layer, head
    for attend, layer, head in slots:
        for leaf in attend.leaves:
            if "learned" in vars(BY_NAME[leaf.pattern]):
                yield leaf, layer, head
