"""Masks as tensors: what is static is a table, what the run-time inputs decide is computed.

A relation is cut into its greatest parts that read no input. These are evaluated once, in numpy;
the patterns that read inputs are evaluated in torch at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from operator import and_
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnspec.graphs.across import Across
from attnspec.graphs.gathered import Gathered
from attnspec.graphs.operators import Complement, Intersection, Shift, Transpose, Union
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.relation import DataDependent, Elementwise, Relation, evaluate_pairs
from attnspec.graphs.token_sets import Data, StandIn, reads_data
from attnspec.lower.work import Work

Part = TypeVar("Part")


@dataclass(frozen=True, eq=False)
class Decided(Relation):
    """The pairs of a choice, which `choice.holds(q, k)` tells."""

    choice: Any

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.choice.holds(q, k)


def with_data(value: Part, data: Mapping[Any, Any]) -> Part:
    """The same relation with values in place of its stand-ins, and choices in place of what the
    data decide."""
    return filling(value)(data)


def filling(value: Part) -> Callable[[Mapping[Any, Any]], Part]:
    """What `with_data` makes of a value and data, for calls one after the other."""
    if isinstance(value, StandIn):
        name = value.name
        return lambda data: Data(data[name])  # type: ignore[return-value]
    if isinstance(value, DataDependent):
        return lambda data: Decided(data[value])  # type: ignore[return-value]
    if isinstance(value, tuple):
        parts, kind = [filling(part) for part in value], type(value)
        return lambda data: kind(part(data) for part in parts)
    if is_dataclass(value) and not isinstance(value, type) and reads_data(value):
        constants = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        read = {name: filling(part) for name, part in constants.items() if reads_data(part)}
        made = type(value)
        return lambda data: made(**constants | {name: fill(data) for name, fill in read.items()})
    return lambda data: value


def of_sample(work: Work, read: Sequence[Tensor]) -> Work:
    """A work with these inputs of one sample in place: bool or numbers [n_k], a length [1, 1]."""
    arrays = [x.detach().cpu().numpy() for x in read]
    values = [x.item() if x.ndim == 2 else x for x in arrays]
    data = dict(zip(work.reads, values, strict=True))
    return replace(work, relation=with_data(work.relation, data), reads=())


MaskPlan: TypeAlias = Callable[[Mapping[Any, Any], int], Tensor]
"""How a mask is computed of data and a length: bool, broadcastable to [B, n_q, n_k], and to
[B, H, n_q, n_k] where the data decide."""


def static(held: Tensor) -> MaskPlan:
    """The plan of what reads no input: bool, broadcastable to [n_q, n_k]."""
    return lambda data, n: held


def joined(op: Callable[..., Tensor], parts: Sequence[MaskPlan]) -> MaskPlan:
    """The plan of parts that are joined one after the other."""
    return lambda data, n: reduce(op, [part(data, n) for part in parts])


def reading(relation: Relation, q: Tensor, k: Tensor) -> MaskPlan:
    """The plan of a pattern that reads inputs, or that the data decide, at positions q and k; these
    may be those of each sample and head, [B or 1, H or 1, …]."""
    filled = filling(relation)

    def sample_by_sample(data: Mapping[Any, Any], n: int) -> Tensor:
        inputs = {name: x for name, x in data.items() if isinstance(name, str)}
        batch = max([q.shape[0], k.shape[0], *(len(x) for x in inputs.values())])
        heads = max(q.shape[1], k.shape[1])
        rows, keys = (x.expand(batch, heads, *x.shape[2:]) for x in (q, k))
        masks = []
        for sample in range(batch):
            mine = filled({name: x[sample, 0] for name, x in inputs.items()})
            pairs = zip(rows[sample], keys[sample], strict=True)
            masks.append(torch.stack([mine.holds(*each, n) for each in pairs]))
        return torch.stack(masks)

    if q.dim() >= 4 and not isinstance(relation, DataDependent):
        return sample_by_sample
    return lambda data, n: filled(data).holds(q, k, n)


def mask_plan(
    relation: Relation, q: np.ndarray, k: np.ndarray, n: int, device: torch.device
) -> MaskPlan:
    """The plan of a relation at positions of n: q [n_q, 1] and k [1, n_k], or positions of each
    sample and head, [B or 1, H or 1, …] both."""
    if not reads_data(relation):
        return static(torch.from_numpy(np.array(evaluate_pairs(relation, q, k, n))).to(device))
    match relation:
        case Union(terms) | Intersection(terms):
            read = [term for term in terms if reads_data(term)]
            rest = tuple(term for term in terms if not reads_data(term))
            parts = [mask_plan(term, q, k, n, device) for term in read]
            if rest:
                parts.append(mask_plan(replace(relation, terms=rest), q, k, n, device))
            return joined(relation.pairs, parts)
        case Complement(term):
            inner = mask_plan(term, q, k, n, device)
            return lambda data, n: ~inner(data, n)
        case Transpose(term):
            return mask_plan(term, k, q, n, device)
        case Shift(term, by):
            low, high = max(0, by), min(n, n + by)
            inside = (q >= low) & (q < high) & (k >= low) & (k < high)
            # positions outside are moved inside before the term sees them
            moved = [np.where((at >= low) & (at < high), at - by, 0) for at in (q, k)]
            bounds = static(torch.from_numpy(inside).to(device))
            return joined(and_, [bounds, mask_plan(term, moved[0], moved[1], n, device)])
        case Gathered(term) | Across(term):
            inside, query, present = relation.places(q, k)
            bounds = static(torch.from_numpy(np.asarray(inside)).to(device))
            length = relation.length
            longer = mask_plan(term, query, present, length, device)
            return joined(and_, [bounds, lambda data, n: longer(data, length)])
        case _:
            at = [torch.from_numpy(np.array(x)).to(device) for x in (q, k)]
            return reading(relation, at[0], at[1])


def mask_of(work: Work, data: Mapping[Any, Any], device: torch.device) -> Tensor:
    """Which keys queries weigh, broadcastable to [B, H, n_q, n_k]: those of the graph, beside a
    mechanism all."""
    n_k, relation = work.n_k, work.relation
    if work.hybrid:
        relation = Causal() if work.causal else Full()
    q, k = np.arange(n_k - work.n_q, n_k)[:, None], np.arange(n_k)[None]
    mask = mask_plan(relation, q, k, n_k, device)(data, n_k)
    # inputs of graphs that are not data-dependent have no axis of heads
    return mask[:, None] if mask.dim() == 3 else mask


def added_by(mask: Tensor, kind: torch.dtype, none: float = -math.inf) -> Tensor:
    """What stands for a mask in scores: 0 for a pair, `none` for another."""
    return mask.new_zeros(mask.shape, dtype=kind).masked_fill_(~mask, none)


def by_key_head(held: Tensor, keys: int) -> Tensor:
    """What is broadcastable to [B, H, n_q, n_k] as [B, K, R, 1, n_q, n_k], for K key heads."""
    held = held.view(*(1,) * (4 - held.dim()), *held.shape)
    if held.shape[1] == 1:
        return held[:, :, None, None]
    return held.reshape(held.shape[0], keys, -1, 1, *held.shape[2:])
