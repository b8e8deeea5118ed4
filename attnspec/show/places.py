"""Layers and heads in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attnspec.text.diagnostics import ranges

Slot = tuple[int, int]
"""A layer and a head, from 0."""


def places(slots: Iterable[Slot], every: Collection[Slot]) -> str:
    """`layer 0..3 head 1; layer 4`: some of the layers and heads; "" where there is one in all."""
    slots = list(slots)
    if len(every) == 1:
        return ""
    if len(slots) == len(every):
        return "every head"
    heads: dict[tuple[int, ...], list[int]] = {}
    for layer in sorted({layer for layer, _ in slots}):
        own = tuple(sorted(head for at, head in slots if at == layer))
        heads.setdefault(own, []).append(layer)
    layers, of_layer = ({slot[side] for slot in every} for side in (0, 1))
    parts = []
    for own, at in heads.items():
        words = [f"layer {ranges(at)}"] if len(layers) > 1 and len(at) < len(layers) else []
        if len(of_layer) > 1:
            words.append("every head" if len(own) == len(of_layer) else f"head {ranges(list(own))}")
        parts.append(" ".join(words) or "every layer")
    return "; ".join(parts)
