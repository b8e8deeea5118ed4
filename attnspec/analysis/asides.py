"""What sets two specs apart besides their pairs: counts, shapes, what is done with the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnspec.spec import Spec


def asides(a: Spec, b: Spec, slots: Sequence[tuple[int, int]]) -> list[str]:
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
            f"a stands on {shapes[0]}, b on {shapes[1]}: positions are compared by their numbers"
        )
    if a.program.extra_tokens != b.program.extra_tokens:
        counts = (a.program.extra_tokens, b.program.extra_tokens)
        notes.append(
            f"a has {counts[0]} extra tokens, b {counts[1]}: position {max(counts)} is not the same"
            " token in both"
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
    verb = "stands" if many == few + 1 else "stand"
    return f"a has {one} {what}{_s(one)}, b {other}: {left} of {larger} {verb} alone, uncompared"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _shape(spec: Spec) -> str:
    grid = spec.program.grid
    if grid is None:
        return "a line"
    known = " x ".join(str(x) if isinstance(x, int) else "…" for x in grid)
    return f"a grid of {known}"


_ASIDE = {
    "mechanism": "the mechanism",
    "scale": "the scale",
    "scores": "the changes to the score",
    "normalize": "the normaliser",
}


def _computed(a: Spec, b: Spec, slots: Sequence[tuple[int, int]]) -> list[str]:
    """What is done with the pairs, where that differs."""
    found: dict[str, None] = {}
    for slot in slots:
        first, second = (spec.program.attend(*slot) for spec in (a, b))
        for name, words in _ASIDE.items():
            if getattr(first, name) != getattr(second, name):
                found[words] = None
    return [f"what is done with the pairs differs: {', '.join(found)}"] if found else []
