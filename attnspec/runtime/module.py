"""The module that runs a compiled attention: what emitted modules derive from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import wraps
from itertools import product
from typing import Any, Never, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from attnspec.backends.common.key_cache import KeyCache
from attnspec.backends.common.masks import mask_of
from attnspec.backends.common.merging import Outputs
from attnspec.backends.common.torch_modes import (
    apart,
    composed,
    is_mapped_over,
    is_transformed,
    is_watched,
)
from attnspec.backends.decided.cluster import moved_centroids
from attnspec.backends.decided.deciders import data_of, decisions_of
from attnspec.backends.planner import AUTO
from attnspec.graphs.across import reads_m
from attnspec.graphs.counter_rng import CENTROIDS, Stream, normals
from attnspec.ir.mechanisms.declaration import Part
from attnspec.ir.program import Attend, Input
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call, Works
from attnspec.runtime.call_checks import (
    FLOATS,
    Inputs,
    Parts,
    check_dropout,
    check_exact,
    check_finite,
    check_inputs,
    check_layer,
    check_promises,
    check_query_start,
    check_tensor,
    check_tensors,
    of_first_keys,
    refuse_unknown,
    require_numbers,
    require_unchanged,
    taken_apart,
)
from attnspec.runtime.engine import NOTHING, Engine, Prepared, engine_of, no_log_sum_exps, text_of
from attnspec.runtime.streaming import StreamState, followed, streamed

Method = TypeVar("Method", bound=Callable[..., Any])


def in_type_of_autocast(method: Method) -> Method:
    """A method of q, k and v that has them in the type that autocast asks for, if it asks: float64
    stays, and what is no float is left to `check_tensors`."""

    @wraps(method)
    def run(self: object, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **settings: Any) -> Any:
        # torch has no autocast of shapes alone
        first: object = q
        kind = first.device.type if isinstance(first, Tensor) else "meta"
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return method(self, q, k, v, *rest, **settings)
        parts: list[Any] = [q, k, v]
        for at, x in enumerate(parts):
            if isinstance(x, Tensor) and x.dtype in FLOATS[:3]:
                parts[at] = x.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return method(self, *parts, *rest, **settings)

    return cast(Method, run)


class CompiledAttention(nn.Module):
    """An attention of queries, keys and values, as its plan describes it.

    It works at every length; what depends on the length is built when it is first seen and kept for
    a while. Its parameters are the learned tables of `score bias` and what mechanisms learn. Where
    the shape of one has the size of a head, `head_size`, it is made by the first call if that is
    not given here. With `check_finite` calls and steps raise ValueError where q, k or v, or scores
    that are given, hold NaN or an infinity, at padding and masked keys too.
    """

    check_finite: bool = False

    def __init__(self, plan: Mapping[str, object], head_size: int | None = None) -> None:
        super().__init__()
        engine, self._before = Engine(plan), dict[tuple[str, int], Tensor]()
        mechanisms = engine.program.mechanisms
        redraws = any(dict(each.arguments).get("redraw", 0) != 0 for each in mechanisms)
        self.draws = Draws(engine.program.layer_count) if redraws else None
        self._run_by(engine)
        self._keeps = any(part.kept for _, part in engine.parts)
        for name, part in engine.own.items():
            if part.kept:
                self.register_buffer(name, UninitializedBuffer())
            else:
                self.register_parameter(name, cast(nn.Parameter, UninitializedParameter()))
        self.make_parameters(head_size, head_size)

    def _run_by(self, engine: Engine) -> None:
        self.engine, self.backend, self.program = engine, engine.backend, engine.program
        # a trace could not enter the program
        self._reads_m, self._decided = reads_m(self.program), engine.decided_leaves
        # whether a call may have nothing besides q, k and v
        self._alone = not (self.program.inputs or engine.own or self.draws)
        self._streams: Cache[tuple[object, ...], tuple[Works, Prepared]] = Cache(LIMITS.layouts)
        # what `replanned` returned
        self.variants: dict[object, CompiledAttention] = {}

    def replanned(self, key: object, plan: Callable[[], Mapping[str, object]]) -> CompiledAttention:
        """A module with the kernels of another plan, of a program that learns the same, and this
        module's own parameters. It is kept by its key."""
        if (other := self.variants.get(key)) is None:
            other = copy(self)
            other._run_by(engine_of(text_of(plan())))
            # last: another thread may ask for it at any time
            self.variants[key] = other
        other.check_finite, other.training = self.check_finite, self.training
        return other

    def with_input(
        self, kind: str, reading: Callable[[Attend, str], Attend]
    ) -> tuple[CompiledAttention, str]:
        """A module, as `replanned`, with one input more, which `reading` makes each attend read,
        and its name."""
        program = self.program
        name = "_".join((kind, *(entry.name for entry in program.inputs)))

        def plan() -> Mapping[str, object]:
            attends = tuple(reading(attend, name) for attend in program.attends)
            inputs = (*program.inputs, Input(name, kind))
            return plan_data(replace(program, attends=attends, inputs=inputs), AUTO)

        return self.replanned(kind, plan), name

    def redraw(self) -> None:
        """Draws random features of mechanisms anew; ValueError where none redraws."""
        if self.draws is None:
            raise ValueError(
                f"no mechanism of `{self.program.name}` redraws its features: write the argument"
                " `redraw` in the spec, as in `favor(redraw = 1000)`"
            )
        self.draws.asked += 1

    def __prepare_scriptable__(self) -> CompiledAttention:
        raise TypeError(
            "torch.jit.script cannot compile this module, whose kernels are built for each"
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
        inputs: Inputs = None,
        return_lse: bool = False,
        query_start: int = 0,
        keys: Tensor | None = None,
        **unknown: Never,
    ) -> Any:
        """Attention of q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v].

        Returns [B, H, n_q, d_v]. Queries are the last n_q of the n_k positions, and H_kv divides H.
        Of a spec that says `cross` they are those of another sequence from `query_start` on, as
        many as one likes; where its graphs read m they are all of it. `key_padding_mask` is bool
        [B, n_k], True for a real key; `inputs` are the tensors that the spec declares. A fraction
        `dropout_p` of the weights is dropped, in training or not. What is masked must be finite all
        the same: NaN or infinity there may reach queries that do not read it, as in torch's own.

        `keys`, an integer [], says how many of the n_k keys count: the others are slots of a static
        cache, of which nothing is read. A traced program serves every number.

        With `return_lse` the log-sum-exps of the scores come as well, [B, H, n_q] in float32 at
        least, natural logarithms, -inf where a query reads nothing: what outputs over other keys
        are merged by; of a mechanism, and of what a graph shares with it, the logarithms of its
        denominators. Both have gradients. ValueError where nothing positive is divided by.

        Raises TypeError or ValueError, with the shapes, for tensors that do not fit; derivatives
        RuntimeError where padding or inputs were written over since the call.
        """
        if unknown:
            refuse_unknown(self.program, unknown, CompiledAttention.forward)
        if keys is not None:
            check_tensor("keys", keys, "ids", (), None)
        # whoever calls from outside may hand in anything
        first: object = q
        traced = isinstance(first, Tensor) and self._is_operator(q)
        run = self._traced if traced else self._computed
        besides = key_padding_mask, inputs, dropout_p
        out, lse = run((q, k, v), layer, query_start, besides, keys, return_lse)
        if self.training and (self.draws is not None or self._keeps):
            self._count(layer, q, k, key_padding_mask)
        return (out, lse) if return_lse else out

    def _traced(
        self, parts: Parts, layer: int, start: int, besides: Any, keys: Any, return_lse: bool
    ) -> Outputs:
        """A call that torch traces, as one operator, of which ONNX has none."""
        if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
            for leaf in self._decided:
                raise ValueError(
                    f"`{leaf.pattern}` chooses pairs by values, for which ONNX has no operator:"
                    " use torch.export, which keeps the attention as one operator"
                )
            with composed():
                return self._computed(parts, layer, start, besides, keys, return_lse)
        layer, start = self.checked(*parts, layer, start)
        call = self.call_of(layer, *parts, *besides)
        seed = torch.randint(1 << 62, ()) if call.dropout_p else None
        # centroids move behind a call of training, whose backward reads them
        tables = [x.clone() if self._keeps and self.training else x for x in call.tables.values()]
        tensors = tables, [*call.data.values()], call.padding
        asked = layer, call.dropout_p, seed, *call.draws, return_lse, start, keys
        outputs: Outputs = torch.ops.attnspec.attention(*parts, self.engine.text, *tensors, *asked)
        return outputs

    def _computed(
        self, parts: Parts, layer: int, start: int, besides: Any, keys: Any, return_lse: bool
    ) -> Outputs:
        """A call that the engine runs, with numbers or as plain operations."""
        (q, k, v), key, prepared = parts, None, None
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
        call = self.call_of(layer, q, k, v, *besides)
        if keys is not None:
            require_numbers("a call reads the value of `keys`", q)
            parts, call = of_first_keys(self.program, parts, call, int(keys))
            key = prepared = None
        if prepared is None:
            prepared = self.engine.prepare(layer, *parts[:2], start, key)
        outputs = self.engine.run(prepared, parts, call, return_lse)
        if (call.data or call.padding is not None) and not is_transformed():
            require_unchanged(outputs, call)
        return outputs

    def _is_operator(self, q: Tensor) -> bool:
        """Whether torch traces a call or records its operators; what is transformed otherwise, or
        must be composed, consists of operations that can be."""
        watched = is_watched(q)
        if watched and torch.compiler.is_dynamo_compiling():
            return True
        if (watched or self._decided) and is_transformed():
            # data-dependent choices are made for the samples themselves
            return bool(self._decided) and is_mapped_over()
        return watched

    def checked(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, start: int = 0
    ) -> tuple[int, int]:
        """The layer and the first query; raises as a call does."""
        if type(start) is not int or start:
            start = check_query_start(self.program, start, self._reads_m)
        layer = check_layer(self.program, layer)
        check_tensors(self.program, q, k, v)
        return layer, start

    def call_of(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        padding: Tensor | None,
        inputs: Inputs,
        dropout_p: float = 0,
        pairs: bool = True,
    ) -> Call:
        """What a checked call has besides: all that is learned, with `pairs` the inputs of that
        kind too, and other inputs as patterns take them; v None where values are not asked for."""
        undropped = type(dropout_p) is int and not dropout_p
        if self._alone and undropped and padding is None and inputs is None:
            if not self.check_finite:
                return NOTHING
        values = k if v is None else v
        if padding is not None:
            shape = q.shape[0], k.shape[2]
            check_tensor("key_padding_mask", padding, "tokens", shape, q.device)
        if not undropped:
            dropout_p = check_dropout(dropout_p)
        data: dict[str, Tensor] = {}
        if inputs is not None or self.program.inputs:
            data = check_inputs(self.program, inputs, q, k, padding)
        if self.check_finite:
            if self._is_operator(q) or is_transformed():
                raise ValueError(
                    "`check_finite` reads values, and a program that is traced or transformed has"
                    " none: set `module.check_finite = False` for it"
                )
            check_finite(self.program, q, k, values, data)
        if self._waits:
            self.make_parameters(q.shape[3], values.shape[3], q.device)
        if self.engine.own:
            self.check_sizes(q, v)
        tables = {name: self.learned(name) for name in self.engine.own}
        for name, x in tables.items():
            if x.device != q.device:
                raise ValueError(
                    f"the parameter `{name}` must be on {q.device}, the device of q, got"
                    f" {x.device}: move the module, `.to({str(q.device)!r})`"
                )
        for (name, row), rows in self._before.items() if self._before and again() else ():
            place = torch.tensor([row], device=rows.device)
            tables[name] = tables[name].index_copy(0, place, rows[None])
        if pairs and self.engine.pairs:
            data, of_pairs = taken_apart(self.program, data, k.shape[2])
            tables |= of_pairs
        draws = (0, 0) if self.draws is None else self.draws.of(layer)
        return Call(padding, dropout_p, tables, data, draws)

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
        inputs: Inputs = None,
        keep_all: bool = False,
        in_place: bool = False,
        return_lse: bool = False,
        **unknown: Never,
    ) -> Any:
        """Goes on with a causal attention: the outputs [B, H, t, d_v] of the next t positions with
        q [B, H, t, d], k [B, H_kv, t, d] and v [B, H_kv, t, d_v], which are the rows of a call with
        the whole sequence, and the state after them, for the next call; `state` is None at first.
        `key_padding_mask` and `inputs` are those of the t positions, [B, t].

        A state holds sums of the features of all keys, or what a later position may read; one may
        go on from it more than once. Heads that look back without a bound are refused, unless a
        state may `keep_all` their keys. With `in_place` the memory of `state` is written over.

        Returns (outputs, state), with `return_lse` ((outputs, log-sum-exps), state). ValueError for
        what is not causal, looks back without a bound, reads a length, or differs at every length.
        """
        if unknown:
            refuse_unknown(self.program, unknown, CompiledAttention.step)
        layer, _ = self.checked(q, k, v, layer)
        of: Any = (self.engine.binder.alike(layer), q.shape[1], k.shape[1], q.device, keep_all)
        works, prepared = self._streams.get(of, lambda: apart(lambda: streamed(self.engine, *of)))
        state, n = StreamState.first(state, works, q, k, v), q.shape[2]
        call = self.call_of(layer, q, k, v, key_padding_mask, inputs, pairs=False)
        parts, end, some = state.parts, state.position + n, 0 not in (q.shape[0], n)
        if some:
            state = replace(state, marked=check_promises(self.program, call.data, state.marked))
            check_exact(self.engine.computed, call.data, end)
            if not prepared.groups:
                # a call of the next queries with all keys
                at = np.arange(state.position, end)
                new = KeyCache(k, v, at, end, call.padding, call.data)
                every = followed(cast("KeyCache | None", parts[0]), new, self.program)
                k, v, key_padding_mask, inputs = every.keys, every.values, every.padding, every.data
                parts = every, *parts[1:]
        if not some or not prepared.groups:
            rest: Any = {"layer": layer, "key_padding_mask": key_padding_mask, "inputs": inputs}
            out = CompiledAttention.forward(self, q, k, v, **rest, return_lse=return_lse)
            return out, state.after(n, parts)
        steps = []
        for group, part in zip(prepared.groups, parts, strict=True):
            tables = self.engine.tables(group, layer, call.tables)
            mine, kernel = replace(call, tables=tables, in_place=in_place), cast(Any, group.kernel)
            (out, lse), after = kernel.step(*group.parts(q, k, v), mine, part, return_lse)
            if return_lse and lse is None:
                raise no_log_sum_exps(self.program)
            steps.append((out, lse, after))
        outs, sums, parts = zip(*steps, strict=True)
        joined: Any = prepared.joined(outs)
        return (joined, prepared.joined(sums)) if return_lse else joined, state.after(n, parts)

    # --- what is learned -------------------------------------------------------------------------

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Starts what is learned anew, as papers say, drawn with the generator."""
        for name, part in self.engine.own.items():
            if not is_lazy(self.learned(name)):
                _start(self.learned(name), part, generator)

    def make_parameters(
        self, head_size: int | None, value_size: int | None, device: torch.device | None = None
    ) -> None:
        """Makes and starts the parameters that wait, as far as sizes in their shapes are known."""
        if (waiting := self._waiting()) and torch.compiler.is_compiling():
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in waiting)} must have a size before the module"
                f" is traced: build the module with head_size={head_size}, or call the module once"
            )
        sizes: dict[Any, Any] = {"d": head_size, "d_v": value_size}
        for name in waiting:
            part, parameter = self.engine.own[name], cast(Any, self.learned(name))
            layers = 1 if part.layers else self.program.layers or 1
            heads = 1 if part.heads else self.program.head_count
            shape = layers, heads, *(sizes.get(entry, entry) for entry in part.shape)
            if None not in shape:
                parameter.materialize(shape, device=device)
                _start(parameter, part, None)
        self._waits = bool(self._waiting())

    def check_sizes(self, q: Tensor, v: Tensor | None) -> None:
        """Raises ValueError for heads of another size than what is learned was made for."""
        sides = {"d": ("q", q), "d_v": ("v", v)}
        for (owner, part), name in self.engine.parts.items():
            for entry, size in zip(part.shape, self.learned(name).shape[2:], strict=False):
                called, tensor = sides.get(str(entry), ("", None))
                if tensor is not None and tensor.shape[3] != size:
                    raise ValueError(
                        f"`{owner}` has learned `{name}` for heads of {size} numbers: {called} must"
                        f" be [B, H, n, {size}], got {list(tensor.shape)}; build a module with"
                        f" head_size={tensor.shape[3]} for these"
                    )

    def learned(self, name: str) -> Tensor:
        return cast(Tensor, getattr(self, name))

    def _waiting(self) -> list[str]:
        return [name for name in self.engine.own if is_lazy(self.learned(name))]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        LazyModuleMixin._lazy_load_hook(self, state_dict, prefix, *rest)  # type: ignore[arg-type]
        self._waits = bool(self._waiting())
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # what waits for its shape has no numbers to detach
    _save_to_state_dict = LazyModuleMixin._save_to_state_dict

    # --- what a call reads, and what moves in training ------------------------------------------

    def pairs(
        self,
        q: Tensor,
        k: Tensor,
        *,
        layer: int = 0,
        inputs: Inputs = None,
        key_padding_mask: Tensor | None = None,
        query_start: int = 0,
    ) -> Tensor:
        """bool [B, H, n_q, n_k]: which keys a call with these tensors reads, by the definition.

        Raises ValueError above n_k = `LIMITS.pairs_shown`, else as a call does.
        """
        works, data, choices = self._shown(q, k, layer, inputs, key_padding_mask, query_start)
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
        inputs: Inputs = None,
        key_padding_mask: Tensor | None = None,
        query_start: int = 0,
    ) -> dict[str, dict[str, Tensor]]:
        """Data-dependent choices in a call with these tensors: for each graph, by its name, the
        `heads` that have it and its lists, buckets, clusters or matchings, [B, H or 1, …]; no lists
        of no tokens.

        Raises ValueError above n_k = `LIMITS.pairs_shown`, and for static layers; else
        as a call does.
        """
        works, _, choices = self._shown(q, k, layer, inputs, key_padding_mask, query_start)
        decisions = decisions_of(works)
        if not decisions:
            raise ValueError(
                f"`choices` shows what graphs such as `topk` choose, and layer {layer} of"
                f" `{self.program.name}` has no such graph: call `pairs`"
            )
        shown: dict[str, dict[str, Tensor]] = {}
        for each in decisions:
            name, count = each.leaf.name, sum(x.partition("_")[0] == each.leaf.name for x in shown)
            heads = torch.tensor(each.heads, device=q.device)
            lists = choices[each.leaf].lists if each.leaf in choices else {}
            shown[f"{name}_{count + 1}" if count else name] = {"heads": heads, **lists}
        return shown

    def _shown(
        self, q: Tensor, k: Tensor, layer: int, inputs: Inputs, padding: Any, start: int
    ) -> tuple[Works, Mapping[str, Tensor], dict[Any, Any]]:
        """The works, inputs and choices of a call whose pairs are asked for."""
        layer, start = self.checked(q, k, k, layer, start)
        call = self.call_of(layer, q, k, None, padding, inputs)
        if (longest := max(q.shape[2], k.shape[2])) > LIMITS.pairs_shown:
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
            for part in (part for part in each.leaf.learned if part.kept):
                name = self.engine.parts[each.leaf.name, part]
                table = self.learned(name)
                row = layer % len(table)
                rows, heads = table[row], list(each.heads) if table.shape[1] > 1 else [0]
                # what a call was computed with, should it be computed again for its backward
                self._before[name, row] = rows.clone()
                call = Call(padding, tables={part.name: rows[heads]})
                rows[heads] = moved_centroids(each.given(q, k, call))


def _start(parameter: Tensor, part: Part, generator: torch.Generator | None) -> None:
    """Fills a parameter as its part says."""
    with torch.no_grad():
        if part.start in ("normal", "scaled"):
            width = parameter.shape[-1] if part.start == "scaled" else 1
            parameter.normal_(0.0, part.by / math.sqrt(max(1, width)), generator=generator)
        elif part.start == "uniform":
            parameter.uniform_(-part.by, part.by, generator=generator)
        elif part.start == "drawn":
            # Gaussian rows [layers, heads, count, d] by the seed, layer and head
            layers, heads, count, size = parameter.shape
            for at in product(range(layers), range(heads)):
                rows = normals(Stream(int(part.by), CENTROIDS, *at), np.arange(count), size)
                parameter[at] = torch.from_numpy(rows)
        else:
            parameter.fill_(1.0 if part.start == "ones" else part.by)


class Draws(nn.Module):
    """Counts the training calls of each layer; its extra state is what a `state_dict` keeps of it.

    Traced calls are not counted: a program has no numbers of its own.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.calls = [0] * layers
        self.last = [0] * layers
        self.asked = 0

    def of(self, layer: int) -> tuple[int, int]:
        """How often a layer was called, and how often anew was asked for."""
        calls = self.last if again() else self.calls
        return calls[layer % len(calls)], self.asked

    def count(self, layer: int) -> None:
        """One more call of a layer in training."""
        if not again():
            row = layer % len(self.calls)
            self.last[row] = self.calls[row]
            self.calls[row] += 1

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.asked, *self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        self.asked, *self.calls = state.tolist()
        self.last = list(self.calls)


def again() -> bool:
    """Whether a call is computed again for a backward, when it must be what it was. What is traced
    is not, and cannot ask."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
