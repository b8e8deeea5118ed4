"""The layers of a module that compute the same, held against the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from attnspec.backends.common.masks import with_data
from attnspec.graphs.relation import Relation
from attnspec.ir.program import Input, Program
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import Bias, Call, Work
from attnspec.runtime.call_checks import PER_HEAD, check_inputs
from attnspec.runtime.module import CompiledAttention
from attnspec.verification import pairs
from attnspec.verification.definition import Definition, Results, gradients
from attnspec.verification.formulas import FormulaTrial, Run
from attnspec.verification.kernel_pairs import Blocks, Layout, layouts_of
from attnspec.verification.numbers import SIZE, numbers_fault, support_fault, weights_fault
from attnspec.verification.report import Check


@dataclass(frozen=True)
class Shape:
    """What is tried: the last `n_q` of `n` positions, for layers and heads that a program may have
    declared or not. Between two sequences the first `keys` of the positions are keys."""

    n_q: int
    n: int
    layers: tuple[int, ...]
    heads: int
    declared: bool
    keys: int | None = None

    def run(self, module: CompiledAttention, data: Mapping[str, torch.Tensor]) -> Run:
        """Calls of a module of this shape."""
        return Run(module, self.layers[0], self.n_q, self.n, self.heads, data, self.keys)

    def apart(self) -> Shape:
        """The same for what takes two sequences as they are, without positions for both."""
        return self if self.keys is None else replace(self, n=self.keys)

    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of no size."""
        n = self.n if self.keys is None else self.keys
        return torch.empty(1, self.heads, self.n_q, 0), torch.empty(1, self.heads, n, 0)


@dataclass(frozen=True, eq=False)
class Part:
    """Heads that compute one work; `relation` is its graph with the inputs that are tried."""

    work: Work
    heads: tuple[int, ...]
    relation: Relation
    chosen: pairs.Chosen
    layouts: tuple[Layout, ...] | None


Known: TypeAlias = "Cache[tuple[Any, ...], Any]"
"""What the definition says, kept for other modules that are asked the same."""

ANY = Relation()
"""What stands for the graph of a work whose pairs are known."""

Computed: TypeAlias = "frozenset[tuple[Work, tuple[int, ...], bytes]]"

Definitions: TypeAlias = "list[tuple[Part, list[Definition]]]"


