"""What a page shows is what happens: run the blocks of a Markdown page and compare.

- an `attn` block is a spec; one that begins with `# NAME.attn` is also saved under that name, and
  stays there for the blocks after it
- a `console` block holds commands after `$ ` with what they print, errors included
- a `python` block runs in order with those before it; lines with `>>>` are doctests

`python tests/transcripts.py PAGE…` writes the output of every console block anew.
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from attnspec.cli import main

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(attn|console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"# ([\w/]+\.attn)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and where the text stands in the page."""

    kind: str
    text: str
    start: int
    end: int


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page that can be run, in order."""
    for match in _BLOCK.finditer(page):
        yield Block(match[1], match[2], match.start(2), match.end(2))


def save(block: Block, folder: Path) -> None:
    """Put a named spec where the commands after it look for it."""
    named = _SAVED.match(block.text)
    if named:
        path = folder / named[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")


def replayed(block: Block, folder: Path) -> str:
    """A console block with the output that its commands have now."""
    lines = []
    for line in block.text.splitlines():
        if not line.startswith("$ "):
            continue
        lines.append(line)
        words = shlex.split(line[2:])
        plain = words[0] == "attnspec" and not {"|", "&&", ">"} & set(words)
        printed = _called(words[1:], folder) if plain else _spawned(line[2:], folder)
        lines.extend(text.rstrip() for text in printed.splitlines())
    return "\n".join(lines) + "\n"


SETTINGS = {"COLUMNS": "80", "LANG": "C.UTF-8", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
"""What is set of the surroundings, so that the same is printed everywhere."""


def _called(arguments: list[str], folder: Path) -> str:
    """What a command prints, in this process: a new one would load torch anew."""
    with contextlib.chdir(folder):
        return CliRunner(env=SETTINGS).invoke(main, arguments).output


def _spawned(command: str, folder: Path) -> str:
    """What a line of a shell prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        ["bash", "-c", command.replace("attnspec ", f"{sys.executable} -m attnspec ", 1)],
        cwd=folder,
        env={**os.environ, **SETTINGS, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def run_python(block: Block, names: dict[str, object], label: str) -> None:
    """Run a python block in the names of those before it; a wrong answer raises."""
    if ">>>" not in block.text:
        exec(compile(block.text, label, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, label, label, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    if runner.summarize(verbose=False).failed:
        raise ValueError("".join(report))


def refreshed(page: str) -> str:
    """The page with the output of every console block written anew."""
    with tempfile.TemporaryDirectory() as name:
        folder, last = Path(name), 0
        result: list[str] = []
        for block in blocks(page):
            if block.kind == "attn":
                save(block, folder)
            elif block.kind == "console":
                result.extend((page[last : block.start], replayed(block, folder)))
                last = block.end
        return "".join((*result, page[last:]))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
