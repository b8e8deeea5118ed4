"""How fast the edges of a graph grow with n, from how it is written.

Growth is n**a log(n)**b, written (a, b). Sizes that depend on n have a growth, and each pattern
turns those of its arguments into one of its edges. Of a term a lower and an upper growth are
known; where they are equal the order is derived, not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from attnspec.ir import Attend, Compound, InputRef, Leaf, Term, TokenCompound, TokenTerm
from attnspec.proofs import is_symmetric
from attnspec.scalars import Apply, Scalar, Symbol

Growth: TypeAlias = "tuple[Fraction, Fraction]"
"""The exponents of n and of log n."""

CONSTANT: Growth = (Fraction(0), Fraction(0))
LINEAR: Growth = (Fraction(1), Fraction(0))
QUADRATIC: Growth = (Fraction(2), Fraction(0))


@dataclass(frozen=True)
class Range:
    """A growth that is at least `low` and at most `high`."""

    low: Growth
    high: Growth


def attend_growth(attend: Attend, causal: bool) -> Range:
    """The growth of what one head computes: its edges, and the operations of its mechanism."""
    parts = []
    if attend.graph is not None:
        parts.append(causal_growth_of(attend.graph) if causal else growth_of(attend.graph))
    if attend.mechanism is not None:
        parts.append(_exactly(_MECHANISMS[attend.mechanism.name]))
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
    found = growth_of(term)
    if isinstance(term, Compound) and term.op == "|":
        parts = [causal_growth_of(child) for child in term.terms]
        return Range(max(part.low for part in parts), max(part.high for part in parts))
    if is_symmetric(term) or (isinstance(term, Leaf) and _looks_back(term)):
        # half of the pairs at least
        return found
    return Range(CONSTANT, found.high)


def _looks_back(leaf: Leaf) -> bool:
    """Whether a constant part of a pattern's pairs has k <= q."""
    given = dict(leaf.arguments)
    if leaf.pattern in ("window", "block"):
        before, after = (size_growth(given.get(name, 0)) for name in ("before", "after"))  # type: ignore[arg-type]
        return (before is not None and before == after) or given.get("after") == 0
    return leaf.pattern in ("causal", "fixed", "summary", "random")


def _uniform(term: Term) -> bool:
    """Whether a shift by a constant leaves the growth as it is: pairs stand all along the rows."""
    return isinstance(term, Leaf) and term.pattern in (
        "self full causal window dilated residue strided block fixed summary".split()
    )


# --- patterns -------------------------------------------------------------------------------------


def _leaf(leaf: Leaf) -> Range:
    given = dict(leaf.arguments)

    def size(name: str, default: Scalar = 0) -> Growth | None:
        value = given.get(name, default)
        return size_growth(value) if _is_scalar(value) else None  # type: ignore[arg-type]

    if leaf.pattern == "cluster" and "count" not in given:
        return _exactly((Fraction(3, 2), Fraction(0)))
    if leaf.pattern == "prefix" and isinstance(given.get("length"), InputRef):
        return Range(CONSTANT, QUADRATIC)
    edges = _EDGES.get(leaf.pattern)
    if leaf.pattern in ("global", "columns", "rows"):
        count = _tokens(given["tokens"])  # type: ignore[arg-type]
        return Range(LINEAR, QUADRATIC) if count is None else _exactly(_times(LINEAR, count))
    found = None if edges is None else edges(size)
    return Range(CONSTANT, QUADRATIC) if found is None else _exactly(found)


def _exactly(growth: Growth) -> Range:
    growth = min(growth, QUADRATIC)
    return Range(growth, growth)


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float | Symbol | Apply)


Size: TypeAlias = "Callable[..., Growth | None]"


def _keys(*names: str) -> Callable[[Size], Growth | None]:
    """As many keys for each query as the largest of the sizes says."""

    def edges(size: Size) -> Growth | None:
        found = [size(name) for name in names]
        known = [growth for growth in found if growth is not None]
        return _times(LINEAR, max(known)) if len(known) == len(found) else None

    return edges


def _steps(reach: str, step: str) -> Callable[[Size], Growth | None]:
    def edges(size: Size) -> Growth | None:
        far, gap = size(reach), size(step)
        if far is None or gap is None:
            return None
        return _times(LINEAR, max(_over(min(far, LINEAR), gap), CONSTANT))

    return edges


def _residue(size: Size) -> Growth | None:
    step = size("step")
    return None if step is None else max(_over(QUADRATIC, step), LINEAR)


def _strided(size: Size) -> Growth | None:
    step = size("stride")
    return None if step is None else max(_over(QUADRATIC, step), _times(LINEAR, step))


