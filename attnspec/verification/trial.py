"""The layers of a module that compute the same, held against the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.masks import with_data
from attnspec.backends.planner import choose
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.ir.program import Program
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work
from attnspec.runtime.call_checks import check_inputs, taken_apart
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import time_text
from attnspec.verification.meaning import SIZE, Known, Meaning, Numbers, results, swept
from attnspec.verification.numbers import EXACT, ROUNDINGS, SMALLEST, moderate, numbers_fault
from attnspec.verification.report import Check
from attnspec.verification.samples import sample_rows
from attnspec.verification.tables import tables_fault

LAID_OUT = 5.0
"""Seconds that the forward of a head may be estimated to take for its layout to be built."""

RUN = 20.0
"""Seconds that the forward of all heads may be estimated to take for it to be run."""

Depth: TypeAlias = Literal["whole", "once", "tables", "pairs", "values"]

Works: TypeAlias = "tuple[tuple[Work, tuple[int, ...]], ...]"
"""What groups of heads compute."""

ANY = Relation()
"""What stands for the graph of a work whose pairs are known."""

Computed: TypeAlias = "frozenset[tuple[Work, tuple[int, ...], bytes]]"


_COMPARED = {
    (False, torch.float64): "each pair is weighed once, no other pair",
    (True, torch.float64): "each pair weighs what the formula says",
    (False, torch.float32): "outputs and gradients agree with float64",
    (True, torch.float32): "outputs and gradients agree with the formula in float64",
}
"""What is compared of graphs, or of formulas, in a type."""

_KINDS = {"tables": (), "pairs": (torch.float64,), "values": (torch.float32,)}
"""The types in which numbers are compared, where these are not both."""


@dataclass(eq=False)
class Trial:
    """Calls of a layer of a module, which stands for others that compute the same, for a batch of
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
        """The position of the first query."""
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

    @cached_property
    def parts(self) -> list[Meaning]:
        """What the heads mean, with what runs them. Raises TooMuch where building that, or its
        mask, is not affordable."""
        values = {name: x[0].numpy() for name, x in self.data.items()}
        plain = {name: x if x.ndim else x.item() for name, x in values.items()}
        chosen = []
        for work, _ in self.works:
            resolved = replace(work, relation=with_data(work.relation, plain), reads=())
            backend = choose(work, "cpu", self.module.backend)
            seconds = backend.cost(resolved) if work.n_k > LIMITS.every_pair else 0.0
            _require_affordable(work, backend.name, seconds)
            chosen.append((resolved, backend.name, seconds))
        q, k = (torch.empty(1, self.heads, rows, 0) for rows in (self.n_q, self.keys))
        engine, program = self.module.engine, self.module.program
        data, tables = taken_apart(program, check_inputs(program, self.data, q, k, None), self.keys)
        given = engine.laid_out((q, k, k), Call(data=data, tables=tables))[1].data
        kernels = {
            head: (group.kernel, place)
            for group in engine.prepare(self.layers[0], q, k).groups
            for place, head in enumerate(group.heads)
        }
        parts = []
        for (work, heads), (resolved, name, seconds) in zip(self.works, chosen, strict=True):
            kernel, place = cast("tuple[Any, int]", kernels[heads[0]])
            if self.forced and hasattr(kernel, "dense_seconds"):
                # tables that were asked for are tried also where dense would cost less
                kernel.dense_seconds = math.inf
            if hasattr(kernel, "kernel_of"):
                kernel = kernel.kernel_of(given, 0)
                if kernel is None:
                    name = "dense"
                    _require_affordable(work, name, 0.0)
            # those that are made already: a kernel may make others where its own cannot go
            held = getattr(kernel, "__dict__", {}).get("tables")
            # of edges the layout has them
            held = held or getattr(getattr(kernel, "layout", None), "tables", None)
            if work.mechanism is None:
                resolved = replace(resolved, reads=work.reads)
            learned = tuple(x for x in engine.tables_of(work) if x[1] not in engine.pairs)
            tried = held if isinstance(held, Tables) else None
            parts.append(Meaning(self, resolved, heads, name, seconds, learned, tried, place))
        return parts

    @property
    def computed(self) -> Computed:
        """What is computed of numbers: works, whatever says which pairs they have, and pairs."""
        every = np.arange(self.first, self.n)
        return frozenset(
            (replace(part.work, relation=ANY), part.heads, part.read(every).tobytes())
            for part in self.parts
        )

    def check(
        self,
        heads: tuple[int, ...] | None,
        backend: str,
        what: str,
        queries: int,
        fault: str | None,
    ) -> Check:
        """What was compared of some heads, None for all together."""
        if fault is not None and self.first:
            fault = f"{fault}; queries are counted from {self.first} on"
        if heads is not None and self.program.heads is None and len(heads) == self.heads:
            heads = None
        return Check(self.layers, heads, backend, what, queries, self.n_q, fault)

    def checks(self) -> Iterator[Check]:
        """What is compared: the tables that kernels hold, and outputs and gradients in float64, of
        which nothing but roundings may differ, and in float32. Of `pairs` the last is left out, and
        of `values` all but the last."""
        if self.depth != "values":
            yield from self._table_checks()
        kinds = _KINDS.get(self.depth, (torch.float64, torch.float32))
        meanings = self._meanings() if kinds and self._runs() else []
        if not meanings:
            return
        drawn = self._drawn(meanings)
        exact, sizes = self._meant(meanings, drawn)
        for kind in kinds:
            single = kind == torch.float32
            numbers = drawn.to(kind)
            rough = self._meant(meanings, numbers)[0] if single else None
            learned = dict(self.module.named_parameters()) if single else {}
            found = self.results(self.module, numbers._replace(learned=learned), self.at)
            for each in meanings:
                if not (single or each.weighs):
                    continue
                fault = numbers_fault(each, found, exact, rough, sizes)
                text = None if fault is None else fault[2]
                if fault is not None and fault[1] is not None and not single:
                    text = self._pair_fault(each, fault[0], fault[1], drawn) or text
                what = _COMPARED[each.held is None, kind]
                yield self.check(each.heads, each.backend, what, len(self.rows), text)

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

    def _table_checks(self) -> Iterator[Check]:
        few = sample_rows(self.n_q, LIMITS.queries_sampled, self.first)
        for part in self.parts:
            if part.tables is not None:
                where = part.place, self.n_q, part.work.relation, self.n, few
                queries, fault = tables_fault(part.tables, *where)
                what = "each pair lies once in its tables, no other pair"
                yield self.check(part.heads, part.backend, what, queries, fault)
                if queries < self.n_q:
                    self.skipped.append("the pairs that tables hold of other queries")

    # --- numbers ---------------------------------------------------------------------------------

    def _meanings(self) -> list[Meaning]:
        """What is compared of numbers."""
        meanings = []
        for part in self.parts:
            formula, dense = part.work.mechanism is not None, part.backend == "dense"
            if formula and self.n > LIMITS.every_pair:
                self.skipped.append(
                    f"mechanisms: their formulas are written out up to n = {LIMITS.every_pair:,}"
                )
            elif self.depth != "pairs" or not (dense or (formula and not part.work.hybrid)):
                # the definition evaluates every pair, and a formula has none
                meanings.append(part)
        return meanings

    def drawn(self, length: int) -> Tensor:
        """Random rows of all heads, float64 [heads, length, SIZE]."""
        return torch.randn(self.heads, length, SIZE, dtype=torch.float64)

    def _drawn(self, meanings: Sequence[Meaning]) -> Numbers:
        """Random q, k and v, and the gradient of the outputs that are examined."""
        of_q, of_k = moderate([(each.work, each.heads) for each in meanings], self.heads)
        q, k, v = self.drawn(self.n_q) * of_q, self.drawn(self.n) * of_k, self.drawn(self.n)
        some = [head for each in meanings for head in each.heads]
        grad = torch.zeros(self.heads, len(self.rows), SIZE, dtype=q.dtype)
        grad[some] = self.drawn(len(self.rows))[some]
        learned = {name: x.detach().double() for name, x in self.module.named_parameters()}
        return Numbers((grad, q, k, v), learned)

    def _meant(
        self, meanings: Sequence[Meaning], numbers: Numbers
    ) -> tuple[Numbers, tuple[float, ...]]:
        """Outputs and gradients by the definition, and in float64 how large numbers are."""
        key = (
            *((each.work, each.heads) for each in meanings),
            self.layers[0] if numbers.learned else None,
            self.rows.tobytes(),
            *(x.numpy().tobytes() for x in (*numbers.heads, *numbers.learned.values())),
        )
        sized = numbers.heads[0].dtype == torch.float64
        found: tuple[Numbers, tuple[float, ...]] = self.known.get(
            key, lambda: results(meanings, numbers, sized=sized)
        )
        return found

    def called(self, module: CompiledAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The outputs [H, n_q, d] of a module."""
        keys = slice(self.keys)
        parts = q[None], k[None, :, keys], v[None, :, keys]
        out: Tensor = module(*parts, layer=self.layers[0], inputs=self.data)
        return out[0]

    def results(self, module: CompiledAttention, numbers: Numbers, at: Tensor | slice) -> Numbers:
        """Outputs of some queries and gradients of a module."""
        every = slice(None)
        return swept(lambda x: [(every, self.called(module, *x.heads[1:])[:, at])], numbers)

    def _pair_fault(self, meaning: Meaning, head: int, place: int, numbers: Numbers) -> str | None:
        """The first key that a query of a wrong output weighs otherwise than it should: the
        gradient of one column of the values is the weights."""
        grad, q, k, v = numbers.heads
        one = torch.zeros_like(grad[..., :1])
        one[head, place] = 1.0
        column = Numbers((one, q, k, torch.zeros_like(v[..., :1])), {})
        found = self.results(self.module, column, self.at).heads[3][head, :, 0]
        meant = torch.zeros_like(found)
        some = meaning.weights([head], slice(place, place + 1), numbers)[0, 0].detach()
        meant[: len(some)] = some
        missing = found.eq(0) & (meant > SMALLEST)
        mask = meant.ne(0) if meaning.held is None else torch.from_numpy(meaning.held[place])
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
