"""A mask function of torch, read by calling it once: with tensors that record what is done to them.

A position stands for any number. What a function makes of it is a scalar of the language, what it
compares a predicate. A number that depends on a condition (`torch.where`, a table of heads) is kept
as cases until it is compared. A captured tensor read at a query or a key is a run-time input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from attnspec.ir.intervals import reach_of
from attnspec.ir.program import Compound, InputRef, Leaf, Term
from attnspec.ir.scalars import Apply, Scalar, Symbol
from attnspec.text.diagnostics import AttnSpecError

MOST_CASES = 64
"""Values that a number may have, by conditions, at most."""

Said: TypeAlias = "Scalar | Term | Read | Cases"
"""What a traced tensor is: a number or a predicate, a graph, what an input holds, or cases."""


class UntracedError(AttnSpecError):
    """A mask function does what no spec says; the message has the reason."""


@dataclass(frozen=True)
class Read:
    """What a captured tensor holds at the query or the key; `kind` is that of the input which its
    equal entries make it, `numbers` of reals."""

    name: str
    side: str
    kind: str = "ids"

    @property
    def symbol(self) -> Symbol:
        """The number as a predicate has it."""
        return Symbol(f"{self.name}({self.side})")


@dataclass(frozen=True)
class Cases:
    """A number by conditions, exactly one of which holds for a pair."""

    each: tuple[tuple[Scalar, Scalar], ...]


@dataclass
class Captured:
    """The tensors that a function reads at positions, by the names of the inputs they become, and
    how many heads the tables have that it reads at its head, None without one."""

    named: Callable[[torch.Tensor], str]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    heads: int | None = None

    def read(self, tensor: torch.Tensor, side: str) -> Read:
        name = self.named(tensor)
        if self.tensors.setdefault(name, tensor) is not tensor:
            name = f"{name}_{len(self.tensors)}"
            self.tensors[name] = tensor
        return Read(name, side, "numbers" if tensor.dtype.is_floating_point else "ids")


class Traced(torch.Tensor):
    """A tensor without numbers that records what is done to it."""

    said: Said

    @staticmethod
    def __new__(cls, said: Said, dtype: torch.dtype = torch.int64) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(cls, (), dtype=dtype)
        made.said = said
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        called = func.overloadpacket.__name__
        name = called.removesuffix("_")
        if name not in _OPERATIONS:
            raise UntracedError(_REFUSED.get(name, f"it computes `torch.{name}`"))
        found = _OPERATIONS[name](*args, **(kwargs or {}))
        if called == name or called.startswith("__"):
            return found
        changed: Traced = args[0]
        changed.said = found.said
        return changed


class Indexing(TorchFunctionMode):
    """Records what captured tensors are read at: an index that is traced."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if any(isinstance(part, Traced) for part in parts):
                return _read(self.captured, tensor, parts)
        return func(*args, **(kwargs or {}))


def trace(mask_mod: Callable[..., Any], captured: Captured) -> Said:
    """The predicate, or the graph, that a function of (b, h, q, k) computes.

    Raises UntracedError with what in it cannot be said.
    """
    b, h, q, k = (Traced(Symbol(name)) for name in ("b", "head", "q", "k"))
    with Indexing(captured):
        found = mask_mod(b, h, q, k)
    if isinstance(found, bool):
        return found
    if not isinstance(found, torch.Tensor) or found.dtype != torch.bool or found.dim():
        tensor = isinstance(found, torch.Tensor)
        what = f"{found.dtype} {list(found.shape)}" if tensor else type(found).__name__
        score = tensor and found.dtype.is_floating_point and not found.dim()
        hint = "; of numbers that are added to scores, return `… == 0`" if score else ""
        raise UntracedError(f"it must return one boolean for a pair, and returns {what}{hint}")
    return _said(found)


