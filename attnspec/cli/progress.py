"""A progress bar on standard error: on a terminal only, and silent while a call is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnspec.cli import console


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """A function that shows the share that is done and what is done now; the bar leaves no trace.

    It draws when it is called and at no other time: a clock of its own would take part of the
    machine from what is measured.
    """
    if sys.stderr is None or not console.has_colour(sys.stderr):
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
