"""One attention over the ranks of a mesh: each holds, and is given back, its shard of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from attnspec.backends.common.merging import Outputs
from attnspec.backends.common.torch_modes import apart
from attnspec.distributed.collectives import Mesh, Run, gathered, tied
from attnspec.distributed.exchange import Tensors
from attnspec.distributed.partitions import Partition
from attnspec.distributed.planning import (
    ALL,
    HEADS,
    ROWS,
    STATES,
    DistributedPlan,
    plan,
    require_one_sequence,
)
from attnspec.distributed.rows import rows_here
from attnspec.distributed.shares import heads_here, states_here
from attnspec.graphs.bind import extents_of
from attnspec.ir.api_checks import index_of, length_of
from attnspec.ir.program import Input, Program
from attnspec.ir.serial import fingerprint
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call
from attnspec.runtime.call_checks import (
    FLOATS,
    Parts,
    along_positions,
    check_layer,
    refuse_unknown,
    taken_apart,
    without_padding,
)
from attnspec.runtime.engine import nothing, require_log_sum_exps
from attnspec.runtime.module import CompiledAttention, in_type_of_autocast

KEPT = 64
"""How many plans are kept, of lengths, layers and shapes."""

_RUNS = {ROWS: rows_here, HEADS: heads_here, ALL: heads_here, STATES: states_here}


class ParallelAttention(torch.nn.Module):
    """The attention of a compiled module over the ranks of a `DeviceMesh` of one dimension: takes
    and returns shards [B, H, n_local, d] as `shard` cuts them.

    `partition` stands in place of the one that is cheapest for each length, and holds for its own
    length alone. A rank waits `timeout` seconds for the others, then raises `LostRank`.

    `bytes_received` counts the bytes of rows that reached this rank in the last call, forward.
    Gradients of the module's parameters are this rank's share: sum them over the mesh, as for every
    parameter that all ranks hold.
    """

    def __init__(
        self,
        module: CompiledAttention,
        mesh: Any,
        *,
        partition: Partition | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        if not isinstance(module, CompiledAttention):
            raise TypeError(
                f"the module must be what `spec.compile()` returns, got {type(module).__name__}:"
                " for a layer of this package pass `layer.attention`"
            )
        require_one_sequence(module.program)
        if getattr(mesh, "ndim", None) != 1:
            raise ValueError(
                f"the mesh must be a DeviceMesh of one dimension, got {mesh}: pass one dimension"
                " by its name, `mesh['cp']`"
            )
        if not isinstance(partition, Partition | None):
            raise TypeError(
                "partition must be that of a plan, `spec.distribute(n, devices).partition`, got"
                f" {partition!r}"
            )
        if partition is not None and partition.ranks != mesh.size():
            raise ValueError(
                f"the partition is for {partition.ranks} ranks, and the mesh has {mesh.size()}"
            )
        self.module, self.device_mesh, self.partition = module, mesh, partition
        group = mesh.get_group()
        self.mesh = Mesh(group, dist.get_world_size(group), dist.get_rank(group), timeout)
        # counts what is no row of a call
        self._aside = replace(self.mesh)
        self._plans: Cache[object, DistributedPlan] = Cache(KEPT)
        self._ready: Cache[object, Run] = Cache(KEPT)
        self._last: Tensors | None = None
        self._spec = int(fingerprint(module.program)[:15], 16)

    @property
    def bytes_received(self) -> int:
        """The bytes of rows that reached this rank in the last call, forward."""
        return self.mesh.received

    # --- shards ----------------------------------------------------------------------------------

    def partition_of(self, n: int) -> Partition:
        """Which positions each rank holds of n."""
        n, fixed = length_of(n), self.partition
        if fixed is not None and fixed.n != n:
            raise ValueError(f"the given partition is for {fixed.n:,} positions, got n = {n:,}")
        return fixed or self._plans.get(n, lambda: plan(self.program, n, self.mesh.ranks)).partition

    def shard(self, x: Tensor, dim: int = 2) -> Tensor:
        """This rank's part of a whole tensor that every rank has, cut along an axis."""
        dim = _axis(x, dim)
        rows = self.partition_of(x.shape[dim]).positions(self.mesh.rank)
        return x.index_select(dim, torch.from_numpy(rows).to(x.device))

    def unshard(self, local: Tensor, dim: int = 2) -> Tensor:
        """The whole tensor of the shards of all ranks, on each of them; differentiable, where every
        rank goes backward through it."""
        dim = _axis(local, dim)
        partition = self._partition(local.shape[dim], local.device)
        return gathered(self._aside, partition, [local], dim)[0]

    def positions(self, first: int, count: int, device: torch.device) -> Tensor:
        """Where the tokens of this rank's shard stand in a whole sequence, which starts at the
        first, int64 [count]; every rank calls it together."""
        partition = self._partition(count, device)
        return first + torch.from_numpy(partition.positions(self.mesh.rank)).to(device)

    @property
    def program(self) -> Program:
        return self.module.program

    def _partition(self, mine: int, device: torch.device) -> Partition:
        """The partition that shards are of, of which this one has so many positions."""
        return self._of_lengths(tuple(each[0] for each in self.mesh.everyones([mine], device)))

    def _of_lengths(self, lengths: tuple[int, ...]) -> Partition:
        """The partition that shards of these lengths are of; ValueError on every rank."""
        partition = self.partition_of(sum(lengths))
        if partition.lengths != lengths:
            raise ValueError(
                f"shards must be those of `shard`: n = {sum(lengths):,} over {len(lengths)} ranks"
                f" ({partition}) has the lengths {list(partition.lengths)}, got {list(lengths)}"
            )
        return partition

    # --- plans -----------------------------------------------------------------------------------

    def plan(self, n: int, *, layer: int = 0, tensors: Tensors | None = None) -> DistributedPlan:
        """The plan of a layer at n positions: for tensors as in the last call, unless others are
        said. `bytes_received` are those of each rank, `bytes_gathered` what one would receive if
        every key and value were sent to every rank."""
        n, layer = length_of(n), check_layer(self.program, layer)
        heads, element = self.program.head_count, torch.get_default_dtype().itemsize
        tensors = tensors or self._last or Tensors(heads=heads, key_heads=heads, element=element)
        key = n, self.module.engine.binder.alike(layer), tensors
        where, ranks = self.partition_of(n), self.mesh.ranks
        made = partial(plan, self.program, n, ranks, tensors, layer=layer, partition=where)
        return self._plans.get(key, made)

    # --- a call ----------------------------------------------------------------------------------

    @in_type_of_autocast
    def forward(
        self,
        q: Any,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
        return_lse: bool = False,
        **unknown: Never,
    ) -> Any:
        """The module's call on shards: q [B, H, n_local, d], k [B, H_kv, n_local, d], v and the
        output alike; `key_padding_mask` [B, n_local] and inputs as shards too, but lengths and
        scores of blocks, which are given whole; of an input of kind `pairs` the rows of own queries
        over all keys, [B, H or 1, n_local, n], whose gradient is their own. `DTensor`s sharded
        along the positions are taken and returned.

        Every rank of the mesh calls it together. Raises as the module does, on every rank if one of
        them has a reason; ValueError for other shards than those of `shard`; LostRank where a rank
        does not answer.
        """
        if unknown:
            refuse_unknown(self.program, unknown, ParallelAttention.forward)
        mesh, module, like = self.mesh, self.module, q if isinstance(q, DTensor) else None
        if like is not None:
            q, k, v = (_local(x, self.device_mesh) for x in (q, k, v))
        mesh.received = 0
        device = q.device if isinstance(q, Tensor) else torch.device("cpu")
        # inputs of pairs stay among the others until all ranks agree on them
        besides = key_padding_mask, inputs, dropout_p, False
        said = partial(self._said, (q, k, v), layer, besides, return_lse)
        (layer, call, names), every = mesh.agreed(said, 12 + 3 * len(module.engine.pairs), device)
        lengths, states, *alike = zip(*every, strict=True)
        for what, values in zip(names, alike, strict=True):
            if len(set(values)) > 1:
                raise ValueError(f"{what} must be the same on every rank, got {list(values)}")
        if any(states) and len(set(states)) < len(states):
            raise ValueError(
                "with dropout_p the random state must differ between ranks: seed every rank by"
                " torch.manual_seed(seed + rank)"
            )
        partition = self._of_lengths(lengths)
        outputs = self._run((q, k, v), partition, layer, self._whole(call, partition), return_lse)
        if module.training and module.draws is not None:
            module.draws.count(layer)
        asked: Any = outputs[: 1 + return_lse]
        if like is not None:
            asked = tuple(_as_dtensor(x, like, partition.n) for x in asked)
        return asked if return_lse else asked[0]

    def _said(
        self, parts: Parts, layer: int, besides: Any, return_lse: bool
    ) -> tuple[tuple[int, Call, list[str]], list[int]]:
        """The layer with the call of own positions and the names of what must be alike, and what
        ranks compare: the length, what random numbers come from, 0 where none are drawn, and
        these."""
        (q, k, v), module = parts, self.module
        layer, _ = module.checked(q, k, v, layer)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q and k must have the same positions, got {q.shape[2]} and {k.shape[2]}: a rank"
                " holds queries, keys and values of its own positions"
            )
        call = module.call_of(layer, q, k, v, *besides)
        chance = round(call.dropout_p * 2**40)
        pairs = {name: call.data[name] for name in module.engine.pairs}
        if return_lse:
            # before any rank sends: those without heads of their own would
            require_log_sum_exps(module.program, layer)
        flags = [call.padding is not None, return_lse, torch.is_grad_enabled()]
        flags += [x.requires_grad for x in (q, k, v, *pairs.values())]
        state = 0
        if chance:
            # what tells the random state of a device from others, from 1 to 2 ** 62
            here: Any = torch.get_device_module(q.device)
            told = torch.get_rng_state() if q.device.type == "cpu" else here.get_rng_state(q.device)
            state = 1 + (int.from_bytes(sha256(told.numpy().tobytes()).digest()[:8]) >> 2)
        alike = {
            "the batch": q.shape[0],
            "the number of heads": q.shape[1],
            "the number of key heads": k.shape[1],
            "the size of heads": q.shape[3],
            "the size of values": v.shape[3],
            "the floating type": FLOATS.index(q.dtype),
            "the layer": layer,
            "what is given, asked for and differentiated": sum(x << i for i, x in enumerate(flags)),
            "dropout_p": chance,
            "the spec": self._spec,
        }
        for name, x in pairs.items():
            alike[f"the floating type of the input `{name}`"] = FLOATS.index(x.dtype)
            alike[f"the number of heads of the input `{name}`"] = x.shape[1]
            alike[f"the number of keys of the input `{name}`"] = x.shape[3]
        return (layer, call, [*alike]), [q.shape[2], state, *alike.values()]

    def _whole(self, call: Call, partition: Partition) -> Call:
        """The call with the padding and the inputs of the whole sequence, but with a number of each
        pair for own queries alone."""
        padding = call.padding
        if padding is not None:
            padding = gathered(self._aside, partition, [padding], 1)[0]

        def whole(entry: Input, x: Tensor, axis: int) -> Tensor:
            if entry.kind == "pairs":
                return x
            (x,) = gathered(self._aside, partition, [x.detach()], axis)
            real = padding if entry.kind == "numbers" else None
            return x if real is None else without_padding(x, real)

        data, pairs = taken_apart(
            self.program, along_positions(self.program, call.data, whole), partition.n
        )
        return replace(call, padding=padding, data=data, tables={**call.tables, **pairs})

    def _run(
        self, parts: Parts, partition: Partition, layer: int, call: Call, return_lse: bool
    ) -> Outputs:
        """The output of own positions, and its log-sum-exps."""
        (q, k, v), n, engine = parts, partition.n, self.module.engine
        pairs = {name: call.tables[name] for name in engine.pairs}
        if n and len(q):
            each = sum(x.shape[1] * x.element_size() for x in pairs.values())
            sizes = len(q), q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size(), each
            self._last = Tensors(*sizes)
            plan = self.plan(n, layer=layer, tensors=self._last)
            engine.check_data(call.data, n)
            key = plan.digest, engine.binder.alike(layer), q.device
            made = self._ready.get(key, lambda: self._made(layer, plan, q.device))
            if plan.layers[0].how in (ALL, HEADS):
                # who weighs the queries of others needs their rows
                pairs = {x: gathered(self.mesh, partition, [y], 3)[0] for x, y in pairs.items()}
            call = replace(call, tables={**call.tables, **pairs})
            out, lse = made(layer, parts, call, return_lse)
        else:
            extents_of(self.program, n)
            out, lse = nothing(*parts)
        for table in pairs.values():
            # a rank may compute no head that reads it
            out = tied(out, table)
        return out, lse

    def _made(self, layer: int, found: DistributedPlan, device: torch.device) -> Run:
        """What runs a layer here; raises on every rank where one cannot, or plans differ."""
        here, engine = _RUNS[found.layers[0].how], self.module.engine
        # what outlives a call is not built in its modes
        made = partial(apart, lambda: here(engine, layer, found, self.mesh, device))
        run, digests = self.mesh.agreed(lambda: (made(), [found.digest]), 1, device)
        if any(each != digests[0] for each in digests):
            raise ValueError(
                "ranks made different plans of the same spec: use one version of attnspec and one"
                " partition on all ranks"
            )
        return run


parallelize = ParallelAttention


def _local(x: Any, mesh: Any) -> Tensor:
    """The shard of a DTensor that is cut along its positions."""
    if not isinstance(x, DTensor) or tuple(x.placements) != (Shard(2),) or x.device_mesh != mesh:
        raise ValueError("DTensors must all be on this mesh and placed by Shard(2), the positions")
    return x.to_local()


def _as_dtensor(found: Tensor, like: Any, n: int) -> Any:
    """An output as a DTensor like one of the call's."""
    shape = torch.Size((*found.shape[:2], n, *found.shape[3:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        found, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def _axis(x: object, dim: int) -> int:
    """The number of a tensor's axis, from 0 on; TypeError or ValueError where it has none such."""
    if not isinstance(x, Tensor):
        raise TypeError(f"a tensor is needed, got {type(x).__name__}")
    axis = index_of("dim", dim)
    if not -x.dim() <= axis < x.dim():
        raise ValueError(
            f"dim must be an axis of a tensor {list(x.shape)}, got {axis}: positions are axis 2 of"
            " [B, H, n, d], and axis 1 of padding, of inputs [B, n] and of [B, n, embed_dim]"
        )
    return axis % x.dim()
