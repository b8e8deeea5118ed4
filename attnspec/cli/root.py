"""The group of all commands: finds them, and gives every failure a message and a status."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import click

from attnspec.cli import console
from attnspec.cli.failures import Failure, failure_of
from attnspec.text.diagnostics import hinted
from attnspec.version import __version__

COMMANDS = tuple(
    "compile check analyse plan show diff verify bench format explain zoo calibrate lsp".split()
)
"""In the order of the help text; each is `command` in `attnspec.cli.NAME_command`."""

ALIASES = {"analyze": "analyse"}
"""Other names of commands."""


CREATED = 20_000
"""Objects after which garbage is looked for: what a command loads is none, and looking through it
as often as Python does by itself took a tenth of its time."""


class Root(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"attnspec.cli.{cmd_name}_command").command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = (*COMMANDS, *ALIASES)
        if args and args[0] not in names and not args[0].startswith("-"):
            message = hinted(f"there is no command `{args[0]}`", args[0], COMMANDS)
            ctx.fail(f"{message}\nthe commands are {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: object,
    ) -> object:
        """Run one command and leave with its status; nothing escapes as a traceback."""
        words = list(sys.argv[1:] if args is None else args)
        status: object
        try:
            with console.plain_warnings(), rare_collections():
                status = super().main(
                    words, prog_name or self.name, complete_var, standalone_mode=False, **extra
                )
        except console.StreamClosed:
            status = _hush()
        except Exception as error:
            if "--debug" in words and not isinstance(error, click.ClickException):
                traceback.print_exc()
            status = _report(failure_of(error), words)
        code = status if isinstance(status, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code


@contextmanager
def rare_collections() -> Iterator[None]:
    """Garbage is looked for after `CREATED` objects, unless more are asked for already."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(CREATED, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _report(failure: Failure, arguments: Sequence[str]) -> int:
    """Say what went wrong, as JSON where that was asked for, and return the status."""
    try:
        if "--json" in arguments and failure.json:
            console.result_json(failure.to_dict())
        elif failure.diagnostics:
            console.diagnose(failure.diagnostics)
        else:
            console.say(failure.text)
    except console.StreamClosed:
        _hush()
    return failure.status


def _hush() -> int:
    """Let the interpreter's last flush go nowhere, so that it has nothing to complain about."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    return 0


@click.group(
    "attnspec",
    cls=Root,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: attnspec zoo bigbird -o mine.attn && attnspec show mine.attn --set block=4",
)
@click.option("--debug", is_flag=True, help="Print the traceback when attnspec itself fails.")
@click.version_option(
    __version__, "--version", prog_name="attnspec", message="%(prog)s %(version)s"
)
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """The attention compiler: say what attends to what, get pictures, checks and PyTorch modules.

    SPEC is a file in the language `.attn`, - for standard input, or the name of a spec of the zoo
    if no file has that name. `check` tells whether the spec is right, `verify` whether the compiled
    module computes it. Exit status: 0 done, 1 the spec or a claim is wrong, 2 wrong usage, 3 a file
    cannot be read or written, 4 a limit of the compiler was reached, 70 an internal error, which
    you should report, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        console.say(ctx.get_help())
        ctx.exit(2)
