"""A mask function of torch, read by calling it once: with tensors that record what is done to them.

A position stands for any number. What a function makes of it is a scalar of the language, what it
compares a predicate. A number that depends on a condition (`torch.where`, a table of heads) is kept
as cases until it is compared. A captured tensor read at a query or a key, or one number of it for
each sample, is a run-time input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain, count, pairwise, product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspec.graphs.forms.written import written_scalar
from attnspec.graphs.predicates.inputs import pair_reading, reading
from attnspec.interchange.simplified import applied, negated
from attnspec.ir.intervals import Bounds, bounds
from attnspec.ir.program import Compound, InputRef, Leaf, Term
from attnspec.ir.scalars import (
    SCORE,
    SCORE_FUNCTIONS,
    TRUTHS,
    Apply,
    Scalar,
    ScalarError,
    Symbol,
    evaluate,
    symbols,
)
from attnspec.ir.scores import HEAD
from attnspec.text.diagnostics import AttnSpecError

MOST_CASES = 64
"""Values that a number may have, by conditions, at most."""

MOST_LISTED = 256
"""Numbers of a captured tensor that stand in a spec one by one, at most."""

Each: TypeAlias = "tuple[tuple[Scalar, Scalar], ...]"
"""Conditions, and the number where one holds."""

Said: TypeAlias = "Scalar | Cases"
"""What a traced tensor is: a number or a predicate, or cases."""


BEFORE = "index a tensor with an entry for each position, computed before the conversion"
"""What to do about what a function makes of one position and a spec cannot say."""


class UntracedError(AttnSpecError):
    """A mask function does what no spec says; the message has the reason."""


@dataclass(frozen=True)
class Entry(Symbol):
    """What a captured tensor holds at the query or the key, or for the sample: its type there, and
    the least and the greatest of its numbers."""

    dtype: torch.dtype = field(compare=False)
    ends: Bounds = field(compare=False)

    @property
    def source(self) -> str:
        """The name of the input."""
        return self.name.partition("(")[0]

    @property
    def side(self) -> str:
        """`q` or `k`; nothing of a number for each sample."""
        return self.name.partition("(")[2].removesuffix(")")


@dataclass(frozen=True)
class Cases:
    """A number by conditions, exactly one of which holds for a pair."""

    each: Each


@dataclass
class Captured:
    """The tensors that a function reads, by the names of the inputs they become: at positions, and
    `lengths`, one number for each sample; and how many heads the tables have that it reads at its
    head, None without one."""

    named: Callable[[Tensor], str]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    lengths: dict[str, Tensor] = field(default_factory=dict)
    heads: int | None = None
    pairs: dict[str, Tensor] = field(default_factory=dict)
    """Those with a number of each pair, [B or 1, H or 1, n, n]."""
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Tensors made of others inside the function, with these; kept, being known by identity."""

    def name_of(self, tensor: Tensor) -> str:
        """The name of a tensor; of one that the function makes that of what it is made of."""
        while id(tensor) in self.made:
            _, tensor = self.made[id(tensor)]
        return self.named(tensor)

    def read(self, tensor: Tensor, side: str) -> Entry:
        """What stands at a side; "" is the sample."""
        same_kind, others = (self.tensors, self.lengths) if side else (self.lengths, self.tensors)
        plain = "marked" if tensor.dtype == torch.bool else "document" if side else "lengths"
        base = self.name_of(tensor) or ("times" if tensor.dtype.is_floating_point else plain)
        names = chain([base], (f"{base}_{at}" for at in count(1)))
        free = (name for name in names if name not in others)
        name = next(x for x in free if _alike(same_kind.get(x, tensor), tensor))
        same_kind.setdefault(name, tensor)
        values = tensor.double() if tensor.numel() else torch.zeros(1)
        ends = values.amin().numpy(), values.amax().numpy()
        return Entry(reading(name, side).name, tensor.dtype, ends)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, or the same booleans."""
    if one.shape != other.shape or (one.dtype == torch.bool) != (other.dtype == torch.bool):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


class Row(Tensor):
    """What a captured tensor holds at a traced index of its first axes, before the rest is read."""

    read: tuple[Tensor, tuple[Any, ...]]

    @staticmethod
    def __new__(cls, tensor: Tensor, parts: tuple[Any, ...]) -> Row:
        shape = tensor.shape[len(parts) :]
        made: Row = Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype)
        made.read = tensor, parts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        raise UntracedError(f"it calls `torch.{name}` on a whole row; index it by [q] or [k] first")


class Traced(Tensor):
    """A tensor without numbers that records what is done to it."""

    said: Said

    @staticmethod
    def __new__(cls, said: Said, dtype: torch.dtype = torch.int64) -> Traced:
        made: Traced = Tensor._make_wrapper_subclass(cls, (), dtype=dtype)
        made.said = said
        return made

    def __bool__(self) -> bool:
        raise UntracedError(
            "it decides by the value of a position, with `if`, `and`, `or` or `not`; write"
            " conditions with `&`, `|`, `~` and torch.where"
        )

    def __index__(self) -> int:
        raise UntracedError(
            f"it uses `{_shown(self)}` as a Python integer, such as the index of a list; make the"
            " list one tensor, for example by torch.stack, and index that"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        called = func.overloadpacket.__name__
        name = called.removesuffix("_")
        if name not in _OPERATIONS:
            raise UntracedError(
                "it takes a Python number from a tensor, by `.item()`, `int()` or `float()`;"
                " compute with the tensor itself"
                if name == "_local_scalar_dense"
                else f"a spec has no counterpart of `torch.{name}`; if its result depends on one"
                f" position, {BEFORE}"
            )
        result = _OPERATIONS[name](*args, **(kwargs or {}))
        if called == name or called.startswith("__"):
            return result
        changed: Traced = args[0]
        changed.said = result.said
        return changed


class Indexing(TorchFunctionMode):
    """Records what captured tensors are read at: an index that is traced."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if isinstance(tensor, Row):
                tensor, before = tensor.read
                parts = before + parts
            if any(isinstance(part, Traced) for part in parts):
                return _read(self.captured, tensor, parts)
        result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if isinstance(result, Tensor) and isinstance(source, Tensor):
            if result is not source and not isinstance(result, Traced):
                self.captured.made[id(result)] = result, source
        return result