def graph(said: Said) -> Term:
    """A predicate as a graph; a graph as it is."""
    if isinstance(said, Leaf | Compound):
        return said
    if isinstance(said, Read):
        pattern = "rows" if said.side == "q" else "columns"
        return Leaf(pattern, (("tokens", InputRef(said.name, "tokens")),))
    if isinstance(said, Cases):
        raise UntracedError("a number stands where a condition is needed")
    return Leaf("where", (("predicate", said),))


# --- operations ----------------------------------------------------------------------------------


def _said(value: Any) -> Said:
    """What an operand is: traced, a number, or a tensor of one number."""
    if isinstance(value, Traced):
        return value.said
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UntracedError(
                f"a captured tensor {list(value.shape)} is computed with as a whole; read it at"
                " [q], [k] or [h]"
            )
        number: Scalar = value.item()
        return number
    if isinstance(value, bool | int | float):
        return value
    raise UntracedError(f"it computes with {type(value).__name__}")


def _kind(*values: Any) -> torch.dtype:
    """The type in which torch computes with one number or two, traced or not."""
    plain = [torch.empty((), dtype=x.dtype) if isinstance(x, Traced) else x for x in values]
    return torch.result_type(plain[0], plain[-1])


def _rounded_to(value: Any, kind: torch.dtype) -> Any:
    """A real constant as torch takes it beside numbers of a type."""
    if isinstance(value, float) and kind.is_floating_point:
        return torch.tensor(value, dtype=kind).item()
    return value


def _require_exact(said: Said, kind: torch.dtype, computed: bool = True) -> None:
    """Raise where torch may round a number of a type, or wrap it, and a spec does not; a spec
    computes with reals as float64 does."""
    if isinstance(said, bool | Read | Leaf | Compound) or kind in (torch.bool, torch.int64):
        return
    for _, value in said.each if isinstance(said, Cases) else ((True, said),):
        if not isinstance(value, Symbol | Apply):
            continue
        power = isinstance(value, Apply) and value.op == "**"
        if kind == torch.float64 and not (computed and power):
            continue
        places = _places(value) if kind.is_floating_point else 0
        info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
        most = 2 / info.eps if isinstance(info, torch.finfo) else info.max
        if places is None or reach_of(value, _RANGES) * 2**places > most:
            raise UntracedError(
                f"it computes with {kind}, which rounds or wraps where specs do not, at lengths up"
                f" to {CHECKED:,}: keep to whole numbers of 64 bits, with `*` in place of `/`, or"
                " use `.double()`"
            )


CHECKED = 65_536
"""The length up to which numbers that are computed in short types must be exact."""

_RANGES = {name: (np.asarray(0), np.asarray(CHECKED)) for name in ("q", "k", "b", "head")}


def _places(scalar: Scalar) -> int | None:
    """How many binary places behind the point a number has at most; None where that has no end."""
    match scalar:
        case float():
            return next((at for at in range(24) if (scalar * 2**at).is_integer()), None)
        case Apply("floor" | "ceil" | "//"):
            return 0
        case Apply(op, args):
            parts = [_places(arg) for arg in args]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            match op, args[-1]:
                case "/", int() | float() as by:
                    fraction, exponent = math.frexp(by)
                    return known[0] + max(0, exponent - 1) if abs(fraction) == 0.5 else None
                case "/", _:
                    return None
                case "**", int() as times:
                    return known[0] * times
                case "*", _:
                    return sum(known)
                case _:
                    return max(known)
        case _:
            return 0


