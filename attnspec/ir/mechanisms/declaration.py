"""What the compiler knows of every mechanism before it runs.

A mechanism's meaning is a formula rather than a set of pairs. Its file declares the arguments, as
fields of a frozen dataclass, and states the formula; q_i, k_j, v_j are rows of queries, keys and
values, d is the width of a head, phi a feature map applied to rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

START = ("zeros", "ones", "constant", "normal", "uniform", "scaled", "drawn")
"""How a learned part may start."""


@dataclass(frozen=True)
class Part:
    """Something that a mechanism learns: a tensor [layers or 1, heads or 1, *shape].

    An entry "d" of the shape is the size of a head, "d_v" that of a head of values. `start` is one
    of `START`, `by` its number: the standard deviation of `normal`, the bound of `uniform`, the
    value of `constant`; `scaled` is normal, with the root of the last extent dividing that
    deviation; `drawn` are Gaussian rows by the seed `by`, the layer and the head. `layers` and
    `heads` say that all layers, or all heads of a layer, share one. What is `kept` is no parameter,
    but a buffer that calls in training move.
    """

    name: str
    shape: tuple[int | str, ...]
    start: str = "zeros"
    by: float = 0.0
    layers: bool = False
    heads: bool = False
    kept: bool = False


class MechanismDeclaration:
    """The base of all mechanisms: name, arguments (the fields), and what it can be part of."""

    name: ClassVar[str] = ""

    causal: ClassVar[bool] = False
    """Whether there is a causal form."""

    why_not_causal: ClassVar[str] = ""
    """Why there is none, to stand behind "`NAME` has no causal form: "."""

    one_sequence: ClassVar[str] = ""
    """Why it has no form between two sequences, "" where it has one, to stand behind "`NAME` has no
    form between two sequences: "."""

    combines: ClassVar[bool] = False
    """Whether it has weights of single pairs, so that `GRAPH + MECHANISM` has a meaning."""

    @classmethod
    def alone(cls, arguments: Mapping[str, object]) -> str:
        """Why, with these arguments, it gives no weights to single pairs, "" where it does; what
        is to be read after its name."""
        return "" if cls.combines else "gives no weights to single pairs"

    @classmethod
    def only_causal(cls, arguments: Mapping[str, object]) -> str:
        """Why, with these arguments, it has a causal form alone, "" where it has both."""
        return ""

    @classmethod
    def takes_scale(cls, arguments: Mapping[str, object]) -> bool:
        """Whether, with these arguments, the scale of scores is a part of its formula."""
        return cls.scaled

    drawn: ClassVar[bool] = False
    """Whether it draws random numbers, which differ by layer and head."""

    scaled: ClassVar[bool] = False
    """Whether the scale of scores is a part of its formula."""

    def parts(self) -> tuple[Part, ...]:
        """What it learns, in the order of its formula."""
        return ()

    @property
    def longest(self) -> int | None:
        """The longest sequence that what it learns is for, None where that knows no length."""
        return None
