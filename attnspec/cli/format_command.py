"""`attnspec format`: specs in canonical text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from attnspec.cli import console, options
from attnspec.cli.failures import WRONG_SPEC, status_of
from attnspec.cli.files import replace_file
from attnspec.cli.specs import shown_path, source_at
from attnspec.grammar.printer import canonical
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source


@click.command("format")
@options.specs_argument
@click.option(
    "--check", "only_check", is_flag=True, help="Change nothing; list the files that would change."
)
@click.option("--stdout", "to_stdout", is_flag=True, help="Print the text, and change no file.")
@click.pass_context
def command(ctx: click.Context, specs: Sequence[str], only_check: bool, to_stdout: bool) -> None:
    """Rewrite specs in canonical text; comments stay.

    `-` reads standard input and prints. A file with errors is not changed. With --check the exit
    status is 1 if any file would change.

    Example: attnspec format *.attn
    """
    if only_check and to_stdout:
        raise click.UsageError("--check and --stdout contradict each other")
    diagnostics: list[Diagnostic] = []
    differing: list[str] = []
    for spec in specs:
        try:
            source = source_at(spec)
            text = canonical(source)
        except SpecError as error:
            diagnostics.extend(error.diagnostics)
            continue
        if only_check:
            if not is_canonical(source, text):
                differing.append(shown_path(spec) if source.path else source.name)
        elif to_stdout or source.path is None:
            console.result(text.removesuffix("\n"))
        elif not is_canonical(source, text):
            replace_file(source.path, text)
            console.say(f"formatted {shown_path(spec)}")
    if differing:
        console.result("\n".join(differing))
    if diagnostics:
        console.diagnose(diagnostics)
    ctx.exit(max(status_of(diagnostics), WRONG_SPEC if differing else 0))


def is_canonical(source: Source, text: str) -> bool:
    """Whether a file holds this text already, to the byte where it is a file."""
    if source.path is None:
        return source.text == text
    return Path(source.path).read_bytes() == text.encode("utf-8")