def trace(mask_mod: Callable[..., Any], captured: Captured) -> Said:
    """The predicate, or the graph, that a function of (b, h, q, k) computes.

    Raises UntracedError with what in it cannot be said.
    """
    b, h, q, k = (Traced(Symbol(name)) for name in ("b", "head", "q", "k"))
    with Indexing(captured):
        result = mask_mod(b, h, q, k)
    if isinstance(result, bool):
        return result
    if not isinstance(result, Tensor) or result.dtype != torch.bool or result.dim():
        what, hint = type(result).__name__, "; return a comparison, such as `q >= k`"
        if isinstance(result, Tensor):
            what = f"a tensor of shape {list(result.shape)} and dtype {result.dtype}"
            what = what if result.dim() else f"a scalar of {result.dtype}"
            if result.dtype.is_floating_point and not result.dim():
                hint = "; if that is 0 for pairs that attend and -inf for others, compare it with 0"
        raise UntracedError(f"it must return one boolean for a pair, and returns {what}{hint}")
    return _said(result)


_ROUNDS = ContextVar("_ROUNDS", default=False)
"""Whether what is traced are scores, which are rounded; lists may be read at any whole number."""


def trace_score(score_mod: Callable[..., Any], captured: Captured) -> Scalar:
    """The score that a function of (score, b, h, q, k) makes of one, as `trace`."""
    own = Traced(Symbol(SCORE), torch.float32)
    b, h, q, k = (Traced(Symbol(name)) for name in ("b", HEAD.name, "q", "k"))
    token = _ROUNDS.set(True)
    try:
        with Indexing(captured):
            said = _cases(score_mod(own, b, h, q, k))
    finally:
        _ROUNDS.reset(token)
    each = _each(said)
    shown = [(when, value) for when, value in each if value != -math.inf]
    if not shown:
        raise UntracedError("it hides every pair")
    if not isinstance(said, Cases):
        return said
    hidden = len(shown) < len(each)
    parts = [x if hidden and len(shown) == 1 else applied("*", (x, when)) for when, x in shown]
    if hidden:
        # a pair outside the softmax has the logarithm of 0
        parts.append(Apply("log", (applied("or", tuple(when for when, _ in shown)),)))
    return reduce(lambda one, other: Apply("+", (one, other)), parts)


