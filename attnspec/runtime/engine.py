"""What computes a program at every length, whatever it has learned.

Each module has an engine; the operator has one for each text of a program, that of a module here if
there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.merging import Partial
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.torch_modes import (
    apart,
    composed,
    derivatives,
    followed,
    is_transformed,
    values_of,
)
from attnspec.backends.decided.choice import Choice
from attnspec.backends.decided.deciders import Decision, data_of, decided, decisions_of
from attnspec.backends.one_block.dense import DenseKernel, OpenKernel
from attnspec.backends.planner import AUTO, check_backend, choose
from attnspec.graphs.bind import extents_of
from attnspec.graphs.predicates.inputs import READ, computed
from attnspec.graphs.relation import DataDependent
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.ir.program import Program, leaves
from attnspec.ir.serial import FORMAT, Plain, from_data
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import Binder, bias_tables, pair_inputs
from attnspec.lower.mechanism_sizes import learned_parts
from attnspec.lower.work import (
    MERGED,
    Backend,
    BackendError,
    Call,
    Kernel,
    Mergeable,
    Work,
    key_heads,
)
from attnspec.runtime.call_checks import Parts, check_exact, check_promise, require_numbers
from attnspec.text.diagnostics import AttnSpecError
from attnspec.version import LEAST_TORCH, is_older

if is_older(torch.__version__, LEAST_TORCH):
    raise AttnSpecError(
        f"attnspec needs torch {'.'.join(map(str, LEAST_TORCH))} or newer, got {torch.__version__}:"
        " before it, gradients on the CPU are wrong where several query heads share a key head"
    )

Key: TypeAlias = "tuple[int, int, int, int, int, str, int]"
"""Layer, heads, key heads, n_q, n_k, device and first query."""

Outputs: TypeAlias = "tuple[Tensor, Tensor | None]"
"""The output [B, H, n_q, d_v], and its log-sum-exps [B, H, n_q] if there are any."""


Built: TypeAlias = "tuple[Kernel, Work, tuple[int, ...]]"
"""A kernel, what it computes, and its heads."""


Selection: TypeAlias = Tensor | range | None
"""Which heads: their numbers, as a range where they are one, None for all."""


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that one kernel runs; `queries` and `keys` select them.

    `tables` has what the kernel calls its tables, with the names of the parameters.
    """

    kernel: Kernel
    work: Work
    heads: tuple[int, ...]
    queries: Selection
    keys: Selection
    tables: tuple[tuple[str, str], ...]

    def parts(self, q: Tensor, k: Tensor, v: Tensor) -> Parts:
        """Queries of these heads, and the keys and values that they read."""
        if self.keys is not None:
            k, v = selected(k, 1, self.keys), selected(v, 1, self.keys)
        return q if self.queries is None else selected(q, 1, self.queries), k, v


