"""The words of the language by what they are, gathered from where each is declared."""

from __future__ import annotations

from functools import cache

from attnspec.elaborate.names import (
    GRAPH_FUNCTIONS,
    INPUT_KINDS,
    METRICS,
    NORMALIZERS,
    POSITIONS,
    PROPERTIES,
    SCALARS,
    SCORES,
    SELECTORS,
    TOKEN_SETS,
)
from attnspec.grammar.parser import keywords
from attnspec.grammar.syntax_errors import ITEMS, RESERVED, STATEMENTS
from attnspec.graphs.grid import AXES
from attnspec.graphs.patterns import BY_NAME as PATTERNS
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.scalars import FUNCTIONS

REACH = "reach"
"""The claim that is written as a call."""

GRID = "grid"
"""What a `sequence` may be."""


@cache
def words() -> dict[str, tuple[str, ...]]:
    """Each kind of word with its words, in the order of their declarations.

    A word may be of several kinds: `causal` is a statement, a pattern and a property.
    """
    constants = ("true", "false")
    others = keywords() - ITEMS - STATEMENTS - RESERVED - set(SCALARS)
    return {
        "item": tuple(sorted(ITEMS)),
        "statement": tuple(sorted(STATEMENTS)),
        "connective": tuple(sorted(others)),
        "operator": tuple(sorted(RESERVED - set(constants))),
        "constant": constants,
        "selector": SELECTORS,
        "pattern": tuple(name for name, pattern in PATTERNS.items() if not pattern.word),
        "mechanism": tuple(MECHANISMS),
        "operation": GRAPH_FUNCTIONS,
        "set": tuple(TOKEN_SETS),
        "function": tuple(FUNCTIONS),
        "score": tuple(SCORES),
        "normalizer": NORMALIZERS,
        "input": INPUT_KINDS,
        "property": PROPERTIES,
        "figure": METRICS,
        "scalar": SCALARS,
        "position": POSITIONS,
        "coordinate": tuple(dict.fromkeys(name for axes in AXES.values() for name in axes)),
    }
