"""What a word can stand for, and how things of each kind are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnspec.ir.parameters import Parameter
from attnspec.ir.program import (
    Compound,
    InputRef,
    Leaf,
    Mechanism,
    Term,
    TokenCompound,
    Tokens,
    TokenTerm,
)
from attnspec.ir.scalars import PAIR, SCORE, TRUTHS, Apply, Scalar, Symbol

SCALARS = ("n", "heads", "layers", "head", "layer")
"""The scalars that are available everywhere."""

POSITIONS = ("q", "k")


def _counts(doc: str, least: int = 0) -> Parameter:
    return Parameter("integer", doc, least=least, positional=True)


TOKEN_SETS: dict[str, dict[str, Parameter]] = {
    "first": {"count": _counts("how many positions at the start")},
    "last": {"count": _counts("how many positions at the end")},
    "every": {
        "step": _counts("distance from one position, layer or head to the next", 1),
        "offset": _counts("the first one, 0 if not given"),
    },
    "positions": {},
}
GRAPH_FUNCTIONS = ("transpose", "shift")
SCORES: dict[str, dict[str, Parameter]] = {
    "softcap": {"cap": Parameter("real", "the limit that no score exceeds", above=0)},
    "alibi": {"slopes": Parameter("real", "slope of a head, by default that of the ALiBi paper")},
    "bias": {
        "buckets": Parameter("integer", "numbers of a head's table", least=4, most=4096),
        "max_distance": Parameter("integer", "from where distances are alike", 2, 2**31 - 1),
    },
}
SCORE_DEFAULTS: dict[str, Scalar | tuple[float, ...]] = {
    "slopes": (),
    "buckets": 32,
    "max_distance": 128,
}
"""What stands for an argument of a change of scores that is left out."""

SELECTORS = ("even", "odd", "all")
"""The words that choose layers or heads."""

NORMALIZERS = ("softmax", "relu", "sigmoid", "softmax1")
INPUTS: dict[str, tuple[str, dict[str, Parameter]]] = {
    "tokens": (
        "marked tokens, bool [B, n]: `columns(x)` for keys, `rows(x)` for queries, or `global(x)`",
        {"at_most": Parameter("integer", "how many tokens of a sample it marks at most", least=0)},
    ),
    "ids": (
        "labels, integers [B, n]: `same(x)` for equal labels, or `x(q)` or `x(k)` in `where(…)`",
        {},
    ),
    "length": (
        "number of positions, integers [B]: `prefix(x)`, or `abs(q - k) <= x` in `where(…)`",
        {},
    ),
    "numbers": (
        "a number of each position, integers or reals [B, n]: `x(q)` or `x(k)` in `where(…)`",
        {},
    ),
    "choices": (
        "the blocks of keys that a query reads, integers [B, H, n_q, c], -1 for none: `chosen(x)`",
        {"size": Parameter("integer", "keys of a block, 1 if not given", least=1)},
    ),
    "scores": (
        "what blocks of keys are chosen by, reals [B, H, query blocks, key blocks]: `topk(score ="
        " x)`",
        {"size": Parameter("integer", "keys of a block, 1 if not given", least=1)},
    ),
    "buckets": ("the hash of each position, integers [B, H, rounds, n]: `lsh(x)`", {}),
    "pairs": ("a number of each pair, reals [B, H or 1, n_q, n]: `x(q, k)` in `score`", {}),
}
"""What an input of each kind says, with its type, axes and readers, and the arguments of a kind."""
INPUT_KINDS = tuple(INPUTS)
METRICS = tuple(
    "edges degree density diameter path_length depth spectral_gap flops bytes order".split()
)
PROPERTIES = ("causal", "rows_nonempty", "stable", "symmetric")

RESERVED = frozenset({*SCALARS, *POSITIONS, "true", "false", "and", "or", "not", "in", "subset"})
"""Words that cannot name a parameter, a local name, an input or a graph."""


@dataclass(frozen=True)
class Hybrid:
    """`GRAPH + MECHANISM`."""

    graph: Term
    mechanism: Mechanism


@dataclass(frozen=True)
class Numbers:
    """`[8, 16, 32]`: a list, of which an index takes one number."""

    items: tuple[Scalar, ...]


Value: TypeAlias = "Scalar | Numbers | TokenTerm | Term | Mechanism | Hybrid"
"""What a name or an expression stands for."""

Kind: TypeAlias = Literal["scalar", "list", "tokens", "input", "graph", "mechanism", "hybrid"]

ARTICLES: dict[Kind, str] = {
    "scalar": "a number",
    "list": "a list",
    "tokens": "a token set",
    "input": "an input",
    "graph": "a graph",
    "mechanism": "a mechanism",
    "hybrid": "a graph with a mechanism",
}


def kind_of(value: Value) -> Kind:
    """What kind of thing a value is."""
    match value:
        case Tokens() | TokenCompound():
            return "tokens"
        case InputRef():
            return "input"
        case Leaf() | Compound():
            return "graph"
        case Mechanism():
            return "mechanism"
        case Hybrid():
            return "hybrid"
        case Numbers():
            return "list"
        case _:
            return "scalar"


ScalarType: TypeAlias = Literal["integer", "real", "boolean"]

_COUNTS = frozenset("+ * min max // % isqrt floor ceil abs item".split())


def type_of(scalar: Scalar) -> ScalarType:
    """The static type of a scalar."""
    match scalar:
        case bool():
            return "boolean"
        case Symbol(name) if name == SCORE or name.endswith(PAIR):
            return "real"
        case int() | Symbol():
            return "integer"
        case float():
            return "real"
        case Apply(op, args):
            types = [type_of(arg) for arg in args]
            if op in TRUTHS:
                return "boolean"
            if op in ("isqrt", "ceil", "floor"):
                return "integer"
            if op in ("/", "sqrt", "log2", "tanh", "exp", "log"):
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
            return op in _COUNTS and all(isinstance(a, int) or _grows(a) for a in args)
        case _:
            return isinstance(exponent, int) and exponent >= 0
