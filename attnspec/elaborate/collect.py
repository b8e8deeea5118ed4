"""Collecting diagnostics: independent errors of one text are reported together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from attnspec.text.diagnostics import Diagnostic
from attnspec.text.source import Span

T = TypeVar("T")
R = TypeVar("R")


class Failed(Exception):
    """This part of the text has no meaning; its diagnostics are collected already."""


class Stopped(Exception):
    """The whole elaboration ends here, because a limit is reached; a diagnostic says which."""


MOST_ERRORS = 100
"""Far more than are shown; a text with so many errors is not elaborated further."""


class Collector:
    """The diagnostics of one elaboration; MOST_ERRORS of them end it."""

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def has_errors(self) -> bool:
        """Whether anything was wrong so far, warnings aside."""
        return any(d.severity == "error" for d in self.diagnostics)

    def add(self, code: str, message: str, span: Span | None, **more: Any) -> None:
        """Record a diagnostic, `more` being its other fields, and go on."""
        self.diagnostics.append(Diagnostic(code, message, span, **more))
        if sum(d.severity == "error" for d in self.diagnostics) >= MOST_ERRORS:
            raise Stopped

    def fail(self, code: str, message: str, span: Span | None, **more: Any) -> NoReturn:
        """Record an error and give up the part of the text that it stands in."""
        self.add(code, message, span, **more)
        raise Failed

    def add_twice(self, name: str, span: Span, first: Span) -> None:
        """Record that a name is defined again."""
        related = (("first defined here", first),)
        self.add("A203", f"`{name}` is defined twice", span, related=related)

    def stop(self, code: str, message: str, span: Span | None) -> NoReturn:
        """Record an error and end the elaboration."""
        self.add(code, message, span)
        raise Stopped


def each(items: Sequence[T], elaborate: Callable[[T], R]) -> list[R]:
    """Elaborate every item, so that independent errors come together, then fail if any did."""
    results: list[R] = []
    failed = False
    for item in items:
        try:
            results.append(elaborate(item))
        except Failed:
            failed = True
    if failed:
        raise Failed
    return results
