"""A layer in which every rank computes some heads at all positions: queries, keys and values go
there and outputs come back (all-to-all over heads)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnspec.backends.common.torch_modes import apart
from attnspec.backends.decided.choice import Choice
from attnspec.backends.planner import choose
from attnspec.distributed.collectives import Mesh, Partial, order_of, tied, travel
from attnspec.distributed.planning import DistributedPlan, dealt
from attnspec.graphs.relation import DataDependent
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.decisions import data_of, decided, decisions_of
from attnspec.runtime.engine import Built, Engine
from attnspec.runtime.head_groups import Prepared


class HeadsHere:
    """What one rank does for a layer: its heads, over the whole sequence."""

    def __init__(
        self, engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
    ) -> None:
        self.engine, self.lengths, self.mesh = engine, plan.partition.lengths, mesh
        self.device, self.tensors = device, plan.tensors
        self.order = order_of(plan.partition, device)
        self.back = torch.from_numpy(plan.partition.order).to(device)
        works = engine.binder.works(layer, self.tensors.heads, plan.n, plan.n)
        some = [(work, tuple(h for h in of if h in self._of("q", mesh.rank))) for work, of in works]
        self.learning = [(work, of) for work, of in some if of]
        self.ready = apart(self._prepared) if self.learning else None
        self.decisions = decisions_of(self.learning)
        self.decides = any(work.decided for work, _ in works)

    def _of(self, name: str, rank: int) -> range:
        """The heads of q, k or v that a rank computes."""
        keys = dealt(rank, self.mesh.ranks, self.tensors.key_heads)
        ratio = self.tensors.ratio if name == "q" else 1
        return range(keys.start * ratio, keys.stop * ratio)

    def _part(self, name: str, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Of q, k or v [B, heads, …] those heads."""
        heads = self._of(name, rank)
        return x.narrow(1, heads.start, len(heads))

    def _prepared(self) -> Prepared:
        """The kernels of own heads, which there are."""
        own, keys = (self._of(name, self.mesh.rank) for name in "qk")
        kind, kernels = self.device.type, list[Built]()
        for work, heads in self.learning:
            work = replace(work, copies=len(heads), device=kind)
            kernel = choose(work, kind, self.engine.backend).build(work, heads, self.device)
            kernels.append((kernel, work, tuple(head - own.start for head in heads)))
        return self.engine.together(kernels, len(own), len(keys), self.device)

    def run(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """The output of own positions, and its log-sum-exps if they are asked for."""
        named, here = dict(zip("qkv", parts, strict=True)), self.mesh.rank
        sent = [
            {name: self._part(name, r, x) for name, x in named.items()}
            for r in range(self.mesh.ranks)
        ]
        shapes = [
            {name: (len(x), len(self._of(name, here)), n, x.shape[3]) for name, x in named.items()}
            for n in self.lengths
        ]
        coming = travel(self.mesh, sent, shapes, parts[0].dtype)
        came = coming.ready()
        queries, keys, values = (
            torch.cat([shards[name] for shards in came], 2).index_select(2, self.order)
            for name in named
        )
        out, lse = self._computed((queries, keys, values), calls, return_lse)
        out = tied(self._returned(out, coming.flat), coming.flat)
        if lse is None:
            return out, None
        return out, tied(self._returned(lse[..., None], coming.flat)[..., 0], coming.flat)

    def _computed(self, parts: Parts, calls: Sequence[Call], return_lse: bool) -> Partial:
        """Own heads at all positions, in order."""
        q, _, v = parts
        if self.decides:
            calls = self._decided(parts, calls)
        if self.ready is None:
            none = q.new_zeros(len(q), 0, q.shape[2], v.shape[-1])
            wide = torch.promote_types(q.dtype, torch.float32)
            return none, none.sum(-1).to(wide) if return_lse else None
        found = [
            self.engine.outputs(group, group.parts(*parts), call, return_lse)
            for group, call in zip(self.ready.groups, calls, strict=True)
        ]
        sums = [lse for _, lse in found if lse is not None]
        out = self.ready.joined([out for out, _ in found])
        return out, self.ready.joined(sums) if sums else None

    def _decided(self, parts: Parts, calls: Sequence[Call]) -> list[Call]:
        """The calls with what queries and keys decide among the inputs; raises on every rank where
        one cannot decide."""
        q, k, _ = parts
        wrong: ValueError | None = None
        found: dict[DataDependent, Choice] = {}
        try:
            if self.decisions:
                padding, data = calls[0].padding, self._inputs(calls[0].data)
                first = self._of("q", self.mesh.rank).start
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
        found = dict(data)
        for name, x in data.items():
            if x.dim() == 4 and x.shape[1] > 1:
                side = "q" if x.shape[1] == self.tensors.heads else "k"
                found[name] = self._part(side, self.mesh.rank, x)
        return found

    def _returned(self, x: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """Own heads [B, hs, n, e] at all positions, made of what came, to own positions of all
        heads [B, H, n_local, e]."""
        shards = torch.split(x.index_select(2, self.back), list(self.lengths), 2)
        mine = self.lengths[self.mesh.rank], x.shape[-1]
        shapes = [{"x": (len(x), len(self._of("q", r)), *mine)} for r in range(self.mesh.ranks)]
        back = travel(self.mesh, [{"x": shard} for shard in shards], shapes, x.dtype, [came])
        return torch.cat([part["x"] for part in back.ready()], 1)