class Trial:
    """The checks of one shape with the inputs `data`, for a batch of one."""

    def __init__(
        self,
        module: CompiledAttention,
        shape: Shape,
        works: Sequence[tuple[Work, tuple[int, ...]]],
        data: dict[str, torch.Tensor],
        forced: bool,
        known: Known,
        *,
        only_values: bool = False,
    ) -> None:
        self.module, self.shape, self.data, self.known = module, shape, data, known
        self.only_values = only_values
        self.run = shape.run(module, data)
        self.skipped: list[str] = []
        values = {name: x[0].numpy() for name, x in data.items()}
        plain = {name: x if x.ndim else x.item() for name, x in values.items()}
        relations = [with_data(work.relation, plain) for work, _ in works]
        chosen = [
            pairs.chosen_for(work, relation, module.backend, forced)
            for (work, _), relation in zip(works, relations, strict=True)
        ]
        prepared = module.engine.prepare(
            shape.layers[0],
            *(shape.heads, shape.heads, shape.n_q, shape.apart().n),
            "cpu",
        )
        q, k = shape.empty()
        call = Call(data=check_inputs(module.program, data, q, k, None))
        given = module.engine.laid_out((q, k, k), call)[1].data
        kernels = {
            head: (group.kernel, place)
            for group in prepared.groups
            for place, head in enumerate(group.heads)
        }
        if forced:
            for kernel, _ in kernels.values():
                if hasattr(kernel, "dense_seconds"):
                    # tables that were asked for are tried also where dense would cost less
                    kernel.dense_seconds = math.inf
        self.parts: list[Part] = []
        self.formulas: list[Part] = []
        found = [
            Part(
                work,
                heads,
                relation,
                runs,
                layouts_of(kernel, shape.n_q, shape.n, given, place),
            )
            for (work, heads), relation, runs in zip(works, relations, chosen, strict=True)
            for kernel, place in (kernels[heads[0]],)
        ]
        for part in found:
            (self.parts if part.work.mechanism is None else self.formulas).append(part)

    @property
    def computed(self) -> Computed:
        """What is computed of numbers: the same works but for what says which pairs they have, and
        the same pairs."""
        found = set()
        for part in (*self.parts, *self.formulas):
            held = self._held(part, np.arange(self.shape.n - self.shape.n_q, self.shape.n))
            found.add((replace(part.work, relation=ANY), part.heads, held.tobytes()))
        return frozenset(found)

    @property
    def exhaustive(self) -> bool:
        """Whether every pair is looked at, and weighed."""
        if not self.parts:
            return self.shape.n <= LIMITS.every_pair
        return self.shape.n <= LIMITS.every_pair and len(self.rows) == self.shape.n_q

    def pair_checks(self) -> Iterator[Check]:
        """What is compared without running anything: the pairs that kernels hold."""
        for part in (*self.parts, *self.formulas):
            yield from self._layout_checks(part)

    def checks(self) -> Iterator[Check]:
        """Everything that is compared."""
        n, n_q, heads = self.shape.n, self.shape.n_q, self.shape.heads
        if not self.only_values:
            yield from self.pair_checks()
        seconds = sum(part.chosen.seconds * len(part.heads) for part in self.parts)
        if n > LIMITS.every_pair and (seconds > pairs.RUN or n * heads > LIMITS.positions_computed):
            self.skipped.append(
                f"weights, outputs and gradients: {heads} heads of {n:,} positions, estimated to"
                f" take {seconds:,.3g} s (up to {LIMITS.positions_computed:,} positions of all"
                f" heads, and {pairs.RUN:,.3g} s, are run)"
            )
            return
        if self.formulas:
            yield from self._formula_checks()
        if not self.parts:
            return
        definitions = self._definitions()
        if len(self.rows) == n_q:
            yield from self._weights(definitions)
        if not self.only_values:
            yield from self._support(definitions)
        yield from self._numbers(definitions)

    # --- mechanisms ----------------------------------------------------------------------------

    def _formula_checks(self) -> Iterator[Check]:
        shape = self.shape
        if shape.n > LIMITS.every_pair:
            self.skipped.append(
                f"mechanisms: their formulas are written out up to n = {LIMITS.every_pair:,}"
            )
            return
        seen = [replace(part.work, relation=part.relation, reads=()) for part in self.formulas]
        works = [(work, part.heads) for work, part in zip(seen, self.formulas, strict=True)]
        trial = FormulaTrial(shape.apart().run(self.module, self.data), works)
        parts = dict(zip(seen, self.formulas, strict=True))
        for what, faults in (
            ("each pair weighs what the formula says", trial.weights()),
            ("outputs and gradients agree with the formula in float64", trial.numbers()),
        ):
            for work, _, fault in faults:
                yield self._check(parts[work], what, shape.n_q, fault)

    # --- the layout ----------------------------------------------------------------------------

    def _layout_checks(self, part: Part) -> Iterator[Check]:
        n, n_q = self.shape.n, self.shape.n_q
        for layout in part.layouts or ():
            rows = np.arange(n - n_q, n)
            if n > LIMITS.every_pair:
                rows = sample_rows(n_q, LIMITS.queries_sampled, layout.parts, n - n_q)
            fault = pairs.rows_fault(layout, rows, self._held(part, rows))
            what = f"each pair lies once in {layout.what}, no other pair"
            yield self._check(part, what, len(rows), fault)
            if len(rows) == n_q:
                continue
            counts = pairs.counts_of(layout, n)
            if pairs.is_counted(part.relation, n):
                fault = pairs.counts_fault(counts, part.relation, n_q)
                what = f"as many keys of each query lie in {layout.what} as in the graph"
                yield self._check(part, what, n_q, fault)
            else:
                self.skipped.append(f"how many keys {layout.what} hold: the graph does not say")
            if counts.sum() <= LIMITS.edges_kept:
                fault = pairs.list_fault(layout, part.relation, n)
                what = f"{layout.what} hold no pair but those of the graph, and none twice"
                yield self._check(part, what, n_q, fault)
            else:
                found = f"the {counts.sum():,} pairs of {layout.what}"
                self.skipped.append(f"{found} one by one (up to {LIMITS.edges_kept:,})")

    # --- the numbers ---------------------------------------------------------------------------

    @cached_property
    def rows(self) -> np.ndarray:
        """The positions whose numbers are looked at."""
        n, n_q = self.shape.n, self.shape.n_q
        rows = np.arange(n - n_q, n)
        few = n <= LIMITS.every_pair and self.shape.heads * n_q * n <= LIMITS.pairs_evaluated
        if few and not self.only_values:
            return rows
        blocks = [b for part in self.parts for layout in part.layouts or () for b in layout.parts]
        return sample_rows(
            n_q, min(LIMITS.queries_sampled, LIMITS.scores_sampled // n), blocks, n - n_q
        )

    def _definitions(self) -> Definitions:
        """The definition of each part, as many heads in one go as fit."""
        found = []
        for part in self.parts:
            held = self._held(part, self.rows)
            step = max(1, LIMITS.pairs_at_once // max(1, held.size))
            groups = (part.heads[low : low + step] for low in range(0, len(part.heads), step))
            found.append((part, [Definition(part.work, some, self.rows, held) for some in groups]))
        return found

    def _held(self, part: Part, rows: np.ndarray) -> np.ndarray:
        """What queries of a part read by the definition, bool [rows, n]."""
        n = self.shape.n
        key = part.relation, rows.tobytes(), n
        found: np.ndarray = self.known.get(key, lambda: pairs.held_rows(part.relation, rows, n))
        return found

    def _weights(self, definitions: Definitions) -> Iterator[Check]:
        """With the unit vectors as values, the output is the weights themselves."""
        q, k = self._scored()
        meant = {each: self._meant(each, q, k) for _, some in definitions for each in some}
        faults: dict[int, list[tuple[bool, int, int, str]]] = {}
        for low in range(0, self.shape.n, LIMITS.unit_vectors):
            part = slice(low, min(low + LIMITS.unit_vectors, self.shape.n))
            v = torch.eye(self.shape.n, dtype=torch.float64)[:, part]
            found = self.run(q, k, v.expand(1, self.shape.heads, -1, -1))[0]
            for each, weights in meant.items():
                held = each.held[:, part]
                for place, head in enumerate(each.heads):
                    right = weights[place, :, part]
                    fault = weights_fault(found[head], right, held, self.rows, low)
                    faults.setdefault(head, []).extend([fault] if fault else [])
        for whole in self.parts:
            first = next((min(faults[head])[3] for head in whole.heads if faults.get(head)), None)
            yield self._check(
                whole, "each pair is weighed once, no other pair", len(self.rows), first
            )

    def _support(self, definitions: Definitions) -> Iterator[Check]:
        """One query's gradient in each column of the values: the weights, as backward has them."""
        n, n_q, heads = self.shape.n, self.shape.n_q, self.shape.heads
        # more columns than the heads have would be padded, which costs most where n is large
        at = sample_rows(len(self.rows), LIMITS.queries_sampled if n <= LIMITS.every_pair else SIZE)
        rows = self.rows[at]
        q, k = self._scored()
        v = torch.zeros(1, heads, n, len(rows), dtype=torch.float64, requires_grad=True)
        grad = torch.zeros(1, heads, n_q, len(rows), dtype=torch.float64)
        grad[:, :, torch.from_numpy(rows - (n - n_q)), torch.arange(len(rows))] = 1.0
        reached = gradients(self.run(q, k, v), grad, [v])[0][0].transpose(1, 2)
        for part, some in definitions:
            fault = None
            for definition in (each.at(at) for each in some):
                meant = self._meant(definition, q, k)
                for head, weights in zip(definition.heads, meant, strict=True):
                    fault = fault or support_fault(reached[head], weights, rows)
            yield self._check(part, "gradients reach the keys that are read", len(rows), fault)

    def _numbers(self, definitions: Definitions) -> Iterator[Check]:
        """Outputs and gradients in float32 against the definition in float64."""
        n, n_q = self.shape.n, self.shape.n_q
        (q, k), v = self._scored(), self.run.drawn(n)
        at = torch.from_numpy(self.rows - (n - n_q))
        grad = torch.zeros_like(q)
        grad[:, :, at] = self.run.drawn(len(at))
        narrow = [x.float().requires_grad_() for x in (q, k, v)]
        learned = dict(self.module.named_parameters())
        out = self.run(narrow[0], narrow[1], narrow[2])
        # a table of other layers is not used here
        found = gradients(out, grad.float(), [*narrow, *learned.values()])
        for part, some in definitions:
            fault = None
            shares = dict(zip(learned, found[3:], strict=True))
            for definition in some:
                heads = definition.heads
                exact, dense = (
                    self._results(
                        definition,
                        [x[0, heads].to(kind) for x in (q, k, v)],
                        grad[0, heads][:, at].to(kind),
                    )
                    for kind in (torch.float64, torch.float32)
                )
                mine = [out.detach()[0, heads][:, at], *(x[0, heads] for x in found[:3])]
                mine += [self._rows(shares[c.table], heads) for c in _biases(part.work)]
                for place, (right, base) in enumerate(zip(exact, dense, strict=True)):
                    given = Results(right.names, tuple(x[place] for x in mine))
                    fault = fault or numbers_fault(given, right, base)
            what = "outputs and gradients agree with float64"
            yield self._check(part, what, len(self.rows), fault)

    def _results(
        self, definition: Definition, given: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> list[Results]:
        """Outputs and gradients of heads by the definition; the largest number in float64 alone."""
        tables = self._tables(definition.work, definition.heads, grad.dtype)
        sized, rows = grad.dtype == torch.float64, definition.rows.numpy().tobytes()
        read = (x.contiguous().numpy().tobytes() for x in (*given, grad, *tables.values()))
        found: list[Results] = self.known.get(
            (definition.work, *definition.heads, rows, *read),
            lambda: definition.results(given, grad, tables, sized=sized),
        )
        return found

    def _scored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random queries and keys."""
        return self.run.scored([(part.work, part.heads) for part in self.parts])

    def _meant(self, definition: Definition, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The weights of heads by the definition, [h, rows, n]."""
        tables = self._tables(definition.work, definition.heads, torch.float64)
        return definition.weights(q[0, definition.heads], k[0, definition.heads], tables)

    def _tables(self, work: Work, heads: list[int], kind: torch.dtype) -> dict[str, torch.Tensor]:
        """The learned tables of heads, [h, buckets]."""
        tables = {c.table: self.module.get_parameter(c.table).detach() for c in _biases(work)}
        return {name: self._rows(table, heads).to(kind) for name, table in tables.items()}

    def _rows(self, table: torch.Tensor, heads: list[int]) -> torch.Tensor:
        """What heads of these layers have of a learned table, [h, buckets]."""
        return table[0 if len(table) == 1 else self.shape.layers[0], heads]

    def _check(self, part: Part, what: str, queries: int, fault: str | None) -> Check:
        first = self.shape.n - self.shape.n_q
        if fault is not None and self.shape.keys is not None and first:
            fault = f"{fault}; queries are counted from {first} on"
        every = len(part.heads) == self.shape.heads and not self.shape.declared
        heads = None if every else part.heads
        place = self.shape.layers, heads, part.chosen.backend
        return Check(*place, what, queries, self.shape.n_q, fault)


def _biases(work: Work) -> list[Bias]:
    return [change for change in work.changes if isinstance(change, Bias)]


CHOICES = 3
"""Blocks that each query chooses in a sample."""

DOCUMENTS = 5
"""About how many runs of equal labels a sequence has."""


def sample_inputs(program: Program, n: int, n_q: int | None = None) -> dict[str, torch.Tensor]:
    """Inputs for a batch of one and the last n_q of n positions, or all: a tenth of the tokens,
    documents of unequal lengths, half, random numbers and choices."""
    found = {}
    for entry in program.inputs:
        if entry.kind == "tokens":
            marked = torch.rand(1, n) < 0.1
            if entry.at_most is not None:
                marked &= marked.cumsum(1) <= entry.at_most
            found[entry.name] = marked
        elif entry.kind == "ids":
            found[entry.name] = (torch.rand(1, n) < DOCUMENTS / n).cumsum(1)
        elif entry.kind == "numbers":
            # whole, because a predicate may divide them, and some equal
            found[entry.name] = torch.randint(0, max(2, n // 2), (1, n))
        elif entry.kind in PER_HEAD:
            found[entry.name] = _about_heads(entry, n, n if n_q is None else n_q)
        else:
            found[entry.name] = torch.tensor([n // 2])
    return found


def words_of(program: Program, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """What such inputs are, in words, each with its name."""
    found = []
    for entry in program.inputs:
        given = inputs[entry.name]
        match entry.kind:
            case "tokens":
                what = f"{int(given.sum()):,} of {given.shape[1]:,} tokens"
            case "ids":
                what = f"{len(torch.unique(given)):,} labels"
            case "numbers":
                what = f"{int(given.min()):,} to {int(given.max()):,}"
            case "length":
                what = f"{int(given):,}"
            case _:
                what = f"random {entry.kind} {list(given.shape)}"
        found.append(f"`{entry.name}` {what}")
    return tuple(found)


def _about_heads(entry: Input, n: int, n_q: int) -> torch.Tensor:
    """An input for a batch of one that all heads have in common."""
    blocks = -(-n // entry.size)
    match entry.kind:
        case "choices":
            return torch.randint(-1, blocks, (1, 1, n_q, CHOICES))
        case "scores":
            return torch.randn(1, 1, n, blocks)
        case "pairs":
            return torch.randn(1, 1, n_q, n)
        case _:
            # two at least, of which one would read all
            return torch.randint(0, max(2, n // DOCUMENTS), (1, 1, 2, n))


def sample_rows(count: int, most: int, blocks: Sequence[Blocks] = (), first: int = 0) -> np.ndarray:
    """`most` of the `count` positions from `first` on, ascending: both ends, the middle, the first
    and last queries of some of the blocks, and random ones. All of them where they are few."""
    last = first + count - 1
    if count <= 2 * most:
        return np.arange(first, last + 1)
    chosen = [first, last, first + count // 2, first + 1, last - 1]
    for index in np.unique(np.linspace(0, len(blocks) - 1, most // 8).astype(int)).tolist():
        if blocks:
            real = blocks[index].queries
            real = real[int(torch.randint(len(real), ()))]
            real = real[real >= 0]
            chosen.extend([*real[:1].tolist(), *real[-1:].tolist()])
    chosen.extend((first + torch.randperm(count)[: 2 * most]).tolist())
    return np.array(sorted(list(dict.fromkeys(chosen))[:most]))
