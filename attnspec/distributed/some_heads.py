"""Some heads of a layer, numbered among themselves: those that travel one way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from attnspec.distributed.regions import Parts
from attnspec.lower.work import Work, key_heads
from attnspec.runtime.engine import Engine


@dataclass(frozen=True)
class SomeHeads:
    """The heads `chosen`, ascending, of so many query heads and key heads of a layer."""

    chosen: tuple[int, ...]
    heads: int
    key_heads: int

    @cached_property
    def keys(self) -> list[int]:
        """The key heads that they read: each once where all are read equally often."""
        return key_heads(self.chosen, self.heads // self.key_heads)

    @property
    def ratio(self) -> int:
        """Heads to each of these keys."""
        return len(self.chosen) // len(self.keys)

    def of(self, parts: Parts) -> Parts:
        """Their queries, keys and values."""
        q, k, v = parts
        if len(self.chosen) == self.heads:
            return parts
        return q[:, list(self.chosen)], k[:, self.keys], v[:, self.keys]

    def works(
        self, engine: Engine, layer: int, n: int
    ) -> list[tuple[Work, tuple[int, ...], tuple[int, ...]]]:
        """What they compute: works with the heads that share each, and their numbers here."""
        number = {head: at for at, head in enumerate(self.chosen)}
        return [
            (work, members, tuple(number[head] for head in members))
            for work, members in engine.binder.works(layer, self.heads, n, n)
            if members[0] in number
        ]
