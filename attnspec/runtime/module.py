"""The module that runs a compiled attention: what emitted modules derive from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Never, cast

import torch

from attnspec.backends.common.masks import mask_of
from attnspec.backends.common.torch_modes import (
    apart,
    composed,
    is_mapped_over,
    is_recorded,
    is_transformed,
    is_watched,
)
from attnspec.backends.decided.choice import Choice
from attnspec.backends.decided.cluster import moved_centroids
from attnspec.graphs.across import reads_m
from attnspec.graphs.relation import DataDependent
from attnspec.ir.program import Mechanism, Program
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import decided_leaves
from attnspec.lower.work import Call, Streamable
from attnspec.runtime.call_checks import (
    check_dropout,
    check_exact,
    check_finite,
    check_inputs,
    check_keys,
    check_layer,
    check_padding,
    check_query_start,
    check_table,
    check_tensors,
    in_type_of_autocast,
    of_first_keys,
    refuse_unknown,
    require_unchanged,
    taken_apart,
)
from attnspec.runtime.decisions import Decision, data_of, decisions_of
from attnspec.runtime.engine import Engine, no_log_sum_exps
from attnspec.runtime.head_groups import Prepared, group_of, together
from attnspec.runtime.parameters import Draws, Learner, again
from attnspec.runtime.streaming import (
    Everything,
    StreamState,
    Works,
    stream_kernel,
    streamed_works,
)


class CompiledAttention(Learner):
    """An attention of queries, keys and values, as its plan describes it.

    It works at every length; what depends on the length is built when it is first seen and kept for
    a while. Its parameters are the learned tables of `score bias` and what mechanisms learn. Where
    the shape of one has the size of a head, `head_size`, it is made by the first call if that is
    not given here. With `check_finite` calls and steps raise ValueError where q, k or v, or scores
    that are given, hold NaN or an infinity, at padding and masked keys too.
    """

    check_finite: bool = False

    def __init__(self, plan: Mapping[str, object], head_size: int | None = None) -> None:
        engine = Engine(plan)
        super().__init__(engine.program, head_size)
        self.engine, self.backend = engine, engine.backend
        redraws = any(_may_redraw(attend.mechanism) for attend in self.program.attends)
        self.draws = Draws(self.program.layers or 1) if redraws else None
        # a trace could not look into the program
        self._reads_m = reads_m(self.program)
        self._keeps = any(part.kept for _, part in self._parts)
        self._before: dict[tuple[str, int], torch.Tensor] = {}
        self._streams: Cache[tuple[object, ...], tuple[Works, Prepared]] = Cache(LIMITS.layouts)

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
        keep_all: bool = False,
        in_place: bool = False,
        return_lse: bool = False,
        **unknown: Never,
    ) -> Any:
        """Goes on with a causal attention: the outputs [B, H, t, d_v] of the next t positions with
        q [B, H, t, d], k [B, H_kv, t, d] and v [B, H_kv, t, d_v], and the state after them, for the
        next call. `state` is None at the start of a sequence, `layer` as in a call;
        `key_padding_mask` and `inputs` are those of the t positions, [B, t].

        The outputs are the rows of a call with the whole sequence. A state holds sums of the
        features of all keys, or the keys and values that a later position may read, with their
        padding and inputs; it stays as it is, so that one may go on from it more than once. Heads
        that look back without a bound are refused, unless a state may `keep_all` their keys. With
        `in_place` what is kept is written into the memory of `state`, which is then used up.

        Returns (outputs, state), with `return_lse` ((outputs, log-sum-exps), state), as a call
        does.

        Raises ValueError for what is not causal, looks back without a bound, reads a length, or
        computes something else at every length; TypeError or ValueError for tensors that do not
        fit.
        """
        if unknown:
            refuse_unknown(self.program, unknown, CompiledAttention.step)
        layer = check_layer(self.program, layer)
        rest = state, layer, key_padding_mask, inputs, keep_all, in_place, return_lse
        return in_type_of_autocast(self._step, q, k, v, *rest)

    def _step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: StreamState | None,
        layer: int,
        padding: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor] | None,
        keep_all: bool,
        in_place: bool,
        return_lse: bool,
    ) -> tuple[Any, StreamState]:
        check_tensors(self.program, q, k, v)
        if self._waits:
            self.make_parameters(q.shape[3], v.shape[3], q.device)
        key = (self.engine.binder.alike(layer), q.shape[1], k.shape[1], str(q.device), keep_all)
        works, prepared = self._streams.get(key, lambda: apart(lambda: self._stream(*key)))
        first = StreamState.first(state, works, q, k, v)
        check_padding(padding, q.shape[0], q.shape[2], q.device)
        data = check_inputs(self.program, inputs, q, k, padding)
        self.check_numbers(q, k, v, data)
        if 0 in (q.shape[0], q.shape[2]):
            out = self._run(q, k, v, layer, padding, 0.0, data, return_lse)
            return out, first.after(q.shape[2], first.parts)
        first = first.with_marked(self.program, data)
        check_exact(self.engine.computed, data, first.position + q.shape[2])
        if any(work.decided or work.has_expression for work, _ in works):
            return self._step_of_all(q, k, v, first, layer, padding, data, return_lse)
        call = Call(padding, 0.0, data=data, in_place=in_place)
        return self._step_of_groups((q, k, v), prepared, first, layer, call, return_lse)

    def _step_of_groups(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        prepared: Prepared,
        state: StreamState,
        layer: int,
        call: Call,
        return_lse: bool,
    ) -> tuple[Any, StreamState]:
        """A step of a layer whose heads go on each from what it keeps."""
        learned, draws = self._learned(tensors[0], tensors[2]), self._draws(layer)
        outs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        parts: list[object] = []
        for group, part in zip(prepared.groups, state.parts, strict=True):
            tables = self.engine.tables(group, layer, learned)
            own = replace(call, tables=tables, draw=group.draw(draws))
            kernel, given = cast(Streamable, group.kernel), group.parts(*tensors)
            (out, lse), after = kernel.step(*given, own, part, return_lse)
            outs.append(out)
            if lse is not None:
                sums.append(lse)
            elif return_lse:
                raise no_log_sum_exps(self.program)
            parts.append(after)
        joined, after_all = prepared.joined(outs), state.after(tensors[0].shape[2], parts)
        return ((joined, prepared.joined(sums)) if return_lse else joined), after_all

    def _step_of_all(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: StreamState,
        layer: int,
        padding: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor],
        return_lse: bool,
    ) -> tuple[Any, StreamState]:
        """A step of a layer in which the data decide: a call of the next queries with all keys."""
        before = state.parts[0]
        if before is None:
            every = Everything(k, v, padding, inputs)
        else:
            every = cast(Everything, before).after(k, v, padding, inputs, self.program)
        rest = layer, every.padding, 0.0, every.inputs, return_lse
        out = self._run(q, every.keys, every.values, *rest)
        return out, state.after(q.shape[2], [every, *state.parts[1:]])

    def _stream(
        self, layer: int, heads: int, keys: int, device: str, keep_all: bool
    ) -> tuple[Works, Prepared]:
        place = torch.device(device)
        groups, works = [], streamed_works(self.engine.binder, layer, heads)
        if any(work.decided or work.has_expression for work, _ in works):
            # each step is a call with all keys
            return works, Prepared((), None)
        for work, members in works:
            kernel = stream_kernel(
                self.program, layer, work, members, place, self.backend, keep_all
            )
            tables = self.engine.tables_of(work)
            groups.append(group_of(kernel, work, members, heads, heads // keys, tables, place))
        return works, together(groups, heads, place)

    def __prepare_scriptable__(self) -> CompiledAttention:
        raise TypeError(
            "torch.jit.script reads the text of functions, and what runs here is built for each"
            " length: use torch.export, torch.compile or torch.jit.trace"
        )

    def extra_repr(self) -> str:
        return f"{self.program.name}, backend={self.backend}"

    @staticmethod
    def positions(first: int, count: int, device: torch.device) -> torch.Tensor:
        """Where so many tokens of a call stand, the first of them given, int64 [count]."""
        return torch.arange(first, first + count, device=device)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: int = 0,
        key_padding_mask: torch.Tensor | None = None,
        dropout_p: float = 0,  # an integer: torch.compile makes a variable of any other number
        inputs: Mapping[str, torch.Tensor] | None = None,
        return_lse: bool = False,
        query_start: int = 0,
        keys: torch.Tensor | None = None,
        **unknown: Never,
    ) -> Any:
        """Attention of q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v].

        Returns [B, H, n_q, d_v]. Queries are the last n_q of the n_k positions, and H_kv divides H.
        Of a spec that says `cross` they are those of another sequence from `query_start` on, as
        many as one likes; where its graphs read m they are all of it.
        `key_padding_mask` is bool [B, n_k], True for a real key; `inputs` are the tensors that the
        spec declares. A fraction `dropout_p` of the weights is dropped, in training or not. What is
        masked must be finite all the same: NaN or infinity in k or v may reach queries that do not
        read that key, 0 times infinity being NaN, as in torch's own attention.

        `keys`, an integer [], says how many of the n_k keys count: the others are slots of a static
        cache that nothing was written to yet, and what padding and inputs say of them is not read.
        Under `torch.compile` and `torch.export` one program serves every number.

        With `return_lse` the log-sum-exps of the scores come as well, [B, H, n_q] in float32 at
        least, natural logarithms, -inf where a query reads nothing: what outputs over other keys
        are merged by. Of a mechanism they are the logarithms of its denominators, and of those that
        a graph shares with it. Both have gradients. `relu`, `sigmoid` and mechanisms without a
        denominator that is positive have none: ValueError.

        Raises TypeError or ValueError, with the shapes, for tensors that do not fit; derivatives
        RuntimeError where padding or inputs were written over since the call.
        """
        if unknown:
            refuse_unknown(self.program, unknown, CompiledAttention.forward)
        start = check_query_start(self.program, query_start, self._reads_m)
        rest = key_padding_mask, dropout_p, inputs, return_lse, start, None, keys
        return self._called(q, k, v, layer, *rest)

    def labelled(
        self,
        engine: Engine,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        dropout_p: float,
        inputs: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """A call whose kernels are those of another engine, with the same parameters and more
        inputs: the documents of `attnspec.packed`."""
        return cast(
            torch.Tensor, self._called(q, k, v, layer, None, dropout_p, inputs, False, 0, engine)
        )

    def _called(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        """A call in the type that autocast asks for; for ONNX, which has no operator of ours, of
        plain operations."""
        if _is_for_onnx():
            decided = decided_leaves(self.program)
            if decided:
                raise ValueError(
                    f"`{decided[0].pattern}` decides by numbers, for which ONNX has no operator:"
                    " torch.export takes it, as one operator"
                )
            with composed():
                return in_type_of_autocast(self._run, q, k, v, *rest)
        return in_type_of_autocast(self._run, q, k, v, *rest)

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
        start: int = 0,
        engine: Engine | None = None,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        engine = self.engine if engine is None else engine
        layer = check_layer(self.program, layer)
        check_tensors(self.program, q, k, v)
        check_padding(padding, q.shape[0], k.shape[2], q.device)
        check_keys(keys)
        dropout_p = check_dropout(dropout_p)
        data = check_inputs(engine.program, inputs, q, k, padding)
        self.check_numbers(q, k, v, data)
        if self._waits:
            self.make_parameters(q.shape[3], v.shape[3], q.device)
        data, pairs = taken_apart(engine.program, data, k.shape[2])
        learned, draws = {**self._learned(q, v), **pairs}, self._draws(layer)
        lse: torch.Tensor | None
        if _is_looked_at(q, self.program):
            seed = torch.randint(1 << 62, ()) if dropout_p else None
            given = engine.text, [*learned.values()], [*data.values()], padding
            out, lse = torch.ops.attnspec.attention(
                q, k, v, *given, layer, dropout_p, seed, *draws, return_lse, start, keys
            )
        else:
            parts, call = (q, k, v), Call(padding, dropout_p, learned, data)
            if keys is not None:
                if is_recorded(q):
                    raise ValueError(
                        "how many keys count is a number, which a program of plain operations does"
                        " not have when it is traced: export it without `composed()`, as one"
                        " operator"
                    )
                parts, call = of_first_keys(engine.program, parts, call, int(keys))
                (q, k, v), padding = parts, call.padding
            out, lse = engine.run(parts, call, layer, draws, return_lse, query_start=start)
            read = [*data.values(), *(() if padding is None else (padding,))]
            if read and not is_transformed():
                require_unchanged((out,) if lse is None else (out, lse), read)
        if self.training and not torch.compiler.is_compiling():
            if self.draws is not None:
                self.draws.count(layer)
            if self._keeps and not again():
                self._move(layer, q, k, padding)
        return (out, cast(torch.Tensor, lse)) if return_lse else out

    def masked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        added: torch.Tensor,
        *,
        layer: int = 0,
        key_padding_mask: torch.Tensor | None = None,
        dropout_p: float = 0,
        inputs: Mapping[str, torch.Tensor] | None = None,
        return_lse: bool = False,
    ) -> Any:
        """What a call returns with numbers `added` to the scores, of q's type and broadcastable to
        [B, H, n_q, n_k], -inf for a pair that is none: of the spec's pairs those that are left.

        It is the definition, and costs what all pairs cost. Raises as a call does; ValueError for a
        mechanism, which has no scores, and in a traced program.
        """
        layer = check_layer(self.program, layer)
        if _is_looked_at(q, self.program):
            raise ValueError(
                "a mask of all pairs is not read in a traced program: say which pairs there are in"
                " the spec, by patterns or run-time inputs"
            )
        check_tensors(self.program, q, k, v)
        check_padding(key_padding_mask, q.shape[0], k.shape[2], q.device)
        data = check_inputs(self.program, inputs, q, k, key_padding_mask)
        self.check_numbers(q, k, v, data)
        if self._waits:
            self.make_parameters(q.shape[3], v.shape[3], q.device)
        data, pairs = taken_apart(self.program, data, k.shape[2])
        learned = {**self._learned(q, v), **pairs}
        call = Call(key_padding_mask, check_dropout(dropout_p), learned, data)
        out, lse = self.engine.masked((q, k, v), call, layer, added, return_lse)
        return (out, cast(torch.Tensor, lse)) if return_lse else out

    def check_numbers(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises ValueError for what is not finite, if that was asked for."""
        if not self.check_finite:
            return
        if _is_looked_at(q, self.program) or is_transformed():
            raise ValueError(
                "`check_finite` looks at numbers, which a program that is traced or transformed has"
                " none of: set `module.check_finite = False` for it"
            )
        scores = {
            x.name: data[x.name] for x in self.program.inputs if x.kind in ("scores", "pairs")
        }
        check_finite(self.program, {"q": q, "k": k, "v": v, **scores})

    def _learned(self, q: torch.Tensor, v: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """What is learned, by name, for a call with these queries and values."""
        self.check_sizes(q, v)
        found = {name: self.learned(name) for name in self.engine.own}
        for name, table in found.items():
            check_table(name, table, q.device)
        if self._before and again():
            for (name, row), rows in self._before.items():
                place = torch.tensor([row], device=rows.device)
                found[name] = found[name].index_copy(0, place, rows[None])
        return found

    def _draws(self, layer: int) -> tuple[int, int]:
        """Which random features a layer draws."""
        return (0, 0) if self.draws is None else self.draws.of(layer)

    def pairs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        layer: int = 0,
        inputs: Mapping[str, torch.Tensor] | None = None,
        key_padding_mask: torch.Tensor | None = None,
        query_start: int = 0,
    ) -> torch.Tensor:
        """bool [B, H, n_q, n_k]: which keys a call with these tensors reads, by the definition.

        Raises ValueError above n_k = `LIMITS.pairs_shown`, else as a call does.
        """
        start = check_query_start(self.program, query_start, self._reads_m)
        works, data, decisions, choices = self._looked_at(
            q, k, layer, inputs, key_padding_mask, start
        )
        held = q.new_zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
        # nothing is decided of no tokens
        for work, heads in works if held.numel() else ():
            mine = data_of(work, heads, decisions, choices, data)
            held[:, list(heads)] = mask_of(work, mine, q.device)[..., : k.shape[2]]
        return held if key_padding_mask is None else held & key_padding_mask[:, None, None]

    def choices(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        layer: int = 0,
        inputs: Mapping[str, torch.Tensor] | None = None,
        key_padding_mask: torch.Tensor | None = None,
        query_start: int = 0,
    ) -> dict[str, dict[str, torch.Tensor]]:
        """What the data decide in a call with these tensors: for each graph, by its name, the
        `heads` that have it and its lists, buckets, clusters or matchings, [B, H or 1, …]; no lists
        of no tokens.

        Raises ValueError above n_k = `LIMITS.pairs_shown`, and where the data decide nothing; else
        as a call does.
        """
        start = check_query_start(self.program, query_start, self._reads_m)
        _, _, decisions, choices = self._looked_at(q, k, layer, inputs, key_padding_mask, start)
        if not decisions:
            raise ValueError(f"the data decide nothing in layer {layer} of `{self.program.name}`")
        found: dict[str, dict[str, torch.Tensor]] = {}
        for each in decisions:
            name = each.leaf.name
            number = sum(other.leaf.name == name for other in decisions[: decisions.index(each)])
            heads = torch.tensor(each.heads, device=q.device)
            lists = choices[each.leaf].lists if each.leaf in choices else {}
            found[f"{name}_{number + 1}" if number else name] = {"heads": heads, **lists}
        return found

    def _looked_at(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: int,
        inputs: Mapping[str, torch.Tensor] | None,
        padding: torch.Tensor | None,
        start: int = 0,
    ) -> tuple[Works, dict[str, torch.Tensor], tuple[Decision, ...], dict[DataDependent, Choice]]:
        """The works, inputs, decisions and choices of a call whose pairs are asked for."""
        layer = check_layer(self.program, layer)
        check_tensors(self.program, q, k, k)
        check_padding(padding, q.shape[0], k.shape[2], q.device)
        data = check_inputs(self.program, inputs, q, k, padding)
        longest = max(q.shape[2], k.shape[2])
        if longest > LIMITS.pairs_shown:
            raise ValueError(
                f"pairs and choices are shown up to n = {LIMITS.pairs_shown:,}, got {longest:,}"
            )
        if self._waits:
            self.make_parameters(q.shape[3], k.shape[3], q.device)
        works = self.engine.binder.works(layer, q.shape[1], q.shape[2], k.shape[2], start)
        decisions, learned = decisions_of(works), self._learned(q)
        held, given = self.engine.laid_out((q, k, k), Call(padding, data=data))
        choices = self.engine.decided(
            decisions, layer, held[:2], given.padding, given.data, learned, k.shape[2]
        )
        return works, dict(given.data), decisions, choices

    def _move(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> None:
        """Moves the centroids that are kept, after a call of training."""
        if 0 in (q.shape[0], q.shape[2], k.shape[2]):
            return
        works = self.engine.binder.works(layer, q.shape[1], q.shape[2], k.shape[2])
        for each in decisions_of(works):
            for part in each.leaf.learned:
                if not part.kept:
                    continue
                name = self._parts[each.leaf.name, part]
                row = layer if len(self.learned(name)) > 1 else 0
                rows = self.learned(name)[row]
                heads = list(each.heads) if len(rows) > 1 else [0]
                # what a call was computed with, should it be computed again for its backward
                self._before[name, row] = rows.clone()
                given = each.given(q, k, padding, {}, {part.name: rows[heads]})
                self.learned(name)[row, heads] = moved_centroids(given)


def _is_looked_at(q: torch.Tensor, program: Program) -> bool:
    """Whether torch traces a call, or looks at its operators one by one: then it sees one. What is
    transformed otherwise, or must be composed, consists of operations that can be."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if is_transformed():
        # what the data decide is decided for the samples themselves
        return is_mapped_over() and bool(decided_leaves(program))
    return is_watched(q)


def _is_for_onnx() -> bool:
    """Whether a call is traced to be written down in ONNX."""
    return torch.compiler.is_compiling() and bool(torch.onnx.is_in_onnx_export())


def _may_redraw(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and dict(mechanism.arguments).get("redraw", 0) != 0
