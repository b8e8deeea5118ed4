"""Why a figure is not known."""

from __future__ import annotations


class Unknown(Exception):
    """Raised, and kept, in place of a figure that is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
