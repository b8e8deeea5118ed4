"""What the commands print, and where: results to standard output, messages to standard error.

Colour appears on a terminal alone; `NO_COLOR`, `TERM=dumb` and the C locale are respected. Whatever
a stream cannot encode is written in ASCII, so that no text of a user can end a command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click

from attnspec.text.diagnostics import SHOWN, Diagnostic, in_order, render

if TYPE_CHECKING:
    from rich.text import Text

    from attnspec.show.terminal import Signs


class StreamClosed(Exception):
    """Whoever read our output has seen enough and closed the pipe."""


_PLAIN = str.maketrans(
    {"…": "...", "·": ",", "→": "->", "↓": "v", "×": "x", "√": "sqrt ", "²": "^2", "≈": "~"}
)
"""The signs that this package itself prints, in ASCII."""


def is_ascii(stream: TextIO) -> bool:
    """Whether only ASCII is to be written: another encoding than UTF, a dumb terminal, locale C."""
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    return (
        not (stream.encoding or "").lower().startswith("utf")
        or locale in ("C", "POSIX")
        or os.environ.get("TERM") == "dumb"
    )


def has_colour(stream: TextIO) -> bool:
    """Whether colour is wanted: a terminal that can, and a user who does not say no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns of the terminal, 80 where there is none; at least 20."""
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def result(text: str) -> None:
    """Write a result, with a line end, to standard output."""
    _write(sys.stdout, text)


def result_json(value: object) -> None:
    """Write one JSON value to standard output."""
    result(as_json(value))


def answer(as_json: bool, data: Mapping[str, object], text: str) -> None:
    """Write a result as text, or as JSON where that is asked for."""
    if as_json:
        result_json({"ok": True, **data})
    else:
        result(text)


def as_json(value: object) -> str:
    """One JSON value as text: strict JSON, ASCII."""
    return json.dumps(value, indent=2, allow_nan=False)


def say(text: str) -> None:
    """Write a message to standard error."""
    _write(sys.stderr, text)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Python's warnings as messages, without the line of ours that gave them."""

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"warning: {message}")
        yield


def diagnose(diagnostics: Iterable[Diagnostic]) -> None:
    """Write diagnostics to standard error: errors first, so that warnings never crowd them out."""
    ordered = in_order(diagnostics)
    if len(ordered) > SHOWN:
        ordered.sort(key=lambda d: d.severity != "error")
    text = render(ordered)
    say(_coloured(text) if sys.stderr and has_colour(sys.stderr) else text)


def signs() -> Signs:
    """What pictures on standard output are made of."""
    if sys.stdout is None:
        return "blocks"
    return "ascii" if is_ascii(sys.stdout) else "colour" if has_colour(sys.stdout) else "blocks"


def styled(text: Text) -> str:
    """A rich text with its colours as the terminal knows them, where it shows any."""
    if signs() != "colour":
        return text.plain
    from rich.console import Console

    terminal = Console(file=sys.stdout, width=width(), highlight=False, soft_wrap=True)
    with terminal.capture() as captured:
        terminal.print(text, end="")
    return captured.get()


def _write(stream: TextIO | None, text: str) -> None:
    # a stream that the shell closed (`>&-`) is None
    if stream is None:
        return
    if is_ascii(stream):
        text = "".join(_as_ascii(c) for c in text.translate(_PLAIN))
    else:
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        raise StreamClosed from None


def _as_ascii(character: str) -> str:
    # one `?` for each character keeps carets under their words; names of files stay exact
    if character.isascii():
        return character
    return ascii(character)[1:-1] if "\udc80" <= character <= "\udcff" else "?"


_SEVERITY = re.compile(r"^(?! )(?:(?P<place>.*?): )?(?P<word>(?:error|warning|note)\[\w+\])", re.M)
_CARETS = re.compile(r"^(?P<margin> +\| \s*)(?P<carets>\^+)$", re.M)
_ADVICE = re.compile(r"^  (?P<word>help|note): ", re.M)


def _coloured(text: str) -> str:
    """A rendering of diagnostics with its severities, carets and help picked out."""

    def severity(match: re.Match[str]) -> str:
        colour = "red" if match["word"].startswith("error") else "yellow"
        place = "" if match["place"] is None else click.style(match["place"], bold=True) + ": "
        return place + click.style(match["word"], fg=colour, bold=True)

    text = _SEVERITY.sub(severity, text)
    text = _CARETS.sub(lambda m: m["margin"] + click.style(m["carets"], fg="red"), text)
    return _ADVICE.sub(lambda m: f"  {click.style(m['word'], fg='cyan')}: ", text)


@contextmanager
def patience(doing: str, after: float = 1.0) -> Iterator[None]:
    """Says on a terminal what is done where that takes longer than so many seconds."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(after, say, [f"{doing} (Ctrl-C ends it)"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """A function that shows the share that is done and what is done now; the bar leaves no trace.

    It draws when it is called and at no other time: a clock of its own would take part of the
    machine from what is measured.
    """
    if sys.stderr is None or not has_colour(sys.stderr):
        yield lambda share, doing: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(
        *columns, console=Console(stderr=True), auto_refresh=False, transient=True
    ) as shown:
        task = shown.add_task("", total=1.0)

        def show(share: float, doing: str) -> None:
            shown.update(task, completed=share, description=doing)
            shown.refresh()

        yield show
