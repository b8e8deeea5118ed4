"""From the SPEC of a command line to a `Spec`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from attnspec.diagnostics import Diagnostic, SpecError
from attnspec.reading import MAX_BYTES, read_source, source_of
from attnspec.source import Source

if TYPE_CHECKING:
    from attnspec.ir import Program
    from attnspec.spec import Spec

STDIN = "<stdin>"


def source_at(spec: str) -> Source:
    """The text of a file, or of standard input for `-`."""
    return _standard_input() if spec == "-" else read_source(Path(spec), shown_path(spec))


def shown_path(path: str) -> str:
    """A path as messages show it: bytes that are no text in backslashes, no line ends."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def spec_at(spec: str, name: str | None, parameters: Mapping[str, str]) -> Spec:
    """The attention that a command is about."""
    from attnspec.spec import Spec

    return Spec(source_at(spec), name=name, parameters=dict(parameters))


def fixed_length(program: Program) -> int | None:
    """The size of a grid whose extents are constant, extra tokens included; None for all others."""
    extents = program.grid or ()
    numbers = [extent for extent in extents if isinstance(extent, int)]
    if not numbers or len(numbers) < len(extents):
        return None
    return prod(numbers) + program.extra_tokens


def length_of(program: Program, asked: int | None, default: int) -> int:
    """The length asked for, or the size of the spec's grid, or the default."""
    if asked is not None:
        return asked
    fixed = fixed_length(program)
    return default if fixed is None else fixed


def _standard_input() -> Source:
    # sys.stdin is None where the shell closed it
    try:
        data = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise SpecError(
            Diagnostic("A183", f"standard input cannot be read: {reason}", None)
        ) from None
    try:
        return source_of(data.decode("utf-8"), STDIN)
    except UnicodeDecodeError as error:
        if len(data) > MAX_BYTES:
            # the limit may have cut a character in two
            return source_of(" " * len(data), STDIN)
        raise SpecError(
            Diagnostic(
                "A101",
                f"expected UTF-8 text, found byte 0x{data[error.start]:02X} at byte {error.start:,}"
                f" of {STDIN}",
                None,
                help="save the text as UTF-8",
            )
        ) from None
