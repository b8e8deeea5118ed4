"""A figure and how far it is to be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from attnspec.text.diagnostics import AttnSpecError

Quality = Literal["exact", "bound", "estimate"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Figure(Generic[T_co]):
    """A value, whether it is exact, a bound or an estimate, and in `note` why it is no more.

    A bound says in its note on which side of the truth it lies.
    """

    value: T_co
    quality: Quality = "exact"
    note: str = ""


class Unknown(Exception):
    """Raised, and kept, in place of a figure that is not known; `limit` is the error of a limit
    that it lies beyond."""

    def __init__(self, reason: str, limit: AttnSpecError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.limit = limit
