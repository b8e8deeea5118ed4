"""What computes a program at every length, whatever it has learned: an engine of each module, and
for the operator of each text of a program."""

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

from attnspec.backends.common.merging import Outputs, joined
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.score_formula import widened
from attnspec.backends.common.torch_modes import apart, is_batched, is_transformed
from attnspec.backends.decided.choice import Choice
from attnspec.backends.decided.deciders import Decision, data_of, decided, decisions_of
from attnspec.backends.one_block.dense import OpenKernel
from attnspec.backends.planner import AUTO, check_backend, choose
from attnspec.graphs.bind import extents_of
from attnspec.graphs.predicates.inputs import computed
from attnspec.graphs.relation import DataDependent
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.ir.mechanisms.declaration import Part
from attnspec.ir.program import Attend, Program
from attnspec.ir.serial import FORMAT, Plain, from_data
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import Binder, bias_tables, buckets_of, decided_leaves, pair_inputs
from attnspec.lower.mechanism_sizes import learned_parts
from attnspec.lower.work import (
    MERGED,
    Backend,
    BackendError,
    Call,
    Heads,
    Kernel,
    Work,
    Works,
    key_heads,
)
from attnspec.runtime.call_checks import (
    Parts,
    along_keys,
    check_exact,
    check_promises,
    require_numbers,
)
from attnspec.text.diagnostics import AttnSpecError
from attnspec.version import LEAST_TORCH, is_older

if is_older(torch.__version__, LEAST_TORCH):
    raise AttnSpecError(
        f"attnspec needs torch {'.'.join(map(str, LEAST_TORCH))} or newer, got {torch.__version__}:"
        " before it, gradients on the CPU are wrong where several query heads share a key head"
    )

Built: TypeAlias = "tuple[Kernel, Work, Heads]"
"""A kernel, what it computes, and its heads."""

Selection: TypeAlias = "Tensor | slice | None"
"""Which heads: their numbers, a slice where they follow each other, None for all."""


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that one kernel runs; `queries` and `keys` select them. `tables` has what the kernel
    calls its tables, with the names of the parameters."""

    kernel: Kernel
    work: Work
    heads: Heads
    queries: Selection
    keys: Selection
    tables: tuple[tuple[str, str], ...]

    def parts(self, q: Tensor, k: Tensor, v: Tensor) -> Parts:
        """Queries of these heads, and the keys and values that they read."""
        k, v = (selected(x, 1, self.keys) for x in (k, v))
        return selected(q, 1, self.queries), k, v


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

    def cut(self, whole: Parts) -> list[Parts]:
        """The parts of each group; of one split if possible: slices have gradients of all heads."""
        q, k, _ = whole
        if self.order is not None or q.shape[1] != k.shape[1]:
            return [group.parts(*whole) for group in self.groups]
        sizes = [len(group.heads) for group in self.groups]
        return list(zip(*(torch.split(x, sizes, 1) for x in whole), strict=True))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The outputs of the groups, [B, H, …], in the order of the heads."""
        return selected(joined(parts, 1), 1, self.order)


def selection(chosen: Sequence[int], count: int, device: torch.device) -> Selection:
    """Some of so many heads."""
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 1
    if step > 0 and list(chosen) == list(heads := range(chosen[0], chosen[-1] + 1, step)):
        return None if len(heads) == count else slice(chosen[0], chosen[-1] + 1, step)
    return torch.tensor(chosen, device=device)


def selected(x: Tensor, axis: int, heads: Selection) -> Tensor:
    """Some heads of a tensor: a view where they follow each other."""
    if heads is None:
        return x
    if isinstance(heads, slice):
        return x[(*(slice(None),) * axis, heads)]
    return x.index_select(axis, heads)


NOTHING = Call()
"""What a call without anything besides q, k and v is given."""


