"""What sets two specs apart besides their pairs: counts, shapes, what is done with the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from attnspec.graphs.stack import Stack
from attnspec.lower.mechanism_sizes import bind_mechanism, symbols_in
from attnspec.text.diagnostics import as_written

if TYPE_CHECKING:
    from attnspec.elaborate import Elaborated
    from attnspec.ir.mechanisms.declaration import MechanismDeclaration
    from attnspec.ir.program import Attend


def asides(a: Elaborated, b: Elaborated, slots: Sequence[tuple[int, int]]) -> list[str]:
    """What else sets two specs apart, in words; `slots` are a layer and head of each group of heads
    that are compared."""
    notes = []
    for what, one, other in (
        ("layer", a.program.layers, b.program.layers),
        ("head", a.program.heads, b.program.heads),
    ):
        if one != other:
            notes.append(_counts(what, one, other))
    shapes = [_shape(spec) for spec in (a, b)]
    if shapes[0] != shapes[1]:
        notes.append(
            f"a is on {shapes[0]}, b on {shapes[1]}; positions of the same number are compared"
        )
    if a.program.extra_tokens != b.program.extra_tokens:
        counts = (a.program.extra_tokens, b.program.extra_tokens)
        notes.append(
            f"a has {counts[0]} extra tokens, b has {counts[1]}; position {max(counts)} is then"
            " another token in a than in b"
        )
    if a.program.causal != b.program.causal:
        notes.append(f"only {'a' if a.program.causal else 'b'} is declared `causal`")
    notes.extend(_computed(a, b, slots))
    return notes


def _counts(what: str, one: int | None, other: int | None) -> str:
    if one is None or other is None:
        lone, count = ("a", other) if one is None else ("b", one)
        rest = "b" if lone == "a" else "a"
        every = f"each of the {count} {what}s" if count != 1 else f"the one {what}"
        return f"{lone} declares no {what}s: it is compared with {every} of {rest}"
    few, many, larger = min(one, other), max(one, other), "a" if one > other else "b"
    left = f"{what} {few}" if many == few + 1 else f"{what}s {few}..{many - 1}"
    verb = "is" if many == few + 1 else "are"
    counted = f"{one} {what}" if one == 1 else f"{one} {what}s"
    return f"a has {counted}, b has {other}; {left} of {larger} {verb} not compared"


def _shape(spec: Elaborated) -> str:
    grid = spec.program.grid
    if grid is None:
        return "a line"
    extents = " x ".join(str(x) if isinstance(x, int) else "…" for x in grid)
    return f"a grid of {extents}"


_ASIDE = {
    "mechanism": "the mechanism",
    "scale": "the scale",
    "scores": "the changes to the score",
    "normalize": "the normaliser",
}


def _computed(a: Elaborated, b: Elaborated, slots: Sequence[tuple[int, int]]) -> list[str]:
    """What is done with the pairs, where that differs."""
    readers: dict[str, None] = {}
    for slot in slots:
        first, second = (spec.program.attend(*slot) for spec in (a, b))
        for name, words in _ASIDE.items():
            if getattr(first, name) != getattr(second, name):
                readers[words] = None
    return [f"a and b differ in {', '.join(readers)}"] if readers else []


@dataclass(frozen=True)
class Mechanisms:
    """The names of two mechanisms, None where a spec has a graph alone there, and the options, with
    their values in a and in b, that differ between two of one name. `lasting`: what is said holds
    for every n."""

    a: str | None
    b: str | None
    options: tuple[tuple[str, str, str], ...] = ()
    lasting: bool = True

    @property
    def equal(self) -> bool:
        """Whether they are one mechanism with the same options."""
        return self.a == self.b and not self.options

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        options = [{"name": name, "a": one, "b": other} for name, one, other in self.options]
        return {"a": self.a, "b": self.b, "equal": self.equal, "options": options}

    def __str__(self) -> str:
        if self.equal:
            return f"`{self.a}` with the same options"
        if self.options:
            listed = "; ".join(f"{name} is {x} in a, {y} in b" for name, x, y in self.options)
            return f"`{self.a}` with different options: {listed}"
        names = ["no mechanism" if name is None else f"`{name}`" for name in (self.a, self.b)]
        return f"{names[0]} in a, {names[1]} in b"


def mechanisms_of(a: Elaborated, b: Elaborated, n: int, layer: int, head: int) -> Mechanisms | None:
    """The mechanisms of one layer and head at n positions, None where both specs have a graph
    alone; raises BindError where an option has no value at n."""
    one, other = (spec.program.attend(layer, head).mechanism for spec in (a, b))
    if one is None and other is None:
        return None
    if one is None or other is None or one.name != other.name:
        return Mechanisms(one.name if one else None, other.name if other else None)
    # n = 0 runs nothing, and sizes that depend on n have a value from 1 on
    first, second = (
        _options(bind_mechanism(each, Stack(spec.program).situation(max(1, n), layer, head)), spec)
        for spec, each in ((a, one), (b, other))
    )
    differing = tuple((name, x, second[name]) for name, x in first.items() if x != second[name])
    lasting = one == other or not any("n" in symbols_in(each) for each in (one, other))
    return Mechanisms(one.name, other.name, differing, lasting)


def kind_of(attend: Attend) -> str:
    """What a head computes, in few words."""
    name = "" if attend.mechanism is None else f"`{attend.mechanism.name}`"
    if attend.graph is None:
        return name
    return f"a graph + {name}" if name else "a graph"


def _options(mechanism: MechanismDeclaration, spec: Elaborated) -> dict[str, str]:
    """The options by name, those that are left out by their defaults, and whether the causal form
    is asked for."""
    options = {
        entry.name: as_written(getattr(mechanism, entry.name))
        for entry in fields(mechanism)  # type: ignore[arg-type]
    }
    return {**options, "causal": as_written(spec.program.causal)}