def _numeric(op: str, *args: Any) -> Traced:
    """An operation on numbers, in each of their cases."""
    kind = _kind(*args)
    if kind == torch.bool and op not in _CONTRARY:
        if op not in _OF_CONDITIONS:
            raise UntracedError("it computes with conditions as with numbers; use torch.where")
        return _joined(_OF_CONDITIONS[op], *args)
    if op == "/" and not kind.is_floating_point:
        kind = torch.get_default_dtype()
    found: list[tuple[Scalar, tuple[Scalar, ...]]] = [(True, ())]
    for arg in args:
        said = _cases(_rounded_to(arg, kind))
        if op in _CONTRARY:
            _require_exact(said, kind, computed=False)
        cases = said.each if isinstance(said, Cases) else ((True, said),)
        found = [
            (both, (*values, value))
            for one, values in found
            for other, value in cases
            if (both := _both(one, other)) is not False
        ]
        if len(found) > MOST_CASES:
            raise UntracedError(f"a number has more than {MOST_CASES} cases")
    each = tuple((condition, _applied(op, values)) for condition, values in found)
    result: Said = each[0][1] if len(each) == 1 else Cases(each)
    if op not in _CONTRARY:
        _require_exact(result, kind)
    return Traced(result, kind)


def _cases(value: Any) -> Scalar | Cases:
    """A number, traced or not, that is no entry of an input; a condition, about none, is 1 or 0."""
    said = _said(value)
    if isinstance(said, Read):
        raise UntracedError(
            f"numbers of the captured tensor `{said.name}` are computed with; only comparisons"
            f" of them are recorded, as {said.name}[q] == {said.name}[k]: write the spec with"
            " an input of kind `numbers`"
        )
    if isinstance(said, Leaf | Compound):
        raise UntracedError("a condition about an input is computed with as a number")
    if isinstance(said, bool):
        return int(said)
    return Cases(((said, 1), (_not(value).said, 0))) if _is_condition(value) else said  # type: ignore[arg-type]


def _applied(op: str, values: tuple[Scalar, ...]) -> Scalar:
    """An operation, done at once where it changes nothing."""
    if op in ("+", "-") and values[1] == 0:
        return values[0]
    if op in ("*", "//") and values[1] == 1:
        return values[0]
    if op in (">=", "<") and isinstance(values[0], Symbol) and values[1] == 0:
        # no position, and no head, is below 0
        return op == ">="
    if op == "-" and isinstance(values[1], Apply) and values[1].op == "neg":
        return Apply("+", (values[0], values[1].args[0]))
    return Apply(op, values)


def _compared(op: str, first: Any, second: Any) -> Traced:
    kind = _kind(first, second)
    first, second = _rounded_to(first, kind), _rounded_to(second, kind)
    one, other = _said(first), _said(second)
    if isinstance(one, Read) or isinstance(other, Read):
        return _labels(op, one, other)
    if _is_condition(first) and _is_condition(second):
        return _conditions(op, _truth(first), _truth(second))
    cases = _numeric(op, _unsigned(op, first, other), second).said
    if not isinstance(cases, Cases):
        return Traced(cases, torch.bool)
    found = Traced(False, torch.bool)
    for condition, held in cases.each:
        found = _joined("or", found, Traced(_both(condition, held), torch.bool))
    return found


def _conditions(op: str, one: Traced, other: Traced) -> Traced:
    """Two conditions compared, of which one that holds is 1."""
    if op in ("==", "!="):
        differ = _xor(one, other)
        return differ if op == "!=" else _not(differ)
    if op in (">", ">="):
        one, other = other, one
    return _joined("and" if op in ("<", ">") else "or", _not(one), other)


def _unsigned(op: str, value: Any, other: Said) -> Any:
    """abs(x) % c as x % c where it is asked whether that is 0."""
    match value.said if isinstance(value, Traced) else None:
        case Apply("%", (Apply("abs", (inner,)), divisor)) if op in ("==", "!=") and other == 0:
            return Traced(Apply("%", (inner, divisor)))
        case _:
            return value


def _is_condition(value: Any) -> bool:
    return (value.dtype if isinstance(value, torch.Tensor) else type(value)) in (torch.bool, bool)


