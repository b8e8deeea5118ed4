"""The module that runs a compiled attention: what emitted modules derive from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import nn

from attnspec.arguments import (
    check_dropout,
    check_inputs,
    check_layer,
    check_padding,
    check_table,
    check_tensors,
    narrowed,
)
from attnspec.caching import Cache, apart
from attnspec.data import FORMAT, Plain, from_data
from attnspec.formula import Blocks, Formula
from attnspec.ir import Program
from attnspec.planning import AUTO, ROWS, check_backend, choose
from attnspec.relations import Relation
from attnspec.row_layout import FEW
from attnspec.target import Bias, Call, Kernel, Traceable, Work
from attnspec.works import Binder, bias_tables, buckets_of, grid_of, stand_ins

KEPT = 64
"""How many layouts a module keeps, for that many combinations of layer, heads, lengths and device.
The type of the tensors is not among them: kernels keep what every type has in common."""

STEPS = 8
"""How many layouts it keeps of a few queries each. The next step of generation has another length,
so that more of them would be of no use, and among the others they would drive out those."""


Selection: TypeAlias = torch.Tensor | range | None
"""Which heads: their numbers, as a range where they are one, None for all."""


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that one kernel runs; `queries` and `keys` select them."""

    kernel: Kernel
    heads: tuple[int, ...]
    queries: Selection
    keys: Selection
    tables: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """The groups of one layer, and where each head's output stands among theirs."""

    groups: tuple[Group, ...]
    order: Selection


