"""What stands beside a formula in a file: checks of sizes, tensors that are made before."""

from __future__ import annotations

import keyword
import math
from dataclasses import dataclass, field
from itertools import chain, count

from attnspec.compile.standalone.expressions import Expression, Operand, call, flat, tensor_of
from attnspec.graphs.predicates.inputs import COUNTED, pair_reading, reading
from attnspec.ir.crossing import QUERIES
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Input, InputRef, Program
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError

RESERVED = frozenset(
    "m b h x size device slots slot_of held pairs math torch abs min max kind n_q score learned"
    " required isqrt is_power listed numbers score_mod slopes_of mask_mod SLOTS range distinct"
    " cycles".split()
)
"""Names that stand for something else in a mask."""

KINDS = {"tokens": "bool", "ids": "int", "length": "int", "numbers": "number"}
"""What the inputs of each kind are that a mask may read."""


class StandaloneError(AttnSpecError):
    """A spec that no short file says; its message ends with the way out."""


@dataclass
class Page:
    """What the formula of a graph needs besides q, k and n.

    `reals` is the method by which tensors become reals. `checks` refuse sizes that are not what an
    argument must be. `numbers` are the inputs that predicates read: how large whole ones may be,
    None where it does not matter, and whether all must be whole. `most` is the longest sequence of
    which every number fits in 64 bits. `lists` are names for tensors that are made before any pair
    is asked for, and where scores read a list of numbers, `inside` says at which pairs its index is
    one of the list.
    """

    program: Program
    reals: str = ".double()"
    checks: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, tuple[int | None, bool]] = field(default_factory=dict)
    most: int = LIMITS.length
    lists: dict[str, str] = field(default_factory=dict)
    inside: list[Expression] = field(default_factory=list)

    @property
    def scores(self) -> bool:
        """Whether a score is written, not a mask."""
        return self.reals != ".double()"

    @property
    def known(self) -> dict[str, int]:
        """The symbols whose values the program says."""
        known = {"layers": self.program.layer_count, "heads": self.program.heads}
        return {name: count for name, count in known.items() if count is not None}

    def symbol(self, name: str) -> Expression:
        """A number for a length or the layer, a tensor for a position or the head."""
        program, fixed = self.program, self.program.fixed_length
        keys = fixed or LIMITS.length
        queries = LIMITS.length if program.cross else keys
        counts = {"q": queries, "k": keys, "layer": program.layers, "head": program.heads}
        lengths = {"n": (fixed or 1, keys), QUERIES: (1 if program.cross else fixed or 1, queries)}
        low, high = lengths.get(name) or (0, (counts[name] or COUNTED) - 1)
        shown = {"head": "h", QUERIES: QUERIES if program.cross else "n"}.get(name, name)
        return Expression(
            shown, tensor=self.reals * (name in ("q", "k", "head")), low=low, high=high
        )

    def require(self, hint: str, value: Expression, parameter: Parameter) -> None:
        """Has a size checked when it is known."""
        if value.tensor:
            raise StandaloneError(f"`{hint}` depends on the head")
        ends = (("least", parameter.least), ("most", parameter.most))
        limits = [f", {name}={end}" for name, end in ends if end is not None]
        self.checks[f'required("{hint}", {value.text}{"".join(limits)})'] = None

    def table(self, function: str, *args: object) -> Expression:
        """The tables [heads, rows, keys] of what a function draws for each head."""
        if tensor_of(*args):
            raise StandaloneError("how much is drawn at random depends on the head")
        drawn = f"[{call(function, *args).text} for head in range(heads)]"
        return self.made("drawn", f"torch.stack({drawn}).to(device)")

    def listed(self, text: str, index: Expression, kind: str) -> Expression:
        """What a list of numbers has at an index."""
        wide = ", dtype=kind" if self.scores else ", dtype=torch.float64"
        device = "q.device" if self.scores else "device"
        text = f"torch.tensor({text}{wide * (kind == 'real')}, device={device})"
        return self.made("items", text, f"[{index.text}]", kind)

    def made(self, hint: str, text: str, index: str = "", kind: str = "int") -> Expression:
        """A tensor that is made before any pair is asked for, or what it has at an index."""
        taken = {*RESERVED, *map(argument_of, self.program.inputs)}
        names = chain([hint], (f"{hint}_{number}" for number in count(2)))
        # one like the hint that stands for this text, or for nothing else
        name = next(x for x in names if x not in taken and self.lists.get(x, text) == text)
        self.lists[name] = text
        return Expression(f"{name}{index}", kind, self.reals)

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
            # rows of an input are counted from the first query
            row = "q" if self.program.cross else "q - (n - n_q)"
            text = f"{argument_of(entry)}[b, h, {row}, k]"
            return {pair_reading(entry.name).name: Expression(text, "score", self.reals)}
        sides = {"": None} if entry.kind == "length" else {"q": q, "k": k}
        return {reading(entry.name, side).name: self.read(entry, at) for side, at in sides.items()}


def argument_of(entry: Input | InputRef) -> str:
    """What an input is called in a mask: by its name, unless that stands for something else."""
    taken = entry.name in RESERVED or entry.name.startswith("bias_")
    taken = taken or keyword.iskeyword(entry.name)
    return f"{entry.name}_input" if taken else entry.name