def _labels(op: str, one: Said, other: Said) -> Traced:
    """An entry of a captured tensor compared, with another one or with a number."""
    reads = [x for x in (one, other) if isinstance(x, Read)]
    if len(reads) == 2 and op in ("==", "!=") and {x.kind for x in reads} == {"ids"}:
        first, second = reads
        if first == second:
            return Traced(op == "==", torch.bool)
        if first.name == second.name:
            same = Leaf("same", (("ids", InputRef(first.name, "ids")),))
            return Traced(same if op == "==" else Compound("~", (same,)), torch.bool)
    if any(isinstance(x, Cases | Leaf | Compound) for x in (one, other)):
        raise UntracedError(
            f"numbers of the captured tensor `{reads[0].name}` are compared with what depends on a"
            " condition; write the spec with an input of kind `numbers`"
        )
    sides = tuple(x.symbol if isinstance(x, Read) else x for x in (one, other))
    inputs = tuple(InputRef(name, "numbers") for name in sorted({x.name for x in reads}))
    predicate = Apply(op, sides)  # type: ignore[arg-type]
    return Traced(Leaf("where_inputs", (("inputs", inputs), ("predicate", predicate))), torch.bool)


def _both(one: Scalar, other: Scalar) -> Scalar:
    if one is True:
        return other
    if other is True:
        return one
    if one is False or other is False:
        return False
    return Apply("and", (one, other))


def _joined(op: str, first: Any, second: Any) -> Traced:
    """`and` or `or` of predicates, `&` or `|` where one of them is a graph."""
    for value in (first, second):
        if isinstance(value, torch.Tensor) and value.dtype != torch.bool:
            raise UntracedError("`&`, `|` and `^` of numbers, bit by bit")
    one, other = _said(first), _said(second)
    unit = op == "and"
    if isinstance(one, bool) or isinstance(other, bool):
        constant, rest = (one, other) if isinstance(one, bool) else (other, one)
        return Traced(rest if constant is unit else constant, torch.bool)
    if not any(isinstance(x, Leaf | Compound | Read) for x in (one, other)):
        chain = [
            part
            for x in (one, other)
            for part in (x.args if isinstance(x, Apply) and x.op == op else (x,))
        ]
        return Traced(Apply(op, tuple(chain)), torch.bool)  # type: ignore[arg-type]
    return Traced(Compound("&" if unit else "|", (graph(one), graph(other))), torch.bool)


def _not(value: Any) -> Traced:
    if value.dtype != torch.bool:
        raise UntracedError("`~` of a number, bit by bit")
    said = _said(value)
    if isinstance(said, bool):
        return Traced(not said, torch.bool)
    if isinstance(said, Leaf | Compound | Read):
        return Traced(Compound("~", (graph(said),)), torch.bool)
    match said:
        case Apply("not", (only,)):
            return Traced(only, torch.bool)
        case Apply(op, args) if op in _CONTRARY:
            return Traced(Apply(_CONTRARY[op], args), torch.bool)
    return Traced(Apply("not", (said,)), torch.bool)  # type: ignore[arg-type]


def _xor(first: Any, second: Any) -> Traced:
    return _joined(
        "or",
        _joined("and", first, _not(_truth(second))),
        _joined("and", _not(_truth(first)), second),
    )


def _truth(value: Any) -> Traced:
    return value if isinstance(value, Traced) else Traced(bool(_said(value)), torch.bool)


def _where(condition: Any, first: Any, second: Any) -> Traced:
    """`torch.where`: of conditions a condition, of numbers cases."""
    holds = _truth(condition)
    if _is_condition(first) and _is_condition(second):
        return _joined(
            "or", _joined("and", holds, _truth(first)), _joined("and", _not(holds), _truth(second))
        )
    said = holds.said
    if isinstance(said, Leaf | Compound | Read | Cases):
        raise UntracedError("a number depends on an input")
    cases: list[tuple[Scalar, Scalar]] = []
    otherwise: Any = _not(holds).said
    for met, value in ((said, first), (otherwise, second)):
        number = _cases(value)
        each = number.each if isinstance(number, Cases) else ((True, number),)
        cases += [(_both(met, condition), part) for condition, part in each]
    return Traced(Cases(tuple(cases)), _kind(first, second))


