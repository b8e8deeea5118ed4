"""What stands beside a formula in a file: names of sizes, checks, tables of what is drawn."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

from attnspec.compile.standalone.expressions import ATOM, Expression, Operand, call, flat, tensor_of
from attnspec.compile.standalone.lifting import DRAWS, file_of
from attnspec.compile.standalone.sources import graph, module
from attnspec.graphs.predicates.inputs import COUNTED, pair_reading, reading
from attnspec.ir.crossing import QUERIES
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Input, InputRef, Program
from attnspec.limits import LIMITS
from attnspec.lower.lower import pair_inputs
from attnspec.text.diagnostics import AttnSpecError

SHORT = 12
"""Characters of an expression that is repeated rather than given a name."""

RESERVED = frozenset(
    "q k m n b h x layer head heads slot math torch abs min max kind n_q row score"
    " learned required isqrt is_power listed numbers score_mod slopes_of bias_of".split()
)
"""Names that stand for something else in a mask."""

KINDS = {"tokens": "bool", "ids": "int", "length": "int", "numbers": "number"}
"""What the inputs of each kind are that a mask may read."""


class StandaloneError(AttnSpecError):
    """A spec that no short file says; its message ends with the way out."""


@dataclass(frozen=True)
class Text:
    """Functions that are written for a spec, settings of those that they call, which function of
    the sources stands for a name, and the sources."""

    functions: dict[str, str]
    settings: dict[str, object]
    names: dict[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = (graph.__name__,)

    def file(self, program: Program, roots: Sequence[str]) -> str:
        """The file of some functions, and of all that they call."""
        settings: dict[str, object] = {
            **{"HEADS": program.heads, "LAYERS": program.layers},
            "INPUTS": {
                x.name: (x.kind.replace("tokens", "bool"), x.at_most) for x in program.inputs
            },
            **{"SLOTS": program.slots, "CROSS": program.cross},
            "PAIRS": bool(pair_inputs(program)),
            **self.settings,
        }
        names = {**self.names, **(module.TWO_SEQUENCES if program.cross else {})}
        sources = *self.sources, DRAWS, module.__name__
        return file_of(roots, sources, self.functions, settings, names)


@dataclass
class Page:
    """What the formula of a graph needs besides q, k and n.

    `reals` is the method by which tensors become reals. `sizes` are names for numbers, `checks`
    refuse those that are not what an argument must be. `numbers` are the inputs that predicates
    read: how large whole ones may be, None where it does not matter, and whether all must be whole.
    `most` is the longest sequence of which every number fits in 64 bits. `lists` are names for
    tensors that are made before any pair is asked for, and where scores read a list of numbers,
    `inside` says at which pairs its index is one of the list.
    """

    program: Program
    inputs: tuple[Input, ...] = ()
    reals: str = ".double()"
    sizes: dict[str, str] = field(default_factory=dict)
    checks: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, tuple[int | None, bool]] = field(default_factory=dict)
    most: int = LIMITS.length
    lists: dict[str, str] = field(default_factory=dict)
    inside: list[Expression] = field(default_factory=list)

    @property
    def n(self) -> Expression:
        fixed = self.program.fixed_length
        return Expression("n", low=fixed or 1, high=fixed or LIMITS.length)

    @property
    def scores(self) -> bool:
        """Whether a score is written, not a mask."""
        return self.reals != ".double()"

    @property
    def m(self) -> Expression:
        """The number of queries."""
        return Expression(QUERIES, low=1, high=LIMITS.length) if self.program.cross else self.n

    @property
    def known(self) -> dict[str, int]:
        """The symbols whose values the program says."""
        known = {"layers": self.program.layers or 1, "heads": self.program.heads}
        return {name: count for name, count in known.items() if count is not None}

    def position(self, side: str) -> Expression:
        length = self.m if side == "q" else self.n
        return Expression(side, tensor=self.reals, low=0, high=length.high - 1)

    def symbol(self, text: str) -> Expression:
        """What stands for n, for the layer, a number, and for the head, a tensor."""
        if text in ("n", QUERIES):
            return self.n if text == "n" else self.m
        if text == "layer":
            return Expression("layer", low=0, high=(self.program.layers or COUNTED) - 1)
        return Expression("h", tensor=self.reals, low=0, high=(self.program.heads or COUNTED) - 1)

    def size(self, hint: str, value: Operand) -> Operand:
        """A name for a size, unless it is as short as one."""
        if not isinstance(value, Expression) or len(value.text) <= SHORT:
            return value
        shown = self._named(self.sizes, hint, value.text)
        return replace(value, text=shown, level=ATOM)

    def require(self, hint: str, value: Expression, parameter: Parameter) -> None:
        """Has a size checked when it is known."""
        if value.tensor:
            raise StandaloneError(f"`{hint}` depends on the head")
        ends = (("least", parameter.least), ("most", parameter.most))
        limits = [f", {name}={end}" for name, end in ends if end is not None]
        self.checks[f'required("{hint}", {value.text}{"".join(limits)})'] = None

    def table(self, function: str, *args: object) -> Expression:
        """A name for the tables [heads, rows, keys] of what a function draws for each head."""
        if tensor_of(*args):
            raise StandaloneError("how much is drawn at random depends on the head")
        drawn = self._unnamed(call(function, *args).text)
        text = f"torch.stack([{drawn} for head in range(heads)]).to(device)"
        return Expression(self._named(self.lists, "drawn", text), tensor=self.reals)

    def listed(self, text: str, index: Expression, kind: str, hint: str = "items") -> Expression:
        """What a list of numbers has at an index."""
        wide = ", dtype=kind" if self.scores else ", dtype=torch.float64"
        device = "q.device" if self.scores else "device"
        made = f"torch.tensor({self._unnamed(text)}{wide * (kind == 'real')}, device={device})"
        return self.made(hint, made, index, kind)

    def made(self, hint: str, text: str, index: Expression, kind: str) -> Expression:
        """What a tensor that is made before any pair is asked for has at an index."""
        shown = f"{self._named(self.lists, hint, text)}[{index.text}]"
        return Expression(shown, kind, self.reals)

    def _unnamed(self, text: str) -> str:
        """A text without the names that sizes have where pairs are asked for."""
        for name, value in self.sizes.items():
            text = re.sub(rf"\b{name}\b", f"({value})", text)
        return text

    def _named(self, named: dict[str, str], hint: str, text: str) -> str:
        """The name of a text, one like the hint that nothing else has where it has none yet."""
        for name, other in named.items():
            if other == text:
                return name
        taken = {*RESERVED, *self.sizes, *self.lists, *map(argument_of, self.inputs)}
        plain = hint.rpartition(" ")[2]
        numbered = (f"{plain}_{number}" for number in count(2))
        shown = next(each for each in chain([plain], numbered) if each not in taken)
        named[shown] = text
        return shown

    def read(self, entry: Input | InputRef, at: Operand | None = None) -> Expression:
        """What an input says at a position; of a kind `length` the one number of a sample."""
        if entry.kind not in KINDS:
            raise StandaloneError(f"its input `{entry.name}` is of the kind {entry.kind}")
        index = "b" if at is None else f"b, {flat(at)}"
        low = 0 if entry.kind == "length" else -math.inf
        return Expression(f"{argument_of(entry)}[{index}]", KINDS[entry.kind], self.reals, low)

    def readings(self, entry: Input | InputRef, q: Operand, k: Operand) -> dict[str, Operand]:
        """What the symbols of an input stand for in predicates and scores."""
        if entry.kind == "pairs":
            row = "q" if self.program.cross else "row"
            text = f"{argument_of(entry)}[b, h, {row}, k]"
            return {pair_reading(entry.name).name: Expression(text, "score", self.reals)}
        sides = {"": None} if entry.kind == "length" else {"q": q, "k": k}
        return {reading(entry.name, side).name: self.read(entry, at) for side, at in sides.items()}


def argument_of(entry: Input | InputRef) -> str:
    """What an input is called in a mask: by its name, unless that stands for something else."""
    taken = entry.name in RESERVED or entry.name.startswith("bias_")
    taken = taken or keyword.iskeyword(entry.name)
    return f"{entry.name}_input" if taken else entry.name
