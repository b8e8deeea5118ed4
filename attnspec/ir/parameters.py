"""What the language asks of a pattern or mechanism: its arguments, and what is wrong with them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from attnspec.text.diagnostics import AttnSpecError


class RelationError(AttnSpecError):
    """A relation that cannot be: arguments that do not fit each other, the grid or the sequence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class Parameter:
    """What the language accepts for one field of a pattern.

    `kind`: "integer", "real", "boolean", "choice", "tokens", "ids", "length", "choices",
    "buckets", "predicate", "inputs", "graph", "extents" or, for what the compiler fills in,
    "context". `input` is the kind of an input that may stand in place of a choice.
    """

    kind: str
    doc: str
    least: int | None = None
    most: int | None = None
    odd: bool = False
    even: bool = False
    choices: tuple[str, ...] = ()
    positional: bool = False
    context: str = ""
    input: str = ""
    above: float | None = None


def argument(kind: str, doc: str, *, default: object = MISSING, **limits: Any) -> Any:
    """A dataclass field that is an argument of the pattern in the language; `limits` are the other
    fields of its `Parameter`."""
    return field(default=default, metadata={"parameter": Parameter(kind, doc, **limits)})


def choice(doc: str, *choices: str, default: str = "") -> Any:
    """An argument that is one of some words, by default the first."""
    return argument("choice", doc, default=default or choices[0], choices=choices)


_OUTSIDE: dict[str, object] = {
    **dict.fromkeys(("layer", "head", "extra_tokens"), 0),
    "causal": False,
    "grid": (),
}
"""What the compiler fills in, with what it is where a pattern stands in no program."""


def context(name: str) -> Any:
    """A dataclass field that the compiler fills in from where the pattern stands.

    `name` is "layer", "head", "causal", "grid" or "extra_tokens".
    """
    parameter = Parameter("context", f"the {name} in whose scope the pattern stands", context=name)
    return field(default=_OUTSIDE[name], metadata={"parameter": parameter})