def _clamp(x: Any, low: Any = None, high: Any = None) -> Traced:
    found = x
    for bound, op in ((low, "max"), (high, "min")):
        if bound is not None:
            found = _numeric(op, found, bound)
    return found  # type: ignore[no-any-return]


def _divided(first: Any, second: Any, rounding_mode: str | None = None) -> Traced:
    if rounding_mode == "trunc":
        raise UntracedError("it divides towards zero; use `//`")
    return _numeric("//" if rounding_mode == "floor" else "/", first, second)


def _filled(number: float) -> Callable[..., Traced]:
    """`new_ones`, `ones_like` and their like, of a single number."""

    def filled(like: Any, size: Sequence[int] = (), *, dtype: Any = None, **rest: Any) -> Traced:
        if len(size):
            raise UntracedError(f"it makes a tensor {list(size)} for a pair")
        kind = like.dtype if dtype is None else dtype
        return Traced(bool(number) if kind == torch.bool else int(number), kind)

    return filled


def _as_type(x: Any, dtype: Any = None, **rest: Any) -> Traced:
    """A conversion: of a condition into a number cases, of a number nothing."""
    if dtype in (None, x.dtype):
        return Traced(_said(x), x.dtype)
    if dtype == torch.bool:
        return _compared("!=", x, 0)
    if x.dtype == torch.bool:
        return _where(x, 1, 0)
    if x.dtype.is_floating_point and not dtype.is_floating_point:
        raise UntracedError("it cuts a real number off; use `//`")
    _require_exact(_said(x), dtype, computed=False)
    return Traced(_said(x), dtype)


def _same(x: Any, *rest: Any, **named: Any) -> Traced:
    return Traced(_said(x), x.dtype)


def _added(op: str, first: Any, second: Any, alpha: float = 1) -> Traced:
    return _numeric(op, first, second if alpha == 1 else _numeric("*", second, alpha))


def _product(first: Any, second: Any) -> Traced:
    if _is_condition(first) and _is_condition(second):
        return _joined("and", first, second)
    return _numeric("*", first, second)


def _halved(x: Any, bits: Any) -> Traced:
    return _numeric("//", x, 2 ** int(_said(bits)))  # type: ignore[arg-type]


_OPERATIONS: dict[str, Callable[..., Traced]] = {
    "add": partial(_added, "+"),
    "sub": partial(_added, "-"),
    "rsub": lambda first, second, alpha=1: _added("-", second, first, alpha),
    "mul": _product,
    "div": _divided,
    "true_divide": _divided,
    "floor_divide": partial(_numeric, "//"),
    "remainder": partial(_numeric, "%"),
    "pow": partial(_numeric, "**"),
    "neg": partial(_numeric, "neg"),
    "abs": partial(_numeric, "abs"),
    "minimum": partial(_numeric, "min"),
    "maximum": partial(_numeric, "max"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "floor": partial(_numeric, "floor"),
    "ceil": partial(_numeric, "ceil"),
    "eq": partial(_compared, "=="),
    "ne": partial(_compared, "!="),
    "lt": partial(_compared, "<"),
    "le": partial(_compared, "<="),
    "gt": partial(_compared, ">"),
    "ge": partial(_compared, ">="),
    "bitwise_and": partial(_joined, "and"),
    "logical_and": partial(_joined, "and"),
    "__and_": partial(_joined, "and"),
    "bitwise_or": partial(_joined, "or"),
    "logical_or": partial(_joined, "or"),
    "bitwise_xor": _xor,
    "logical_xor": _xor,
    "bitwise_not": _not,
    "logical_not": _not,
    "bitwise_right_shift": _halved,
    "__rshift_": _halved,
    "where": _where,
    "new_ones": _filled(1),
    "ones_like": _filled(1),
    "new_zeros": _filled(0),
    "zeros_like": _filled(0),
    "_to_copy": _as_type,
    "clone": _same,
    "detach": _same,
    "alias": _same,
    "lift_fresh": _same,
    "view": _same,
    "squeeze": _same,
    "expand": _same,
}

_OF_CONDITIONS = {"+": "or", "max": "or", "min": "and"}
"""What operations on numbers do with two conditions."""

_CONTRARY = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}

