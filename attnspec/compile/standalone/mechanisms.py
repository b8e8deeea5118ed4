"""The file of a spec whose heads all have one mechanism: its own kernel, linear in n where the
mechanism is."""

from __future__ import annotations

from typing import Any

from attnspec.backends.factored.definitions import TEXTS, settings_of
from attnspec.compile.standalone.page import StandaloneError, Text
from attnspec.graphs.bind import Situation
from attnspec.ir.program import Program
from attnspec.ir.scalars import Apply, Symbol
from attnspec.lower.mechanism_sizes import bind_mechanism, learned_parts

STARTS = {"zeros": ("constant", 0.0), "ones": ("constant", 1.0)}
"""How a part starts, and by which number, where it says so in one word."""


def mechanism_text(program: Program) -> Text:
    """The settings of a file. Raises StandaloneError for what cannot be said."""
    attend = program.attends[0]
    if len(program.attends) > 1:
        raise StandaloneError("its heads or layers have different mechanisms")
    if attend.mechanism is None or attend.graph is not None:
        raise StandaloneError("it adds a mechanism to a graph")
    if any(isinstance(value, Symbol | Apply) for _, value in attend.mechanism.arguments):
        raise StandaloneError("the arguments of its mechanism depend on n, the layer or the head")
    if isinstance(attend.scale, Symbol | Apply):
        raise StandaloneError("its scale depends on n, the layer or the head")
    layers, heads = program.layers or 1, program.heads or 1
    at = Situation(1, {}, layers=layers, heads=program.heads)
    declared: Any = bind_mechanism(attend.mechanism, at)
    if getattr(declared, "redraw", 0):
        raise StandaloneError("`redraw` draws its features anew in training")
    parts = {}
    for (_, part), name in learned_parts(program).items():
        shape = 1 if part.layers else layers, 1 if part.heads else heads, *part.shape
        parts[name] = (shape, *STARTS.get(part.start, (part.start, part.by)))
    chosen, names = settings_of(declared, program.causal, attend.scale)
    if not all(any(name in vars(text) for text in TEXTS) for name in names.values()):
        raise StandaloneError(f"`{declared.name}` is not a mechanism that it knows")
    settings = {
        **{"INPUTS": {}, "PAIRS": False},
        **chosen,
        "PARTS": parts,
        "SIZED": any(isinstance(x, str) for shape, _, _ in parts.values() for x in shape),
        "DRAWN": any(start != "constant" for _, start, _ in parts.values()),
    }
    return Text({}, settings, names, tuple(text.__name__ for text in TEXTS))