class CompiledAttention(nn.Module):
    """An attention of queries, keys and values, as its plan describes it.

    It works at every length; what depends on the length is built when it is first seen and kept for
    a while. Learned tables of `score bias` are its only parameters.
    """

    def __init__(self, plan: Mapping[str, object]) -> None:
        super().__init__()
        if plan["format"] != FORMAT:
            raise ValueError(f"this run time reads plans of format {FORMAT}, got {plan['format']}")
        self.program: Program = from_data(cast("Mapping[str, Plain]", plan["program"]))
        self.backend = cast(str, plan["backend"])
        check_backend(self.backend)
        for (_, score), name in bias_tables(self.program).items():
            shape = (self.program.layers or 1, self.program.heads or 1, buckets_of(score))
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._binder = Binder(self.program, stand_ins(self.program))
        self._prepared: Cache[tuple[object, ...], Prepared] = Cache(KEPT)
        self._steps: Cache[tuple[object, ...], Prepared] = Cache(STEPS)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the learned tables to zero: no position is preferred at first."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def extra_repr(self) -> str:
        return f"{self.program.name}, backend={self.backend}"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: int = 0,
        key_padding_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v].

        Returns [B, H, n_q, d_v]. Queries are the last n_q of the n_k positions, and H_kv divides H.
        `key_padding_mask` is bool [B, n_k], True for a real key; `inputs` are the tensors that the
        spec declares. A fraction `dropout_p` of the weights is dropped, in training or not. What is
        masked must be finite all the same: NaN or infinity in k or v may reach queries that do not
        read that key, 0 times infinity being NaN, as in torch's own attention.

        Raises TypeError or ValueError, with the shapes, for tensors that do not fit.
        """
        layer = check_layer(self.program, layer)
        given: object = q
        device = given.device if isinstance(given, torch.Tensor) else torch.device("cpu")
        # torch knows no autocast of the device that holds shapes alone
        if device.type != "meta" and torch.is_autocast_enabled(device.type):
            narrow = torch.get_autocast_dtype(device.type)
            with torch.autocast(device.type, enabled=False):
                q, k, v = (narrowed(x, narrow) for x in (q, k, v))
                return self._run(q, k, v, layer, key_padding_mask, dropout_p, inputs)
        return self._run(q, k, v, layer, key_padding_mask, dropout_p, inputs)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        padding: torch.Tensor | None,
        dropout_p: float,
        inputs: Mapping[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        check_tensors(self.program, q, k, v)
        batch, heads, n_q, _ = q.shape
        n_k = k.shape[2]
        check_padding(padding, batch, n_k, q.device)
        dropout_p = check_dropout(dropout_p)
        data = check_inputs(self.program, inputs, batch, n_k, q.device)
        if 0 in (batch, n_q, n_k):
            grid_of(self.program, n_k)
            return _nothing(q, k, v)
        prepared = self.prepare(layer, heads, k.shape[1], n_q, n_k, str(q.device))
        outs = []
        for group in prepared.groups:
            call = Call(padding, dropout_p, self._tables(group, layer, q.device), data)
            outs.append(
                group.kernel(
                    _selected(q, 1, group.queries),
                    _selected(k, 1, group.keys),
                    _selected(v, 1, group.keys),
                    call,
                )
            )
        if len(outs) == 1:
            return outs[0]
        out = torch.cat(outs, 1)
        return _selected(out, 1, prepared.order)

    def _tables(self, group: Group, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The learned tables of a group's heads, [heads of the group, buckets]."""
        row = 0 if self.program.layers is None else layer
        found = {}
        for name in group.tables:
            table = self.get_parameter(name)
            check_table(name, table, device)
            found[name] = _selected(table[row], 0, group.queries)
        return found

    def prepare(
        self, layer: int, heads: int, key_heads: int, n_q: int, n_k: int, device: str
    ) -> Prepared:
        """The kernels that run a layer for so many heads and positions, built or kept."""
        if torch.compiler.is_compiling():
            # a range has a fixed length, so a symbolic size becomes the number it stands for
            fixed = [len(range(size)) for size in (layer, heads, key_heads, n_q, n_k)]
            key = (fixed[0], fixed[1], fixed[2], fixed[3], fixed[4], device)
            self._ready(*key)
            return self._prepared.kept[key]
        key = (self._binder.alike(layer), heads, key_heads, n_q, n_k, device)
        if n_q > FEW:
            return self._prepared.get(key, lambda: apart(lambda: self._build(*key)))
        if self.backend in (AUTO, ROWS.name):
            # this costs less than a thread that is apart, and nothing of it outlives the call
            return self._build(*key)
        return self._steps.get(key, lambda: apart(lambda: self._build(*key)))

    # dynamo calls this instead of tracing it, and then finds what was built in the cache
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _ready(
        self, layer: int, heads: int, key_heads: int, n_q: int, n_k: int, device: str
    ) -> bool:
        key = (layer, heads, key_heads, n_q, n_k, device)
        prepared = self._prepared.get(key, lambda: apart(lambda: self._build(*key)))
        for group in prepared.groups:
            if isinstance(group.kernel, Traceable):
                group.kernel.make_traceable()
        return True

    def _build(
        self, layer: int, heads: int, key_heads: int, n_q: int, n_k: int, device: str
    ) -> Prepared:
        place = torch.device(device)
        works = self._binder.works(layer, heads, n_q, n_k)
        groups = []
        for work, members in works:
            chosen = choose(work, place.type, self.backend)
            groups.append(
                Group(
                    kernel=chosen.build(work, members, place),
                    heads=members,
                    queries=_selection(members, heads, place),
                    keys=_selection(_key_heads(members, heads // key_heads), key_heads, place),
                    tables=tuple(c.table for c in work.changes if isinstance(c, Bias)),
                )
            )
        flat = [head for group in groups for head in group.heads]
        order = sorted(range(heads), key=flat.__getitem__)
        return Prepared(tuple(groups), _selection(order, heads, place))


def _key_heads(heads: tuple[int, ...], ratio: int) -> list[int]:
    """The key heads of some query heads: each once where all are read equally often."""
    read = [head // ratio for head in heads]
    distinct = sorted(set(read))
    times = len(read) // len(distinct)
    even = read == [head for head in distinct for _ in range(times)]
    return distinct if even else read


def _selection(chosen: tuple[int, ...] | list[int], count: int, device: torch.device) -> Selection:
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step > 0 and list(chosen) == list(found := range(chosen[0], chosen[-1] + 1, step)):
        return None if len(found) == count else found
    return torch.tensor(chosen, device=device)


def _selected(x: torch.Tensor, axis: int, heads: Selection) -> torch.Tensor:
    """Some heads of a tensor: a view where they are a range."""
    if heads is None:
        return x
    if isinstance(heads, torch.Tensor):
        return x.index_select(axis, heads)
    return x[(*(slice(None),) * axis, slice(heads.start, heads.stop, heads.step))]


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Zeros [B, H, n_q, d_v] that depend on q, k and v as far as autograd is concerned."""
    batch, heads, n_q, size = q.shape
    keys = k.shape[1]
    work = Work(Relation(), n_q, k.shape[2])
    q = q.view(batch, keys, heads // keys, 1, n_q, size)
    formula = Formula(work, tuple(range(heads)), q.device)
    out = formula(q, k[:, :, None], v[:, :, None], Blocks(None, None), Call())
    return out.reshape(batch, heads, n_q, v.shape[-1])
