"""The module that runs a compiled attention: what emitted modules derive from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any, Never, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from attnspec.backends.common.masks import mask_of
from attnspec.backends.common.torch_modes import (
    apart,
    composed,
    is_mapped_over,
    is_transformed,
    is_watched,
)
from attnspec.backends.decided.cluster import moved_centroids
from attnspec.backends.decided.deciders import data_of, decisions_of
from attnspec.graphs.across import reads_m
from attnspec.ir.program import Program
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import decided_leaves
from attnspec.lower.work import Call, Kernel, Streamable, Work
from attnspec.runtime.call_checks import (
    FLOATS,
    INTEGERS,
    Parts,
    check_dropout,
    check_exact,
    check_finite,
    check_inputs,
    check_layer,
    check_query_start,
    check_tensor,
    check_tensors,
    of_first_keys,
    refuse_unknown,
    require_numbers,
    require_unchanged,
    taken_apart,
)
from attnspec.runtime.engine import NOTHING, Engine, Outputs, Prepared, no_log_sum_exps
from attnspec.runtime.parameters import Draws, Learner, again
from attnspec.runtime.streaming import (
    Kept,
    StreamState,
    Works,
    followed,
    stream_kernel,
    streamed_works,
)

Method = TypeVar("Method", bound=Callable[..., Any])

Besides: TypeAlias = "tuple[Tensor | None, Mapping[str, Tensor] | None, float]"
"""Padding, inputs and dropout of a call."""

Asked: TypeAlias = "tuple[int, int, Besides, Tensor | None, bool]"
"""Layer, first query, what there is besides q, k and v, the keys that count, whether log-sum-exps
are asked for."""


def in_type_of_autocast(method: Method) -> Method:
    """A method of q, k and v that has them in the type that autocast asks for, if it asks: float64
    stays, and what is no float is left to `check_tensors`."""

    def narrowed(x: Any, kind: str) -> Any:
        narrow = isinstance(x, Tensor) and x.dtype in FLOATS[:3]
        return x.to(torch.get_autocast_dtype(kind)) if narrow else x

    @wraps(method)
    def run(self: object, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **settings: Any) -> Any:
        # torch has no autocast of shapes alone
        first: object = q
        kind = first.device.type if isinstance(first, Tensor) else "meta"
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return method(self, q, k, v, *rest, **settings)
        with torch.autocast(kind, enabled=False):
            return method(self, *(narrowed(x, kind) for x in (q, k, v)), *rest, **settings)

    return cast(Method, run)


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
        mechanisms = [each.mechanism for each in self.program.attends if each.mechanism is not None]
        redraws = any(dict(each.arguments).get("redraw", 0) != 0 for each in mechanisms)
        self.draws = Draws(self.program.layers or 1) if redraws else None
        self._run_by(engine)
        self._keeps = any(part.kept for _, part in self._parts)
        self._before: dict[tuple[str, int], Tensor] = {}

    def _run_by(self, engine: Engine) -> None:
        self.engine, self.backend, self.program = engine, engine.backend, engine.program
        # a trace could not enter the program
        self._reads_m = reads_m(self.program)
        # whether a call may have nothing besides q, k and v
        self._alone = not (self.program.inputs or engine.own or self.draws)
        self._streams: Cache[tuple[object, ...], tuple[Works, Prepared]] = Cache(LIMITS.layouts)
        # what `replanned` returned, by the text of its plan or by what else tells it
        self.variants: dict[object, CompiledAttention] = {}

    def replanned(self, engine: Engine) -> CompiledAttention:
        """A module whose kernels are those of another engine, of a program that learns the same:
        the parameters are this module's own, and move with it. It is kept for the next time."""
        other = self.variants.get(engine.text)
        if other is None:
            other = self.variants[engine.text] = copy(self)
            other._run_by(engine)
        other.check_finite, other.training = self.check_finite, self.training
        return other

    def redraw(self) -> None:
        """Draws random features of mechanisms anew; ValueError where none redraws."""
        if self.draws is None:
            raise ValueError(
                f"no mechanism of `{self.program.name}` redraws its features: write how often it"
                " does in training, as in `favor(redraw = 1000)`"
            )
        self.draws.asked += 1

    def __prepare_scriptable__(self) -> CompiledAttention:
        raise TypeError(
            "torch.jit.script reads the text of functions, and what runs here is built for each"
            " length: use torch.export, torch.compile or torch.jit.trace"
        )

    def extra_repr(self) -> str:
        return f"{self.program.name}, backend={self.backend}"

    @staticmethod
    def positions(first: int, count: int, device: torch.device) -> Tensor:
        """Where so many tokens of a call stand, the first of them given, int64 [count]."""
        return torch.arange(first, first + count, device=device)

    @in_type_of_autocast
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0,  # an integer: torch.compile makes a variable of any other number
        inputs: Mapping[str, Tensor] | None = None,
        return_lse: bool = False,
        query_start: int = 0,
        keys: Tensor | None = None,
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
        # whoever calls from outside may hand in anything
        first: object = q
        watched = isinstance(first, Tensor) and _is_operator(q, self.program)
        run = self._traced if watched else self._computed
        besides = key_padding_mask, inputs, dropout_p
        out, lse = run((q, k, v), (layer, query_start, besides, keys, return_lse))
        if self.training and (self.draws is not None or self._keeps):
            self._count(layer, q, k, key_padding_mask)
        return (out, lse) if return_lse else out

    def _traced(self, parts: Parts, asked: Asked) -> Outputs:
        """A call that torch traces, as one operator, of which ONNX has none."""
        if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
            for leaf in decided_leaves(self.program):
                raise ValueError(
                    f"`{leaf.pattern}` decides by numbers, for which ONNX has no operator:"
                    " torch.export takes it, as one operator"
                )
            with composed():
                return self._computed(parts, asked)
        layer, start, besides, keys, return_lse = asked
        layer, start = self.checked(*parts, layer, start)
        dropout_p, learned, data, draws = self.besides(layer, *parts, *besides)
        if keys is not None:
            check_tensor("keys", keys, INTEGERS, "an integer type", (), None)
        seed = torch.randint(1 << 62, ()) if dropout_p else None
        rest = self.engine.text, [*learned.values()], [*data.values()], besides[0]
        outputs: Outputs = torch.ops.attnspec.attention(
            *parts, *rest, layer, dropout_p, seed, *draws, return_lse, start, keys
        )
        return outputs

    def _computed(self, parts: Parts, asked: Asked) -> Outputs:
        """A call that the engine runs, with numbers or as plain operations."""
        (q, k, v), (layer, start, besides, keys, return_lse) = parts, asked
        (padding, inputs, dropout_p), key, prepared = besides, None, None
        if type(layer) is int and type(start) is int:
            try:
                # all that the checks of q, k and v go by
                key = (
                    *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, layer, start),
                    *(q.device, k.device, v.device, q.layout, k.layout, v.layout),
                )
                prepared = self.engine.calls.kept.get(key)
            except (AttributeError, RuntimeError, TypeError):
                # no tensor, or a size that is a symbol
                key = None
        if prepared is None:
            layer, start = self.checked(q, k, v, layer, start)
        undropped = type(dropout_p) is int and not dropout_p
        call, alone = NOTHING, self._alone and not self.check_finite
        if not (alone and undropped and padding is None and inputs is None):
            call = Call(padding, *self.besides(layer, q, k, v, *besides))
        if keys is not None:
            check_tensor("keys", keys, INTEGERS, "an integer type", (), None)
            require_numbers("the value of `keys` is read", q)
            parts, call = of_first_keys(self.program, parts, call, int(keys))
            key = prepared = None
        if prepared is None:
            prepared = self.engine.prepare(layer, *parts[:2], start, key)
        out, lse = self.engine.run(prepared, parts, call, return_lse)
        if (call.data or call.padding is not None) and not is_transformed():
            read = [*call.data.values(), call.padding]
            require_unchanged((out, lse), [x for x in read if x is not None])
        return out, lse

    def checked(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, start: int = 0
    ) -> tuple[int, int]:
        """The layer and the first query; raises as a call does."""
        if type(start) is not int or start:
            start = check_query_start(self.program, start, self._reads_m)
        layer = check_layer(self.program, layer)
        check_tensors(self.program, q, k, v)
        return layer, start

    def besides(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        padding: Tensor | None,
        inputs: Mapping[str, Tensor] | None,
        dropout_p: float = 0,
        pairs: bool = True,
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor], tuple[int, int]]:
        """The dropout, what is learned by name, the inputs as patterns take them, and which random
        features are drawn, of tensors that were checked; `v` is None where values are not asked
        for, and inputs of `pairs` are among what is learned, or else among the inputs."""
        values = k if v is None else v
        if padding is not None:
            shape = q.shape[0], k.shape[2]
            check_tensor("key_padding_mask", padding, (torch.bool,), "bool", shape, q.device)
        if type(dropout_p) is not int or dropout_p:
            dropout_p = check_dropout(dropout_p)
        learned: dict[str, Tensor] = {}
        data: dict[str, Tensor] = {}
        if inputs is not None or self.program.inputs:
            data = check_inputs(self.program, inputs, q, k, padding)
        if self.check_finite:
            if _is_operator(q, self.program) or is_transformed():
                raise ValueError(
                    "`check_finite` reads values, and a program that is traced or transformed has"
                    " none: set `module.check_finite = False` for it"
                )
            check_finite(self.program, q, k, values, data)
        if self._waits:
            self.make_parameters(q.shape[3], values.shape[3], q.device)
        if self.engine.own:
            learned = self._learned(q, v)
        if pairs and self.engine.pairs:
            data, tables = taken_apart(self.program, data, k.shape[2])
            learned |= tables
        return dropout_p, learned, data, (0, 0) if self.draws is None else self.draws.of(layer)

    def _learned(self, q: Tensor, v: Tensor | None) -> dict[str, Tensor]:
        """What is learned, by name, for a call with these queries and values."""
        self.check_sizes(q, v)
        tables = {name: self.learned(name) for name in self.engine.own}
        for name, table in tables.items():
            if table.device != q.device:
                raise ValueError(
                    f"the parameter `{name}` must be on {q.device} as q, got {table.device}:"
                    f" move the module, `.to({str(q.device)!r})`"
                )
        if self._before and again():
            for (name, row), rows in self._before.items():
                place = torch.tensor([row], device=rows.device)
                tables[name] = tables[name].index_copy(0, place, rows[None])
        return tables

    def masked(
        self,
        parts: Parts,
        added: Tensor,
        layer: int,
        besides: Besides,
        return_lse: bool = False,
    ) -> Any:
        """What a call returns with numbers `added` to the scores, of q's type and broadcastable to
        [B, H, n_q, n_k], -inf for a pair that is none: of the spec's pairs those that are left.

        It is the definition, and costs what all pairs cost. Raises as a call does; ValueError for a
        mechanism, which has no scores, and in a traced program.
        """
        if _is_operator(parts[0], self.program):
            raise ValueError(
                "attn_mask cannot be used in a traced program: describe its pairs in the spec, by"
                " patterns or inputs"
            )
        layer, _ = self.checked(*parts, layer)
        call = Call(besides[0], *self.besides(layer, *parts, *besides))
        out, lse = self.engine.masked(layer, parts, call, added, return_lse)
        return (out, lse) if return_lse else out

    # --- steps -----------------------------------------------------------------------------------

    @in_type_of_autocast
    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: StreamState | None = None,
        *,
        layer: int = 0,
        key_padding_mask: Tensor | None = None,
        inputs: Mapping[str, Tensor] | None = None,
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
        layer, padding = check_layer(self.program, layer), key_padding_mask
        check_tensors(self.program, q, k, v)
        key = (self.engine.binder.alike(layer), q.shape[1], k.shape[1], str(q.device), keep_all)
        works, prepared = self._streams.get(key, lambda: apart(lambda: self._stream(*key)))
        state, count = StreamState.first(state, works, q, k, v), q.shape[2]
        besides = self.besides(layer, q, k, v, padding, inputs, pairs=False)
        data = besides[2]
        nothing = 0 in (q.shape[0], count)
        if not nothing:
            state = state.with_marked(self.program, data)
            check_exact(self.engine.computed, data, state.position + count)
        if nothing or any(work.decided or work.changes.inputs for work, _ in works):
            # a call of the next queries with all keys
            if not nothing:
                before = cast("Kept | None", state.parts[0])
                every = followed(before, (k, v, padding, data), self.program)
                state = replace(state, parts=(every, *state.parts[1:]))
                k, v, padding, inputs = every
            rest: dict[str, Any] = {"layer": layer, "key_padding_mask": padding, "inputs": inputs}
            out = CompiledAttention.forward(self, q, k, v, **rest, return_lse=return_lse)
            return out, state.after(count, state.parts)
        call = Call(padding, *besides, in_place=in_place)
        return self._go_on(replace(prepared, layer=layer), (q, k, v), call, state, return_lse)

    def _go_on(
        self, prepared: Prepared, tensors: Parts, whole: Call, state: StreamState, return_lse: bool
    ) -> Any:
        """A step by kernels that go on from the parts of a state."""
        steps = []
        for group, part in zip(prepared.groups, state.parts, strict=True):
            kernel = cast(Streamable, group.kernel)
            call = replace(whole, tables=self.engine.tables(group, prepared.layer, whole.tables))
            out, after = kernel.step(*group.parts(*tensors), call, part, return_lse)
            if return_lse and out[1] is None:
                raise no_log_sum_exps(self.program)
            steps.append((*out, after))
        outs, sums, parts = zip(*steps, strict=True)
        joined: Any = prepared.joined(outs)
        if return_lse:
            joined = joined, prepared.joined(sums)
        return joined, state.after(tensors[0].shape[2], parts)

    def _stream(
        self, layer: int, heads: int, keys: int, device: str, keep_all: bool
    ) -> tuple[Works, Prepared]:
        place, works = torch.device(device), streamed_works(self.engine.binder, layer, heads)
        if any(work.decided or work.changes.inputs for work, _ in works):
            # each step is a call with all keys
            return works, Prepared()

        def built(work: Work, of: tuple[int, ...]) -> Kernel:
            return stream_kernel(self.program, layer, work, of, place, self.backend, keep_all)

        kernels = [(built(*each), *each) for each in works]
        return works, self.engine.together(kernels, heads, keys, place)

    # --- what a call reads, and what moves in training ------------------------------------------

    def pairs(
        self,
        q: Tensor,
        k: Tensor,
        *,
        layer: int = 0,
        inputs: Mapping[str, Tensor] | None = None,
        key_padding_mask: Tensor | None = None,
        query_start: int = 0,
    ) -> Tensor:
        """bool [B, H, n_q, n_k]: which keys a call with these tensors reads, by the definition.

        Raises ValueError above n_k = `LIMITS.pairs_shown`, else as a call does.
        """
        works, data, choices = self._shown(q, k, layer, query_start, (key_padding_mask, inputs, 0))
        read = q.new_zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
        # nothing is decided of no tokens
        for work, heads in works if read.numel() else ():
            mine = data_of(work, heads, decisions_of(works), choices, data)
            read[:, list(heads)] = mask_of(work, mine, q.device)[..., : k.shape[2]]
        return read if key_padding_mask is None else read & key_padding_mask[:, None, None]

    def choices(
        self,
        q: Tensor,
        k: Tensor,
        *,
        layer: int = 0,
        inputs: Mapping[str, Tensor] | None = None,
        key_padding_mask: Tensor | None = None,
        query_start: int = 0,
    ) -> dict[str, dict[str, Tensor]]:
        """Data-dependent choices in a call with these tensors: for each graph, by its name, the
        `heads` that have it and its lists, buckets, clusters or matchings, [B, H or 1, …]; no lists
        of no tokens.

        Raises ValueError above n_k = `LIMITS.pairs_shown`, and for static layers; else
        as a call does.
        """
        works, _, choices = self._shown(q, k, layer, query_start, (key_padding_mask, inputs, 0))
        decisions = decisions_of(works)
        if not decisions:
            raise ValueError(
                "`choices` shows what graphs such as `topk` choose, and layer"
                f" {layer} of `{self.program.name}` has none of them: call `pairs`"
            )
        shown: dict[str, dict[str, Tensor]] = {}
        names = Counter[str]()
        for each in decisions:
            name, number = each.leaf.name, names[each.leaf.name] + 1
            names[name] = number
            heads = torch.tensor(each.heads, device=q.device)
            lists = choices[each.leaf].lists if each.leaf in choices else {}
            shown[f"{name}_{number}" if number > 1 else name] = {"heads": heads, **lists}
        return shown

    def _shown(
        self, q: Tensor, k: Tensor, layer: int, start: int, besides: Besides
    ) -> tuple[Works, Mapping[str, Tensor], dict[Any, Any]]:
        """The works, inputs and choices of a call whose pairs are asked for."""
        layer, start = self.checked(q, k, k, layer, start)
        call = Call(besides[0], *self.besides(layer, q, k, None, *besides))
        longest = max(q.shape[2], k.shape[2])
        if longest > LIMITS.pairs_shown:
            raise ValueError(
                f"pairs and choices are shown up to n = {LIMITS.pairs_shown:,}, got {longest:,}"
            )
        works = self.engine.binder.works(layer, q.shape[1], q.shape[2], k.shape[2], start)
        laid = self.engine.laid_out((q, k, k), call)
        choices = self.engine.decided(decisions_of(works), layer, *laid, k.shape[2])
        return works, laid[1].data, choices

    def _count(self, layer: int, q: Tensor, k: Tensor, padding: Tensor | None) -> None:
        """Counts a call of training, and moves the centroids that are kept."""
        if torch.compiler.is_compiling():
            return
        layer = check_layer(self.program, layer)
        if self.draws is not None:
            self.draws.count(layer)
        if not self._keeps or again() or 0 in (q.shape[0], q.shape[2], k.shape[2]):
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
                context = each.given(q, k, Call(padding, tables={part.name: rows[heads]}))
                self.learned(name)[row, heads] = moved_centroids(context)


def _is_operator(q: Tensor, program: Program) -> bool:
    """Whether torch traces a call, or records its operators one by one: then it sees one. What is
    transformed otherwise, or must be composed, consists of operations that can be."""
    watched = is_watched(q)
    if watched and torch.compiler.is_dynamo_compiling():
        return True
    if is_transformed():
        # data-dependent choices are made for the samples themselves
        return is_mapped_over() and bool(decided_leaves(program))
    return watched
