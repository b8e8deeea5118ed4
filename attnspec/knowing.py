"""What the patterns in a relation know of themselves."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from attnspec.relations import Relation


def is_closed(relation: Relation) -> bool:
    """Whether every pattern in the relation has a cover of its own."""
    parts = [part for part in _parts(relation) if isinstance(part, Relation)]
    if parts:
        return all(is_closed(part) for part in parts)
    return type(relation).cover is not Relation.cover


def is_scattered(relation: Relation) -> bool:
    """Whether a pattern in the relation is drawn position by position."""
    return relation.scattered or any(
        is_scattered(part) for part in _parts(relation) if isinstance(part, Relation)
    )


def _parts(value: object) -> list[object]:
    found: list[object] = []
    if is_dataclass(value):
        for entry in fields(value):
            content = getattr(value, entry.name)
            found.extend(content if isinstance(content, tuple) else [content])
    return found