def _summary(size: Size) -> Growth | None:
    step, cells = size("stride"), size("cells", 1)
    if step is None or cells is None or step > LINEAR:
        return None
    return _times(LINEAR, _times(_over(LINEAR, step), min(cells, step)))


def _fixed(size: Size) -> Growth | None:
    columns, step = _summary(size), size("stride")
    return None if columns is None or step is None else max(columns, _times(LINEAR, step))


def _block(size: Size) -> Growth | None:
    length, before, after = size("size"), size("before"), size("after")
    if length is None or before is None or after is None:
        return None
    return _times(LINEAR, _times(length, max(before, after)))


def _cluster(size: Size) -> Growth | None:
    count = size("count")
    return None if count is None else max(_over(QUADRATIC, count), LINEAR)


def _random_blocks(size: Size) -> Growth | None:
    length, blocks = size("size"), size("blocks")
    return None if length is None or blocks is None else _times(LINEAR, _times(length, blocks))


_EDGES: dict[str, Callable[[Size], Growth | None]] = {
    "full": lambda size: QUADRATIC,
    "causal": lambda size: QUADRATIC,
    "self": lambda size: LINEAR,
    "powers": lambda size: (Fraction(1), Fraction(1)) if size("base") == CONSTANT else None,
    "expander": _keys("degree"),
    "window": _keys("radius", "before", "after"),
    "random": _keys("keys"),
    "prefix": _keys("length"),
    "dilated": _steps("radius", "step"),
    "residue": _residue,
    "strided": _strided,
    "summary": _summary,
    "fixed": _fixed,
    "block": _block,
    "random_blocks": _random_blocks,
    # decided by the data: what is looked at, sorting included
    "lsh": lambda size: _times((Fraction(1), Fraction(1)), size("chunk", 64) or CONSTANT),
    "cluster": _cluster,
    "sinkhorn": _keys("size"),
    "topk": _random_blocks,
}


def _tokens(term: TokenTerm) -> Growth | None:
    """The growth of the number of tokens in a set."""
    if isinstance(term, InputRef):
        return None
    if isinstance(term, TokenCompound):
        parts = [_tokens(part) for part in term.terms]
        known = [part for part in parts if part is not None]
        return max(known) if term.op == "|" and len(known) == len(parts) else None
    match term.kind:
        case "first" | "last":
            return size_growth(term.values[0])
        case "every":
            step = size_growth(term.values[0])
            return None if step is None else max(_over(LINEAR, step), CONSTANT)
        case _:
            return CONSTANT


# --- sizes ----------------------------------------------------------------------------------------


def size_growth(scalar: Scalar) -> Growth | None:
    """The growth of a size that is at least a constant; None where it is not known."""
    match scalar:
        case Symbol("n"):
            return LINEAR
        case Symbol() | bool():
            return CONSTANT
        case Apply(op, args):
            return _applied(op, args)
        case _:
            return CONSTANT


def _applied(op: str, args: tuple[Scalar, ...]) -> Growth | None:
    if op == "**":
        base = size_growth(args[0])
        if base is None or isinstance(args[1], Symbol | Apply):
            return None
        power = Fraction(args[1]).limit_denominator(1000)
        return base[0] * power, base[1] * power
    found = [size_growth(arg) for arg in args]
    known = [growth for growth in found if growth is not None]
    if len(known) < len(found):
        return None
    match op:
        case "+" | "max":
            return max(known)
        case "min":
            return min(known)
        case "*":
            return _times(*known)
        case "-":
            # of two sizes that grow alike nothing may be left
            return known[0] if known[0] > known[1] or known == [CONSTANT, CONSTANT] else None
        case "/" | "//":
            return max(_over(*known), CONSTANT) if known[0] >= known[1] else CONSTANT
        case "isqrt" | "sqrt":
            return known[0][0] / 2, known[0][1] / 2
        case "log2":
            return (Fraction(0), Fraction(1)) if known[0][0] else None
        case "ceil" | "floor" | "abs":
            return known[0]
        case _:
            return None


def growth_text(growth: Growth) -> str:
    """A growth as it is written in the language: n**1.5, n * log2(n)."""
    power, logs = growth
    parts = []
    if power:
        parts.append("n" if power == 1 else f"n**{float(power):g}")
    if logs:
        parts.append("log2(n)" if logs == 1 else f"log2(n)**{float(logs):g}")
    return " * ".join(parts) or "a constant"


def _times(first: Growth, second: Growth) -> Growth:
    return first[0] + second[0], first[1] + second[1]


def _over(first: Growth, second: Growth) -> Growth:
    return first[0] - second[0], first[1] - second[1]
