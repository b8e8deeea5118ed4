"""The report on a model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from attnspec.text.diagnostics import count_of

Pair: TypeAlias = "tuple[int, int, int | None, int, int]"
"""Sample, layer, head (None where heads cannot be separated), query and key."""


@dataclass
class LayerCheck:
    """One attention layer: what was compared, or the `reason` why not, `excused` if no fault.

    `layer` is its number, if the spec has it; `path` names the module, `kind` what it called;
    `heads` is None where they cannot be separated; `passes` counts calls for this check. `leaks`
    and `missing` have the first pairs; `weight` is that of the first leak; `causes` counts leaks by
    what is read.
    """

    layer: int | None
    path: str
    kind: str
    heads: int | None = None
    pairs: int = 0
    passes: int = 0
    leaks: Sequence[Pair] = ()
    leak_count: int = 0
    weight: float = 0.0
    causes: Sequence[tuple[str, int]] = ()
    missing: Sequence[Pair] = ()
    missing_count: int = 0
    faults: Sequence[str] = ()
    reason: str | None = None
    excused: bool = False

    @property
    def ok(self) -> bool:
        """Whether it was checked and reads just the pairs of the spec."""
        return self.reason is None and not (self.leak_count or self.missing_count or self.faults)

    def lines(self) -> list[str]:
        """What is printed of it."""
        name = "" if self.layer is None else f"layer {self.layer}, "
        place = f"{name}{self.path or 'the model'} ({self.kind})"
        if self.reason is not None:
            return [f"not checked: {place}: {self.reason}"]
        heads = count_of(self.heads or 0, "head")
        heads = heads if self.heads else "heads not separated, (q, q) not compared"
        lines = [f"{place}: {heads}, {'equal, ' * self.ok}{self.pairs:,} pairs allowed"]
        for what, pairs, count, end in (
            ("read and not allowed", self.leaks, self.leak_count, f", weight {self.weight:.3g}"),
            ("allowed and not read", self.missing, self.missing_count, ""),
        ):
            for b, _, h, q, k in pairs[:1]:
                head = "" if h is None else f"head {h}, "
                first = f"sample {b}, {head}query {q:,}, key {k:,}{end}"
                lines.append(f"  {what}: {count:,}; first: {first}")
        lines += [f"    {count:,} of them: {what}" for what, count in self.causes]
        return [*lines, *(f"  {fault}" for fault in self.faults)]


@dataclass
class ModelVerification:
    """A model compared with a spec in a `setting`: its attention `layers`, and `faults` of no
    layer. `equal_with`: settings that are equal; `interrupted`: why layers were not checked."""

    spec: str
    model: str
    setting: list[str]
    layers: list[LayerCheck] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    equal_with: list[str] = field(default_factory=list)
    interrupted: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every attention layer of the spec was checked and is equal."""
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
        count = f"{count_of(len(checked), 'attention layer')} checked"
        lines = [f"`{self.spec}` and {self.model}: {'equal' if self.ok else otherwise}; {count}"]
        lines += [f"setting: {'; '.join(self.setting)}"] * bool(self.setting)
        lines += [f"interrupted: {self.interrupted}"] * bool(self.interrupted)
        lines += [*self.faults, *(line for layer in self.layers for line in layer.lines())]
        lines += [f"equal with {change}" for change in self.equal_with]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        layers = [{"ok": layer.ok, **asdict(layer)} for layer in self.layers]
        pairs = {"leaks": self.leaks, "missing": self.missing}
        return {"ok": self.ok, **asdict(self), **pairs, "layers": layers}
