"""`attnspec lsp`: the language server that editors start."""

from __future__ import annotations

import click


@click.command("lsp")
def command() -> None:
    """Serve an editor by the language server protocol.

    Reports mistakes while you type, completes words, shows formulas on hover, finds definitions and
    formats. Editors start this command themselves, over standard input and output; the folder
    editors/ of the project has their settings. Needs `pip install "attnspec[lsp]"`.

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
