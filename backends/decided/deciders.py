"""Who decides which graph, before any head runs: one choice of each, for all heads that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnspec.backends.common.remembered import table_of
from attnspec.backends.common.score_formula import scale_of
from attnspec.backends.decided import cluster, lists, lsh, sinkhorn, topk
from attnspec.backends.decided.choice import Choice, Given, part_of
from attnspec.graphs.relation import DataDependent
from attnspec.graphs.token_sets import inputs_of
from attnspec.lower.work import Call, Heads, Work

DECIDERS: dict[str, Callable[[Any, Given], Choice]] = {
    "chosen": lists.decide_chosen,
    "topk": topk.decide,
    "lsh": lsh.decide,
    "cluster": cluster.decide,
    "sinkhorn": sinkhorn.decide,
}


@dataclass(frozen=True, eq=False)
class Decision:
    """A data-dependent graph, the heads that have it, from the `first` on, and the work of each."""

    leaf: DataDependent
    heads: Heads
    works: tuple[Work, ...]
    first: int = 0

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The run-time inputs that the graph is about."""
        return tuple(inputs_of(self.leaf))

    def given(self, q: Tensor, k: Tensor, call: Call, keys: int | None = None) -> Given:
        """What there is to decide by, for q [B, H, n_q, d] and k [B, H_kv, n_k, d], and the tables
        of these heads; `keys` as `Given` has it."""
        ratio = q.shape[1] // k.shape[1]
        # [B, H, …], [B, H_kv, …] or [B, 1, …]
        own = {name: call.data[name] for name in self.inputs if name in call.data}
        count = q.shape[1]
        if len(self.heads) < count or own:
            index = table_of(tuple(head - self.first for head in self.heads), q.device)
            for name, x in own.items():
                if x.shape[1] > 1:
                    own[name] = x[:, index // (count // x.shape[1])]
            if len(self.heads) < count:
                q, k = q[:, index], k[:, index // ratio]
        return Given(
            q=q,
            k=k,
            heads=self.heads,
            groups=tuple(head // ratio for head in self.heads),
            scales=tuple(scale_of(work, q.shape[3]) for work in self.works),
            padding=call.padding,
            data={**call.data, **own},
            tables=call.tables,
            keys=keys,
        )


def decisions_of(works: Sequence[tuple[Work, Heads]]) -> tuple[Decision, ...]:
    """The decisions of a layer's works; what stands in the arguments of another comes first."""
    found: dict[DataDependent, dict[int, Work]] = {}
    for work, heads in works:
        for leaf in work.decided:
            found.setdefault(leaf, {}).update(dict.fromkeys(heads, work))
    return tuple(
        Decision(leaf, tuple(sorted(of)), tuple(of[head] for head in sorted(of)))
        for leaf, of in found.items()
    )


def decided(
    decisions: Sequence[Decision],
    q: Tensor,
    k: Tensor,
    call: Call,
    tables: Callable[[Decision], Mapping[str, Tensor]],
    keys: int | None = None,
) -> dict[DataDependent, Choice]:
    """The choices of a layer, one for each decision."""
    known: dict[Any, Any] = {name: _with_heads(x) for name, x in call.data.items()}
    choices: dict[DataDependent, Choice] = {}
    for each in decisions:
        given = each.given(q, k, replace(call, data=known, tables=tables(each)), keys)
        choices[each.leaf] = known[each.leaf] = DECIDERS[each.leaf.name](each.leaf, given)
    return choices


def data_of(
    work: Work,
    heads: Sequence[int],
    decisions: Sequence[Decision],
    choices: Mapping[DataDependent, Choice],
    data: Mapping[Any, Any],
) -> Mapping[Any, Any]:
    """What a kernel of some heads is handed: the inputs, and the choices of its graphs."""
    if not work.decided:
        return data
    parts: dict[Any, Any] = {name: _with_heads(x) for name, x in data.items()}
    for each in decisions:
        if each.leaf in work.decided:
            choice = choices[each.leaf]
            if tuple(heads) != each.heads:
                index = torch.tensor([each.heads.index(head) for head in heads])
                choice = part_of(choice, slice(None), index)
            parts[each.leaf] = choice
    return parts


def _with_heads(x: Tensor) -> Tensor:
    """An input with an axis of heads: [B, 1, n] of [B, n]."""
    return x if x.dim() == 4 else x[:, None]
