"""Collecting diagnostics: independent errors of one text are reported together."""

from __future__ import annotations

from typing import NoReturn

from attnspec.text.diagnostics import Diagnostic, Severity
from attnspec.text.source import Span


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
        self._errors = 0

    def has_errors(self) -> bool:
        """Whether anything was wrong so far, warnings aside."""
        return any(d.severity == "error" for d in self.diagnostics)

    def add(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        notes: tuple[str, ...] = (),
        help: str | None = None,
        related: tuple[tuple[str, Span], ...] = (),
        severity: Severity = "error",
    ) -> None:
        """Record a diagnostic and go on."""
        self.diagnostics.append(Diagnostic(code, message, span, severity, notes, help, related))
        self._errors += severity == "error"
        if self._errors == MOST_ERRORS:
            raise Stopped

    def fail(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        notes: tuple[str, ...] = (),
        help: str | None = None,
        related: tuple[tuple[str, Span], ...] = (),
    ) -> NoReturn:
        """Record an error and give up the part of the text that it stands in."""
        self.add(code, message, span, notes=notes, help=help, related=related)
        raise Failed

    def stop(self, code: str, message: str, span: Span | None) -> NoReturn:
        """Record an error and end the elaboration."""
        self.add(code, message, span)
        raise Stopped
