"""What was looked at in a model, and what was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypeAlias

Pair: TypeAlias = "tuple[int, int, int | None, int, int]"
"""Sample, layer, head (None where heads cannot be told apart), query and key."""


@dataclass(frozen=True)
class LayerCheck:
    """One attention layer: what was compared, or the `reason` why not, `excused` if no fault.

    `layer` is its number, None where the spec does not speak of it; `path` the module that called
    it and `kind` what was called, in so many `passes`; `heads` None where heads cannot be told
    apart. `leaks` and `missing` have the first pairs, `leak_count` and `missing_count` all,
    `weight` is that of the first leak; `causes` says how many read what no query may read.
    """

    layer: int | None
    path: str
    kind: str
    heads: int | None = None
    pairs: int = 0
    passes: int = 0
    leaks: tuple[Pair, ...] = ()
    leak_count: int = 0
    weight: float = 0.0
    causes: tuple[tuple[str, int], ...] = ()
    missing: tuple[Pair, ...] = ()
    missing_count: int = 0
    faults: tuple[str, ...] = ()
    reason: str | None = None
    excused: bool = False

    @property
    def ok(self) -> bool:
        """Whether it was checked and reads just the pairs of the spec."""
        return self.reason is None and not (self.leak_count or self.missing_count or self.faults)

    def lines(self) -> list[str]:
        """What there is to say of it."""
        name = "" if self.layer is None else f"layer {self.layer}, "
        place = f"{name}{self.path or 'the model'} ({self.kind})"
        if self.reason is not None:
            return [f"not checked: {place}: {self.reason}"]
        heads = f"{self.heads} heads" if self.heads else "heads together, (q, q) not compared"
        lines = [f"{place}: {heads}, {'equal, ' * self.ok}{self.pairs:,} pairs"]
        weight = f" with weight {self.weight:.3g}"
        for what, pairs, count, end in (
            ("read and not allowed", self.leaks, self.leak_count, weight),
            ("allowed and not read", self.missing, self.missing_count, ""),
        ):
            for b, _, h, q, k in pairs[:1]:
                head = "" if h is None else f"head {h}, "
                first = f"sample {b}, {head}query {q:,} and key {k:,}{end}"
                lines.append(f"  {what}: {count:,}; first: {first}")
        lines += [f"    {count:,} of them: {what}" for what, count in self.causes]
        return [*lines, *(f"  {fault}" for fault in self.faults)]


@dataclass(frozen=True)
class ModelVerification:
    """A model held against a spec: with which `setting`, with which others (`equal_with`) it is
    equal, `faults` that are of no layer, and why not everything was looked at (`interrupted`)."""

    spec: str
    model: str
    setting: tuple[str, ...]
    layers: tuple[LayerCheck, ...]
    faults: tuple[str, ...] = ()
    equal_with: tuple[str, ...] = ()
    interrupted: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every attention layer that the spec speaks of was checked and is equal."""
        asked = [layer for layer in self.layers if not layer.excused]
        return bool(asked) and all(x.ok for x in asked) and not (self.faults or self.interrupted)

    @property
    def leaks(self) -> list[Pair]:
        """Pairs (sample, layer, head, query, key) that are read and not allowed, first ones."""
        return [pair for layer in self.layers for pair in layer.leaks]

    @property
    def missing(self) -> list[Pair]:
        """Pairs that are allowed and not read, likewise."""
        return [pair for layer in self.layers for pair in layer.missing]

    def __str__(self) -> str:
        checked = [layer for layer in self.layers if layer.reason is None]
        otherwise = "not shown to be equal" if all(x.ok for x in checked) else "not equal"
        count = f"{len(checked)} attention layers checked"
        lines = [f"`{self.spec}` and {self.model}: {'equal' if self.ok else otherwise}; {count}"]
        lines += [f"setting: {'; '.join(self.setting)}"] * bool(self.setting)
        lines += [f"interrupted: {self.interrupted}"] * bool(self.interrupted)
        lines += [*self.faults, *(line for layer in self.layers for line in layer.lines())]
        lines += [f"equal {change}" for change in self.equal_with]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        layers = [{"ok": layer.ok, **asdict(layer)} for layer in self.layers]
        pairs = {"leaks": self.leaks, "missing": self.missing}
        return {"ok": self.ok, **asdict(self), **pairs, "layers": layers}
