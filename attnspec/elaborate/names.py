"""What a word can stand for, and the environment that says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from attnspec.ir.program import InputRef, Mechanism, Term, TokenTerm
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.text.source import Span

Kind: TypeAlias = Literal["scalar", "tokens", "input", "graph", "mechanism", "hybrid", "broken"]

ARTICLES: dict[str, str] = {
    "scalar": "a number",
    "tokens": "a token set",
    "input": "an input",
    "graph": "a graph",
    "mechanism": "a mechanism",
    "hybrid": "a graph with a mechanism",
}

SCALARS = ("n", "heads", "layers", "head", "layer")
"""The scalars that are available everywhere."""

POSITIONS = ("q", "k")
COORDINATES: dict[int, tuple[str, ...]] = {2: ("row", "col"), 3: ("time", "row", "col")}

TOKEN_SETS: dict[str, tuple[str, ...]] = {
    "first": ("count",),
    "last": ("count",),
    "every": ("step", "offset"),
    "positions": (),
}
GRAPH_FUNCTIONS = ("transpose", "shift")
SCORES: dict[str, dict[str, Scalar | None]] = {
    "softcap": {"cap": None},
    "alibi": {},
    "bias": {"buckets": 32, "max_distance": 128},
}
NORMALIZERS = ("softmax", "relu", "sigmoid", "softmax1")
INPUT_KINDS = ("tokens", "ids", "length")
METRICS = (
    "edges",
    "degree",
    "density",
    "diameter",
    "path_length",
    "depth",
    "spectral_gap",
    "flops",
    "bytes",
    "order",
)
PROPERTIES = ("causal", "rows_nonempty", "stable", "symmetric")

RESERVED = frozenset({*SCALARS, *POSITIONS, "true", "false", "and", "or", "not", "in", "subset"})
"""Words that cannot name a parameter, a local name, an input or a graph."""


@dataclass(frozen=True)
class Bound:
    """What a name or an expression stands for.

    A hybrid is a pair (graph, mechanism). A broken name has a definition that failed: whoever uses
    it fails without another message.
    """

    kind: Kind
    value: Scalar | TokenTerm | InputRef | Term | Mechanism | tuple[Term, Mechanism]
    span: Span | None = None


BROKEN = Bound("broken", 0)


@dataclass
class Environment:
    """Names in scope. `used` collects the names that were looked up, for the lints; `numbers` says
    that nothing but numbers and truth values is meant here."""

    names: dict[str, Bound] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    predicate: bool = False
    numbers: bool = False
    grid_rank: int | None = None

    def child(self) -> Environment:
        """A scope inside this one: sees the same names, adds its own, shares what was used."""
        return Environment(
            dict(self.names), self.used, self.predicate, self.numbers, self.grid_rank
        )


ScalarType: TypeAlias = Literal["integer", "real", "boolean"]


def type_of(scalar: Scalar) -> ScalarType:
    """The static type of a scalar."""
    match scalar:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "real"
        case Symbol():
            return "integer"
        case Apply(op, args):
            types = [type_of(arg) for arg in args]
            if op in ("==", "!=", "<", "<=", ">", ">=", "and", "or", "not", "within", "one_of"):
                return "boolean"
            if op in ("isqrt", "ceil", "floor"):
                return "integer"
            if op in ("/", "sqrt", "log2"):
                return "real"
            if op == "**" and not (isinstance(args[1], int) and args[1] >= 0):
                # an exponent that is not a constant is taken for a count, as in 2 ** head
                return "integer" if set(types) == {"integer"} and _grows(args[1]) else "real"
            return "real" if "real" in types else "integer"


def _grows(exponent: Scalar) -> bool:
    """Whether an exponent is a symbol or sum of such: never negative where the language is used."""
    match exponent:
        case Symbol():
            return True
        case Apply(op, args):
            return op in (
                "+",
                "*",
                "min",
                "max",
                "//",
                "%",
                "isqrt",
                "floor",
                "ceil",
                "abs",
            ) and all(isinstance(a, int) or _grows(a) for a in args)
        case _:
            return isinstance(exponent, int) and exponent >= 0
