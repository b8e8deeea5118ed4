"""The mechanisms of one layer and head in two specs: whether they are one, else which options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from attnspec.declared import bind_mechanism, symbols_in
from attnspec.stack import Stack

if TYPE_CHECKING:
    from attnspec.ir import Attend
    from attnspec.mechanism import MechanismDeclaration
    from attnspec.spec import Spec


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
            listed = "; ".join(f"{name}: {x} in a, {y} in b" for name, x, y in self.options)
            return f"`{self.a}` with other options: {listed}"
        names = ["no mechanism" if name is None else f"`{name}`" for name in (self.a, self.b)]
        return f"{names[0]} in a, {names[1]} in b"


def mechanisms_of(a: Spec, b: Spec, n: int, layer: int, head: int) -> Mechanisms | None:
    """The mechanisms of one layer and head at n positions, None where both specs have a graph
    alone; raises BindError where an option has no value at n."""
    one, other = (spec.program.attend(layer, head).mechanism for spec in (a, b))
    if one is None and other is None:
        return None
    if one is None or other is None or one.name != other.name:
        return Mechanisms(one.name if one else None, other.name if other else None)
    # n = 0 runs nothing, and sizes that depend on n have a value from 1 on
    options = [
        _options(bind_mechanism(each, Stack(spec).situation(max(1, n), layer, head)), spec)
        for spec, each in ((a, one), (b, other))
    ]
    differing = tuple(
        (name, value, options[1][name])
        for name, value in options[0].items()
        if value != options[1][name]
    )
    lasting = one == other or not any("n" in symbols_in(each) for each in (one, other))
    return Mechanisms(one.name, other.name, differing, lasting)


def kind_of(attend: Attend) -> str:
    """What a head computes, in few words."""
    name = "" if attend.mechanism is None else f"`{attend.mechanism.name}`"
    if attend.graph is None:
        return name
    return f"a graph + {name}" if name else "a graph"


def _options(mechanism: MechanismDeclaration, spec: Spec) -> dict[str, str]:
    """The options by name, those that are left out by their defaults, and whether the causal form
    is asked for."""
    found = {
        entry.name: _shown(getattr(mechanism, entry.name))
        for entry in fields(mechanism)  # type: ignore[arg-type]
    }
    return {**found, "causal": _shown(spec.program.causal)}


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
