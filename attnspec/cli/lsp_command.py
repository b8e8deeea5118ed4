"""`attnspec lsp`: the language server that editors start."""

from __future__ import annotations

import click


@click.command("lsp")
def command() -> None:
    """Answer an editor over standard input and output, in the language server protocol.

    Mistakes while typing, completion, formulas under the pointer, definitions and canonical text.
    Editors start this by themselves: the folder editors/ of the project has what they need.
    Needs `pip install "attnspec[lsp]"`.

    Example: attnspec lsp
    """
    try:
        from attnspec.editor.server import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise click.UsageError(
            f"the language server needs {error.name}, which is not installed"
            '\nhelp: pip install "attnspec[lsp]"'
        ) from None
    server.start_io()
