"""From the SPEC of a command line to a `Spec`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attnspec.diagnostics import Diagnostic, SpecError
from attnspec.reading import MAX_BYTES, read_source, source_of_bytes
from attnspec.source import Source

if TYPE_CHECKING:
    from attnspec.ir import Program
    from attnspec.spec import Spec

STDIN = "<stdin>"


def source_at(spec: str) -> Source:
    """The text of a file, or of standard input for `-`."""
    if spec.endswith(".py") and os.path.isfile(spec):
        name = shown_path(spec)
        message = f"a spec is required, {name} is a Python module"
        known = f"`attnspec verify {name}` takes a compiled module"
        raise SpecError(Diagnostic("A182", message, None, help=known))
    return _standard_input() if spec == "-" else read_source(Path(spec), shown_path(spec))


def shown_path(path: str) -> str:
    """A path as messages show it: bytes that are no text in backslashes, no line ends."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def spec_at(spec: str, name: str | None, parameters: Mapping[str, str]) -> Spec:
    """The attention that a command is about."""
    from attnspec.spec import Spec

    return Spec(source_at(spec), name=name, parameters=dict(parameters))


def length_of(program: Program, asked: int | None, default: int) -> int:
    """The length asked for, or the size of the spec's grid, or the default, no longer than what
    the spec's mechanisms learn."""
    from attnspec.declared import longest_of

    if asked is not None:
        return asked
    if program.fixed_length is not None:
        return program.fixed_length
    return min(default, longest_of(program) or default)


def _standard_input() -> Source:
    # sys.stdin is None where the shell closed it
    try:
        data = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise SpecError(
            Diagnostic("A183", f"standard input cannot be read: {reason}", None)
        ) from None
    return source_of_bytes(data, STDIN)
