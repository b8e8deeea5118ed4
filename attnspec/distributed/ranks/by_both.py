"""A layer of graphs beside mechanisms: keys that a graph reads travel to their readers and are
weighed pair by pair; of all others their owner sends the sums of the mechanism.

These sums are others for each rank, since they leave out what that rank is sent: nothing is added
to be taken away again, so that nothing cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from attnspec.backends.common.merging import in_one_frame
from attnspec.backends.common.torch_modes import apart
from attnspec.backends.factored.features.kernel import FeatureKernel
from attnspec.backends.factored.features.sums import State
from attnspec.backends.factored.hybrid.formula import HybridFormula, others_of
from attnspec.backends.factored.kernels import kernel_of
from attnspec.backends.planner import AUTO
from attnspec.distributed.planning import DistributedPlan, Way, sends_sums, sums_of
from attnspec.distributed.ranks.by_rows import GroupHere, Guests, came, sent
from attnspec.distributed.ranks.collectives import Mesh, anchor, taking, tied, travel
from attnspec.distributed.ranks.regions import Parts, in_wide, joined, no_sums_with_sums
from attnspec.graphs.gathered import gathered
from attnspec.lower.work import Call
from attnspec.runtime.engine import Engine


class BothHere:
    """What one rank does for such heads of a layer."""

    def __init__(
        self,
        engine: Engine,
        layer: int,
        plan: DistributedPlan,
        way: Way,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.engine, self.mesh, self.device = engine, mesh, device
        self.partition, self.tensors = plan.partition, plan.tensors
        # what is drawn goes by the layer, of which plans know nothing
        every = engine.binder.works(layer, plan.tensors.heads, plan.n, plan.n)
        works = {head: work for work, heads in every for head in heads}
        ratio = plan.tensors.heads // plan.tensors.key_heads
        self.groups = [
            GroupHere(
                replace(group, work=works[group.heads[0]]),
                mesh.rank,
                ratio,
                device,
                AUTO,
            )
            for group in way.groups
        ]
        self.learning = [(here.group.work, here.group.heads) for here in self.groups]
        self.heads = [head for here in self.groups for head in here.group.heads]
        self.ready = apart(lambda: [_Ready(here) for here in self.groups])

    def run(
        self, parts: Parts, calls: Sequence[Call], return_lse: bool
    ) -> tuple[torch.Tensor, None]:
        """The output of own positions; log-sum-exps do not travel with sums of features."""
        if return_lse:
            raise no_sums_with_sums(self.engine.program)
        kind = parts[0].dtype
        parts = in_wide(parts)
        rows = sent(self.mesh, self.groups, parts, kind).ready()
        guests = came(self.mesh, self.groups, rows, parts)
        sums, before = self._summed(parts, calls)
        each = zip(self.ready, calls, guests, before, strict=True)
        outs = [ready.run(parts, mine, guest, state) for ready, mine, guest, state in each]
        out, _ = joined([(found, None) for found in outs], self.heads)
        return tied(tied(out.to(kind), rows), sums), None

    def _summed(
        self, parts: Parts, calls: Sequence[Call]
    ) -> tuple[torch.Tensor, list[State | None]]:
        """What came, and of each group the sums over keys elsewhere that do not travel."""
        me, ranks = self.mesh.rank, self.mesh.ranks
        kind = torch.promote_types(parts[0].dtype, torch.float32)
        learned = [table for call in calls for table in call.tables.values()]
        pieces, counts, got = [anchor((*parts, *learned), kind)], [0] * ranks, [0] * ranks
        shapes = [sums_of(here.group, self.tensors) for here in self.groups]
        sizes = [rows * (features * width + 1) for rows, features, width in shapes]
        known: list[dict[bytes, State]] = [{} for _ in self.groups]
        for r in range(ranks):
            for number, here in enumerate(self.groups):
                if sends_sums(here.group, me, r):
                    own = self.ready[number].sums(r, parts, calls[number], known[number])
                    base = own.total.new_zeros(shapes[number][0]) if own.base is None else own.base
                    pieces += [own.total.reshape(-1), base.to(kind)]
                    counts[r] += sizes[number]
                if sends_sums(here.group, r, me):
                    got[r] += sizes[number]
        flat = travel(self.mesh, torch.cat(pieces), counts, got).ready()
        taken = taking(flat)
        found: list[list[State]] = [[] for _ in self.groups]
        for r in range(ranks):
            for number, here in enumerate(self.groups):
                if sends_sums(here.group, r, me):
                    total = taken(*shapes[number])
                    found[number].append(State(total, taken(shapes[number][0]).detach()))
        return flat, [_together(some) for some in found]


class _Ready:
    """What weighs the pairs of a group, and what sums its keys."""

    def __init__(self, here: GroupHere) -> None:
        self.here = here
        work, heads = here.group.work, here.group.heads
        alone = kernel_of(replace(work, hybrid=False), heads, here.device)
        self.kernel = cast(FeatureKernel, alone)
        keys = np.concatenate([here.own, here.guests])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        self.order, self.keys = (torch.from_numpy(x).to(here.device) for x in (order, keys))
        if here.own.size:
            laid_out = here.region(here.own, keys).laid_out
            others, _, _ = gathered(others_of(work), work.n_k, here.own, keys)
            self.formula = HybridFormula(laid_out, heads, self.kernel, here.device, others)

    def run(self, parts: Parts, call: Call, guests: Guests, before: State | None) -> torch.Tensor:
        """The outputs of own queries over the keys that are here, on top of sums over others."""
        here = self.here
        q = parts[0][:, list(here.group.heads)]
        if not q.shape[2]:
            return q.new_zeros(*q.shape[:3], parts[2].shape[3])
        k, v = (
            torch.cat([here.expanded(own[:, here.keys]), more], 2).index_select(2, self.order)
            for own, more in zip(parts[1:], (guests.keys, guests.values), strict=True)
        )
        if call.padding is not None:
            call = replace(call, padding=call.padding.index_select(1, self.keys))
        return self.formula.partial(q, k, v, call, before)[0]

    def sums(self, reader: int, parts: Parts, call: Call, known: dict[bytes, State]) -> State:
        """The sums over own keys that do not travel to another rank; those over the same keys are
        `known` once they are there."""
        here = self.here
        kept = np.ones(len(here.own), bool)
        kept[here.sent_keys[reader]] = False
        code = kept.tobytes()
        if code not in known:
            rows = torch.from_numpy(np.flatnonzero(kept)).to(here.device)
            at = torch.from_numpy(here.own[kept]).to(here.device)
            q = parts[0][:, list(here.group.heads)]
            k, v = (here.expanded(x[:, here.keys]).index_select(2, rows) for x in parts[1:])
            if call.padding is not None:
                call = replace(call, padding=call.padding.index_select(1, at))
            known[code], _ = self.kernel.key_sums(q, k, v, call, at)
        return known[code]


def _together(some: Sequence[State]) -> State | None:
    """Sums over the keys of several ranks as one; None where there are none."""
    if not some:
        return None
    bases = torch.stack([cast(torch.Tensor, each.base) for each in some])
    top, shares = in_one_frame(bases, 0)
    total = torch.zeros_like(some[0].total)
    for each, share in zip(some, shares, strict=True):
        total = total + each.total * share[:, None, None]
    return State(total, top[0])
