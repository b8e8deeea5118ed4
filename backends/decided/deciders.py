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
from attnspec.graphs.relation import DataDependent, decided_in
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
    """A data-dependent graph, its heads, from the `first` on, and the works of all heads."""

    leaf: DataDependent
    heads: Heads
    works: Mapping[int, Work]
    first: int = 0

    @cached_property
    def nested(self) -> tuple[DataDependent, ...]:
        """The data-dependent graphs among the arguments."""
        return decided_in(self.leaf)[:-1]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The run-time inputs that the graph is about."""
        return tuple(inputs_of(self.leaf))

    def given(self, q: Tensor, k: Tensor, call: Call, keys: int | None = None) -> Given:
        """What decides, of q [B, H, n_q, d] and k [B, H_kv, n_k, d]; `keys` as `Given` has it."""
        count, ratio = q.shape[1], q.shape[1] // k.shape[1]
        share = self.leaf.share or ("group" if ratio > 1 else "head")
        scored, groups = self.heads, {head // ratio for head in self.heads}
        if share != "head":
            scored = tuple(x for x in sorted(self.works) if share == "all" or x // ratio in groups)
        # [B, H, …], [B, H_kv, …] or [B, 1, …]
        own = {name: call.data[name] for name in self.inputs if name in call.data}
        if len(scored) < count or own:
            index = table_of(tuple(head - self.first for head in scored), q.device)
            for name, x in own.items():
                if x.shape[1] > 1:
                    own[name] = x[:, index // (count // x.shape[1])]
            if len(scored) < count:
                q, k = q[:, index], k[:, index // ratio]
        return Given(
            q=q,
            k=k,
            heads=scored,
            ratio=ratio,
            share=share,
            scales=tuple(scale_of(self.works[head], q.shape[3]) for head in scored),
            padding=call.padding,
            data={**call.data, **own},
            tables=call.tables,
            keys=keys,
        )


def decisions_of(works: Sequence[tuple[Work, Heads]]) -> tuple[Decision, ...]:
    """The decisions of a layer's works; what stands in the arguments of another comes first."""
    found: dict[DataDependent, list[int]] = {}
    for work, heads in works:
        for leaf in work.decided:
            found.setdefault(leaf, []).extend(heads)
    by_head = {head: work for work, heads in works for head in heads}
    return tuple(Decision(leaf, tuple(sorted(heads)), by_head) for leaf, heads in found.items())


def decided(
    decisions: Sequence[Decision],
    q: Tensor,
    k: Tensor,
    call: Call,
    tables: Callable[[Decision], Mapping[str, Tensor]],
    keys: int | None,
) -> dict[DataDependent, Choice]:
    """The choices of a layer, one for each decision."""
    known: dict[Any, Any] = {name: _with_heads(x) for name, x in call.data.items()}
    choices: dict[DataDependent, Choice] = {}
    heads_of = {each.leaf: each.heads for each in decisions}
    for each in decisions:
        given = each.given(q, k, replace(call, data=known, tables=tables(each)), keys)
        if each.nested:
            near = [_near(head, each.heads, given.ratio) for head in given.heads]
            nested = {x: _for_heads(near, choices[x], heads_of[x]) for x in each.nested}
            given = replace(given, data={**given.data, **nested})
        choice = DECIDERS[each.leaf.name](each.leaf, given)
        choices[each.leaf] = _for_heads(each.heads, choice, given.heads)
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
            parts[each.leaf] = _for_heads(heads, choices[each.leaf], each.heads)
    return parts


def _for_heads(heads: Sequence[int], choice: Choice, every: Heads) -> Choice:
    """The part for some heads of a choice that was made for all of `every`."""
    if tuple(heads) == every:
        return choice
    return part_of(choice, slice(None), torch.tensor([every.index(head) for head in heads]))


def _with_heads(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[:, None]


def _near(head: int, heads: Heads, ratio: int) -> int:
    """The head itself if it is one of those, else one that shares its keys, else any of them."""
    return min(heads, key=lambda each: (each // ratio != head // ratio, each != head))
