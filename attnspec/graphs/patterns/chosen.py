"""Choices made elsewhere: an input lists for each query the key blocks that it reads.

Blocks are counted from position 0. Edges: at most c b n for lists of c blocks of b keys.
Source: what DeepSeek-V3.2 and MiniMax-M3 hand to their attention: DeepSeek-AI 2025,
"DeepSeek-V3.2-Exp", section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnspec.graphs.relation import DataDependent
from attnspec.graphs.token_sets import Data
from attnspec.ir.linear import N
from attnspec.ir.parameters import argument
from attnspec.ir.scalars import Scalar


@dataclass(frozen=True)
class Chosen(DataDependent):
    """The key blocks that an input names."""

    choices: Data = argument("choices", "an input of kind `choices`", positional=True)

    name: ClassVar = "chosen"
    by_inputs: ClassVar = True

    @classmethod
    def order(cls, given: Mapping[str, Scalar]) -> Scalar:
        return N