class Engine:
    """The kernels of a program, chosen and built for every layer and length that is asked for.
    `text` is its plan, by which traced programs name it; `own` names what is learned, in the order
    of a module's parameters, `pairs` the inputs with a number of each pair, [1, H or 1, B, n_q,
    n_k], which have gradients as tables have, and `learned` both."""

    def __init__(self, plan: Mapping[str, object]) -> None:
        if plan["format"] != FORMAT:
            raise ValueError(f"this attnspec reads plans of format {FORMAT}, got {plan['format']}")
        self.text, self.backend = text_of(plan), cast(str, plan["backend"])
        check_backend(self.backend)
        self.program = program = from_data(cast("Mapping[str, Plain]", plan["program"]))
        self.binder, self.parts = _binder(program), learned_parts(program)
        biases = bias_tables(program).items()
        # tables of `score bias` start at zero, so that no position is preferred
        self.own = {name: Part(name, (buckets_of(x),)) for (_, x), name in biases}
        self.own |= {name: part for (_, part), name in self.parts.items()}
        self.pairs, self.decided_leaves = pair_inputs(program), decided_leaves(program)
        self.learned = (*self.own, *self.pairs)
        self.computed: dict[Any, Sequence[str]] = {}
        for graph in program.graphs:
            self.computed |= computed(graph)
        self._exact: Remembered[None] = Remembered()
        self.prepared: Cache[object, Prepared] = Cache(LIMITS.layouts)
        # the same by layer and by all that checks of q, k and v go by; layers share what they can
        layers = range(program.layer_count)
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
        """The output, and log-sum-exps if asked for, of a checked call whose tables are all that is
        learned, [layers or 1, heads or 1, …]. With `reusable` log-sum-exps come also where kernels
        compute them anyway, for derivatives, 0 for other heads."""
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
        outs: list[Tensor] = []
        sums: list[Any] = []
        plain, cut, first = [parts], [laid[0]], prepared.groups[0]
        if first.queries is not None or first.keys is not None:
            plain = prepared.cut(parts)
            cut = plain if laid[0] is parts else prepared.cut(laid[0])
        for number, group in enumerate(prepared.groups):
            # a mechanism takes two sequences as they are
            whole = group.work.mechanism is not None
            rows, mine = (plain[number], call) if whole else (cut[number], laid[1])
            kernel: Any = group.kernel
            if mine.tables or mine.known is not None or choices:
                known: Any = mine.known if _reuses(kernel, q) else None
                mine = replace(
                    mine,
                    tables=self.tables(group, prepared.layer, mine.tables),
                    data=data_of(group.work, group.heads, prepared.decisions, choices, mine.data),
                    known=known and cast(Any, [selected(x, 1, group.queries) for x in known]),
                )
            asked = return_lse or (reusable and _reuses(kernel, q))
            if asked and hasattr(kernel, "partial"):
                out, lse = kernel.partial(*rows, mine)
            else:
                out, lse = kernel(*rows, mine), None
            if return_lse and lse is None:
                raise no_log_sum_exps(self.program)
            if lse is None and reusable:
                lse = widened(q.new_zeros(out.shape[:3]))
            outs.append(out)
            sums.append(lse)
        if len(outs) == 1 and prepared.order is None:
            return outs[0], sums[0]
        return prepared.joined(outs), prepared.joined(sums) if return_lse or reusable else None

    def check_data(self, data: Mapping[str, Tensor], n: int, m: int | None = None) -> None:
        """Raises ValueError where inputs of n positions, and of m queries, break a promise, or what
        predicates compute of them may not be exact."""
        check_promises(self.program, data, {})
        read = [data[name] for name in sorted(set().union(*self.computed.values()))]
        if any(x.is_cuda for x in read) and torch.cuda.is_current_stream_capturing():
            # nothing may wait there, and what is captured runs first
            return
        if read:
            self._exact.get(read, lambda: check_exact(self.computed, data, n, m), n, m)

    def laid_out(self, parts: Parts, call: Call) -> tuple[Parts, Call]:
        """A call at as many positions as hold two sequences, those behind the keys no keys."""
        q, k, _ = parts
        n = k.shape[2]
        crossing = self.binder.crossing(q.shape[2], n)
        if crossing is None or crossing.length == n:
            return parts, call
        if call.padding is None and crossing.first == n:
            call = replace(call, padding=torch.ones(len(k), n, dtype=torch.bool, device=k.device))

        def longer(x: Tensor, axis: int) -> Tensor:
            return pad(x, [0] * 2 * (x.dim() - axis - 1) + [0, crossing.length - n])

        return along_keys(self.program, parts, call, longer)

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
        if is_batched(q, k):
            raise ValueError(
                f"{who}, and forward-mode differentiation under `vmap` hides the numbers: take the"
                " derivatives of one sample at a time, or `vjp`"
            )

        def tables(each: Decision) -> dict[str, Tensor]:
            heads = torch.tensor(each.heads, device=q.device)
            return {
                part.name: rows_of(call.tables[self.parts[each.leaf.name, part]], layer, heads)
                for part in each.leaf.learned
            }

        count = keys if self.program.cross else None
        return decided(decisions, q, k, call, tables, count)

    def tables(self, group: Group, layer: int, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a group's heads have learned, in float32 at least: its gradients are long sums."""
        return {x: widened(rows_of(learned[y], layer, group.queries)) for x, y in group.tables}

    def tables_of(self, work: Work) -> tuple[tuple[str, str], ...]:
        """What a kernel of the work calls its tables, with the names of the parameters."""
        names = [(name, name) for name in (*work.changes.tables, *work.changes.pairs)]
        if (mechanism := work.mechanism) is not None:
            names += [(x.name, self.parts[mechanism.name, x]) for x in mechanism.parts()]
        return tuple(names)

    # --- kernels ---------------------------------------------------------------------------------

    def together(
        self, kernels: Iterable[Built], heads: int, keys: int, device: torch.device, first: int = 0
    ) -> Prepared:
        """Kernels, with their works and their heads, that have between them so many heads from the
        first on, of so many key heads."""
        groups = []
        for kernel, work, members in kernels:
            mine = tuple(head - first for head in members)
            rows = selection(mine, heads, device)
            read = selection(key_heads(mine, heads // keys), keys, device)
            groups.append(Group(kernel, work, members, rows, read, self.tables_of(work)))
        flat = [head for group in groups for head in group.heads]
        order = selection(sorted(range(heads), key=flat.__getitem__), heads, device)
        decisions = decisions_of([(group.work, group.heads) for group in groups])
        return Prepared(tuple(groups), order, tuple(replace(x, first=first) for x in decisions))

    def prepare(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        query_start: int = 0,
        call: tuple[object, ...] | None = None,
    ) -> Prepared:
        """What runs a layer for q [B, H, n_q, d] and k [B, H_kv, n_k, d], the definition where a
        trace does not count positions; kept for all calls of which `call` says the same."""
        (batch, heads, n_q, _), (_, key_heads, n_k, _) = q.shape, k.shape
        symbols: tuple[object, object] = n_q, n_k
        if 0 in (batch, n_q, n_k):
            extents_of(self.program, n_k)
            prepared = Prepared()
        elif torch.SymInt in map(type, symbols):
            try:
                works = self.binder.open_works(layer, heads)
            except BackendError as error:
                raise ValueError(
                    f"`{self.program.name}` cannot be exported within `composed()` with a dynamic"
                    f" length: {error}; export the module outside of `composed()`, as one operator"
                    " for any length"
                ) from None
            works = [(replace(work, n_q=n_q, n_k=n_k), members) for work, members in works]
            kernels = [(OpenKernel(*each, q.device), *each) for each in works]
            prepared = self.together(kernels, heads, key_heads, q.device)
        else:
            key = self.binder.alike(layer), heads, n_q, n_k, query_start

            def build() -> Prepared:
                return self.built(self.binder.works(*key), heads, key_heads, q.device)

            if self.backend == AUTO and n_q <= min(LIMITS.rows_looked_up, n_k - 1):
                # this costs less than a thread that is apart, and nothing of it outlives the call
                prepared, call = build(), None
            else:
                whole = *key, key_heads, q.device
                prepared = self.prepared.get(whole, lambda: apart(build))
        prepared = replace(prepared, layer=layer, start=query_start)
        return prepared if call is None else self.calls.get(call, lambda: prepared)

    def built(
        self, works: Works, heads: int, keys: int, device: torch.device, first: int = 0
    ) -> Prepared:
        """As `together`, of works, each by the backend that is chosen for it."""
        chosen: dict[str, tuple[Backend, list[tuple[Work, Heads]]]] = {}
        for work, members in works:
            work = replace(work, copies=len(members), device=device.type)
            backend = choose(work, device.type, self.backend)
            chosen.setdefault(backend.name, (backend, []))[1].append((work, members))
        kernels: list[Built] = []
        for backend, mine in chosen.values():
            each, joining = [work for work, of in mine for _ in of], cast(Any, backend)
            if len(mine) > 1 and hasattr(backend, "joins") and joining.joins(each):
                members = tuple(head for _, of in mine for head in of)
                kernels.append((joining.build_joined(mine, device), each[0], members))
            else:
                kernels += [(backend.build(*each, device), *each) for each in mine]
        return self.together(kernels, heads, keys, device, first)


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
    if any(map(_without_logarithm, program.attends_of(layer))):
        raise no_log_sum_exps(program)


def _without_logarithm(attend: Attend) -> str:
    """What keeps a head from dividing by a sum of positive weights, "" where nothing does."""
    mechanism = attend.mechanism
    if mechanism is not None:
        if why := MECHANISMS_BY_NAME[mechanism.name].no_logarithm(dict(mechanism.arguments)):
            return f"`{mechanism.name}`, {why}"
    elif attend.normalize not in MERGED:
        return f"`normalize {attend.normalize}`, which is not a softmax"
    averaged = any(dict(leaf.arguments).get("combine") == "mean" for leaf in attend.leaves)
    return "`combine = mean`, which averages the outputs of rounds" if averaged else ""


def no_log_sum_exps(program: Program) -> ValueError:
    """Why there are none."""
    what = next(filter(None, map(_without_logarithm, program.attends)), "these weights")
    return ValueError(f"`return_lse` cannot be used with {what}; leave `return_lse` out")


def rows_of(table: Tensor, layer: int, heads: Selection) -> Tensor:
    """What some heads of a layer have learned, [heads or 1, …]; what is shared has one row."""
    rows = table[layer % len(table)]
    return selected(rows, 0, heads) if len(rows) > 1 else rows


def _reuses(kernel: Kernel, q: Tensor) -> bool:
    """Whether a kernel gives log-sum-exps in passing, and goes on from them."""
    return q.device.type in getattr(kernel, "reuses", ())


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    """Zeros [B, H, n_q, d_v] that autograd ties to q, k and v, and log-sum-exps of nothing."""
    zero = q[:0].sum() + k[:0].sum() + v[:0].sum()
    out = zero.expand(*q.shape[:3], v.shape[3]).clone()
    return out, widened(q.new_full(q.shape[:3], -torch.inf))
