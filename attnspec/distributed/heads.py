"""A layer in which every rank computes some heads at all positions: queries, keys and values go
there and outputs come back (all-to-all over heads); or all heads, of which it keeps what is its
own (all-gather)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnspec.backends.decided.deciders import decisions_of
from attnspec.backends.planner import choose
from attnspec.distributed.collectives import Mesh, order_of, tied, travel
from attnspec.distributed.exchange import Works
from attnspec.distributed.planning import ALL, DistributedPlan, dealt
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import Parts
from attnspec.runtime.engine import Built, Engine, Outputs, Prepared


class HeadsHere:
    """What one rank does for a layer: its heads, over the whole sequence."""

    def __init__(
        self, engine: Engine, layer: int, plan: DistributedPlan, mesh: Mesh, device: torch.device
    ) -> None:
        self.engine, self.layer, self.mesh = engine, layer, mesh
        self.lengths = plan.partition.lengths
        self.device, self.tensors = device, plan.tensors
        self.every = plan.layers[0].how == ALL
        self.order = order_of(plan.partition, device)
        self.back = torch.from_numpy(plan.partition.order).to(device)
        works = engine.binder.works(layer, self.tensors.heads, plan.n, plan.n)
        local = self._of("q", mesh.rank)
        some = [(work, tuple(head for head in of if head in local)) for work, of in works]
        own = [(work, of) for work, of in some if of]
        self.ready = self._prepared(own) if own else None
        self.decides = any(work.decided for work, _ in works)

    def _of(self, name: str, rank: int) -> range:
        """The heads of q, k or v that a rank computes."""
        keys = range(self.tensors.key_heads)
        if not self.every:
            keys = dealt(rank, self.mesh.ranks, len(keys))
        ratio = self.tensors.ratio if name == "q" else 1
        return range(keys.start * ratio, keys.stop * ratio)

    def _part(self, name: str, rank: int, x: Tensor) -> Tensor:
        """Of q, k or v [B, heads, …] those heads."""
        heads = self._of(name, rank)
        return x.narrow(1, heads.start, len(heads))

    def _prepared(self, works: Works) -> Prepared:
        """The kernels of own heads, which there are; what draws goes by the numbers of heads."""
        local, keys = (self._of(name, self.mesh.rank) for name in "qk")
        kind, kernels = self.device.type, list[Built]()
        for work, heads in works:
            work = replace(work, copies=len(heads), device=kind)
            kernel = choose(work, kind, self.engine.backend).build(work, heads, self.device)
            kernels.append((kernel, work, tuple(head - local.start for head in heads)))
        ready = self.engine.together(kernels, len(local), len(keys), self.device)
        pairs = zip(ready.groups, works, strict=True)
        groups = tuple(replace(group, heads=heads) for group, (_, heads) in pairs)
        decisions = tuple(replace(x, first=local.start) for x in decisions_of(works))
        return replace(ready, groups=groups, decisions=decisions, layer=self.layer)

    def run(self, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        """The output of own positions, and its log-sum-exps if they are asked for."""
        here = self.mesh.rank
        named = dict(zip("qkv", parts, strict=True))
        sent = [
            {name: self._part(name, r, x) for name, x in named.items()}
            for r in range(self.mesh.ranks)
        ]
        shapes = [
            {name: (len(x), len(self._of(name, here)), n, x.shape[3]) for name, x in named.items()}
            for n in self.lengths
        ]
        flat, ready = travel(self.mesh, sent, shapes, parts[0].dtype)
        came = ready()
        queries, keys, values = (
            torch.cat([shards[name] for shards in came], 2).index_select(2, self.order)
            for name in named
        )
        out, lse = self._computed((queries, keys, values), call, return_lse)
        out = tied(self._returned(out, flat), flat)
        if lse is None:
            return out, None
        return out, tied(self._returned(lse[..., None], flat)[..., 0], flat)

    def _computed(self, parts: Parts, call: Call, return_lse: bool) -> Outputs:
        """Own heads at all positions, in order; raises on every rank where one cannot decide."""
        (q, _, v), wrong = parts, None
        out, lse = q.new_zeros(len(q), 0, q.shape[2], v.shape[-1]), None
        if return_lse:
            lse = out.sum(-1).to(torch.promote_types(q.dtype, torch.float32))
        # of inputs about heads [B, H or H_kv or 1, …], and of what is learned, the part of own ones
        here, data, tables = self.mesh.rank, dict(call.data), dict(call.tables)
        for name, x in data.items():
            if x.dim() == 4 and x.shape[1] > 1:
                data[name] = self._part("q" if x.shape[1] == self.tensors.heads else "k", here, x)
        for name, x in tables.items():
            tables[name] = self._part("q", here, x) if x.shape[1] > 1 else x
        mine = replace(call, data=data, tables=tables)
        try:
            if self.ready is not None:
                out, lse = self.engine.run(self.ready, parts, mine, return_lse)
        except ValueError as error:
            if not self.decides:
                raise
            wrong = error
        if self.decides:
            self.mesh.agreed([], wrong, self.device)
        return out, lse

    def _returned(self, x: Tensor, came: Tensor) -> Tensor:
        """Own heads [B, hs, n, e] at all positions to all heads [B, H, n_local, e] at own ones."""
        held = torch.split(self.back, list(self.lengths))
        if self.every:
            return x.index_select(2, held[self.mesh.rank])
        shards = [x.index_select(2, at) for at in held]
        mine = self.lengths[self.mesh.rank], x.shape[-1]
        shapes = [{"x": (len(x), len(self._of("q", r)), *mine)} for r in range(self.mesh.ranks)]
        _, ready = travel(self.mesh, [{"x": shard} for shard in shards], shapes, x.dtype, [came])
        return torch.cat([part["x"] for part in ready()], 1)