def graph(said: Said) -> Term:
    """A predicate as a graph: what reads inputs is a pattern of its own, as far as conditions are
    joined by `and`, `or` and `not`."""
    if isinstance(said, Cases):
        raise UntracedError("it uses a number as a condition; compare the number, as in `x != 0`")
    read = entries(said)
    if not read:
        return Leaf("where", (("predicate", said),))
    match said:
        case Entry():
            pattern = "rows" if said.side == "q" else "columns"
            return Leaf(pattern, (("tokens", InputRef(said.source, "tokens")),))
        case Apply("not", (inner,)):
            return Compound("~", (graph(inner),))
        case Apply("and" | "or" as op, args):
            # what reads no input stays together, of which more is known
            still = tuple(x for x in args if not entries(x))
            kept = [x for x in args if x not in still[1:]]
            terms = (graph(applied(op, still) if x in still else x) for x in kept)
            return Compound("&" if op == "and" else "|", tuple(terms))
        case Apply("==" | "!=" as op, (Entry() as one, Entry() as other)) if _labels(one, other):
            same = Leaf("same", (("ids", InputRef(one.source, "ids")),))
            return same if op == "==" else Compound("~", (same,))
    inputs = {x.source: InputRef(x.source, "numbers" if x.side else "length") for x in read}
    ordered = tuple(inputs[name] for name in sorted(inputs))
    leaf = Leaf("where_inputs", (("inputs", ordered), ("predicate", said)))
    return _prefix(said) or leaf


def _labels(one: Entry, other: Entry) -> bool:
    """Whether two entries are whole numbers of one tensor, at the query and at the key."""
    whole = not one.dtype.is_floating_point
    return whole and one.source == other.source and {one.side, other.side} == {"q", "k"}


def _prefix(predicate: Scalar) -> Term | None:
    """The pattern `prefix` where a predicate compares a position with a length."""
    match predicate:
        case Apply("<" | ">=" as op, (Symbol("q" | "k" as side), Entry() as length)):
            pass
        case Apply(">" | "<=" as turned, (Entry() as length, Symbol("q" | "k" as side))):
            op = "<" if turned == ">" else ">="
        case _:
            return None
    if length.side:
        return None
    term: Term = Leaf("prefix", (("length", InputRef(length.source, "length")),))
    term = Compound("transpose", (term,)) if side == "q" else term
    return term if op == "<" else Compound("~", (term,))


def entries(scalar: Scalar) -> tuple[Entry, ...]:
    """What a scalar reads of captured tensors."""
    if isinstance(scalar, Apply):
        return tuple(entry for arg in scalar.args for entry in entries(arg))
    return (scalar,) if isinstance(scalar, Entry) else ()


# --- operations ----------------------------------------------------------------------------------