_REFUSED = {
    "_local_scalar_dense": (
        "it decides by the value of a position, with `if`, `and`, `or`, `not` or `.item()`; write"
        " conditions with `&`, `|`, `~` and torch.where"
    ),
    "is_nonzero": "it decides by the value of a position; write conditions with `&`, `|` and `~`",
    "fmod": "it computes `torch.fmod`; `%` has the sign of the divisor, as specs have it",
}


# --- captured tensors ----------------------------------------------------------------------------


def _read(captured: Captured, tensor: Any, parts: tuple[Any, ...]) -> Traced:
    """An entry of a captured tensor, at [q], [k], [b, q], [b, k], or [h] of a short table."""
    symbols = [part.said if isinstance(part, Traced) else None for part in parts]
    names = [said.name if isinstance(said, Symbol) else "" for said in symbols]
    shape = list(tensor.shape)
    if isinstance(tensor, Traced) or len(parts) != tensor.dim():
        raise UntracedError(f"a captured tensor {shape} is read with {len(parts)} of its axes")
    if names[-1] in ("q", "k") and names[:-1] in ([], ["b"]):
        return _entry(captured, tensor, names[-1])
    if names == ["head"]:
        if len(tensor) > MOST_CASES or tensor.dtype.is_complex:
            raise UntracedError(f"a table of more than {MOST_CASES} heads is captured")
        if captured.heads not in (None, len(tensor)):
            raise UntracedError(f"tables of {captured.heads} and of {len(tensor)} heads are read")
        captured.heads, head = len(tensor), Symbol("head")
        table = [(Apply("==", (head, at)), value) for at, value in enumerate(tensor.tolist())]
        if tensor.dtype == torch.bool:
            held = tuple(condition for condition, value in table if value)
            said: Scalar = Apply("or", held) if len(held) > 1 else held[0] if held else False
            return Traced(said, torch.bool)
        return Traced(Cases(tuple(table)), tensor.dtype)
    if sorted(names[-2:]) == ["k", "q"]:
        raise UntracedError(
            f"it looks pairs up in a captured mask {shape}, which is no rule;"
            " attnspec.explain_mask(mask) looks for one"
        )
    raise UntracedError(
        f"a captured tensor of shape {shape} is read at something else than [q], [k], [b, q],"
        " [b, k] or [h]: what depends on a position stands in a tensor of its own, one number for"
        " each position, as `starts[document]` for `starts[document[k]]`, read at [k]"
    )


def _entry(captured: Captured, tensor: torch.Tensor, side: str) -> Traced:
    if tensor.dtype.is_complex:
        raise UntracedError(f"a captured tensor of {tensor.dtype} is read at positions")
    real = tensor.dtype.is_floating_point or tensor.dtype == torch.bool
    kind = tensor.dtype if real else torch.int64
    said = captured.read(tensor, side)
    return Traced(graph(said) if kind == torch.bool else said, kind)


def constants(said: object) -> set[int]:
    """The whole numbers that stand in a predicate or graph."""
    if isinstance(said, bool):
        return set()
    if isinstance(said, int):
        return {abs(said)}
    if isinstance(said, float):
        return {math.ceil(abs(said))} if math.isfinite(said) else set()
    if isinstance(said, Apply):
        return set().union(*map(constants, said.args))
    if isinstance(said, Compound):
        return set().union(*map(constants, said.terms))
    if isinstance(said, Leaf):
        return set().union(*(constants(value) for _, value in said.arguments), set())
    return set()
