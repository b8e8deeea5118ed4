"""What computes a program at every length, whatever it has learned.

Each module has an engine; the operator has one for each text of a program, that of a module here if
there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import pad

from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.backends.common.torch_modes import (
    apart,
    composed,
    derivatives,
    followed,
    is_open,
    is_recorded,
    is_transformed,
    values_of,
)
from attnspec.backends.decided.choice import Choice
from attnspec.backends.dense.kernel import MaskedKernel, OpenKernel
from attnspec.backends.planner import AUTO, ROWS, TORCH, check_backend, choose
from attnspec.graphs.bind import extents_of
from attnspec.graphs.predicates.inputs import READ, computed
from attnspec.graphs.relation import DataDependent, Relation
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Program
from attnspec.ir.serial import FORMAT, Plain, from_data
from attnspec.layout.tiling import TooFine
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import Binder, bias_tables, pair_inputs, stand_ins
from attnspec.lower.mechanism_sizes import learned_parts
from attnspec.lower.work import (
    MERGED,
    Backend,
    BackendError,
    Bias,
    Call,
    Cutting,
    Expression,
    Joining,
    Kernel,
    Mergeable,
    Work,
)
from attnspec.runtime.call_checks import Parts, check_exact, check_promise
from attnspec.runtime.decisions import Decision, data_of, decided
from attnspec.runtime.head_groups import Group, Prepared, group_of, selected, together
from attnspec.text.diagnostics import AttnSpecError
from attnspec.version import LEAST_TORCH, is_older

if is_older(torch.__version__, LEAST_TORCH):
    raise AttnSpecError(
        f"attnspec needs torch {'.'.join(map(str, LEAST_TORCH))} or newer, got {torch.__version__}:"
        " before it, gradients on the CPU are wrong where several query heads share a key head"
    )

Key: TypeAlias = "tuple[int, int, int, int, int, str, int]"
"""Layer, heads, key heads, n_q, n_k, device and first query."""

Outputs: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""The output [B, H, n_q, d_v], and its log-sum-exps [B, H, n_q] if there are any."""


