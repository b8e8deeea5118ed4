"""The command line: `attnspec COMMAND`. One file, one command, loaded when used."""

from __future__ import annotations

from attnspec.cli.root import main

__all__ = ["main"]
