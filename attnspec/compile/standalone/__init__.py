"""Files that need torch alone and can be read in one sitting: what `--standalone` writes.

A graph becomes a function of (q, k, n), traced from the relations that define it; everything else
is ordinary source of `attnspec.compile.standalone.sources`, taken over as it stands.
"""

from __future__ import annotations

from attnspec.compile.standalone.graphs import graph_module
from attnspec.compile.standalone.mechanisms import mechanism_module
from attnspec.compile.standalone.page import StandaloneError
from attnspec.ir.program import Program
from attnspec.lower.lower import decided_leaves

__all__ = ["StandaloneError", "standalone_module"]


def standalone_module(program: Program, class_name: str) -> str:
    """All but the docstring of the file; raises StandaloneError for what no short file says."""
    graphs = all(attend.mechanism is None for attend in program.attends)
    try:
        for leaf in decided_leaves(program):
            raise StandaloneError(f"queries and keys decide which pairs `{leaf.pattern}` has")
        return (graph_module if graphs else mechanism_module)(program, class_name)
    except StandaloneError as error:
        raise StandaloneError(
            f"`{program.name}` cannot be said in a short file that stands alone: {error};"
            " compile it without --standalone"
        ) from None
