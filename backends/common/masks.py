"""Masks as tensors: what is static is a table, evaluated once, in numpy; what the run-time inputs
decide is computed in torch at every call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.labels import ALL, Part, reading_of
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.full import Full
from attnspec.graphs.relation import DataDependent, Elementwise, Relation, evaluate_pairs
from attnspec.graphs.token_sets import Data, StandIn, reads_data
from attnspec.lower.work import Work

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Decided(Relation):
    """The pairs that a function tells: those of a choice, or a table."""

    pairs: Callable[[Elementwise, Elementwise], Elementwise]

    def holds(self, q: Elementwise, k: Elementwise, n: int) -> Elementwise:
        return self.pairs(q, k)


@dataclass(frozen=True, eq=False)
class ByPositions:
    """An input [B, 1, n] that is read at positions of each sample and head, [B or 1, H or 1, …]."""

    values: Tensor

    def __getitem__(self, index: tuple[object, Tensor]) -> Tensor:
        samples = torch.arange(len(self.values), device=self.values.device)
        return self.values[samples.view(-1, *(1,) * (index[1].dim() - 1)), 0, index[1]]


def with_data(value: Value, data: Mapping[Any, Any]) -> Value:
    """The same relation with values in place of its stand-ins, choices in place of what the data
    decide, and tables in place of static parts."""
    filled: Any = value
    if isinstance(value, StandIn):
        filled = Data(data[value.name])
    elif isinstance(value, DataDependent):
        filled = Decided(data[value].holds)
    elif isinstance(value, Part):
        table = data[value]
        filled = Decided(lambda q, k: table)
    elif isinstance(value, tuple):
        filled = type(value)(with_data(part, data) for part in value)
    elif is_dataclass(value) and not isinstance(value, type) and reads_data(value):
        parts = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        read = {name: with_data(x, data) for name, x in parts.items() if reads_data(x)}
        filled = type(value)(**parts | read)
    return cast(Value, filled)


def of_sample(work: Work, read: Sequence[Tensor]) -> Work:
    """A work with these inputs of one sample in place: bool or numbers [n_k], a length [1, 1]."""
    arrays = [x.detach().cpu().numpy() for x in read]
    values = [x.item() if x.ndim == 2 else x for x in arrays]
    data = dict(zip(work.reads, values, strict=True))
    return replace(work, relation=with_data(work.relation, data), reads=())


MaskPlan: TypeAlias = Callable[[Mapping[Any, Any]], Tensor]
"""How a mask is computed of data: bool, broadcastable to [B, n_q, n_k], and to [B, H, n_q, n_k]
where the data decide."""


def reading(
    relation: Relation, q: Tensor, k: Tensor, n: int, parts: Mapping[Part, Tensor]
) -> MaskPlan:
    """The plan of a relation at positions q and k of n, which may be those of each sample and head,
    [B or 1, H or 1, …], with tables of its static parts."""
    rank = max(q.dim(), k.dim())

    def placed(x: Any) -> Any:
        # a length is one number of each sample
        return ByPositions(x) if x.dim() == 3 else x.reshape(-1, *(1,) * (rank - 1))

    def plan(data: Mapping[Any, Any]) -> Tensor:
        if rank > 3:
            data = {key: placed(x) if isinstance(key, str) else x for key, x in data.items()}
        mask: Tensor = with_data(relation, {**data, **parts}).holds(q, k, n)
        return mask

    return plan


def mask_plan(
    relation: Relation, q: np.ndarray, k: np.ndarray, n: int, device: torch.device
) -> MaskPlan:
    """The plan of a relation at positions of n: q [n_q, 1] and k [1, n_k], or positions of each
    sample and head, [B or 1, H or 1, …] both."""

    def table(static: Relation) -> Tensor:
        return torch.from_numpy(np.array(evaluate_pairs(static, q, k, n))).to(device)

    within = reading_of(relation)
    if within.condition is None:
        mask = table(relation)
        return lambda data: mask
    parts = {Part(number): table(part) for number, part in enumerate(within.parts)}
    at = [torch.from_numpy(np.array(x)).to(device) for x in (q, k)]
    condition = reading(within.condition, at[0], at[1], n, parts)
    if within.static == ALL:
        return condition
    static = table(within.static)
    return lambda data: static & condition(data)


def mask_of(
    work: Work, data: Mapping[Any, Any], device: torch.device, rows: np.ndarray | None = None
) -> Tensor:
    """Which keys queries weigh, broadcastable to [B, H, n_q, n_k]: those of the graph, beside a
    mechanism all; of some rows alone if asked for."""
    n_k, relation = work.n_k, work.relation
    if work.hybrid:
        relation = Causal() if work.causal else Full()
    rows = np.arange(work.n_q) if rows is None else rows
    q, k = rows[:, None] + n_k - work.n_q, np.arange(n_k)[None]
    mask = mask_plan(relation, q, k, n_k, device)(data)
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
    return torch.unflatten(held, 1, (keys, -1))[:, :, :, None]
