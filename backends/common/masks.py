"""Masks as tensors: what is static is a table, what the run-time inputs decide is computed.

A relation is cut into its greatest parts that read no input. These are evaluated once, in numpy;
the patterns that read inputs are evaluated in torch at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.relation import Relation, evaluate_pairs
from attnspec.graphs.token_sets import Data, StandIn, reads_data

Part = TypeVar("Part")


def with_data(value: Part, data: Mapping[str, object]) -> Part:
    """The same relation with values in place of its stand-ins."""
    if isinstance(value, StandIn):
        return Data(data[value.name])  # type: ignore[return-value]
    if isinstance(value, tuple):
        return type(value)(with_data(part, data) for part in value)
    if is_dataclass(value) and not isinstance(value, type) and reads_data(value):
        changed = {
            entry.name: with_data(getattr(value, entry.name), data) for entry in fields(value)
        }
        return replace(value, **changed)
    return value


@dataclass(frozen=True, eq=False)
class Static:
    """A part that reads no input: bool, broadcastable to [n_q, n_k]."""

    held: torch.Tensor

    def mask(self, data: Mapping[str, torch.Tensor], n: int) -> torch.Tensor:
        return self.held


@dataclass(frozen=True, eq=False)
class Reading:
    """A pattern that reads inputs, at positions q [n_q, 1] and k [1, n_k]."""

    relation: Relation
    q: torch.Tensor
    k: torch.Tensor

    def mask(self, data: Mapping[str, torch.Tensor], n: int) -> torch.Tensor:
        held: torch.Tensor = with_data(self.relation, data).holds(self.q, self.k, n)
        return held


@dataclass(frozen=True, eq=False)
class Joined:
    """`|`, `&` or `~` of parts."""

    op: str
    parts: tuple[Static | Reading | Joined, ...]

    def mask(self, data: Mapping[str, torch.Tensor], n: int) -> torch.Tensor:
        held = self.parts[0].mask(data, n)
        if self.op == "~":
            return ~held
        for part in self.parts[1:]:
            other = part.mask(data, n)
            held = held | other if self.op == "|" else held & other
        return held


MaskPlan = Static | Reading | Joined
"""How a mask is computed; `mask(data, n)` is bool, broadcastable to [B, n_q, n_k]."""


def mask_plan(
    relation: Relation, q: np.ndarray, k: np.ndarray, n: int, device: torch.device
) -> MaskPlan:
    """The plan of a relation at positions q [n_q, 1] and k [1, n_k] of n."""
    if not reads_data(relation):
        held = np.array(evaluate_pairs(relation, q, k, n))
        return Static(torch.from_numpy(held).to(device))
    match relation:
        case Union(terms) | Intersection(terms):
            read = [term for term in terms if reads_data(term)]
            rest = tuple(term for term in terms if not reads_data(term))
            parts = [mask_plan(term, q, k, n, device) for term in read]
            if rest:
                parts.append(mask_plan(replace(relation, terms=rest), q, k, n, device))
            return Joined(relation.name, tuple(parts))
        case Complement(term):
            return Joined("~", (mask_plan(term, q, k, n, device),))
        case Transpose(term):
            return mask_plan(term, k, q, n, device)
        case Shift(term, by):
            low, high = max(0, by), min(n, n + by)
            inside = (q >= low) & (q < high) & (k >= low) & (k < high)
            # positions outside are moved inside before the term sees them
            moved = [np.where((at >= low) & (at < high), at - by, 0) for at in (q, k)]
            bounds = Static(torch.from_numpy(inside).to(device))
            return Joined("&", (bounds, mask_plan(term, moved[0], moved[1], n, device)))
        case _:
            at = [torch.from_numpy(np.array(x)).to(device) for x in (q, k)]
            return Reading(relation, at[0], at[1])