class Engine:
    """The kernels of a program, chosen and built for every layer and length that is asked for.

    `text` is the plan that it was made of, by which traced programs name it; `own` names what is
    learned, in the order of a module's parameters, `learned` beside that the inputs that have a
    number of each pair, [1, H or 1, B, n_q, n_k]: they have gradients as tables have.
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
        self.learned = (*self.own, *pair_inputs(self.program))
        graphs = (attend.graph for attend in self.program.attends)
        self.computed = {x: y for g in graphs if g is not None for x, y in computed(g).items()}
        self._computed_of = sorted({name for names in self.computed.values() for name in names})
        self._exact: Remembered[None] = Remembered()
        self.prepared: Cache[Key, Prepared] = Cache(LIMITS.layouts)
        self.steps: Cache[Key, Prepared] = Cache(LIMITS.layouts_of_steps)
        self._whole: Cache[tuple[int, int, int, int], Prepared | None] = Cache(LIMITS.layouts_few)
        # the newest of a text: the operator shares what a module has laid out
        _living[self.text] = self

    # --- a call ----------------------------------------------------------------------------------

    def run(
        self,
        parts: Parts,
        call: Call,
        layer: int,
        draws: tuple[int, int],
        return_lse: bool = False,
        reusable: bool = False,
        query_start: int = 0,
        prepared: Prepared | None = None,
    ) -> Outputs:
        """The output, and its log-sum-exps with `return_lse`, by the kernels that are `prepared`,
        else those of the plan; between two sequences the queries are those from `query_start` on.

        The call's tables are all that is learned, by name, [layers or 1, heads or 1, …]; `draws`
        are how often the layer was called in training, and how often anew was asked for. With
        `reusable` log-sum-exps come also where kernels find them anyway, for `derivatives` to go on
        from, 0 for other heads.
        """
        q, k, v = parts
        queries = query_start + q.shape[2] if self.program.cross else None
        self.check_data(call.data, k.shape[2], queries)
        if return_lse:
            require_log_sum_exps(self.program, layer)
        if 0 in (len(q), q.shape[2], k.shape[2]):
            extents_of(self.program, k.shape[2])
            return _nothing(q, k, v)
        if prepared is None:
            sizes = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
            prepared = self.prepare(layer, *sizes, str(q.device), query_start)
        held, given = self.laid_out(parts, call)
        choices = self.decided(
            prepared.decisions, layer, held[:2], given.padding, given.data, call.tables, k.shape[2]
        )
        outs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for group in prepared.groups:
            tables, draw = self.tables(group, layer, call.tables), group.draw(draws)
            known = None
            if call.known is not None and _reuses(group.kernel, q):
                known = group.rows(call.known[0]), group.rows(call.known[1])
            # a mechanism takes two sequences as they are
            own, of = (held, given) if group.work.mechanism is None else (parts, call)
            data = data_of(group.work, group.heads, prepared.decisions, choices, of.data)
            mine = Call(of.padding, call.dropout_p, tables, data, draw, known)
            out, lse = self.outputs(group, group.parts(*own), mine, return_lse, reusable)
            outs.append(out)
            if return_lse or reusable:
                sums.append(_unknown(out) if lse is None else lse)
        return prepared.joined(outs), prepared.joined(sums) if sums else None

    def check_data(self, data: Mapping[str, torch.Tensor], n: int, m: int | None = None) -> None:
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
        """A call with keys and values at as many positions as hold two sequences, those behind the
        keys being no keys."""
        q, k, v = parts
        n = k.shape[2]
        crossing = self.binder.crossing(q.shape[2], n)
        more = 0 if crossing is None else crossing.length - n
        if not more:
            return parts, call
        padding = call.padding
        if padding is None and crossing is not None and crossing.first == n:
            padding = torch.ones(len(k), n, dtype=torch.bool, device=k.device)
        kinds = {entry.name: entry.kind for entry in self.program.inputs}
        data = {
            name: pad(x, (0, more)) if kinds[name] in ("tokens", *READ) else x
            for name, x in call.data.items()
        }
        pairs = {name: pad(call.tables[name], (0, more)) for name in pair_inputs(self.program)}
        given = replace(
            call,
            padding=None if padding is None else pad(padding, (0, more)),
            tables={**call.tables, **pairs},
            data=data,
        )
        return (q, pad(k, (0, 0, 0, more)), pad(v, (0, 0, 0, more))), given

    def masked(
        self, parts: Parts, call: Call, layer: int, added: torch.Tensor, return_lse: bool = False
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
        sizes, place = (q.shape[1], k.shape[1]), q.device
        groups = []
        for work, members in self.binder.works(layer, sizes[0], q.shape[2], k.shape[2]):
            if work.mechanism is not None:
                raise ValueError(
                    f"`{work.mechanism.name}` has no scores that a mask could be added to: leave it"
                    " out, and say in the spec which pairs there are"
                )
            kernel = MaskedKernel(work, members, place, added)
            tables, ratio = self.tables_of(work), sizes[0] // sizes[1]
            groups.append(group_of(kernel, work, members, sizes[0], ratio, tables, place))
        prepared = together(groups, sizes[0], place)
        return self.run(parts, call, layer, (0, 0), return_lse, prepared=prepared)

    def outputs(
        self, group: Group, parts: Parts, call: Call, return_lse: bool, reusable: bool = False
    ) -> Outputs:
        """Those of one group of heads, whose queries, keys and values these are."""
        kernel = group.kernel
        reused = reusable and _reuses(kernel, parts[0])
        if (return_lse or reused) and isinstance(kernel, Mergeable):
            out, lse = kernel.partial(*parts, call)
            if lse is not None:
                return out, lse
        if return_lse:
            raise no_log_sum_exps(self.program)
        return kernel(*parts, call), None

    def derivatives(
        self,
        parts: Parts,
        call: Call,
        layer: int,
        draws: tuple[int, int],
        grads: tuple[torch.Tensor | None, torch.Tensor | None],
        asks: Sequence[bool],
        again: bool = False,
        query_start: int = 0,
    ) -> list[torch.Tensor | None]:
        """The gradients of q, k and v, and of the call's tables in their order, where `asks` says
        so, from those of what `run` returned. What the call knows is not computed again.

        With `again` they can be differentiated again, with regard to the tensors that are given.
        """
        given = [*parts, *call.tables.values()]
        if not again:
            given = [x.detach().requires_grad_(a) for x, a in zip(given, asks, strict=True)]

        def run(*given: torch.Tensor) -> Sequence[torch.Tensor | None]:
            q, k, v, *learned = given
            whole = replace(call, tables=dict(zip(call.tables, learned, strict=True)))
            lse = grads[1] is not None
            return self.run((q, k, v), whole, layer, draws, lse, query_start=query_start)

        with composed() if again else followed():
            return derivatives(run, given, asks, grads, again)

    def decided(
        self,
        decisions: Sequence[Decision],
        layer: int,
        parts: tuple[torch.Tensor, torch.Tensor],
        padding: torch.Tensor | None,
        data: Mapping[str, torch.Tensor],
        learned: Mapping[str, torch.Tensor],
        keys: int,
    ) -> dict[DataDependent, Choice]:
        """What the data decide for q and k as they are laid out, of which `keys` are keys, by
        graph."""
        q, k = parts
        if not decisions or 0 in (q.shape[0], q.shape[2], k.shape[2]):
            return {}
        check_numbers(decisions[0], q, k)

        def tables(each: Decision) -> dict[str, torch.Tensor]:
            found = {}
            for part in each.leaf.learned:
                rows = _rows_of(learned[self._parts[each.leaf.name, part]], layer)
                found[part.name] = rows[list(each.heads)] if len(rows) > 1 else rows
            return found

        apart = keys if self.program.cross else None
        return decided(decisions, q, k, padding, data, tables, apart)

    def tables(
        self, group: Group, layer: int, learned: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What a group's heads have learned, [heads of the group or 1, …], in float32 at least:
        gradients of tables are sums over all pairs."""
        found = {}
        for called, name in group.tables:
            rows = _rows_of(learned[name], layer)
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            found[called] = selected(rows, 0, group.queries if len(rows) > 1 else None)
        return found

    def tables_of(self, work: Work) -> tuple[tuple[str, str], ...]:
        """What a kernel of the work calls its tables, with the names of the parameters."""
        biases = [
            (change.table, change.table) for change in work.changes if isinstance(change, Bias)
        ]
        biases += [
            (name, name)
            for change in work.changes
            for name in (change.reads if isinstance(change, Expression) else ())
        ]
        mechanism = work.mechanism
        parts = () if mechanism is None else mechanism.parts()
        name = "" if mechanism is None else mechanism.name
        return (*biases, *((part.name, self._parts[name, part]) for part in parts))

    # --- kernels ---------------------------------------------------------------------------------

    def prepare(
        self,
        layer: int,
        heads: int,
        key_heads: int,
        n_q: int,
        n_k: int,
        device: str,
        query_start: int = 0,
    ) -> Prepared:
        """The kernels that run a layer for so many heads and positions, built or kept; for
        positions that a trace does not count, the definition."""
        if is_open(n_q) or is_open(n_k):
            return self._open(layer, heads, key_heads, n_q, n_k, torch.device(device))
        key = (self.binder.alike(layer), heads, key_heads, n_q, n_k, device, query_start)
        if n_q > LIMITS.rows_looked_up:
            return self.prepared.get(key, lambda: apart(lambda: self._build(key)))
        if self.backend in (AUTO, ROWS.name):
            # this costs less than a thread that is apart, and nothing of it outlives the call
            return self._build(key)
        return self.steps.get(key, lambda: apart(lambda: self._build(key)))

    def _open(
        self, layer: int, heads: int, key_heads: int, n_q: int, n_k: int, device: torch.device
    ) -> Prepared:
        """The definition for lengths that are symbols; ValueError where there is none of them."""
        groups = []
        try:
            works = self.binder.open_works(layer, heads)
        except BackendError as error:
            raise ValueError(
                f"plain operations of `{self.program.name}` are laid out for one length, since"
                f" {error}, and this trace is for many: leave out `composed()`, and the program has"
                " one operator for all of them, or try a file that `attnspec compile --standalone`"
                " writes"
            ) from None
        for work, members in works:
            work = replace(work, n_q=n_q, n_k=n_k)
            kernel, tables = OpenKernel(work, members, device), self.tables_of(work)
            groups.append(
                group_of(kernel, work, members, heads, heads // key_heads, tables, device)
            )
        return together(groups, heads, device)

    def _build(self, key: Key) -> Prepared:
        layer, heads, key_heads, n_q, n_k, device, _ = key
        if n_q != n_k or n_q <= LIMITS.rows_looked_up or device != "cpu":
            return self._new(key)
        longest = self.binder.longest(layer, heads, n_k)
        if longest is None:
            return self._new(key)
        whole = self._whole.get(
            (layer, heads, key_heads, longest),
            lambda: self._longest((layer, heads, key_heads, longest, longest, device, 0)),
        )
        found = None if whole is None else whole.below(n_k)
        return self._new(key) if found is None else found

    def _longest(self, key: Key) -> Prepared | None:
        """The kernels of the longest sequence of a range, of which others are cut; None where some
        cannot be."""
        try:
            for work, _, backend in self._chosen(key):
                # the shortest sequences are planned each by itself, unless it is evident how
                if work.n_k <= LIMITS.planned_alone and backend is not TORCH:
                    return None
                if not isinstance(backend, Cutting) or not backend.cuts(work):
                    return None
            return self._new(key)
        except (RelationError, BackendError, TooFine):
            # it has no value there, or is too long, which says nothing of shorter ones
            return None

    def _chosen(self, key: Key) -> Iterator[tuple[Work, tuple[int, ...], Backend]]:
        """The works of a layer with their heads, and what runs them."""
        layer, heads, _, n_q, n_k, device, query_start = key
        kind = torch.device(device).type
        for work, members in self.binder.works(layer, heads, n_q, n_k, query_start):
            work = replace(work, copies=len(members), device=kind)
            yield work, members, choose(work, kind, self.backend)

    def _new(self, key: Key) -> Prepared:
        _, heads, key_heads, _, _, device, _ = key
        place, ratio = torch.device(device), heads // key_heads
        chosen: dict[str, tuple[Backend, list[tuple[Work, tuple[int, ...]]]]] = {}
        for work, members, backend in self._chosen(key):
            chosen.setdefault(backend.name, (backend, []))[1].append((work, members))
        groups = []
        for backend, mine in chosen.values():
            if len(mine) > 1 and isinstance(backend, Joining):
                if backend.joins([work for work, members in mine for _ in members]):
                    kernel = backend.build_joined(mine, place)
                    every = tuple(head for _, members in mine for head in members)
                    groups.append(group_of(kernel, mine[0][0], every, heads, ratio, (), place))
                    continue
            for work, members in mine:
                kernel = backend.build(work, members, place)
                tables = self.tables_of(work)
                groups.append(group_of(kernel, work, members, heads, ratio, tables, place))
        return together(groups, heads, place)


@lru_cache(maxsize=LIMITS.layouts_few)
def _binder(program: Program) -> Binder:
    """What binds a program, whatever backend is asked for: engines of one program share it."""
    return Binder(program, stand_ins(program))


_living: WeakValueDictionary[str, Engine] = WeakValueDictionary()
_kept: Cache[str, Engine] = Cache(LIMITS.layouts_few)


def text_of(plan: Mapping[str, object]) -> str:
    """What names a plan in traced programs."""
    return json.dumps(dict(plan), separators=(",", ":"))


def engine_of(text: str) -> Engine:
    """The engine of a plan that was written down; ValueError for a plan of another format."""
    found = _living.get(text)
    return found or _kept.get(text, lambda: Engine(json.loads(text)))


def require_log_sum_exps(program: Program, layer: int) -> None:
    """Raises ValueError where what a head of the layer divides by has no logarithm."""
    for head in range(program.heads or 1):
        attend = program.attend(layer, head)
        found, positive = attend.mechanism, attend.normalize in MERGED
        if found is not None:
            positive = MECHANISMS_BY_NAME[found.name].positive(dict(found.arguments))
        if not positive:
            raise no_log_sum_exps(program)


def no_log_sum_exps(program: Program) -> ValueError:
    """Why there are none."""
    return ValueError(
        f"`return_lse` asks for log-sum-exps, and what `{program.name}` divides by has no"
        " logarithm: `relu`, `sigmoid`, and mechanisms whose denominator may be negative, have none"
    )


def _rows_of(table: torch.Tensor, layer: int) -> torch.Tensor:
    """What the heads of a layer have learned, [heads or 1, …]; what is shared has one row."""
    return table[layer if len(table) > 1 else 0]


def _reuses(kernel: Kernel, q: torch.Tensor) -> bool:
    """Whether a kernel gives log-sum-exps in passing, and goes on from them."""
    return q.device.type in getattr(kernel, "reuses", ())


def check_numbers(first: Decision, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where there are no numbers by which something could be decided."""
    for x in (q, k):
        if is_transformed() and is_recorded(x):
            raise ValueError(
                f"`{first.leaf.name}` decides by numbers, which a program of plain operations does"
                " not have when it is traced: export it without `composed()`, as one operator"
            )
        if torch._C._functorch.is_batchedtensor(values_of(x)):
            raise ValueError(
                f"`{first.leaf.name}` decides by numbers, and forward-mode differentiation under"
                " `vmap` shows none: take the derivatives of one sample at a time, or `vjp`"
            )


def _unknown(out: torch.Tensor) -> torch.Tensor:
    """What stands for log-sum-exps that nobody asked for, beside an output [B, H, n_q, d_v]."""
    return out.new_zeros(out.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
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
