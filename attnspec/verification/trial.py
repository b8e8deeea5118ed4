"""The layers of a module that compute the same, held against what they are meant to compute:
outputs, gradients and weights, straight from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, product
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.masks import with_data
from attnspec.backends.common.score_formula import scale_of, shares
from attnspec.backends.common.scores import ScoreFunction, inputs_read
from attnspec.backends.factored.definitions import defined, has_weights, weights_of
from attnspec.backends.factored.matrices import MatrixKernel
from attnspec.backends.planner import AUTO, choose
from attnspec.graphs.stack import TooMuch
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Call, Heads, Work, Works
from attnspec.runtime.call_checks import check_inputs, taken_apart
from attnspec.runtime.engine import rows_of
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError, time_text
from attnspec.verification.numbers import (
    EXACT,
    NAMES,
    ROUNDINGS,
    SIZE,
    SMALLEST,
    error_bound,
    moderate,
)
from attnspec.verification.report import Check
from attnspec.verification.samples import sample_rows
from attnspec.verification.tables import held_rows, tables_fault

LAID_OUT = 5.0
"""Seconds that the forward of a head may be estimated to take for its layout to be built."""

CLOSE = 1e-9
"""How far float64 numbers of what tensors decide may be apart, for numbers of about 1."""

RUN = 20.0
"""Seconds that the forward of all heads may be estimated to take for it to be run."""

Depth: TypeAlias = Literal["whole", "pairs", "values"]

_COMPARED = {
    (False, torch.float64): "each pair is weighed once, no other pair",
    (True, torch.float64): "each pair weighs what the formula says",
    (False, torch.float32): "outputs and gradients agree with float64",
    (True, torch.float32): "outputs and gradients agree with the formula in float64",
}
"""What is compared of graphs, or of formulas, in a type."""

_KINDS = {"pairs": (torch.float64,), "values": (torch.float32,)}
"""The types in which numbers are compared, where these are not both."""

SHARED = ", whose text is what it runs"
"""What is added of a mechanism that the definition itself computes."""

Numbers: TypeAlias = "dict[str, Tensor]"
"""What heads compute with, by name: under "output" the gradient of their outputs [H, r, d], q
[H, n_q, d], k and v [H, n, d], and what is learned; or what comes of it, outputs and the gradients
of the same."""

Meant: TypeAlias = "tuple[Numbers, tuple[float, ...]]"
"""What heads are meant to compute and, in float64, how large numbers are in it [H]."""

Known: TypeAlias = Cache[object, Meant]
"""What the definition says, kept for other modules that are asked the same."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """Heads of one work of a layer, which a backend computes: its relation is the graph with the
    inputs that are tried. `learned` are what the formula calls what is learned, and the names of
    the parameters. `tables`, if there are any, are what a kernel holds, these heads the `place`-th
    in them; `shared` says that the kernel runs the text of the definition; `seconds` is the
    estimate for one head, 0 for a sequence short enough to try."""

    trial: Trial
    work: Work
    heads: Heads
    backend: str
    seconds: float
    learned: tuple[tuple[str, str], ...]
    tables: Tables | None
    place: int
    shared: bool

    @property
    def formula(self) -> bool:
        return self.work.mechanism is not None

    @cached_property
    def held(self) -> np.ndarray:
        """The keys that the examined queries read in a graph, bool [r, n]."""
        return held_rows(self.work.relation, self.trial.rows, self.trial.n)

    @property
    def weighs(self) -> bool:
        """Whether pairs have weights."""
        return not self.formula or has_weights(self.work)

    def learned_by(self, heads: Sequence[int], learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What some heads have learned, [h or 1, …], by what the formula calls it."""
        layer, chosen = self.trial.layers[-1], torch.tensor(heads)
        return {called: rows_of(learned[name], layer, chosen) for called, name in self.learned}

    def chunks(
        self, numbers: Numbers, steady: bool = False
    ) -> Iterator[tuple[tuple[int, slice], Tensor]]:
        """The outputs [rows, d] of heads and some examined queries, with their places; to
        gradients `steady` weights are divided by constants."""
        # rows of one head, whose gradients are not those of all
        each: Any = numbers | {name: numbers[name].unbind() for name in "qkv"}
        rows = len(self.trial.rows)
        step = max(1, rows if self.formula else LIMITS.pairs_at_once // self.trial.n)
        for head, low in product(self.heads, range(0, rows, step)):
            at, v = slice(low, low + step), each["v"][head]
            if self.weighs:
                weights = self.weights(head, at, each, steady)
                yield (head, at), weights @ v[: weights.shape[1]]
            else:
                q, k, tables = self.alone(head, each)
                out = defined(self.work, head, q, k, v[: len(k)], tables)
                yield (head, at), out[self.trial.at[at]]

    def weights(self, head: int, at: slice, numbers: Numbers, steady: bool = False) -> Tensor:
        """The weights [rows, n] of a head and examined queries."""
        places = self.trial.at[at]
        if self.formula:
            alone = self.alone(head, numbers)
            return weights_of(self.work, head, *alone, steady=steady)[places]
        q, k = numbers["q"][head][places], numbers["k"][head]
        scores = (q * scale_of(self.work, q.shape[1])) @ k.T
        change = ScoreFunction(self.work.changes, [head], self.work.length, torch.device("cpu"))
        symbols, tables = self._symbols(places), self.learned_by([head], numbers)
        pairs = torch.from_numpy(self.held[at])
        scores = change(scores[None, None, None, None], symbols, tables, pairs=pairs)[0, 0, 0, 0]
        weights, total, _ = shares(scores, pairs, self.work.normalize)
        return weights / (total.detach() if steady else total)

    def _symbols(self, places: Tensor) -> dict[str, Tensor]:
        """What expressions of scores read, broadcastable to [1, 1, 1, 1, rows, n]."""
        trial = self.trial
        read = inputs_read(self.work, trial.call, trial.n_q, places, 1)
        return {"q": (places + trial.first)[:, None], "k": torch.arange(trial.n), **read}

    def alone(self, head: int, numbers: Numbers) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The queries and keys of a head, and what it has learned and its scores read."""
        q, k = numbers["q"][head], numbers["k"][head][: self.trial.keys]
        tables = {name: x[0] for name, x in self.learned_by([head], numbers).items()}
        if self.work.changes.inputs:
            tables |= self._symbols(torch.arange(len(q)))
        return q, k, tables


def results(meanings: Sequence[Meaning], numbers: Numbers) -> Meant:
    """What heads are meant to compute and, in float64, the largest numbers [H] that stand in it, or
    would without the part of the gradients that goes through the sums of weights: the two parts may
    cancel, and leave the roundings of numbers of that size."""

    def chunks(followed: Numbers, steady: bool = False) -> Iterator[tuple[Any, Tensor]]:
        return chain.from_iterable(each.chunks(followed, steady) for each in meanings)

    plain = swept(chunks, numbers)
    if numbers["q"].dtype != torch.float64:
        return plain, ()
    steady = swept(partial(chunks, steady=True), numbers)
    every = [*(plain[name] for name in NAMES), *(steady[name] for name in "qkv")]
    sizes = [x.abs().flatten(1).amax(1) for x in every if x[0].numel()]
    largest = torch.stack(sizes).amax(0).tolist() if sizes else [0.0] * len(every[0])
    with torch.no_grad():
        for meaning in meanings:
            for head in meaning.heads if meaning.formula else ():
                most = 1.0
                if meaning.weighs:
                    # weights of a mechanism, some negative, may cancel
                    alone = meaning.alone(head, numbers)
                    weights = weights_of(meaning.work, head, *alone, sized=True)
                    most = max(most, weights.abs().sum(-1).max().item())
                largest[head] = most * max(largest[head], most)
    return plain, tuple(largest)


def swept(chunks: Callable[[Numbers], Iterable[tuple[Any, Tensor]]], numbers: Numbers) -> Numbers:
    """Outputs that come in chunks, each with its place in [H, r], and what their gradient leaves of
    q, k, v and what is learned; zeros for what they do not depend on."""
    grad, *given = numbers.values()
    leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in given]
    out, grads = torch.zeros_like(grad), [torch.zeros_like(x) for x in leaves]
    parts = iter(chunks(dict(zip(numbers, (grad, *leaves), strict=True))))
    together = max(1, LIMITS.pairs_at_once // max(1, out.shape[1] * leaves[1].shape[1]))
    while some := [*islice(parts, together)]:
        for at, part in some:
            out[at] = part.detach()
        # of a sum, because torch loads sympy to compare the shapes of an output and its gradient
        total = torch.stack([(part * grad[at]).sum() for at, part in some]).sum()
        if total.requires_grad:
            found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            grads = [x + y for x, y in zip(grads, found, strict=True)]
    return dict(zip(numbers, (out, *grads), strict=True))


def numbers_fault(
    meaning: Meaning, found: Numbers, exact: Numbers, rough: Numbers | None, sizes: Sequence[float]
) -> tuple[int, int | None, str | None]:
    """The first of the numbers of a module that errs too much: its head, the place of the query
    where it is one of its outputs, and what is wrong, None if nothing. `exact` are those of the
    definition in float64, the largest of each head `sizes`, and `rough` those in the type of the
    module, None for float64."""
    three = found, exact, rough or exact
    rows: list[Any] = [
        (word, head, [x[name][head] for x in three], sizes[head])
        for head in meaning.heads
        for name, word in NAMES.items()
    ]
    largest = max(sizes[head] for head in meaning.heads)
    pairs = exact["q"].shape[1] * exact["k"].shape[1]
    for called, name in meaning.learned if rough else ():
        of_each = (meaning.learned_by(meaning.heads, x)[called] for x in three)
        for tables in zip(*of_each, strict=True):
            # a table's gradient adds up all pairs, and the errors of a sum grow as its root
            size = max(largest, tables[1].abs().max().item())
            size *= math.sqrt(max(1.0, pairs / tables[1].numel()))
            rows.append((f"gradient of {name}", meaning.heads[0], tables, size))
    for name, head, (mine, right, base), size in rows:
        bound = ROUNDINGS * EXACT * max(1.0, size)
        if rough is not None:
            bound = error_bound(right, base.double(), torch.float32, size)
        errors = (mine.double() - right).abs()
        # a comparison that NaN fails as well
        wrong = ~(errors <= bound)
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            error = errors[row].max().item()
            fault = f"the {name} errs by {error:.3g} in row {row}, and {bound:.3g} is allowed"
            return head, row if name == "output" else None, fault
    return meaning.heads[0], None, None


@dataclass(eq=False)
class Trial:
    """Calls of the last of some layers of a module that compute the same, for a batch of
    one, with the last `n_q` of `n` positions; between two sequences the first `keys` of these are
    keys. `forced` says that tables run whatever they cost."""

    module: CompiledAttention
    program: Program
    data: Mapping[str, Tensor]
    n_q: int
    n: int
    keys: int
    layers: tuple[int, ...]
    heads: int
    works: Works
    depth: Depth
    forced: bool
    known: Known
    skipped: list[str] = field(default_factory=list)

    @property
    def first(self) -> int:
        return self.n - self.n_q

    @property
    def exhaustive(self) -> bool:
        """Whether every pair is examined, and weighed."""
        return self.n <= LIMITS.every_pair and len(self.rows) == self.n_q

    @cached_property
    def rows(self) -> np.ndarray:
        """The positions whose numbers are examined."""
        n, n_q = self.n, self.n_q
        short = n <= LIMITS.every_pair and self.heads * n_q * n <= LIMITS.pairs_evaluated
        if short and self.depth != "values":
            return np.arange(self.first, n)
        return sample_rows(n_q, min(LIMITS.queries_sampled, LIMITS.scores_sampled // n), self.first)

    @property
    def at(self) -> Tensor:
        """Where these stand among the queries."""
        return torch.from_numpy(self.rows - self.first)

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        """Queries and keys of a call, without numbers."""
        q, k = (torch.empty(1, self.heads, rows, 0) for rows in (self.n_q, self.keys))
        return q, k

    @cached_property
    def call(self) -> Call:
        """What a call has beside queries, keys and values, as kernels take it."""
        (q, k), program = self._sides, self.module.program
        data, tables = taken_apart(program, check_inputs(program, self.data, q, k, None), self.keys)
        call = self.module.engine.laid_out((q, k, k), Call(data=data, tables=tables))[1]
        # of one layer
        return replace(call, tables={name: x[0] for name, x in call.tables.items()})

    @cached_property
    def parts(self) -> list[Meaning]:
        """What the heads mean, with what runs them. Raises TooMuch where building that, or its
        mask, is not affordable."""
        data = {name: x[0].numpy() if x.dim() > 1 else x.item() for name, x in self.data.items()}
        engine, chosen, parts = self.module.engine, [], []
        for work, _ in self.works:
            resolved = replace(work, relation=with_data(work.relation, data), reads=())
            backend = choose(work, "cpu", self.module.backend)
            seconds = backend.cost(resolved) if work.n_k > LIMITS.every_pair else 0.0
            _require_affordable(work, backend.name, seconds)
            chosen.append((resolved, backend.name, seconds))
        kernels: dict[int, tuple[Any, int]] = {
            head: (group.kernel, place)
            for group in engine.prepare(self.layers[-1], *self._sides).groups
            for place, head in enumerate(group.heads)
        }
        for (work, heads), (resolved, name, seconds) in zip(self.works, chosen, strict=True):
            kernel, place = kernels[heads[0]]
            if self.forced and hasattr(kernel, "dense_seconds"):
                # tables that were asked for are tried also where dense would cost less
                kernel.dense_seconds = math.inf
            if hasattr(kernel, "kernel_of"):
                kernel = kernel.kernel_of(self.call.data, 0)
                if kernel is None:
                    name = "dense"
                    _require_affordable(work, name, 0.0)
            # those that are made already: a kernel may make others where its own cannot go
            own = getattr(kernel, "__dict__", {}).get("tables")
            tables = own if isinstance(own, Tables) else None
            learned = tuple(x for x in engine.tables_of(work) if x[1] not in engine.pairs)
            # comparing both shows faults of what stands in the place of single functions alone
            shared = isinstance(kernel, MatrixKernel)
            parts.append(
                Meaning(self, resolved, heads, name, seconds, learned, tables, place, shared)
            )
        return parts

    def check(self, of: Meaning | None, what: str, fault: str | None, queries: int) -> Check:
        """What was compared of some heads, None for all together, and of so many queries."""
        if fault is not None and self.first:
            fault = f"{fault}; queries are counted from {self.first} on"
        heads, backend = (of.heads, of.backend) if of else (None, self.module.backend)
        if heads is not None and self.program.heads is None and len(heads) == self.heads:
            heads = None
        return Check(self.layers, heads, backend, what, queries, self.n_q, fault)

    def checks(self) -> Iterator[Check]:
        """What is compared: the tables that kernels hold, and outputs and gradients in float64, of
        which nothing but roundings may differ, and in float32. Of `pairs` the last is left out, and
        of `values` all but the last."""
        if self.depth != "values":
            few = sample_rows(self.n_q, LIMITS.queries_sampled, self.first)
            for part in self.parts:
                if part.tables is not None:
                    where = part.place, self.n_q, part.work.relation, self.n, few
                    queries, fault = tables_fault(part.tables, *where)
                    what = "each pair lies once in its tables, no other pair"
                    yield self.check(part, what, fault, queries)
                    if queries < self.n_q:
                        self.skipped.append("the pairs that tables hold of other queries")
        kinds = _KINDS.get(self.depth, (torch.float64, torch.float32))
        meanings = self._meanings() if self._runs() else []
        if not meanings:
            return
        # random q, k and v, and the gradient of the outputs that are examined
        of_q, of_k = moderate([(each.work, each.heads) for each in meanings], self.heads)
        q, k, v = self.drawn(self.n_q) * of_q, self.drawn(self.n) * of_k, self.drawn(self.n)
        some = [head for each in meanings for head in each.heads]
        grad = torch.zeros(self.heads, len(self.rows), SIZE, dtype=q.dtype)
        grad[some] = self.drawn(len(self.rows))[some]
        learned = {name: x.detach().double() for name, x in self.module.named_parameters()}
        drawn = {"output": grad, "q": q, "k": k, "v": v, **learned}
        exact, sizes = self._meant(meanings, drawn)
        for head, row, _ in (~exact["output"].isfinite()).nonzero()[:1].tolist():
            raise AttnSpecError(
                f"`{self.program.name}` has no output for query {self.rows[row]} in head {head} at"
                f" n = {self.n:,}: a score is infinite or not a number"
            )
        for kind in kinds:
            single = kind == torch.float32
            numbers = {name: x.to(kind) for name, x in drawn.items()}
            rough = self._meant(meanings, numbers)[0] if single else None
            found = self.results(self.module, numbers, self.at, learned=single)
            for each in meanings:
                if not (single or each.weighs):
                    continue
                head, place, fault = numbers_fault(each, found, exact, rough, sizes)
                if place is not None and not single:
                    fault = self._pair_fault(each, head, place, drawn) or fault
                what = _COMPARED[each.formula, kind] + SHARED * each.shared
                yield self.check(each, what, fault, len(self.rows))

    def decided_checks(self) -> Iterator[Check]:
        """What is compared of graphs that tensors decide, of all heads together: with the dense
        definition of the same."""
        k = self.drawn(self.n)
        shared = any(work.unit_keys for work, _ in self.works)
        q = k[:, self.first :].clone() if shared else self.drawn(self.n_q)
        formulas = any(work.mechanism is not None for work, _ in self.works)
        plan = plan_data(replace(self.program, crossing=None), AUTO if formulas else "dense")
        definition = CompiledAttention(plan).eval()
        definition.make_parameters(q.shape[2], q.shape[2])
        definition.load_state_dict(self.module.state_dict())
        # with the unit vectors as values, the output is the weights themselves
        units = torch.eye(self.keys, dtype=q.dtype).expand(self.heads, -1, -1)
        read = self.called(self.module, q, k, units).detach() != 0
        sides = q[None], k[None, :, : self.keys]
        pairs = definition.pairs(*sides, layer=self.layers[-1], inputs=self.data)[0]
        what, fault, wrong = "keys are read that were decided, and no others", None, read != pairs
        for work, heads in self.works:
            if work.normalize == "relu":
                # a pair may weigh nothing
                wrong[[*heads]] &= read[[*heads]]
        for head, at, key in wrong.nonzero()[:1].tolist():
            verb = "is read" if read[head, at, key] else "is not read"
            fault = f"head {head}: key {key} {verb} by query {at + self.first}"
        yield self.check(None, what, fault, self.n_q)
        drawn = {"output": self.drawn(self.n_q), "q": q, "k": k, "v": self.drawn(self.n)}
        mine, meant = (self.results(x, drawn, slice(None)) for x in (self.module, definition))
        what, fault = "outputs and gradients agree with the definition", None
        for name, other in meant.items():
            both = other, mine[name] - other
            size, apart = (float(x.abs().max()) if x.numel() else 0.0 for x in both)
            if fault is None and not apart <= CLOSE * max(1.0, size):
                fault = f"{NAMES.get(name, name)} differs by {apart:.3g}"
        yield self.check(None, what, fault, self.n_q)

    def _runs(self) -> bool:
        """Whether numbers are computed; raises TooMuch where nothing would be examined then."""
        seconds = sum(part.seconds * len(part.heads) for part in self.parts)
        many = self.n * self.heads > LIMITS.positions_computed
        if self.n <= LIMITS.every_pair or not (seconds > RUN or many):
            return True
        reason = (
            f"weights, outputs and gradients: {self.heads} heads of {self.n:,} positions, estimated"
            f" to take {time_text(seconds)} (up to {LIMITS.positions_computed:,} positions of all"
            f" heads, and {time_text(RUN)}, are run)"
        )
        if all(part.tables is None for part in self.parts):
            raise TooMuch(f"n = {self.n:,} is too long for {reason}")
        self.skipped.append(reason)
        return False

    # --- numbers ---------------------------------------------------------------------------------

    def _meanings(self) -> list[Meaning]:
        """What is compared of numbers."""
        meanings = []
        for part in self.parts:
            if part.formula and self.n > LIMITS.every_pair:
                self.skipped.append(
                    f"mechanisms: their formulas are written out up to n = {LIMITS.every_pair:,}"
                )
            elif self.depth != "pairs" or (
                part.work.hybrid if part.formula else part.backend != "dense"
            ):
                # the definition evaluates every pair, and a formula has none
                meanings.append(part)
        return meanings

    def drawn(self, length: int) -> Tensor:
        """Random rows of all heads, float64 [heads, length, SIZE]."""
        return torch.randn(self.heads, length, SIZE, dtype=torch.float64)

    def _meant(self, meanings: Sequence[Meaning], numbers: Numbers) -> Meant:
        """Outputs and gradients by the definition, and in float64 how large numbers are."""
        key = (
            *((each.work, each.heads) for each in meanings),
            self.layers[-1] if len(numbers) > len(NAMES) else None,
            self.rows.tobytes(),
            *(x.numpy().tobytes() for x in numbers.values()),
        )
        return self.known.get(key, lambda: results(meanings, numbers))

    def called(self, module: CompiledAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The outputs [H, n_q, d] of a module."""
        parts = q[None], k[None, :, : self.keys], v[None, :, : self.keys]
        out: Tensor = module(*parts, layer=self.layers[-1], inputs=self.data)
        return out[0]

    def results(
        self, module: CompiledAttention, numbers: Numbers, at: Tensor | slice, learned: bool = True
    ) -> Numbers:
        """Outputs of some queries and gradients of a module, if asked of what it has learned."""
        parts = {name: numbers[name] for name in NAMES}
        parts |= dict(module.named_parameters()) if learned else {}

        def whole(x: Numbers) -> list[tuple[slice, Tensor]]:
            return [(slice(None), self.called(module, x["q"], x["k"], x["v"])[:, at])]

        return swept(whole, parts)

    def _pair_fault(self, meaning: Meaning, head: int, place: int, numbers: Numbers) -> str | None:
        """The first key that a query of a wrong output weighs otherwise than it should: the
        gradient of one column of the values is the weights."""
        one, v = (torch.zeros_like(numbers[name][..., :1]) for name in ("output", "v"))
        one[head, place] = 1.0
        column = numbers | {"output": one, "v": v}
        found = self.results(self.module, column, self.at, learned=False)["v"][head, :, 0]
        meant = torch.zeros_like(found)
        some = meaning.weights(head, slice(place, place + 1), numbers)[0].detach()
        meant[: len(some)] = some
        missing = found.eq(0) & (meant > SMALLEST)
        mask = meant.ne(0) if meaning.formula else torch.from_numpy(meaning.held[place])
        other = ~((found - meant).abs() <= ROUNDINGS * EXACT * meant.abs().max().clamp(min=1.0))
        # a pair too many or too few changes the weights of all others in its row
        for wrong, verb in (
            (found.ne(0) & ~mask, "reads key {}, which is not a pair"),
            (missing, "does not read key {}"),
            (other, "weighs key {} with {:.6g}, not {:.6g}"),
        ):
            if wrong.any():
                key = int(wrong.nonzero()[0, 0])
                return f"query {self.rows[place]} {verb.format(key, found[key], meant[key])}"
        return None


def _require_affordable(work: Work, name: str, seconds: float) -> None:
    """Raises TooMuch for a long sequence whose layout, or mask, is not to be built."""
    pairs = work.n_q * work.n_k
    if work.n_k <= LIMITS.every_pair:
        return
    if name == "dense" and pairs > LIMITS.pairs_listed:
        raise TooMuch(
            f"n = {work.n_k:,} is too long for the backend dense, which computes every score:"
            f" up to {LIMITS.pairs_listed:,} are allowed, and there are {pairs:,}"
        )
    if not seconds <= LAID_OUT:
        raise TooMuch(
            f"n = {work.n_k:,} is too long for the backend {name}: a head is estimated to take"
            f" {time_text(seconds)}, and {time_text(LAID_OUT)} are allowed"
        )
