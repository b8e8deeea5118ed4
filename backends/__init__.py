"""Ways to run a plan with torch; one file, one backend."""

from __future__ import annotations

from attnspec.backends.bands import BandsBackend
from attnspec.backends.dense import Dense
from attnspec.backends.factored import FactoredBackend
from attnspec.backends.rows import RowsBackend
from attnspec.backends.scattered import ScatteredBackend
from attnspec.backends.tiles import TilesBackend
from attnspec.target import Backend

if __name__ != "attnspec.backends":
    # a second import under another name would make second copies of every class
    raise ImportError("import this package as attnspec.backends")

BACKENDS: tuple[Backend, ...] = (
    RowsBackend(),
    Dense(),
    TilesBackend(),
    BandsBackend(),
    ScatteredBackend(),
    FactoredBackend(),
)
"""All backends; importing them loads no torch."""
