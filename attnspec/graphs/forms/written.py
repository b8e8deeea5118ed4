"""Terms as they are written in the language, for messages: names, parameters and imports are gone,
so that what a size reads is in sight."""

from __future__ import annotations

from dataclasses import MISSING, fields

from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Compound, InputRef, Leaf, Mechanism, Term, TokenCompound, Tokens
from attnspec.ir.scalars import FUNCTIONS, SCORE_FUNCTIONS, Apply, Scalar, Symbol

_LEVELS = (
    ("or",),
    ("and",),
    ("not",),
    ("==", "!=", "<", "<=", ">", ">=", "within", "one_of"),
    ("|",),
    ("&",),
    ("+", "-"),
    ("*", "/", "//", "%"),
    ("neg", "~"),
    ("**",),
)
"""Operators, loosest first, as the grammar has them."""

_LEVEL = {op: level for level, ops in enumerate(_LEVELS) for op in ops}


def written_scalar(scalar: Scalar) -> str:
    """A scalar or predicate."""
    match scalar:
        case bool():
            return str(scalar).lower()
        case Symbol(name):
            # a length has no position that it is read at
            return name.removesuffix("()")
        case Apply(op, args) if op in FUNCTIONS or op in SCORE_FUNCTIONS:
            return f"{op}({', '.join(map(written_scalar, args))})"
        case Apply("within", (place, first, last)):
            return f"{_part(place, 'within')} in {_part(first, '+')}..{_part(last, '+')}"
        case Apply("one_of", (place, *members)):
            return f"{_part(place, 'one_of')} in {{{', '.join(map(written_scalar, members))}}}"
        case Apply("item", (index, *items)):
            return f"[{', '.join(map(written_scalar, items))}][{written_scalar(index)}]"
        case Apply("neg" | "not" as op, (only,)):
            return ("-" if op == "neg" else "not ") + _part(only, op)
        case Apply(op, (first, *others)):
            # operators group from the left, powers from the right
            parts = [_part(first, op, op == "**"), *(_part(x, op, op != "**") for x in others)]
            return f" {op} ".join(parts)
        case _:
            return str(scalar)


def _part(scalar: Scalar, around: str, tight: bool = False) -> str:
    """An operand, in brackets where the operator around it would take it apart; `tight` also at
    the same level."""
    text = written_scalar(scalar)
    level = _LEVEL.get(scalar.op, 99) if isinstance(scalar, Apply) else 99
    if isinstance(scalar, int | float) and not isinstance(scalar, bool) and scalar < 0:
        level = _LEVEL["neg"]
    return f"({text})" if level < _LEVEL[around] + tight else text


def written_tokens(term: object) -> str:
    """A token set."""
    match term:
        case InputRef(name):
            return name
        case TokenCompound("~", (only,)):
            inner = written_tokens(only)
            return f"~({inner})" if isinstance(only, TokenCompound) else f"~{inner}"
        case TokenCompound(op, terms):
            parts = [
                f"({written_tokens(part)})"
                if isinstance(part, TokenCompound)
                else written_tokens(part)
                for part in terms
            ]
            return f" {op} ".join(parts)
        case Tokens("positions", values):
            ranges = [
                written_scalar(low)
                if low == high
                else f"{written_scalar(low)}..{written_scalar(high)}"
                for low, high in zip(values[::2], values[1::2], strict=True)
            ]
            return f"positions({', '.join(ranges)})"
        case Tokens("every", (step, 0)):
            return f"every({written_scalar(step)})"
        case Tokens(kind, values):
            return f"{kind}({', '.join(map(written_scalar, values))})"
        case _:
            return str(term)


def written_leaf(leaf: Leaf) -> str:
    """A pattern with the arguments that are not its defaults."""
    arguments, parts = dict(leaf.arguments), []
    for entry in fields(BY_NAME[leaf.pattern]):  # type: ignore[arg-type]
        parameter: Parameter = entry.metadata["parameter"]
        value = arguments.get(entry.name)
        if parameter.kind == "inputs":
            # the predicate beside them has their names
            continue
        if value is None or (entry.default is not MISSING and value == entry.default):
            continue
        text = _argument(value)
        parts.append(text if parameter.positional else f"{entry.name} = {text}")
    word = BY_NAME[leaf.pattern].word or leaf.pattern
    return f"{word}({', '.join(parts)})" if parts else word


def _argument(value: object) -> str:
    if isinstance(value, Tokens | TokenCompound | InputRef):
        return written_tokens(value)
    if isinstance(value, Leaf | Compound):
        return written(value)
    if isinstance(value, tuple):
        return ", ".join(map(written_scalar, value))
    return value if isinstance(value, str) else written_scalar(value)  # type: ignore[arg-type]


def written_mechanism(mechanism: Mechanism) -> str:
    """A mechanism with those of its arguments that are not plain numbers or options."""
    shown = [
        f"{name} = {written_scalar(value)}"
        for name, value in mechanism.arguments
        if isinstance(value, Symbol | Apply)
    ]
    return f"{mechanism.name}({', '.join(shown)})"


def written(term: Term) -> str:
    """A graph."""
    if isinstance(term, Leaf):
        return written_leaf(term)
    if term.op in ("transpose", "shift"):
        by = "" if term.by is None else f", by = {written_scalar(term.by)}"
        return f"{term.op}({written(term.terms[0])}{by})"
    level = _LEVEL[term.op]
    parts = []
    for index, part in enumerate(term.terms):
        inner = _LEVEL.get(part.op, 99) if isinstance(part, Compound) else 99
        loose = inner < level or (inner == level and (index > 0 or term.op == "~"))
        parts.append(f"({written(part)})" if loose else written(part))
    return f"~{parts[0]}" if term.op == "~" else f" {term.op} ".join(parts)
