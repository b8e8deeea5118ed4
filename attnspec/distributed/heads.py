"""A layer in which every rank computes some heads at all positions: queries, keys and values go
there and outputs come back (all-to-all over heads)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attnspec.backends.common.torch_modes import apart
from attnspec.backends.decided.choice import Choice
from attnspec.backends.planner import choose
from attnspec.distributed.collectives import Mesh, anchor, tied, travel, unpacked
from attnspec.distributed.planning import DistributedPlan, Works, dealt
from attnspec.distributed.regions import Partial, Parts
from attnspec.graphs.relation import DataDependent
from attnspec.lower.work import Call, Work
from attnspec.runtime.decisions import data_of, decided, decisions_of
from attnspec.runtime.engine import Engine
from attnspec.runtime.head_groups import Group, group_of, together


class HeadsHere:
    """What one rank does for a layer: its heads, over the whole sequence."""

    def __init__(
        self,
        engine: Engine,
        layer: int,
        plan: DistributedPlan,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.engine, self.partition, self.mesh = engine, plan.partition, mesh
        self.heads, self.key_heads = plan.tensors.heads, plan.tensors.key_heads
        self.ratio = self.heads // self.key_heads
        order = self.partition.order
        self.order = torch.from_numpy(np.argsort(order)).to(device)
        self.back = torch.from_numpy(order).to(device)
        self.device = device
        works = engine.binder.works(layer, self.heads, plan.n, plan.n)
        self.groups, self.learning = apart(lambda: self._built(works))
        self.decisions = decisions_of(self.learning)
        self.decides = any(work.decided for work, _ in works)

    def mine(self, rank: int) -> tuple[int, int, int, int]:
        """The first query head of a rank and how many, the first key head and how many."""
        keys = dealt(rank, self.partition.ranks, self.key_heads)
        return keys.start * self.ratio, len(keys) * self.ratio, keys.start, len(keys)

    def _built(self, works: Works) -> tuple[list[Group], list[tuple[Work, tuple[int, ...]]]]:
        first, count, _, _ = self.mine(self.mesh.rank)
        groups, learning = [], []
        for work, members in works:
            here = tuple(head for head in members if first <= head < first + count)
            if not here:
                continue
            local = tuple(head - first for head in here)
            work = replace(work, copies=len(here), device=self.device.type)
            kernel = choose(work, self.device.type, self.engine.backend).build(
                work, here, self.device
            )
            tables = self.engine.tables_of(work)
            groups.append(group_of(kernel, work, local, count, self.ratio, tables, self.device))
            learning.append((work, here))
        return groups, learning

    def run(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """The output of own positions, and its log-sum-exps if they are asked for."""
        q, k, v = parts
        lengths, rank = self.partition.lengths, self.mesh.rank
        batch = len(q)
        pieces, sent = [], []
        for r in range(self.mesh.ranks):
            h, hs, g, gs = self.mine(r)
            some = q[:, h : h + hs], k[:, g : g + gs], v[:, g : g + gs]
            pieces += [x.reshape(-1) for x in some]
            sent.append(sum(x.numel() for x in some))
        _, hs, _, gs = self.mine(rank)
        sides = [(hs, q.shape[3]), (gs, k.shape[3]), (gs, v.shape[3])]
        row = batch * sum(heads * size for heads, size in sides)
        flat = travel(self.mesh, torch.cat(pieces), sent, [n * row for n in lengths]).ready()
        whole = unpacked(flat, batch, sides, lengths)
        queries, keys, values = (x.index_select(2, self.order) for x in whole)
        out, lse = self._computed((queries, keys, values), calls, return_lse)
        out = tied(self._returned(out, flat, batch), flat)
        if lse is None:
            return out, None
        return out, tied(self._returned(lse[..., None], flat, batch)[..., 0], flat)

    def _computed(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """Own heads at all positions, in order."""
        q, _, v = parts
        outs, sums = [], []
        if self.decides:
            calls = self._decided(parts, calls)
        for group, call in zip(self.groups, calls, strict=True):
            out, lse = self.engine.outputs(group, group.parts(*parts), call, return_lse)
            outs.append(out)
            if lse is not None:
                sums.append(lse)
        if not outs:
            none = q.new_zeros(len(q), 0, q.shape[2], v.shape[-1])
            wide = torch.promote_types(q.dtype, torch.float32)
            return none, none.sum(-1).to(wide) if return_lse else None
        ready = together(self.groups, q.shape[1], self.device)
        return ready.joined(outs), ready.joined(sums) if sums else None

    def _decided(self, parts: Parts, calls: Sequence[Call]) -> list[Call]:
        """The calls with what queries and keys decide among the inputs; raises on every rank where
        one cannot decide."""
        q, k, _ = parts
        wrong: ValueError | None = None
        found: dict[DataDependent, Choice] = {}
        try:
            if self.decisions:
                padding, data = calls[0].padding, self._inputs(calls[0].data)
                first, *_ = self.mine(self.mesh.rank)
                found = decided(self.decisions, q, k, padding, data, lambda _: {}, first=first)
        except ValueError as error:
            wrong = error
        self.mesh.agreed([], wrong, self.device)
        return [
            replace(call, data=data_of(work, heads, self.decisions, found, call.data))
            for (work, heads), call in zip(self.learning, calls, strict=True)
        ]

    def _inputs(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        """Inputs, of those about heads [B, H or H_kv or 1, …] the part of own heads."""
        first, count, key, keys = self.mine(self.mesh.rank)
        found = dict(data)
        for name, x in data.items():
            if x.dim() == 4 and x.shape[1] == self.heads:
                found[name] = x[:, first : first + count]
            elif x.dim() == 4 and x.shape[1] > 1:
                found[name] = x[:, key : key + keys]
        return found

    def _returned(self, x: torch.Tensor, came: torch.Tensor, batch: int) -> torch.Tensor:
        """Own heads [B, hs, n, e] at all positions, made of what came, to own positions of all
        heads."""
        lengths, rank = self.partition.lengths, self.mesh.rank
        parts = torch.split(x.index_select(2, self.back), list(lengths), 2)
        width, mine = x.shape[-1], lengths[rank]
        counts = [self.mine(r)[1] for r in range(self.mesh.ranks)]
        got = [batch * heads * mine * width for heads in counts]
        flat = travel(
            self.mesh,
            torch.cat([anchor([came], x.dtype), *(part.reshape(-1) for part in parts)]),
            [part.numel() for part in parts],
            got,
        ).ready()
        found = [
            part.view(batch, heads, mine, width)
            for part, heads in zip(torch.split(flat, got), counts, strict=True)
        ]
        return torch.cat(found, 1)
