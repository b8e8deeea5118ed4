"""Which functions of a tree a process calls: noted where a recorder waits for it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType


def key_of(path: Path, function: str) -> str:
    """By what a function is known."""
    return f"{path.stem}:{function}"


class Calls:
    """The functions of a tree that are called, as long as they are noted."""

    def __init__(self, tree: str) -> None:
        self.tree = tree
        self._seen: dict[int, CodeType] = {}

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        # a code object is kept, so that no other has its number
        self._seen[id(frame.f_code)] = frame.f_code

    def start(self) -> None:
        """Notes what is called from now on."""
        self._seen = {}
        threading.settrace(self._note)
        sys.settrace(self._note)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def keys(self) -> set[str]:
        """By what the functions are known."""
        # what runs here may be noted as well
        seen = list(self._seen.values())
        ours = (code for code in seen if code.co_filename.startswith(self.tree))
        return {key_of(Path(code.co_filename), code.co_qualname) for code in ours}


NOTED = "ATTNSPEC_NOTED"
"""Names the folder and the tree to processes that should note what they call."""


def noting() -> Callable[[], None]:
    """Notes what this process calls, if a recorder waits for that; returns what tells it."""
    if NOTED not in os.environ:
        return lambda: None
    folder, tree = os.environ[NOTED].split(os.pathsep)
    calls = Calls(tree)
    calls.start()
    into = Path(folder, f"{os.getpid()}.json")

    def tell() -> None:
        into.write_text(json.dumps(sorted(calls.keys())))

    return tell
