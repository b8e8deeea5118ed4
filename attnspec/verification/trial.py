"""The layers of a module that compute the same, held against the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.masks import with_data
from attnspec.backends.planner import choose
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.layout.tables import Tables
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work
from attnspec.runtime.call_checks import check_inputs, taken_apart
from attnspec.text.diagnostics import time_text
from attnspec.verification.meaning import (
    Known,
    Meaning,
    Numbers,
    Results,
    Run,
    Works,
    gradients,
    results,
)
from attnspec.verification.numbers import EXACT, ROUNDINGS, SMALLEST, moderate, numbers_fault
from attnspec.verification.report import Check
from attnspec.verification.samples import sample_rows
from attnspec.verification.tables import tables_fault

LAID_OUT = 5.0
"""Seconds that the forward of a head may be estimated to take for its layout to be built."""

RUN = 20.0
"""Seconds that the forward of all heads may be estimated to take for it to be run."""

Depth: TypeAlias = Literal["whole", "once", "tables", "pairs", "values"]

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


class Trial:
    """The checks of heads that compute some works."""

    def __init__(self, run: Run, works: Works, depth: Depth, forced: bool, known: Known) -> None:
        """`forced` says that tables run whatever they cost. Raises TooMuch where building what
        runs, or its mask, is not affordable."""
        self.run, self.depth, self.known, self.skipped = run, depth, known, list[str]()
        values = {name: x[0].numpy() for name, x in run.data.items()}
        plain = {name: x if x.ndim else x.item() for name, x in values.items()}
        chosen = []
        for work, _ in works:
            resolved = replace(work, relation=with_data(work.relation, plain), reads=())
            backend = choose(work, "cpu", run.module.backend)
            seconds = backend.cost(resolved) if work.n_k > LIMITS.every_pair else 0.0
            _require_affordable(work, backend.name, seconds)
            chosen.append((resolved, backend.name, seconds))
        q, k = (torch.empty(1, run.heads, rows, 0) for rows in (run.n_q, run.keys))
        engine, program = run.module.engine, run.module.program
        data, tables = taken_apart(program, check_inputs(program, run.data, q, k, None), run.keys)
        call = Call(data=data, tables=tables)
        given = engine.laid_out((q, k, k), call)[1].data
        prepared = engine.prepare(run.layers[0], q, k)
        kernels = {
            head: (group.kernel, place)
            for group in prepared.groups
            for place, head in enumerate(group.heads)
        }
        self.parts: list[Meaning] = []
        for (work, heads), (resolved, name, seconds) in zip(works, chosen, strict=True):
            kernel, place = cast("tuple[Any, int]", kernels[heads[0]])
            if forced and hasattr(kernel, "dense_seconds"):
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
            tried = held if isinstance(held, Tables) else None, place
            means = resolved, heads, name, run, self.rows, learned, known, seconds
            self.parts.append(Meaning(*means, *tried))

    @property
    def computed(self) -> Computed:
        """What is computed of numbers: works, whatever says which pairs they have, and pairs."""
        every = np.arange(self.run.first, self.run.n)
        return frozenset(
            (replace(part.work, relation=ANY), part.heads, part.read(every).tobytes())
            for part in self.parts
        )

    @property
    def exhaustive(self) -> bool:
        """Whether every pair is examined, and weighed."""
        return self.run.n <= LIMITS.every_pair and len(self.rows) == self.run.n_q

    def checks(self) -> Iterator[Check]:
        """What is compared: the tables that kernels hold, and outputs and gradients in float64, of
        which nothing but roundings may differ, and in float32. Of `pairs` the last is left out, and
        of `values` all but the last."""
        run, depth = self.run, self.depth
        if depth != "values":
            yield from self._table_checks()
        meanings = self._meanings() if depth != "tables" and self._runs() else []
        if not meanings:
            return
        drawn = self._drawn(meanings)
        exact = self._meant(meanings, drawn)
        kinds = {"pairs": (torch.float64,), "values": (torch.float32,)}
        for kind in kinds.get(depth, (torch.float64, torch.float32)):
            numbers, rough = drawn, None
            if kind == torch.float32:
                numbers = drawn.to(kind)
                rough = self._meant(meanings, numbers)
            results = self._found(numbers)
            for each in meanings:
                if rough is None and not each.weighs:
                    continue
                fault = numbers_fault(each, results, exact, rough)
                text = None if fault is None else fault[2]
                if fault is not None and rough is None:
                    text = self._pair_fault(each, fault, drawn) or text
                what = _COMPARED[each.held is None, kind]
                yield run.check(each.heads, each.backend, what, len(self.rows), text)

    def _runs(self) -> bool:
        """Whether numbers are computed; raises TooMuch where nothing would be examined then."""
        run, seconds = self.run, sum(part.seconds * len(part.heads) for part in self.parts)
        many = run.n * run.heads > LIMITS.positions_computed
        if run.n <= LIMITS.every_pair or not (seconds > RUN or many):
            return True
        reason = (
            f"weights, outputs and gradients: {run.heads} heads of {run.n:,} positions, estimated"
            f" to take {time_text(seconds)} (up to {LIMITS.positions_computed:,} positions of all"
            f" heads, and {time_text(RUN)}, are run)"
        )
        if all(part.tables is None for part in self.parts):
            raise TooMuch(f"n = {run.n:,} is too long for {reason}")
        self.skipped.append(reason)
        return False

    def _table_checks(self) -> Iterator[Check]:
        run = self.run
        few = sample_rows(run.n_q, LIMITS.queries_sampled, run.first)
        for part in self.parts:
            if part.tables is not None:
                arguments = part.tables, part.place, run.n_q, part.work.relation, run.n, few
                queries, fault = tables_fault(*arguments)
                what = "each pair lies once in its tables, no other pair"
                yield run.check(part.heads, part.backend, what, queries, fault)
                if queries < run.n_q:
                    self.skipped.append("the pairs that tables hold of other queries")

    # --- what is meant ---------------------------------------------------------------------------

    @cached_property
    def rows(self) -> np.ndarray:
        """The positions whose numbers are examined."""
        n, n_q = self.run.n, self.run.n_q
        short = n <= LIMITS.every_pair and self.run.heads * n_q * n <= LIMITS.pairs_evaluated
        if short and self.depth != "values":
            return np.arange(n - n_q, n)
        most = min(LIMITS.queries_sampled, LIMITS.scores_sampled // n)
        return sample_rows(n_q, most, n - n_q)

    @property
    def _at(self) -> Tensor:
        """Where these stand among the queries."""
        return torch.from_numpy(self.rows - self.run.first)

    def _meanings(self) -> list[Meaning]:
        """What is compared of numbers."""
        meanings = []
        for part in self.parts:
            formula, dense = part.work.mechanism is not None, part.backend == "dense"
            if formula and self.run.n > LIMITS.every_pair:
                self.skipped.append(
                    f"mechanisms: their formulas are written out up to n = {LIMITS.every_pair:,}"
                )
                continue
            if self.depth != "pairs" or not (dense or (formula and not part.work.hybrid)):
                # the definition evaluates every pair, and a formula has none
                meanings.append(part)
        return meanings

    def _drawn(self, meanings: Sequence[Meaning]) -> Numbers:
        """Random q, k and v, and the gradient of the outputs that are examined."""
        run = self.run
        of_q, of_k = moderate([(each.work, each.heads) for each in meanings], run.heads)
        q, k, v = run.drawn(run.n_q) * of_q, run.drawn(run.n) * of_k, run.drawn(run.n)
        heads = torch.tensor([head for each in meanings for head in each.heads])
        grad = torch.zeros_like(q)
        grad[0, heads[:, None], self._at] = run.drawn(len(self.rows))[0, heads]
        learned = {name: x.detach().double() for name, x in run.module.named_parameters()}
        return Numbers(q[0], k[0], v[0], learned, grad[0])

    def _meant(self, meanings: Sequence[Meaning], numbers: Numbers) -> Results:
        """Outputs and gradients by the definition; the largest numbers in float64 alone."""
        tensors = numbers.q, numbers.k, numbers.v, numbers.grad, *numbers.learned.values()
        key = (
            *((each.work, each.heads) for each in meanings),
            self.run.layers[0] if numbers.learned else None,
            self.rows.tobytes(),
            *(x.numpy().tobytes() for x in tensors),
        )
        sized = numbers.q.dtype == torch.float64
        found: Results = self.known.get(key, lambda: results(meanings, numbers, sized=sized))
        return found

    def _found(self, numbers: Numbers) -> Results:
        """Outputs and gradients of the module; of what is learned in float32 alone."""
        single = numbers.grad.dtype == torch.float32
        learned = dict(self.run.module.named_parameters()) if single else {}
        parts = [x[None] for x in numbers[:3]]
        out, *grads = self.run.differentiated(parts, numbers.grad[None], learned.values())
        heads = out[0][:, self._at], *(x[0] for x in grads[:3])
        return Results(heads, dict(zip(learned, grads[3:], strict=True)))

    def _pair_fault(
        self, meaning: Meaning, fault: tuple[int, int | None, str], numbers: Numbers
    ) -> str | None:
        """The first key that a query of a wrong output weighs otherwise than it should: the
        gradient of one column of the values is the weights."""
        head, place, _ = fault
        if place is None:
            return None
        q, k = numbers.q[None], numbers.k[None]
        row = int(self.rows[place])
        v = torch.zeros(*k.shape[:3], 1, dtype=k.dtype, requires_grad=True)
        grad = torch.zeros(*q.shape[:3], 1, dtype=q.dtype)
        grad[0, head, row - self.run.first] = 1.0
        found = gradients(self.run(q, k, v), grad, [v])[0][0, head, :, 0]
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
                return f"query {row} {verb.format(key, found[key], meant[key])}"
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
