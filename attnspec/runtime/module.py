"""The module that runs a compiled attention: what emitted modules derive from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from attnspec.backends.common.masks import mask_of
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.backends.common.torch_modes import constant_in_traces
from attnspec.backends.decided.choice import Choice
from attnspec.backends.decided.cluster import moved_centroids
from attnspec.backends.planner import AUTO, ROWS, check_backend, choose
from attnspec.backends.rows.keys import FEW
from attnspec.graphs.bind import extents_of
from attnspec.graphs.relation import DataDependent, Relation
from attnspec.ir.program import Mechanism
from attnspec.ir.serial import FORMAT, Plain, from_data
from attnspec.lower.cache import Cache, apart
from attnspec.lower.lower import Binder, stand_ins
from attnspec.lower.work import Backend, Bias, Call, Joining, Mergeable, Streamable, Traceable, Work
from attnspec.runtime.call_checks import (
    check_dropout,
    check_inputs,
    check_layer,
    check_padding,
    check_table,
    check_tensors,
    narrowed,
)
from attnspec.runtime.decisions import Decision, data_of, decided, decisions_of
from attnspec.runtime.head_groups import Group, Prepared, group_of, selected, together
from attnspec.runtime.parameters import Draws, Learner, again
from attnspec.runtime.streaming import (
    Everything,
    StreamState,
    Works,
    stream_kernel,
    streamed_works,
)

KEPT = 64
"""How many layouts a module keeps, for that many combinations of layer, heads, lengths and device.
The type of the tensors is not among them: kernels keep what every type has in common."""

LONGEST_PAIRS = 8192
"""The longest sequence of which pairs and choices are shown."""

STEPS = 8
"""How many layouts it keeps of a few queries each. The next step of generation has another length,
so that more of them would be of no use, and among the others they would drive out those."""


class CompiledAttention(Learner):
    """An attention of queries, keys and values, as its plan describes it.

    It works at every length; what depends on the length is built when it is first seen and kept for
    a while. Its parameters are the learned tables of `score bias` and what mechanisms learn. Where
    the shape of one has the size of a head, `head_size`, it is made by the first call if that is
    not given here.
    """

    def __init__(self, plan: Mapping[str, object], head_size: int | None = None) -> None:
        if plan["format"] != FORMAT:
            raise ValueError(f"this run time reads plans of format {FORMAT}, got {plan['format']}")
        backend = cast(str, plan["backend"])
        check_backend(backend)
        super().__init__(from_data(cast("Mapping[str, Plain]", plan["program"])), head_size)
        self.backend = backend
        redraws = any(_may_redraw(attend.mechanism) for attend in self.program.attends)
        self.draws = Draws(self.program.layers or 1) if redraws else None
        self._before: dict[tuple[str, int], torch.Tensor] = {}
        self._binder = Binder(self.program, stand_ins(self.program))
        self._prepared: Cache[tuple[object, ...], Prepared] = Cache(KEPT)
        self._steps: Cache[tuple[object, ...], Prepared] = Cache(STEPS)
        self._streams: Cache[tuple[object, ...], tuple[Works, Prepared]] = Cache(KEPT)

    def redraw(self) -> None:
        """Draws the random features of mechanisms that redraw them anew; ValueError where none
        does."""
        if self.draws is None:
            raise ValueError(
                f"no mechanism of `{self.program.name}` redraws its features: say how often it does"
                " in training, `favor(redraw = 1000)`"
            )
        self.draws.redraw()

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: StreamState | None = None,
        *,
        layer: int = 0,
        key_padding_mask: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, StreamState]:
        """Goes on with a causal attention: the outputs [B, H, t, d_v] of the next t positions with
        q [B, H, t, d], k [B, H_kv, t, d] and v [B, H_kv, t, d_v], and the state after them, for the
        next call. `state` is None at the start of a sequence, `layer` as in a call;
        `key_padding_mask` and `inputs` are those of the t positions, [B, t].

        The outputs are the rows of a call with the whole sequence. A state holds sums of the
        features of all keys, or the keys and values that a later position may read, with their
        padding and inputs; it stays as it is, so that one may go on from it more than once.

        Raises ValueError for what is not causal, looks back without a bound, reads a length, or
        computes something else at every length; TypeError or ValueError for tensors that do not
        fit.
        """
        layer = check_layer(self.program, layer)
        narrow = _autocast_type(q)
        if narrow is not None:
            with torch.autocast(q.device.type, enabled=False):
                q, k, v = (narrowed(x, narrow) for x in (q, k, v))
                return self._step(q, k, v, state, layer, key_padding_mask, inputs)
        return self._step(q, k, v, state, layer, key_padding_mask, inputs)

    def _step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: StreamState | None,
        layer: int,
        padding: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, StreamState]:
        check_tensors(self.program, q, k, v)
        if self._waits:
            self.make_parameters(q.shape[3], v.shape[3], q.device)
        key = (self._binder.alike(layer), q.shape[1], k.shape[1], str(q.device))
        works, prepared = self._streams.get(key, lambda: apart(lambda: self._stream(*key)))
        outs: list[torch.Tensor] = []
        parts: list[object] = []
        first = StreamState.first(state, works, q, k, v)
        check_padding(padding, q.shape[0], q.shape[2], q.device)
        data = check_inputs(self.program, inputs, q, k)
        if 0 in (q.shape[0], q.shape[2]):
            return _nothing(q, k, v)[0], first.after(q.shape[2], first.parts)
        first = first.with_marked(self.program, data)
        if any(work.decided for work, _ in works):
            return self._step_of_all(q, k, v, first, layer, padding, data)
        for group, part in zip(prepared.groups, first.parts, strict=True):
            draw = 0 if self.draws is None else self.draws.number(layer, group.redraw)
            call = Call(padding, 0.0, self._tables(group, layer, q.device), data, draw)
            given = (
                selected(q, 1, group.queries),
                selected(k, 1, group.keys),
                selected(v, 1, group.keys),
            )
            out, after = cast(Streamable, group.kernel).step(*given, call, part)
            outs.append(out)
            parts.append(after)
        return _joined(outs, prepared), first.after(q.shape[2], parts)

    def _step_of_all(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: StreamState,
        layer: int,
        padding: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, StreamState]:
        """A step of a layer in which the data decide: a call of the next queries with all keys."""
        before = state.parts[0]
        if before is None:
            every = Everything(k, v, padding, inputs)
        else:
            every = cast(Everything, before).after(k, v, padding, inputs)
        out = self._run(q, every.keys, every.values, layer, every.padding, 0.0, every.inputs, False)
        return cast(torch.Tensor, out), state.after(q.shape[2], [every, *state.parts[1:]])

    def _stream(self, layer: int, heads: int, keys: int, device: str) -> tuple[Works, Prepared]:
        place = torch.device(device)
        groups, works = [], streamed_works(self._binder, layer, heads)
        if any(work.decided for work, _ in works):
            # each step is a call with all keys
            return works, Prepared((), None)
        for work, members in works:
            kernel = stream_kernel(self.program, layer, work, members, place, self.backend)
            tables = self.tables_of(work)
            groups.append(group_of(kernel, work, members, heads, heads // keys, tables, place))
        return works, together(groups, heads, place)

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
        return_lse: bool = False,
    ) -> Any:
        """Attention of q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v].

        Returns [B, H, n_q, d_v]. Queries are the last n_q of the n_k positions, and H_kv divides H.
        `key_padding_mask` is bool [B, n_k], True for a real key; `inputs` are the tensors that the
        spec declares. A fraction `dropout_p` of the weights is dropped, in training or not. What is
        masked must be finite all the same: NaN or infinity in k or v may reach queries that do not
        read that key, 0 times infinity being NaN, as in torch's own attention.

        With `return_lse` the log-sum-exps of the scores come as well, [B, H, n_q] in float32 at
        least, natural logarithms, -inf where a query reads nothing: what outputs over other keys
        are merged by. Both have gradients. Weights that are no softmax have none: ValueError.

        Raises TypeError or ValueError, with the shapes, for tensors that do not fit.
        """
        layer = check_layer(self.program, layer)
        narrow = _autocast_type(q)
        rest = layer, key_padding_mask, dropout_p, inputs, return_lse
        if narrow is not None:
            with torch.autocast(q.device.type, enabled=False):
                q, k, v = (narrowed(x, narrow) for x in (q, k, v))
                return self._run(q, k, v, *rest)
        return self._run(q, k, v, *rest)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        padding: torch.Tensor | None,
        dropout_p: float,
        inputs: Mapping[str, torch.Tensor] | None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        check_tensors(self.program, q, k, v)
        batch, heads, n_q, _ = q.shape
        n_k = k.shape[2]
        check_padding(padding, batch, n_k, q.device)
        dropout_p = check_dropout(dropout_p)
        data = check_inputs(self.program, inputs, q, k)
        if self._waits:
            self.make_parameters(q.shape[3], v.shape[3], q.device)
        if 0 in (batch, n_q, n_k):
            extents_of(self.program, n_k)
            out, lse = _nothing(q, k, v)
            return (out, lse) if return_lse else out
        prepared = self.prepare(layer, heads, k.shape[1], n_q, n_k, str(q.device))
        choices = self._decided(prepared.decisions, layer, q, k, padding, data)
        outs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for group in prepared.groups:
            draw = 0 if self.draws is None else self.draws.number(layer, group.redraw)
            mine = data_of(group.work, group.heads, prepared.decisions, choices, data)
            call = Call(padding, dropout_p, self._tables(group, layer, q.device), mine, draw)
            given = (
                selected(q, 1, group.queries),
                selected(k, 1, group.keys),
                selected(v, 1, group.keys),
            )
            if return_lse:
                out, lse = self._partial(group, given, call)
                sums.append(lse)
            else:
                out = group.kernel(*given, call)
            outs.append(out)
        if self.training and not torch.compiler.is_compiling():
            if self.draws is not None:
                self.draws.count(layer)
            if not again():
                self._move(prepared.decisions, layer, q, k, padding)
        out = _joined(outs, prepared)
        return (out, _joined(sums, prepared)) if return_lse else out

    def pairs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        layer: int = 0,
        inputs: Mapping[str, torch.Tensor] | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """bool [B, H, n_q, n_k]: which keys a call with these tensors reads, by the definition.

        Raises ValueError above n_k = `LONGEST_PAIRS`, else as a call does.
        """
        works, data, decisions = self._looked_at(q, k, layer, inputs, key_padding_mask)
        choices = self._decided(decisions, layer, q, k, key_padding_mask, data)
        held = q.new_zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
        for work, heads in works:
            mine = data_of(work, heads, decisions, choices, data)
            held[:, list(heads)] = mask_of(work, mine, q.device)
        return held if key_padding_mask is None else held & key_padding_mask[:, None, None]

    def choices(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        layer: int = 0,
        inputs: Mapping[str, torch.Tensor] | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> dict[str, dict[str, torch.Tensor]]:
        """What the data decide in a call with these tensors: for each graph, by its name, the
        `heads` that have it and its lists, buckets, clusters or matchings, [B, H or 1, …].

        Raises ValueError above n_k = `LONGEST_PAIRS`, and where the data decide nothing; else as a
        call does.
        """
        _, data, decisions = self._looked_at(q, k, layer, inputs, key_padding_mask)
        if not decisions:
            raise ValueError(f"the data decide nothing in layer {layer} of `{self.program.name}`")
        choices = self._decided(decisions, layer, q, k, key_padding_mask, data)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for each in decisions:
            name = each.leaf.name
            number = sum(other.leaf.name == name for other in decisions[: decisions.index(each)])
            heads = torch.tensor(each.heads, device=q.device)
            found[f"{name}_{number + 1}" if number else name] = {
                "heads": heads,
                **choices[each.leaf].lists,
            }
        return found

    def _looked_at(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: int,
        inputs: Mapping[str, torch.Tensor] | None,
        padding: torch.Tensor | None,
    ) -> tuple[Works, dict[str, torch.Tensor], tuple[Decision, ...]]:
        """The works, inputs and decisions of a call whose pairs are asked for."""
        layer = check_layer(self.program, layer)
        check_tensors(self.program, q, k, k)
        check_padding(padding, q.shape[0], k.shape[2], q.device)
        data = check_inputs(self.program, inputs, q, k)
        if k.shape[2] > LONGEST_PAIRS:
            raise ValueError(
                f"pairs and choices are shown up to n = {LONGEST_PAIRS:,}, got {k.shape[2]:,}"
            )
        if self._waits:
            self.make_parameters(q.shape[3], k.shape[3], q.device)
        works = self._binder.works(layer, q.shape[1], q.shape[2], k.shape[2])
        return works, data, decisions_of(works)

    def _decided(
        self,
        decisions: Sequence[Decision],
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        padding: torch.Tensor | None,
        data: Mapping[str, torch.Tensor],
    ) -> dict[DataDependent, Choice]:
        """The choices for the tensors of a call."""
        if not decisions or 0 in (q.shape[0], q.shape[2]):
            return {}

        def tables(each: Decision) -> dict[str, torch.Tensor]:
            found = {}
            for part in each.leaf.learned:
                rows = self._rows_of(self._parts[each.leaf.name, part], layer, q.device)
                found[part.name] = rows[list(each.heads)] if len(rows) > 1 else rows
            return found

        return decided(decisions, q, k, padding, data, tables)

    def _move(
        self,
        decisions: Sequence[Decision],
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> None:
        """Moves the centroids that are kept, after a call of training."""
        for each in decisions:
            for part in each.leaf.learned:
                if not part.kept:
                    continue
                name = self._parts[each.leaf.name, part]
                rows = self._rows_of(name, layer, q.device)
                row = layer if len(self.learned(name)) > 1 else 0
                heads = list(each.heads) if len(rows) > 1 else [0]
                # what a call was computed with, should it be computed again for its backward
                self._before[name, row] = rows.clone()
                given = each.given(q, k, padding, {}, {part.name: rows[heads]})
                self.learned(name)[row, heads] = moved_centroids(given)

    def _partial(
        self, group: Group, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and log-sum-exps of a group's heads."""
        if isinstance(group.kernel, Mergeable):
            out, lse = group.kernel.partial(*given, call)
            if lse is not None:
                return out, lse
        raise ValueError(
            f"`return_lse` asks for log-sum-exps, and what `{self.program.name}` weighs by is no"
            " softmax of scores: a mechanism, `relu` and `sigmoid` have none"
        )

    def _tables(self, group: Group, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
        """What a group's heads have learned, [heads of the group or 1, …]."""
        found = {}
        for called, name in group.tables:
            rows = self._rows_of(name, layer, device)
            found[called] = selected(rows, 0, group.queries if len(rows) > 1 else None)
        return found

    def _rows_of(self, name: str, layer: int, device: torch.device) -> torch.Tensor:
        """What the heads of a layer have learned, [heads or 1, …]."""
        table = self.learned(name)
        check_table(name, table, device)
        # what is shared has one row
        row = layer if len(table) > 1 else 0
        return self._before[name, row] if again() and (name, row) in self._before else table[row]

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
    @constant_in_traces
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
        chosen: dict[str, tuple[Backend, list[tuple[Work, tuple[int, ...]]]]] = {}
        for work, members in works:
            work = replace(work, copies=len(members))
            backend = choose(work, place.type, self.backend)
            chosen.setdefault(backend.name, (backend, []))[1].append((work, members))
        groups = []
        for backend, mine in chosen.values():
            if len(mine) > 1 and isinstance(backend, Joining):
                if backend.joins([work for work, members in mine for _ in members]):
                    kernel = backend.build_joined(mine, place)
                    every = tuple(head for _, members in mine for head in members)
                    ratio = heads // key_heads
                    groups.append(group_of(kernel, mine[0][0], every, heads, ratio, (), place))
                    continue
            for work, members in mine:
                kernel = backend.build(work, members, place)
                tables = self.tables_of(work)
                ratio = heads // key_heads
                groups.append(group_of(kernel, work, members, heads, ratio, tables, place))
        return together(groups, heads, place)

    def tables_of(self, work: Work) -> tuple[tuple[str, str], ...]:
        """What a kernel of the work calls its tables, with the names of the parameters."""
        biases = [
            (change.table, change.table) for change in work.changes if isinstance(change, Bias)
        ]
        mechanism = work.mechanism
        parts = () if mechanism is None else mechanism.parts()
        name = "" if mechanism is None else mechanism.name
        return (*biases, *((part.name, self._parts[name, part]) for part in parts))


def _autocast_type(q: object) -> torch.dtype | None:
    """The type that autocast asks for where q is, None where it asks for none."""
    # what is no tensor is left to `check_tensors`
    kind = q.device.type if isinstance(q, torch.Tensor) else "meta"
    # torch knows no autocast of the device that holds shapes alone
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _may_redraw(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and dict(mechanism.arguments).get("redraw", 0) != 0


def _joined(parts: Sequence[torch.Tensor], prepared: Prepared) -> torch.Tensor:
    """What all groups have found, [B, H, …], in the order of the heads."""
    return selected(parts[0] if len(parts) == 1 else torch.cat([*parts], 1), 1, prepared.order)


def _nothing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros [B, H, n_q, d_v] that depend on q, k and v as far as autograd is concerned, and
    log-sum-exps of nothing."""
    batch, heads, n_q, size = q.shape
    keys = k.shape[1]
    work = Work(Relation(), n_q, k.shape[2])
    q = q.view(batch, keys, heads // keys, 1, n_q, size)
    formula = Formula(work, tuple(range(heads)), q.device)
    out = formula(q, k[:, :, None], v[:, :, None], Blocks(None, None), Call())
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((batch, heads, n_q), -torch.inf, dtype=wide)
    return out.reshape(batch, heads, n_q, v.shape[-1]), lse
