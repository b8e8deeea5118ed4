"""How fast the edges of a graph grow with n, from how it is written.

Growth is n**a log(n)**b, written (a, b). Sizes that depend on n have a growth, and each pattern
turns those of its arguments into one of its edges. Of a term a lower and an upper growth are
known; where they are equal the order is derived, not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

from attnspec.analysis.growth.size_growth import (
    CONSTANT,
    LINEAR,
    QUADRATIC,
    Growth,
    Range,
    exactly,
    over,
    size_growth,
    times,
)
from attnspec.analysis.growth.where_growth import predicate_growth
from attnspec.graphs.forms.prelude import predicate_of_leaf
from attnspec.graphs.forms.properties import is_symmetric
from attnspec.ir.program import Attend, Compound, Leaf, Term
from attnspec.ir.scalars import Apply, Scalar, Symbol

_CAUSAL = Apply("<=", (Symbol("k"), Symbol("q")))


def attend_growth(attend: Attend, causal: bool) -> Range:
    """The growth of what one head computes: its edges, and the operations of its mechanism."""
    parts = []
    if attend.graph is not None:
        parts.append(causal_growth_of(attend.graph) if causal else growth_of(attend.graph))
    if attend.mechanism is not None:
        parts.append(exactly(_MECHANISMS[attend.mechanism.name]))
    return Range(max(part.low for part in parts), max(part.high for part in parts))


_MECHANISMS: dict[str, Growth] = {
    **dict.fromkeys(
        "linear favor rfa taylor efficient rbf linformer nystrom mixer".split(),
        LINEAR,
    ),
    "fourier": (Fraction(1), Fraction(1)),
    **dict.fromkeys("synthesizer gmlp".split(), QUADRATIC),
}
"""The growth of each mechanism's operations, its sizes being constants."""


def growth_of(term: Term) -> Range:
    """The growth of the edges of a term."""
    if isinstance(term, Leaf):
        return _leaf(term)
    parts = [growth_of(child) for child in term.terms]
    match term.op:
        case "|":
            return Range(max(part.low for part in parts), max(part.high for part in parts))
        case "&":
            return Range(CONSTANT, min(part.high for part in parts))
        case "-":
            # what grows more slowly than the first cannot take its growth away
            rest = max(part.high for part in parts[1:])
            return Range(parts[0].low if rest < parts[0].low else CONSTANT, parts[0].high)
        case "~":
            return Range(QUADRATIC if parts[0].high < QUADRATIC else CONSTANT, QUADRATIC)
        case "shift":
            kept = parts[0].low if isinstance(term.by, int) and _uniform(term.terms[0]) else None
            return Range(CONSTANT if kept is None else kept, parts[0].high)
        case _:
            return parts[0]


def causal_growth_of(term: Term) -> Range:
    """The growth of the edges with k <= q of a term."""
    predicate = predicate_of_leaf(term) if isinstance(term, Leaf) else None
    if predicate is not None and not is_symmetric(term):
        return predicate_growth(Apply("and", (predicate, _CAUSAL)))
    found = growth_of(term)
    if isinstance(term, Compound) and term.op == "|":
        parts = [causal_growth_of(child) for child in term.terms]
        return Range(max(part.low for part in parts), max(part.high for part in parts))
    drawn = isinstance(term, Leaf) and term.pattern in ("random", "random_blocks")
    if drawn or is_symmetric(term):
        # half of the pairs at least
        return found
    return Range(CONSTANT, found.high)


def _uniform(term: Term) -> bool:
    """Whether a shift by a constant leaves the growth as it is: pairs stand all along the rows."""
    return isinstance(term, Leaf) and term.pattern in (
        "self full causal window dilated residue strided block fixed summary".split()
    )


# --- patterns -------------------------------------------------------------------------------------


def _leaf(leaf: Leaf) -> Range:
    predicate = predicate_of_leaf(leaf)
    if predicate is not None:
        return predicate_growth(predicate)
    given = dict(leaf.arguments)

    def size(name: str, default: Scalar = 0) -> Growth | None:
        value = given.get(name, default)
        return size_growth(value) if _is_scalar(value) else None  # type: ignore[arg-type]

    if leaf.pattern == "cluster" and "count" not in given:
        return exactly((Fraction(3, 2), Fraction(0)))
    if leaf.pattern in ("global", "columns", "rows"):
        return Range(LINEAR, QUADRATIC)
    edges = _EDGES.get(leaf.pattern)
    found = None if edges is None else edges(size)
    return Range(CONSTANT, QUADRATIC) if found is None else exactly(found)


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float | Symbol | Apply)


Size: TypeAlias = "Callable[..., Growth | None]"


def _keys(*names: str) -> Callable[[Size], Growth | None]:
    """As many keys for each query as the largest of the sizes says."""

    def edges(size: Size) -> Growth | None:
        found = [size(name) for name in names]
        known = [growth for growth in found if growth is not None]
        return times(LINEAR, max(known)) if len(known) == len(found) else None

    return edges


def _cluster(size: Size) -> Growth | None:
    count = size("count")
    return None if count is None else max(over(QUADRATIC, count), LINEAR)


def _random_blocks(size: Size) -> Growth | None:
    length, blocks = size("size"), size("blocks")
    return None if length is None or blocks is None else times(LINEAR, times(length, blocks))


_EDGES: dict[str, Callable[[Size], Growth | None]] = {
    "powers": lambda size: (Fraction(1), Fraction(1)) if size("base") == CONSTANT else None,
    "expander": _keys("degree"),
    "random": _keys("keys"),
    "random_blocks": _random_blocks,
    # decided by the data: what is looked at, sorting included
    "lsh": lambda size: times((Fraction(1), Fraction(1)), size("chunk", 64) or CONSTANT),
    "cluster": _cluster,
    "sinkhorn": _keys("size"),
    "topk": _random_blocks,
}