@dataclass(frozen=True, eq=False)
class Prepared:
    """What runs a layer: its groups, none where there is nothing to compute, where each head's
    output stands among theirs, and what the data decide for them. Between two sequences queries are
    those from `start` on."""

    groups: tuple[Group, ...] = ()
    order: Selection = None
    decisions: tuple[Decision, ...] = ()
    layer: int = 0
    start: int = 0

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The outputs of the groups, [B, H, …], in the order of the heads."""
        whole = parts[0] if len(parts) == 1 else torch.cat([*parts], 1)
        return whole if self.order is None else selected(whole, 1, self.order)


def selection(chosen: Sequence[int], count: int, device: torch.device) -> Selection:
    """Some of so many heads."""
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step > 0 and list(chosen) == list(heads := range(chosen[0], chosen[-1] + 1, step)):
        return None if len(heads) == count else heads
    return torch.tensor(chosen, device=device)


def selected(x: Tensor, axis: int, heads: Selection | Sequence[int]) -> Tensor:
    """Some heads of a tensor: a view where they are a range."""
    if heads is None:
        return x
    if not isinstance(heads, range):
        return x.index_select(axis, torch.as_tensor(heads, device=x.device))
    return x[(*(slice(None),) * axis, slice(heads.start, heads.stop, heads.step))]


NOTHING = Call()
"""What a call without anything besides q, k and v is given."""


class Engine:
    """The kernels of a program, chosen and built for every layer and length that is asked for.

    `text` is the plan that it was made of, by which traced programs name it; `own` names what is
    learned, in the order of a module's parameters, `pairs` the inputs that have a number of each
    pair, [1, H or 1, B, n_q, n_k], which have gradients as tables have, and `learned` both.
    """

    def __init__(self, plan: Mapping[str, object]) -> None:
        if plan["format"] != FORMAT:
            raise ValueError(f"this run time reads plans of format {FORMAT}, got {plan['format']}")
        self.backend = cast(str, plan["backend"])
        check_backend(self.backend)
        self.text = text_of(plan)
        self.program = from_data(cast("Mapping[str, Plain]", plan["program"]))
        self.binder = _binder(self.program)
        self._parts = learned_parts(self.program)
        self.own = (*bias_tables(self.program).values(), *self._parts.values())
        self.pairs = pair_inputs(self.program)
        self.learned = (*self.own, *self.pairs)
        graphs = (attend.graph for attend in self.program.attends)
        self.computed = {x: y for g in graphs if g is not None for x, y in computed(g).items()}
        self._computed_of = sorted({name for names in self.computed.values() for name in names})
        self._exact: Remembered[None] = Remembered()
        self.prepared: Cache[Key, Prepared] = Cache(LIMITS.layouts)
        # the same by layer and by all that checks of q, k and v go by; layers share what they can
        layers = range(self.program.layers or 1)
        shared = len(layers) // len({self.binder.alike(layer) for layer in layers})
        self.calls: Cache[tuple[object, ...], Prepared] = Cache(LIMITS.layouts * shared)
        # the newest of a text: the operator shares what a module has laid out
        _living[self.text] = self

    # --- a call ----------------------------------------------------------------------------------

    def run(
        self,
        prepared: Prepared,
        parts: Parts,
        call: Call,
        return_lse: bool = False,
        reusable: bool = False,
    ) -> Outputs:
        """The output, and its log-sum-exps if they are asked for, of a call that was checked, whose
        tables are all that is learned, by name, [layers or 1, heads or 1, …]. With `reusable`
        log-sum-exps come also where kernels compute them anyway, for `derivatives` to reuse, 0 for
        other heads.
        """
        q, k, v = parts
        if self.program.inputs:
            m = prepared.start + q.shape[2] if self.program.cross else None
            self.check_data(call.data, k.shape[2], m)
        if return_lse:
            require_log_sum_exps(self.program, prepared.layer)
        if not prepared.groups:
            return nothing(q, k, v)
        laid = self.laid_out(parts, call) if self.program.cross else (parts, call)
        choices: Mapping[DataDependent, Choice] = {}
        if prepared.decisions:
            choices = self.decided(prepared.decisions, prepared.layer, *laid, k.shape[2])
        outs, sums = [], []
        for group in prepared.groups:
            # a mechanism takes two sequences as they are
            rows, mine = laid if group.work.mechanism is None else (parts, call)
            if group.queries is not None or group.keys is not None:
                rows = group.parts(*rows)
            if mine.tables or mine.known is not None or choices:
                mine = self._of_group(group, prepared, mine, choices, q)
            if return_lse or reusable:
                out, lse = self._merging(group.kernel, rows, mine, return_lse)
                sums.append(lse)
            else:
                out = group.kernel(*rows, mine)
            outs.append(out)
        if len(outs) == 1 and prepared.order is None:
            return outs[0], sums[0] if sums else None
        return prepared.joined(outs), prepared.joined(sums) if sums else None

    def _of_group(
        self,
        group: Group,
        prepared: Prepared,
        call: Call,
        choices: Mapping[DataDependent, Choice],
        q: Tensor,
    ) -> Call:
        """The call as the kernel of a group takes it."""
        known, data = call.known if _reuses(group.kernel, q) else None, call.data
        if known is not None:
            known = selected(known[0], 1, group.queries), selected(known[1], 1, group.queries)
        if choices:
            data = data_of(group.work, group.heads, prepared.decisions, choices, data)
        tables = self.tables(group, prepared.layer, call.tables)
        return replace(call, tables=tables, data=data, known=known)

    def _merging(self, kernel: Kernel, parts: Parts, call: Call, return_lse: bool) -> Partial:
        """The output, and log-sum-exps where they are asked for or computed anyway, else 0."""
        if (return_lse or _reuses(kernel, parts[0])) and isinstance(kernel, Mergeable):
            out, lse = kernel.partial(*parts, call)
            if lse is not None:
                return out, lse
        if return_lse:
            raise no_log_sum_exps(self.program)
        out = kernel(*parts, call)
        wide = torch.promote_types(out.dtype, torch.float32)
        return out, out.new_zeros(out.shape[:3], dtype=wide)

    def check_data(self, data: Mapping[str, Tensor], n: int, m: int | None = None) -> None:
        """Raises ValueError where the inputs of n positions, read by m queries of another sequence
        if it is given, break a promise, or numbers that predicates compute of them may not be
        exact."""
        for entry in self.program.inputs:
            if entry.at_most is not None and len(data[entry.name]):
                check_promise(entry.name, entry.at_most, data[entry.name].sum(-1))
        read = [data[name] for name in self._computed_of]
        if any(x.is_cuda for x in read) and torch.cuda.is_current_stream_capturing():
            # nothing may wait there, and what is captured runs first
            return
        if read:
            self._exact.get(read, lambda: check_exact(self.computed, data, n, m), n, m)

    def laid_out(self, parts: Parts, call: Call) -> tuple[Parts, Call]:
        """A call at as many positions as hold two sequences, those behind the keys no keys."""
        q, k, v = parts
        n = k.shape[2]
        crossing = self.binder.crossing(q.shape[2], n)
        if crossing is None or crossing.length == n:
            return parts, call
        padding, more = call.padding, crossing.length - n
        if padding is None and crossing.first == n:
            padding = torch.ones(len(k), n, dtype=torch.bool, device=k.device)
        padding = None if padding is None else pad(padding, (0, more))
        read = [x.name for x in self.program.inputs if x.kind in ("tokens", *READ)]
        data = {**call.data, **{name: pad(call.data[name], (0, more)) for name in read}}
        pairs = {name: pad(call.tables[name], (0, more)) for name in self.pairs}
        call = replace(call, padding=padding, tables={**call.tables, **pairs}, data=data)
        return (q, pad(k, (0, 0, 0, more)), pad(v, (0, 0, 0, more))), call

    def masked(
        self, layer: int, parts: Parts, call: Call, added: Tensor, return_lse: bool
    ) -> Outputs:
        """What `run` returns with numbers added to the scores of all pairs, broadcastable to
        [B, H, n_q, n_k], -inf for a pair that is none: by the definition, whose cost is that of all
        pairs. ValueError where a mechanism has no scores."""
        if self.program.cross:
            raise ValueError(
                f"`{self.program.name}` joins two sequences, and a mask that comes with a call is"
                " for one: leave it out, and say in the spec which pairs there are"
            )
        q, k, _ = parts
        works = self.binder.works(layer, q.shape[1], q.shape[2], k.shape[2])
        for mechanism in (work.mechanism for work, _ in works if work.mechanism is not None):
            raise ValueError(
                f"`{mechanism.name}` has no scores that a mask could be added to: leave it out, and"
                " say in the spec which pairs there are"
            )
        kernels = ((DenseKernel(*each, q.device, added=added), *each) for each in works)
        prepared = self.together(kernels, q.shape[1], k.shape[1], q.device)
        if 0 in (q.shape[0], q.shape[2], k.shape[2]):
            prepared = Prepared()
        return self.run(replace(prepared, layer=layer), parts, call, return_lse)

    def derivatives(
        self,
        prepared: Prepared,
        parts: Parts,
        call: Call,
        grads: tuple[Tensor | None, Tensor | None],
        asks: Sequence[bool],
        again: bool = False,
    ) -> list[Tensor | None]:
        """The gradients of q, k and v, and of the call's tables in their order, where `asks` says
        so, from those of what `run` returned. What the call knows is not computed again.

        With `again` they can be differentiated again, with regard to these tensors.
        """
        leaves = [*parts, *call.tables.values()]
        if not again:
            leaves = [x.detach().requires_grad_(a) for x, a in zip(leaves, asks, strict=True)]

        def run(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Any:
            whole = replace(call, tables=dict(zip(call.tables, learned, strict=True)))
            return self.run(prepared, (q, k, v), whole, grads[1] is not None)

        with composed() if again else followed():
            return derivatives(run, leaves, asks, grads, again)

    def decided(
        self, decisions: Sequence[Decision], layer: int, parts: Parts, call: Call, keys: int
    ) -> dict[DataDependent, Choice]:
        """Data-dependent choices by graph, for q and k as they are laid out, with so many keys."""
        q, k, _ = parts
        if not decisions or 0 in (q.shape[0], q.shape[2], k.shape[2]):
            return {}
        who = f"`{decisions[0].leaf.name}` decides by numbers"
        if is_transformed():
            require_numbers(who, q, k)
        if any(torch._C._functorch.is_batchedtensor(values_of(x)) for x in (q, k)):
            raise ValueError(
                f"{who}, and forward-mode differentiation under `vmap` shows none: take the"
                " derivatives of one sample at a time, or `vjp`"
            )

        def tables(each: Decision) -> dict[str, Tensor]:
            parts = each.leaf.learned if self._parts else ()
            names = {x.name: self._parts[each.leaf.name, x] for x in parts}
            return {x: rows_of(call.tables[y], layer, each.heads) for x, y in names.items()}

        count = keys if self.program.cross else None
        return decided(decisions, q, k, call, tables, count)

    def tables(self, group: Group, layer: int, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a group's heads have learned, [heads of the group or 1, …], in float32 at least:
        gradients of tables are sums over all pairs."""
        tables = {}
        for called, name in group.tables:
            rows = rows_of(learned[name], layer, group.queries)
            tables[called] = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return tables

    def tables_of(self, work: Work) -> tuple[tuple[str, str], ...]:
        """What a kernel of the work calls its tables, with the names of the parameters."""
        biases = [(name, name) for name in (*work.changes.tables, *work.changes.pairs)]
        if work.mechanism is None:
            return tuple(biases)
        name, parts = work.mechanism.name, work.mechanism.parts()
        return (*biases, *((part.name, self._parts[name, part]) for part in parts))

    # --- kernels ---------------------------------------------------------------------------------

    def together(
        self, kernels: Iterable[Built], heads: int, keys: int, device: torch.device
    ) -> Prepared:
        """Kernels that have all heads between them, with their works and their heads."""
        groups = []
        for kernel, work, members in kernels:
            rows = selection(members, heads, device)
            read = selection(key_heads(members, heads // keys), keys, device)
            groups.append(Group(kernel, work, members, rows, read, self.tables_of(work)))
        flat = [head for group in groups for head in group.heads]
        order = selection(sorted(range(heads), key=flat.__getitem__), heads, device)
        decisions = decisions_of([(group.work, group.heads) for group in groups])
        return Prepared(tuple(groups), order, decisions)

    def prepare(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        query_start: int = 0,
        call: tuple[object, ...] | None = None,
    ) -> Prepared:
        """What runs a layer for q [B, H, n_q, d] and k [B, H_kv, n_k, d], built or kept; for
        positions that a trace does not count, the definition. It is kept as that of all calls of
        which `call` says the same."""
        n_q, n_k = q.shape[2], k.shape[2]
        sizes = q.shape[1], k.shape[1], n_q, n_k
        symbols: tuple[object, object] = n_q, n_k
        if 0 in (q.shape[0], n_q, n_k):
            extents_of(self.program, n_k)
            prepared = Prepared()
        elif torch.SymInt in map(type, symbols):
            prepared = self._open(layer, *sizes, q.device)
        else:
            key = (self.binder.alike(layer), *sizes, str(q.device), query_start)
            if self.backend == AUTO and n_q <= min(LIMITS.rows_looked_up, n_k - 1):
                # this costs less than a thread that is apart, and nothing of it outlives the call
                prepared, call = self._build(key), None
            else:
                prepared = self.prepared.get(key, lambda: apart(lambda: self._build(key)))
        prepared = replace(prepared, layer=layer, start=query_start)
        return prepared if call is None else self.calls.get(call, lambda: prepared)

    def _open(
        self, layer: int, heads: int, key_heads: int, n_q: int, n_k: int, device: torch.device
    ) -> Prepared:
        """The definition for lengths that are symbols; ValueError where there is none of them."""
        try:
            works = self.binder.open_works(layer, heads)
        except BackendError as error:
            raise ValueError(
                f"plain operations of `{self.program.name}` are laid out for one length, since"
                f" {error}, and this trace is for many: leave out `composed()`, and the program has"
                " one operator for all of them, or try a file that `attnspec compile --standalone`"
                " writes"
            ) from None
        works = [(replace(work, n_q=n_q, n_k=n_k), members) for work, members in works]
        kernels = [(OpenKernel(*each, device), *each) for each in works]
        return self.together(kernels, heads, key_heads, device)

    def _build(self, key: Key) -> Prepared:
        layer, heads, key_heads, n_q, n_k, device, query_start = key
        place = torch.device(device)
        chosen: dict[str, tuple[Backend, list[tuple[Work, tuple[int, ...]]]]] = {}
        for work, members in self.binder.works(layer, heads, n_q, n_k, query_start):
            work = replace(work, copies=len(members), device=place.type)
            backend = choose(work, place.type, self.backend)
            chosen.setdefault(backend.name, (backend, []))[1].append((work, members))
        kernels: list[Built] = []
        for backend, mine in chosen.values():
            joining: Any = backend if len(mine) > 1 and hasattr(backend, "joins") else None
            if joining and joining.joins([work for work, members in mine for _ in members]):
                every = tuple(head for _, members in mine for head in members)
                kernels.append((joining.build_joined(mine, place), mine[0][0], every))
                continue
            kernels += [(backend.build(*each, place), *each) for each in mine]
        return self.together(kernels, heads, key_heads, place)


# engines of one program share what binds it, whatever backend is asked for
_binder = lru_cache(maxsize=LIMITS.layouts_few)(Binder)

_living: WeakValueDictionary[str, Engine] = WeakValueDictionary()
_kept: Cache[str, Engine] = Cache(LIMITS.layouts_few)


def text_of(plan: Mapping[str, object]) -> str:
    """What names a plan in traced programs."""
    return json.dumps(dict(plan), separators=(",", ":"))


def engine_of(text: str) -> Engine:
    """The engine of a plan that was written down; ValueError for a plan of another format."""
    engine = _living.get(text)
    return engine or _kept.get(text, lambda: Engine(json.loads(text)))


def require_log_sum_exps(program: Program, layer: int) -> None:
    """Raises ValueError where what a head of the layer divides by has no logarithm."""
    for head in range(program.heads or 1):
        attend = program.attend(layer, head)
        mechanism, positive = attend.mechanism, attend.normalize in MERGED
        if mechanism is not None:
            positive = MECHANISMS_BY_NAME[mechanism.name].positive(dict(mechanism.arguments))
        for leaf in () if attend.graph is None else leaves(attend.graph):
            # a mean over rounds is not a softmax
            positive = positive and dict(leaf.arguments).get("combine") != "mean"
        if not positive:
            raise no_log_sum_exps(program)


def no_log_sum_exps(program: Program) -> ValueError:
    """Why there are none."""
    return ValueError(
        f"`return_lse` asks for log-sum-exps, and what `{program.name}` divides by has no"
        " logarithm: `relu`, `sigmoid`, and mechanisms whose denominator may be negative, have none"
    )


def rows_of(table: Tensor, layer: int, heads: Selection | Sequence[int]) -> Tensor:
    """What some heads of a layer have learned, [heads or 1, …]; what is shared has one row."""
    rows = table[layer if len(table) > 1 else 0]
    return selected(rows, 0, heads) if len(rows) > 1 else rows


def _reuses(kernel: Kernel, q: Tensor) -> bool:
    """Whether a kernel gives log-sum-exps in passing, and goes on from them."""
    return q.device.type in getattr(kernel, "reuses", ())


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    """Zeros [B, H, n_q, d_v] that depend on q, k and v as far as autograd is concerned, and
    log-sum-exps of nothing."""
    every = torch.ones((), dtype=torch.bool, device=q.device)
    nothing = (q.sum() + k.sum() + v.sum()).masked_fill(every, 0.0)
    out = nothing.to(q.dtype).expand(*q.shape[:3], v.shape[3]).clone()
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=wide)
