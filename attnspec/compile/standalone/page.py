"""What stands beside a formula in a file: names of sizes, checks, tables, helpers."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import cast

import numpy as np

from attnspec.compile.standalone.expressions import Expression, Operand, call, flat, name
from attnspec.graphs.grid import AXES
from attnspec.graphs.predicates.inputs import reading
from attnspec.graphs.token_sets import Data
from attnspec.ir.crossing import QUERIES
from attnspec.ir.intervals import Bounds
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Input
from attnspec.ir.scalars import LARGEST
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError

SHORT = 12
"""Characters of an expression that is repeated rather than given a name."""

COUNTED = 2**16
"""More layers and heads than there are."""

RESERVED = frozenset(
    "q k m n b h x layer head heads slot math torch abs min max r s t u v w"
    " required isqrt is_power listed numbers".split()
)
"""Names that stand for something else in a mask."""


class StandaloneError(AttnSpecError):
    """A spec that no short file says; what is said to its user ends with the way out."""


@dataclass
class Page:
    """What the formula of a graph needs besides q, k and n.

    `cross` says that m queries are another sequence. `sizes` are names for numbers, `checks` those
    that are refused where they are not what an argument must be, `tables` names for what a function
    draws for each head; `helpers` are the functions that are called, `symbols` those of `layer` and
    `h` that are read. `numbers` are the
    inputs that predicates read: how large whole ones may be, None where it does not matter, and
    whether all must be whole. `most` is the longest sequence of which every number fits in 64 bits.
    """

    inputs: tuple[Input, ...]
    fixed: int | None
    cross: bool = False
    sizes: dict[str, Expression] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    tables: dict[str, Expression] = field(default_factory=dict)
    helpers: dict[str, None] = field(default_factory=dict)
    symbols: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, tuple[int | None, bool]] = field(default_factory=dict)
    most: int = LIMITS.length

    @property
    def n(self) -> Expression:
        low, high = (1, LIMITS.length) if self.fixed is None else (self.fixed, self.fixed)
        return name("n", low=low, high=high)

    @property
    def m(self) -> Expression:
        """The number of queries."""
        return name(QUERIES, low=1, high=LIMITS.length) if self.cross else self.n

    def position(self, side: str) -> Expression:
        length = self.m if side == "q" else self.n
        return name(side, tensor=True, below=length.op, low=0, high=length.high - 1)

    def ranges(self) -> dict[str, Bounds]:
        """What each symbol of a scalar ranges over."""
        n = self.n
        found = {"n": (n.low, n.high), "layer": (0, COUNTED), "head": (0, COUNTED)}
        found |= {side: (0, n.high - 1) for side in "qk"}
        found |= {f"{side}.{axis}": (0, n.high - 1) for side in "qk" for axis in AXES[3]}
        found |= {QUERIES: (1, LIMITS.length)} if self.cross else {}
        read = (reading(entry.name, side).name for entry in self.inputs for side in "qk")
        found |= dict.fromkeys(read, (-LARGEST, LARGEST))
        return {key: (np.asarray(low), np.asarray(high)) for key, (low, high) in found.items()}

    def symbol(self, text: str) -> Expression:
        """What stands for n, for the layer, a number, and for the head, a tensor."""
        if text in ("n", QUERIES):
            return self.n if text == "n" else self.m
        shown = "h" if text == "head" else text
        self.symbols[shown] = None
        return name(shown, tensor=text == "head", low=0, high=COUNTED)

    def size(self, hint: str, value: Expression) -> Expression:
        """A name for a size, unless it is as short as one."""
        if len(flat(value)) <= SHORT:
            return value
        same = [known for known, other in self.sizes.items() if flat(other) == flat(value)]
        shown = same[0] if same else self._free(hint)
        self.sizes[shown] = value
        return replace(name(shown, value.kind, tensor=value.tensor), low=value.low, high=value.high)

    def require(self, hint: str, value: Expression, parameter: Parameter) -> None:
        """Has a size checked when it is known."""
        if value.tensor:
            raise StandaloneError(f"`{hint}` depends on the head")
        self.helpers["required"] = None
        found = Check(hint, value, parameter.least, parameter.most)
        if found not in self.checks:
            self.checks.append(found)

    def table(self, hint: str, function: str, *args: object) -> Expression:
        """A name for the tables [heads, rows, keys] of what a function draws for each head."""
        if any(getattr(each, "tensor", False) for each in args):
            raise StandaloneError("how much is drawn at random depends on the head")
        self.helpers |= dict.fromkeys((function, "listed"))
        self.symbols["h"] = None
        drawn = expanded(call(function, *cast("tuple[Operand, ...]", args)), self.sizes)
        for known, other in self.tables.items():
            if flat(other) == flat(drawn):
                return name(known, tensor=True)
        found = self._free(hint)
        self.tables[found] = drawn
        return name(found, tensor=True)

    def _free(self, hint: str) -> str:
        """A name like the hint that nothing else has."""
        taken = RESERVED | set(self.sizes) | set(self.tables)
        taken |= {argument_of(entry) for entry in self.inputs}
        plain = hint.rpartition(" ")[2]
        numbered = (f"{plain}_{number}" for number in count(2))
        return next(shown for shown in chain([plain], numbered) if shown not in taken)

    def data(self) -> dict[str, Data]:
        """What stands for the run-time inputs."""
        return {entry.name: Data(_stand_in(entry)) for entry in self.inputs}


@dataclass(frozen=True)
class Check:
    """What an argument must be."""

    name: str
    value: Expression
    least: int | None
    most: int | None

    @property
    def text(self) -> str:
        least = "" if self.least is None else f", least={self.least}"
        most = "" if self.most is None else f", most={self.most}"
        return f'required("{self.name}", {flat(self.value)}{least}{most})'


def expanded(operand: Expression, sizes: Mapping[str, Expression]) -> Expression:
    """An expression with the sizes written out."""
    if operand.op in sizes and not operand.args:
        return sizes[operand.op]
    args = tuple(
        expanded(arg, sizes) if isinstance(arg, Expression) else arg for arg in operand.args
    )
    return replace(operand, args=args)


def argument_of(entry: Input) -> str:
    """What an input is called in a mask: by its name, unless that stands for something else."""
    taken = entry.name in RESERVED or keyword.iskeyword(entry.name)
    return f"{entry.name}_given" if taken else entry.name


def _stand_in(entry: Input) -> Expression:
    match entry.kind:
        case "tokens":
            return name(argument_of(entry), "bool", tensor=True)
        case "ids":
            return name(argument_of(entry), tensor=True)
        case "length":
            return name(f"{argument_of(entry)}[b]", tensor=True)
        case "numbers":
            return name(argument_of(entry), "number", tensor=True)
        case _:
            raise StandaloneError(f"its input `{entry.name}` is of the kind {entry.kind}")
