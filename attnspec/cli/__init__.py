"""The command line: `attnspec COMMAND`. Each command is a file of this package, loaded when used."""

from __future__ import annotations

from attnspec.cli.root import main

__all__ = ["main"]
