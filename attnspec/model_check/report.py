"""What was looked at in a model, and what was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypeAlias

Pair: TypeAlias = "tuple[int, int, int | None, int, int]"
"""Sample, layer, head (None where heads cannot be told apart), query and key."""


@dataclass(frozen=True)
class LayerCheck:
    """One attention layer: what was compared, or why it was not.

    `layer` is its number among those that the spec speaks of, None for any other; `path` the module
    that called it and `kind` what was called; `heads` None where heads cannot be told apart.
    `leaks` and `missing` have the first pairs, `leak_count` and `missing_count` count all. `weight`
    is that of the first leak in its row; `causes` says how many leaks read a later position,
    another document, padding or an unused slot. `faults` are other things that are wrong, `notes`
    what to know. `reason` says why a layer was not checked; `excused` that this is no fault: the
    spec does not speak of it, or it was not asked for. `passes` counts the calls that were made.
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
    notes: tuple[str, ...] = ()
    reason: str | None = None
    excused: bool = False

    @property
    def checked(self) -> bool:
        """Whether its pairs were compared."""
        return self.reason is None

    @property
    def ok(self) -> bool:
        """Whether it was checked and reads just the pairs of the spec."""
        return self.checked and not (self.leak_count or self.missing_count or self.faults)

    def lines(self) -> list[str]:
        """What there is to say of it."""
        name = "" if self.layer is None else f"layer {self.layer}, "
        place = f"{name}{self.path or 'the model'} ({self.kind})"
        if self.reason is not None:
            return [f"not checked: {place}: {self.reason}"]
        heads = "heads together" if self.heads is None else _count(self.heads, "head")
        lines = [f"{place}: {heads}, {'equal, ' if self.ok else ''}{_count(self.pairs, 'pair')}"]
        if self.leak_count:
            first = f"{_words(self.leaks[0])} with weight {self.weight:.3g}"
            lines.append(f"  read and not allowed: {self.leak_count:,}; first: {first}")
            lines += [f"    {count:,} of them: {what}" for what, count in self.causes]
        if self.missing_count:
            first = _words(self.missing[0])
            lines.append(f"  allowed and not read: {self.missing_count:,}; first: {first}")
        lines += [f"  {fault}" for fault in self.faults]
        return [*lines, *(f"  note: {note}" for note in self.notes)]


@dataclass(frozen=True)
class ModelVerification:
    """A model held against a spec; printed, what was looked at and what differs.

    `setting` says what the model ran with, `equal_with` with which other setting the same pairs are
    equal; `faults` are those of no layer. `interrupted` says why not everything was looked at.
    """

    spec: str
    model: str
    setting: tuple[str, ...]
    layers: tuple[LayerCheck, ...]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    equal_with: tuple[str, ...] = ()
    interrupted: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every attention layer that the spec speaks of was checked and is equal."""
        asked = [layer for layer in self.layers if not layer.excused]
        return bool(asked) and all(x.ok for x in asked) and not (self.faults or self.interrupted)

    @property
    def leaks(self) -> list[Pair]:
        """Pairs that are read and not allowed: (sample, layer, head, query, key), the first ones of
        each layer."""
        return [pair for layer in self.layers for pair in layer.leaks]

    @property
    def missing(self) -> list[Pair]:
        """Pairs that are allowed and not read, likewise."""
        return [pair for layer in self.layers for pair in layer.missing]

    @property
    def differing(self) -> tuple[LayerCheck, ...]:
        """The layers whose pairs are not the spec's."""
        return tuple(x for x in self.layers if x.checked and not x.ok)

    def __str__(self) -> str:
        checked = sum(layer.checked for layer in self.layers)
        verdict = "equal" if self.ok else "not equal" if self.differing else "not shown to be equal"
        layers = f"{_count(checked, 'attention layer')} checked"
        lines = [f"`{self.spec}` and {self.model}: {verdict}; {layers}"]
        lines += [f"setting: {'; '.join(self.setting)}"] * bool(self.setting)
        lines += [f"interrupted: {self.interrupted}"] * (self.interrupted is not None)
        lines += self.faults
        for layer in self.layers:
            lines += layer.lines()
        lines += [f"equal {change}" for change in self.equal_with]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        layers = [{"ok": x.ok, "checked": x.checked, **asdict(x)} for x in self.layers]
        pairs = {"leaks": self.leaks, "missing": self.missing}
        return {"ok": self.ok, **asdict(self), **pairs, "layers": layers}


def _words(pair: Pair) -> str:
    sample, _, head, query, key = pair
    of_head = "" if head is None else f"head {head}, "
    return f"sample {sample}, {of_head}query {query:,} and key {key:,}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