def _said(value: Any) -> Said:
    """What an operand is: traced, a number, or a tensor of one number."""
    if isinstance(value, Traced):
        return value.said
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UntracedError(
                f"it computes with the whole of a captured tensor of shape {list(value.shape)};"
                " index the tensor by [q], [k], [b] or [h], or ask by `torch.isin(x, tensor)`"
                " whether a number `x` is in it"
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
    if kind in (torch.bool, torch.int64) or _ROUNDS.get():
        return
    floating = kind.is_floating_point
    info = torch.finfo(kind) if floating else torch.iinfo(kind)
    most = 2 / info.eps if isinstance(info, torch.finfo) else info.max
    for _, value in _each(said):
        if not isinstance(value, Symbol | Apply):
            continue
        op = value.op if isinstance(value, Apply) else ""
        if kind == torch.float64 and not (computed and op == "**"):
            continue
        if isinstance(value, Entry) and value.dtype.is_floating_point:
            # as it was captured
            continue
        places, ranges = _places(value) if floating else 0, _ranges(value)
        below = not floating and bounds(value, ranges)[0] < info.min
        if places is None or below or _reach(value, ranges, places) > most:
            fault, longer = ("round differently", "float64") if floating else ("overflow", "int64")
            grows = places is not None and {"q", "k"} & {*symbols(value)}
            where = f" in a sequence of up to {CHECKED:,} positions" if grows else ""
            advice = f"convert the operands to torch.{longer}, in which a spec computes"
            if kind == torch.float64:
                advice = "a spec has another `**`: write products (`x * x`) or `torch.sqrt`"
            raise UntracedError(f"`{_text(value)}` may {fault} in {kind}{where}; {advice}")


CHECKED = 65_536
"""The length up to which numbers that are computed in short types must be exact."""


def _ranges(scalar: Scalar) -> dict[str, Bounds]:
    """Bounds of what a scalar asks for, up to such a length."""
    ranges = dict.fromkeys(symbols(scalar), (np.asarray(0), np.asarray(CHECKED)))
    return ranges | {entry.name: entry.ends for entry in entries(scalar)}


def _reach(scalar: Scalar, ranges: dict[str, Bounds], places: int) -> float:
    """A bound of every number met on the way to a scalar's value, each in units of its last binary
    place, or of the value's where that is larger."""
    parts = scalar.args if isinstance(scalar, Apply) else ()
    unit = 2.0 ** min(_places(scalar) or 0, places)
    largest = max(float(np.max(np.abs(end))) for end in bounds(scalar, ranges))
    return max(largest * unit, *(_reach(part, ranges, places) for part in parts), 0)


def _places(scalar: Scalar) -> int | None:
    """How many binary places behind the point a number has at most; None where that has no end."""
    match scalar:
        case float():
            return next((at for at in range(24) if (scalar * 2**at).is_integer()), None)
        case Entry():
            return None if scalar.dtype.is_floating_point else 0
        case Apply("floor" | "ceil" | "//"):
            return 0
        case Apply(op, args):
            parts = [_places(arg) for arg in args]
            places = [part for part in parts if part is not None]
            if len(places) < len(parts):
                return None
            match op, args[-1]:
                case "/", int() | float() as by:
                    fraction, exponent = math.frexp(by)
                    return places[0] + max(0, exponent - 1) if abs(fraction) == 0.5 else None
                case "/", _:
                    return None
                case "**", int() as times:
                    return places[0] * times
                case "*", int() as by:
                    # a power of two moves the point
                    return max(0, places[0] + 1 - (by & -by).bit_length())
                case "*", _:
                    return sum(places)
                case _:
                    return max(places)
        case _:
            return 0


def _numeric(op: str, *args: Any) -> Traced:
    """An operation on numbers, in each of their cases."""
    kind = _kind(*args)
    asked = op in TRUTHS
    if kind == torch.bool and not asked:
        if op not in _OF_CONDITIONS:
            raise UntracedError("it does arithmetic with conditions; use torch.where")
        return _joined(_OF_CONDITIONS[op], *args)
    if op == "/" and not kind.is_floating_point:
        kind = torch.get_default_dtype()
    sides = [_each(_cases(_rounded_to(arg, kind))) for arg in args]
    if asked:
        for side in sides:
            _require_exact(Cases(side), kind, computed=False)
    if math.prod(map(len, sides)) > MOST_CASES**2:
        raise UntracedError(f"a number has more than {MOST_CASES} cases")
    if asked:
        return Traced(_holds(op, sides, True, ()), torch.bool)
    each = tuple(
        (condition, applied(op, tuple(value for _, value in chosen)))
        for chosen in product(*sides)
        if (condition := applied("and", tuple(when for when, _ in chosen))) is not False
    )
    if len(each) > MOST_CASES:
        raise UntracedError(f"a number has more than {MOST_CASES} cases")
    result: Said = each[0][1] if len(each) == 1 else Cases(each)
    _require_exact(result, kind)
    return Traced(result, kind)


def _holds(op: str, sides: list[Each], where: Scalar, values: tuple[Scalar, ...]) -> Scalar:
    """Where a comparison holds of the cases of numbers, those of the first ones being chosen: each
    case of one side stands once, beside all those of the next that it goes with."""
    if not sides:
        return applied(op, values)
    rows = []
    for when, value in sides[0]:
        both = applied("and", (where, when))
        if both is not False:
            rest = _holds(op, sides[1:], both, (*values, value))
            rows.append(applied("and", (when, rest)))
    return applied("or", tuple(rows))


def _cases(value: Any) -> Scalar | Cases:
    """A number, traced or not; a condition, about none, is 1 or 0."""
    cases = _said(value)
    if isinstance(cases, bool):
        return int(cases)
    if _is_condition(value):
        return Cases(((cases, 1), (negated(cases), 0)))  # type: ignore[arg-type]
    return cases


def _each(said: Said) -> Each:
    return said.each if isinstance(said, Cases) else ((True, said),)


def _compared(op: str, first: Any, second: Any) -> Traced:
    kind = _kind(first, second)
    first, second = _rounded_to(first, kind), _rounded_to(second, kind)
    if _is_condition(first) and _is_condition(second):
        return _conditions(op, _truth(first), _truth(second))
    return _numeric(op, _unsigned(op, first, _said(second)), second)


def _conditions(op: str, one: Traced, other: Traced) -> Traced:
    """Two conditions compared, of which one that holds is 1."""
    if op in ("==", "!="):
        return _xor(one, other if op == "!=" else _not(other))
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
    return (value.dtype if isinstance(value, Tensor) else type(value)) in (torch.bool, bool)


def _joined(op: str, first: Any, second: Any) -> Traced:
    """`and` or `or` of predicates."""
    for value in (first, second):
        if isinstance(value, Tensor) and value.dtype != torch.bool:
            raise UntracedError(
                "it applies `&`, `|` or `^` to numbers, and a spec has no bitwise operations; apply"
                " them to conditions, and test a bit by `//` and `%`, such as `q // 4 % 2 == 1`"
            )
    return Traced(applied(op, (_said(first), _said(second))), torch.bool)  # type: ignore[arg-type]


def _not(value: Any) -> Traced:
    if value.dtype != torch.bool:
        raise UntracedError("it applies `~` to a number; apply it to a condition")
    return Traced(negated(_said(value)), torch.bool)  # type: ignore[arg-type]


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
    cases: list[tuple[Scalar, Scalar]] = []
    for met, value in ((holds, first), (_not(holds), second)):
        each = _each(_cases(value))
        cases += [(applied("and", (met.said, condition)), part) for condition, part in each]  # type: ignore[arg-type]
    able = tuple(case for case in cases if case[0] is not False)
    only = able[0][1] if len({part for _, part in able}) == 1 else None
    return Traced(Cases(able) if only is None else only, _kind(first, second))


def _clamp(x: Any, low: Any = None, high: Any = None) -> Traced:
    clamped = x
    for bound, op in ((low, "max"), (high, "min")):
        if bound is not None:
            clamped = _numeric(op, clamped, bound)
    return clamped  # type: ignore[no-any-return]


def _divided(first: Any, second: Any, rounding_mode: str | None = None) -> Traced:
    if rounding_mode == "trunc":
        return _natural("//", first, second)
    return _numeric("/" if rounding_mode is None else "//", first, second)


_TRUNCATED = {
    "//": "for y > 0 write `torch.where(x >= 0, x // y, -(-x // y))`, or `x // y` to round down",
    "%": "for y > 0 write `torch.where(x >= 0, x % y, -(-x % y))`, or `x % y` for results >= 0",
    "floor": "write `torch.where(x >= 0, x.floor(), x.ceil())`, or `x.floor()` to round down",
}


def _natural(op: str, *values: Any) -> Traced:
    """An operation of which torch and specs make different things where a number is negative."""
    numbers = [number for value in values for _, number in _each(_cases(value))]
    if not all(bounds(number, _ranges(number))[0] >= 0 for number in numbers):
        raise UntracedError(f"it rounds towards 0 a number that may be negative; {_TRUNCATED[op]}")
    return _numeric(op, *values)


_cut_off = partial(_natural, "floor")


# --- constants in a tensor -----------------------------------------------------------------------


def _listed(what: str, tensor: Any) -> list[int | float]:
    """The numbers of a captured tensor, of which each stands in the spec."""
    traced = isinstance(tensor, Traced)
    if traced or not isinstance(tensor, Tensor):
        raise UntracedError(
            f"{what} must be a captured tensor as a whole, not an entry of it; to compare the"
            " entries at two positions, write `x[q] == x[k]`"
        )
    if tensor.numel() > MOST_LISTED:
        raise UntracedError(
            f"{what} must have at most {MOST_LISTED} numbers, not {tensor.numel():,}; {BEFORE}"
        )
    numbers: list[int | float] = tensor.flatten().tolist()
    return numbers


def _isin(x: Any, members: Any, *, invert: bool = False, **rest: Any) -> Traced:
    numbers = sorted(set(_listed("the second argument of `torch.isin`", members)))
    member = _numeric("one_of", x, *numbers) if numbers else Traced(False, torch.bool)
    return _not(member) if invert else member


def _bucketed(x: Any, limits: Any, right: bool = False, **rest: Any) -> Traced:
    """How many of some ascending numbers lie below a number, or with `right` at or below it."""
    numbers = _listed("the boundaries of `torch.bucketize`", limits)
    if x.dtype.is_floating_point or not all(isinstance(number, int) for number in numbers):
        passed = [_compared("<=" if right else "<", number, x) for number in numbers]
    else:
        firsts = [int(number) + (not right) for number in numbers]
        steps = {after - before for before, after in pairwise(firsts)}
        if len(firsts) > 2 and len(steps) == 1 and (step := steps.pop()):
            before, offset = divmod(firsts[0], step)
            place = _numeric("//", _numeric("-", x, offset), step)
            return _clamp(_numeric("+", place, 1 - before), 0, len(firsts))
        passed = [_compared(">=", x, first) for first in firsts]
    conditions = [True, *(each.said for each in passed), False]
    cases = enumerate(
        applied("and", (low, negated(high)))  # type: ignore[arg-type]
        for low, high in pairwise(conditions)
    )
    return Traced(Cases(tuple((when, count) for count, when in cases if when is not False)))


def _filled(
    number: int, like: Any, size: Sequence[int] = (), *, dtype: Any = None, **rest: Any
) -> Traced:
    """`new_ones`, `ones_like` and their like, of a single number."""
    if len(size):
        raise UntracedError(
            f"it makes a tensor of shape {list(size)} for a pair, and only scalars are allowed;"
            " make a scalar, such as `q.new_ones(())`"
        )
    kind = like.dtype if dtype is None else dtype
    return Traced(bool(number) if kind == torch.bool else number, kind)


def _as_type(x: Any, dtype: Any = None, **rest: Any) -> Traced:
    """A conversion: of a condition into a number cases, of a number nothing."""
    if dtype in (None, x.dtype):
        return Traced(_said(x), x.dtype)
    if dtype == torch.bool:
        return _compared("!=", x, 0)
    if x.dtype == torch.bool:
        return _where(x, 1, 0)
    if x.dtype.is_floating_point and not dtype.is_floating_point:
        x = _cut_off(x)
    _require_exact(_said(x), dtype, computed=False)
    return Traced(_said(x), dtype)


def _added(op: str, first: Any, second: Any, alpha: float = 1) -> Traced:
    return _numeric(op, first, second if alpha == 1 else _numeric("*", second, alpha))


def _product(first: Any, second: Any) -> Traced:
    if _is_condition(first) and _is_condition(second):
        return _joined("and", first, second)
    return _numeric("*", first, second)


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
    **{
        name: partial(_numeric, name)
        for name in (*SCORE_FUNCTIONS, "sqrt", "log2", "neg", "abs", "floor", "ceil")
    },
    "minimum": partial(_numeric, "min"),
    "maximum": partial(_numeric, "max"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "fmod": partial(_natural, "%"),
    "isin": _isin,
    "bucketize": _bucketed,
    "searchsorted": lambda limits, x, right=False, **rest: _bucketed(x, limits, right),
    "trunc": _cut_off,
    "eq": partial(_compared, "=="),
    "ne": partial(_compared, "!="),
    "lt": partial(_compared, "<"),
    "le": partial(_compared, "<="),
    "gt": partial(_compared, ">"),
    "ge": partial(_compared, ">="),
    **dict.fromkeys(("bitwise_and", "logical_and", "__and_"), partial(_joined, "and")),
    **dict.fromkeys(("bitwise_or", "logical_or"), partial(_joined, "or")),
    **dict.fromkeys(("bitwise_xor", "logical_xor"), _xor),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    **dict.fromkeys(
        ("bitwise_right_shift", "__rshift_"),
        lambda x, bits: _numeric("//", x, 2 ** int(_said(bits))),  # type: ignore[arg-type]
    ),
    "where": _where,
    **dict.fromkeys(("new_ones", "ones_like"), partial(_filled, 1)),
    **dict.fromkeys(("new_zeros", "zeros_like"), partial(_filled, 0)),
    "_to_copy": _as_type,
    **dict.fromkeys(
        ("clone", "detach", "alias", "lift_fresh", "view", "squeeze", "expand"),
        lambda x, *rest, **named: Traced(_said(x), x.dtype),
    ),
}

_OF_CONDITIONS = {"+": "or", "max": "or", "min": "and"}
"""What operations on numbers do with two conditions."""


# --- captured tensors ----------------------------------------------------------------------------


def _read(captured: Captured, tensor: Any, parts: tuple[Any, ...]) -> Traced | Row:
    """An entry of a captured tensor, at [q], [k], [b, q], [b, k], [b], or [h] of a short table."""
    shape = list(tensor.shape)
    if not isinstance(tensor, Traced) and len(parts) < len(shape):
        return Row(tensor, parts)
    if isinstance(tensor, Traced) or len(parts) != len(shape):
        raise UntracedError(f"it indexes a tensor of shape {shape} by {len(parts)} numbers")
    fixed = next((at for at, part in enumerate(parts) if type(part) is int), None)
    if fixed is not None:
        row = tensor.select(fixed, parts[fixed])
        captured.made[id(row)] = row, tensor
        return _read(captured, row, (*parts[:fixed], *parts[fixed + 1 :]))
    names = [_position(part, count) for part, count in zip(parts, shape, strict=True)]
    if _ROUNDS.get() and names[-1] not in ("q", "k", "b"):
        return _listed_at(captured, tensor, parts, names)
    square = names[-2:] == ["q", "k"] and shape[-1] == shape[-2]
    if _ROUNDS.get() and square and tensor.dtype.is_floating_point:
        by = [captured.name_of(tensor) or "pairs", *names[:-2]]
        axes = [len(tensor) if "b" in by else 1, tensor.shape[-3] if HEAD.name in by else 1]
        captured.heads = axes[1] if axes[1] > 1 else captured.heads
        captured.pairs[by[0]] = tensor.reshape(*axes, *shape[-2:])
        return Traced(pair_reading(by[0]), tensor.dtype)
    if names[-1] in ("q", "k") and names[:-1] in ([], ["b"]):
        if tensor.dtype.is_complex:
            raise UntracedError(f"a captured tensor of {tensor.dtype} is read at positions")
        return Traced(captured.read(tensor, names[-1]), tensor.dtype)
    if names == ["b"]:
        return _length(captured, tensor)
    if names == ["head"]:
        return _of_head(captured, tensor)
    if sorted(names[-2:]) == ["k", "q"]:
        raise UntracedError(
            f"it looks pairs up in a captured tensor of shape {shape}, and a spec needs a rule;"
            " `attnspec.explain_mask`, called with that tensor, looks for the rule"
        )
    at, name = ", ".join(map(_shown, parts)), captured.name_of(tensor) or "tensor"
    every = re.sub(r"\b[bh]\b", ":", re.sub(r"\[[qk]\]", "", at))
    every = re.sub(r"\b[qk]\b", "torch.arange(n)", every)
    advice = f"{BEFORE}, such as `t = {name}[{every}]` for n positions"
    if {"q", "k"} <= set(re.findall(r"\w+", at)):
        advice = "write a condition on q and k, such as `torch.isin(q - k, distances)`"
    raise UntracedError(
        f"it indexes `{name}`, of shape {shape}, by [{at}], and only [q], [k], [b, q], [b, k], [b]"
        f" and [h] are allowed; {advice}"
    )


def _shown(part: Any) -> str:
    """An index as a message has it."""
    if not isinstance(part, Traced):
        return "…" if isinstance(part, Tensor) else str(part)
    return "…" if isinstance(part.said, Cases) else _text(part.said)


def _text(scalar: Scalar) -> str:
    """A scalar as a function of torch has it, the entries of tensors in brackets."""
    text = re.sub(r"\bhead\b", "h", written_scalar(scalar))
    for entry in set(entries(scalar)):
        name = re.escape(written_scalar(entry))
        text = re.sub(rf"\b{name}(?!\w)", f"{entry.source}[{entry.side or 'b'}]", text)
    return text


def _position(part: Any, count: int) -> str:
    """The name of the position, sample or head that an index is, wherever an axis of so many
    entries has one: also behind a clamp that changes nothing there."""
    index = part.said if isinstance(part, Traced) else part
    if isinstance(index, Symbol) and not isinstance(index, Entry):
        return index.name
    each = _each(index)
    scalars = [scalar for pair in each for scalar in pair]
    asked = {name for scalar in scalars for name in symbols(scalar)}
    if not isinstance(part, Traced) or len(asked) != 1 or any(map(entries, scalars)):
        return ""
    (name,), places = asked, np.arange(count)
    try:
        for condition, value in each:
            holds = np.broadcast_to(evaluate(condition, {name: places}), count)
            if (np.asarray(evaluate(value, {name: places})) != places)[holds].any():
                return ""
    except ScalarError:
        return ""
    return name


def _listed_at(
    captured: Captured, tensor: Tensor, parts: tuple[Any, ...], names: list[str]
) -> Traced:
    """An entry of a list, of all heads or one for each, at a whole number."""
    index = _said(parts[-1])
    listed = tuple(_listed("a list", tensor))
    if names[:-1] not in ([], [HEAD.name]) or isinstance(index, Cases) or tensor.is_complex():
        raise UntracedError("a list of numbers is read at one index, or at [h, index]")
    if HEAD.name in names:
        captured.heads = len(tensor)
    if len(names) == 2:
        row = Apply("*", (HEAD, tensor.shape[1]))
        index = Apply("+", (row, index))
    return Traced(Apply("item", (index, *listed)), tensor.dtype)


def _of_head(captured: Captured, tensor: Tensor) -> Traced:
    """An entry of a table of heads: cases, or of booleans a condition."""
    if len(tensor) > MOST_CASES or tensor.dtype.is_complex:
        raise UntracedError(f"a table of more than {MOST_CASES} heads is captured")
    if captured.heads not in (None, len(tensor)):
        raise UntracedError(
            f"it indexes a table of {captured.heads} numbers and one of {len(tensor)} numbers by"
            " [h]; every table must have one number for each head"
        )
    captured.heads, head = len(tensor), Symbol("head")
    table = [(Apply("==", (head, at)), value) for at, value in enumerate(tensor.tolist())]
    if tensor.dtype == torch.bool:
        conditions = tuple(condition for condition, value in table if value)
        return Traced(applied("or", conditions), torch.bool)
    return Traced(Cases(tuple(table)), tensor.dtype)


def _length(captured: Captured, tensor: Tensor) -> Traced:
    """A number for each sample, which is an input of kind `length`."""
    kind = tensor.dtype
    if kind == torch.bool or kind.is_floating_point or kind.is_complex:
        advice = "if all its numbers are whole, convert it by `.long()`"
        if kind == torch.bool:
            advice = (
                "compute `lengths = torch.where(flag, n, 0)` before the conversion, where `flag` is"
                " that tensor and `n` the length of the sequence, and write `k < lengths[b]` in"
                " place of `flag[b]`"
            )
        raise UntracedError(
            f"it indexes a tensor of shape {list(tensor.shape)} and dtype {kind} by [b], and only a"
            f" tensor of integers can be indexed so; {advice}"
        )
    if tensor.numel() and int(tensor.min()) < 0:
        raise UntracedError(f"`{captured.name_of(tensor)}` has a length below 0")
    return Traced(captured.read(tensor, ""), kind)


def constants(said: object) -> set[int]:
    """The whole numbers that stand in a predicate or graph."""
    match said:
        case int() | float() if not isinstance(said, bool) and math.isfinite(said):
            return {math.ceil(abs(said))}
        case Apply(_, parts) | Compound(_, parts):
            return set().union(*map(constants, parts))
        case Leaf():
            return set().union(*(constants(value) for _, value in said.arguments))
        case _:
            return set()
