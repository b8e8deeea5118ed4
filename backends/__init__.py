"""Ways to run a plan with torch; one folder, one backend."""

from __future__ import annotations

from attnspec.backends.edges.backend import EdgesBackend
from attnspec.backends.factored.backend import FactoredBackend
from attnspec.backends.flex.backend import FlexBackend
from attnspec.backends.one_block.backend import Dense, TorchCall
from attnspec.backends.tables.backend import TablesBackend
from attnspec.backends.triton.backend import TritonBackend
from attnspec.lower.work import Backend, Call, Kernel, Work

if __name__ != "attnspec.backends":
    # a second import under another name would make second copies of every class
    raise ImportError("import this package as attnspec.backends")

__all__ = ["BACKENDS", "Backend", "Call", "Kernel", "Work"]

BACKENDS: tuple[Backend, ...] = (
    TorchCall(),
    Dense(),
    TablesBackend(),
    EdgesBackend(),
    FactoredBackend(),
    FlexBackend(),
    TritonBackend(),
)
"""All backends; importing them loads no torch."""
