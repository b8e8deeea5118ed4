"""What the compiler knows of every mechanism before it runs.

A mechanism's meaning is a formula rather than a set of pairs. Its file declares the arguments, as
fields of a frozen dataclass, and states the formula; q_i, k_j, v_j are rows of queries, keys and
values, d is the width of a head, phi a feature map applied to rows.
"""

from __future__ import annotations

from typing import ClassVar


class MechanismDeclaration:
    """The base of all mechanisms: name, arguments (the fields), and what it can be part of."""

    name: ClassVar[str] = ""

    causal: ClassVar[bool] = False
    """Whether there is a causal form."""

    why_not_causal: ClassVar[str] = ""
    """Why there is none, to stand behind "`NAME` has no causal form: "."""

    combines: ClassVar[bool] = False
    """Whether it has weights of single pairs, so that `GRAPH + MECHANISM` has a meaning."""
