"""From an exception to what the user reads and the status that the shell gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from attnspec.text.diagnostics import AttnSpecError, Diagnostic, InternalError, SpecError

WRONG_SPEC, WRONG_USAGE, WRONG_FILE, LIMIT, INTERNAL, INTERRUPTED = 1, 2, 3, 4, 70, 130


class LimitReached(click.ClickException):
    """A size or time limit of the compiler."""

    exit_code = LIMIT


@dataclass(frozen=True)
class Failure:
    """A status with the diagnostics, or where there are none the text, that explain it.

    `json` is False where the command has no `--json` to answer in.
    """

    status: int
    text: str
    diagnostics: tuple[Diagnostic, ...] = ()
    json: bool = True

    def to_dict(self) -> dict[str, object]:
        """The value that `--json` prints."""
        return {
            "ok": False,
            "status": self.status,
            "message": self.text,
            "diagnostics": [d.to_dict() for d in self.diagnostics],
        }


def status_of(diagnostics: Iterable[Diagnostic], strict: bool = False) -> int:
    """0 without errors, else the status that the gravest asks for; `strict` counts warnings too."""
    counted = (x for x in diagnostics if x.severity == "error" or strict)
    return max((_status(int(x.code[1:])) for x in counted), default=0)


def _status(number: int) -> int:
    if 180 <= number <= 189 or 520 <= number <= 549:
        return WRONG_FILE
    return LIMIT if 190 <= number <= 199 else WRONG_SPEC


@contextmanager
def fitting() -> Iterator[None]:
    """A backend that refuses, or a length that the spec does not have, is wrong usage; what is
    larger than is supported reaches a limit."""
    # no help text should wait for it
    from attnspec.graphs.stack import TooMuch

    try:
        yield
    except (SpecError, InternalError):
        raise
    except TooMuch as error:
        raise LimitReached(str(error)) from None
    except AttnSpecError as error:
        # the spec is sound, the request does not fit it
        raise click.UsageError(str(error)) from None


def failure_of(error: Exception) -> Failure:
    """What to say and which status to leave with."""
    match error:
        case SpecError():
            # an error without diagnostics of its own severity is still an error
            status = status_of(error.diagnostics) or WRONG_SPEC
            return Failure(status, str(error), error.diagnostics)
        case InternalError():
            text = f"internal error: {error}\nfor the traceback: attnspec --debug …"
            return Failure(INTERNAL, text)
        case AttnSpecError():
            return Failure(WRONG_SPEC, f"error: {error}")
        case click.exceptions.NoSuchOption() if error.option_name == "--json":
            return Failure(WRONG_USAGE, _usage(error), json=False)
        case click.UsageError():
            return Failure(WRONG_USAGE, _usage(error))
        case click.ClickException():
            return Failure(error.exit_code, f"error: {error.format_message()}")
        case click.Abort():
            return Failure(INTERRUPTED, "interrupted")
        case OSError():
            reason, name = (error.strerror or str(error)).lower(), error.filename
            where = "" if name is None else f"{os.fsdecode(name)}: "
            return Failure(WRONG_FILE, f"error: {where}{reason}")
        case MemoryError():
            return Failure(LIMIT, "error: this needs more memory than there is")
        case _:
            detail = str(error).strip()
            what = type(error).__name__ + (f": {detail}" if detail else "")
            notes = getattr(error, "__notes__", [])
            return failure_of(InternalError("\n".join([what, *notes])))


def _usage(error: click.UsageError) -> str:
    lines = [f"error: {error.format_message()}"]
    if error.ctx is not None:
        lines.append(error.ctx.get_usage())
        lines.append(f"help: {error.ctx.command_path} --help")
    return "\n".join(lines)
