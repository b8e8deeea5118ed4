"""Translation validation: what a compiled attention computes is held against what the spec means.

Three readings of one computation. With the unit vectors as values the output is the weights
themselves, so every pair is seen, and seen once. Outputs and gradients are compared with the
definition in float64: a backend may err twice as much as the definition does in the same type. And
the gradient of one query's output reaches exactly the keys that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnspec.backends.tiles import TilesBackend
from attnspec.data import plan_data
from attnspec.dense_kernel import dense_kernel
from attnspec.ir import Program
from attnspec.layout import FULL_TILE, tile_layout
from attnspec.masking import with_data
from attnspec.planning import AUTO, candidates, numbers
from attnspec.relations import Relation, evaluate_pairs
from attnspec.runtime import CompiledAttention
from attnspec.target import Bias, Call, Work
from attnspec.works import stand_ins, works_of

if TYPE_CHECKING:
    import torch

LONGEST = 4096
"""The longest sequence that is verified: all pairs are looked at, in float64."""

SIZE = 16
"""The size of the heads that are tried."""

HEADS = 2
"""The heads that are tried where the spec declares none."""

SLACK = 2.0
"""How much more a backend may err than the definition in the same type."""

ROUNDINGS = 16
"""Units in the last place of the largest number that are no error."""

COLUMNS = 512
"""Unit vectors tried in one go."""

ALL = 2**62
"""More scores than there are: the definition is to stay the formula."""

QUERIES = 32
"""Queries whose gradients are looked at one by one."""


@dataclass(frozen=True)
class Check:
    """One thing that was compared; `fault` says what differs, None if nothing does."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    backend: str
    what: str
    fault: str | None


@dataclass(frozen=True)
class Verification:
    """All checks of a program at one length; `str` has a line for each."""

    name: str
    n: int
    checks: tuple[Check, ...]

    @property
    def faults(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.fault is not None)

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.faults

    def __str__(self) -> str:
        lines = [f"{self.name}, n = {self.n}: {len(self.checks)} checks, {len(self.faults)} failed"]
        for check in self.checks:
            place = f"layer {numbers(check.layers)}, head {numbers(check.heads)}, {check.backend}"
            lines.append(f"{'ok  ' if check.fault is None else 'FAIL'}  {place}: {check.what}")
            if check.fault is not None:
                lines.append(f"      {check.fault}")
        return "\n".join(lines)


def verify(
    program: Program,
    n: int,
    *,
    backend: str = AUTO,
    module: torch.nn.Module | None = None,
) -> Verification:
    """Compares a module of the program, by default one that is built here, with the spec's meaning.

    Raises ValueError for n above LONGEST or one that the spec does not have.
    """
    import torch

    if not 1 <= n <= LONGEST:
        raise ValueError(f"n must be between 1 and {LONGEST}, got {n}: all pairs are looked at")
    if module is None:
        module = CompiledAttention(plan_data(program, backend))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        checks: list[Check] = []
        heads = program.heads or HEADS
        stands = stand_ins(program)
        data = _sample(program, n)
        seen: dict[tuple[tuple[Work, tuple[int, ...]], ...], list[int]] = {}
        for layer in range(program.layers or 1):
            works = tuple(works_of(program, layer, heads, n, n, stands))
            seen.setdefault(works, []).append(layer)
        for works, layers in seen.items():
            trial = _Trial(program, n, heads, tuple(layers), works, data, module, backend)
            checks.extend(trial.checks())
    return Verification(program.name, n, tuple(checks))


class _Trial:
    """The layers that compute the same, held against the definition."""

    def __init__(
        self,
        program: Program,
        n: int,
        heads: int,
        layers: tuple[int, ...],
        works: tuple[tuple[Work, tuple[int, ...]], ...],
        data: dict[str, torch.Tensor],
        module: torch.nn.Module,
        backend: str,
    ) -> None:
        self.n, self.heads, self.layers, self.works = n, heads, layers, works
        self.data, self.module, self.backend = data, module, backend
        self.kinds = {entry.name: entry.kind for entry in program.inputs}
        self.row = 0 if program.layers is None else layers[0]

    def checks(self) -> Iterator[Check]:
        """Everything that is compared for these layers."""
        import torch

        shape = (1, self.heads, self.n, SIZE)
        q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(4))
        yield from self._weights(q, k)
        yield from self._numbers(q, k, v, grad)
        for work, heads in self.works:
            chosen = candidates(work, "cpu", self.backend)[0].backend.name
            if chosen == TilesBackend.name:
                yield self._check(work, heads, "its tiles are the graph", _tiles_fault(work))

    def _weights(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[Check]:
        """The weights of all pairs, and the pairs that gradients reach."""
        import torch

        wanted, found = [], []
        for low in range(0, self.n, COLUMNS):
            v = torch.eye(self.n, dtype=torch.float64)[:, low : low + COLUMNS]
            v = v.expand(1, self.heads, -1, -1)
            wanted.append(self._defined(q, k, v))
            found.append(self._run(q, k, v))
        meant, weights = torch.cat(wanted, 3)[0], torch.cat(found, 3)[0]
        queries = np.unique(np.linspace(0, self.n - 1, QUERIES).astype(int)).tolist()
        values = torch.ones(1, self.heads, self.n, 1, dtype=torch.float64, requires_grad=True)
        out = self._run(q, k, values)
        reached = torch.stack(
            [
                torch.autograd.grad(out[0, :, query].sum(), values, retain_graph=True)[0][
                    0, :, :, 0
                ]
                for query in queries
            ],
            1,
        )
        for work, heads in self.works:
            held = torch.from_numpy(self._held(work.relation))
            for head in heads:
                fault = _weights_fault(weights[head], meant[head], held, work.normalize)
                if fault is not None:
                    break
            yield self._check(work, heads, "each pair is weighed once, no other pair", fault)
            fault = None
            for head in heads:
                differs = reached[head].ne(0) != meant[head][queries].ne(0)
                if (at := _first(differs)) is not None:
                    fault = f"the gradient of query {queries[at[0]]} is wrong at key {at[1]}"
                    break
            yield self._check(work, heads, "gradients reach the keys that are read", fault)

    def _numbers(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
    ) -> Iterator[Check]:
        """Outputs and gradients in float32 against the definition in float64."""
        import torch

        exact = _with_gradients(self._defined, (q, k, v), grad)
        narrow = [x.to(torch.float32) for x in (q, k, v)]
        dense = _with_gradients(self._defined, narrow, grad.to(torch.float32))
        found = _with_gradients(self._run, narrow, grad.to(torch.float32))
        largest = max(x.abs().max().item() for x in exact)
        for work, heads in self.works:
            fault = None
            for name, *three in zip(("output", "dq", "dk", "dv"), exact, dense, found, strict=True):
                right, base, given = (x[0, list(heads)].double() for x in three)
                error = (given - right).abs().max().item()
                bound = error_bound(right, base, torch.float32, largest)
                # a comparison that NaN fails as well
                if not error <= bound:
                    fault = f"the {name} errs by {error:.3g}, and {bound:.3g} is allowed"
                    break
            yield self._check(work, heads, "output and gradients agree with float64", fault)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(q, k, v, layer=self.layers[0], inputs=self.data)
        return out

    def _defined(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output head by head by the definition."""
        import torch

        shaped = {
            name: x.view(1, 1, 1) if self.kinds[name] == "length" else x
            for name, x in self.data.items()
        }
        outs: dict[int, torch.Tensor] = {}
        for work, heads in self.works:
            for head in heads:
                tables = {
                    change.table: self.module.get_parameter(change.table)[self.row, head : head + 1]
                    for change in work.changes
                    if isinstance(change, Bias)
                }
                kernel = dense_kernel(work, (head,), q.device, large=ALL)
                part = slice(head, head + 1)
                call = Call(tables=tables, data=shaped)
                outs[head] = kernel(q[:, part], k[:, part], v[:, part], call)
        return torch.cat([outs[head] for head in range(self.heads)], 1)

    def _held(self, relation: Relation) -> np.ndarray:
        data = {name: x[0].numpy() for name, x in self.data.items()}
        at = np.arange(self.n)
        return np.array(evaluate_pairs(with_data(relation, data), at[:, None], at[None], self.n))

    def _check(self, work: Work, heads: tuple[int, ...], what: str, fault: str | None) -> Check:
        backend = candidates(work, "cpu", self.backend)[0].backend.name
        return Check(self.layers, heads, backend, what, fault)


def error_bound(
    exact: torch.Tensor, dense: torch.Tensor, dtype: torch.dtype, largest: float
) -> float:
    """How far from `exact` a backend may be in a type in which the definition gives `dense`.

    `largest` is the largest number among outputs and gradients: a gradient may vanish by
    cancellation of terms of that size.
    """
    import torch

    error = (dense - exact).abs().max().item() if exact.numel() else 0.0
    return SLACK * error + ROUNDINGS * torch.finfo(dtype).eps * largest


def _weights_fault(
    weights: torch.Tensor, meant: torch.Tensor, held: torch.Tensor, normalize: str
) -> str | None:
    """Where the weights [n, n] of a head are not those that are meant, or not on its pairs."""
    if (at := _first(weights.ne(0) & ~held)) is not None:
        return f"query {at[0]} reads key {at[1]}, which is no pair"
    # relu alone gives weight 0 to keys that are read
    if normalize != "relu" and (at := _first(weights.eq(0) & held)) is not None:
        return f"query {at[0]} does not read key {at[1]}"
    if (at := _first((weights - meant).abs() > ROUNDINGS * 1e-12)) is not None:
        return f"query {at[0]} weighs key {at[1]} with {weights[at]:.6g}, not {meant[at]:.6g}"
    return None


def _with_gradients(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The output of `run` and its gradients."""
    import torch

    given = [x.detach().requires_grad_() for x in tensors]
    out = run(given[0], given[1], given[2])
    return out.detach(), *torch.autograd.grad(out, given, grad)


def _tiles_fault(work: Work) -> str | None:
    """Where the tiles are not the graph, each pair once; FULL tiles and masks apart."""
    layout = tile_layout(work.relation, work.n_q, work.n_k, TilesBackend().tile(work))
    full, masked, times = layout.dense()
    q = np.arange(work.n_k - work.n_q, work.n_k)
    held = evaluate_pairs(work.relation, q[:, None], np.arange(work.n_k)[None], work.n_k)
    for wrong, words in (
        (full & ~held, "a FULL tile holds the pair"),
        (masked & ~held, "a mask holds the pair"),
        (held & ~(full | masked), "no tile holds the pair"),
        (times > 1, "two tiles hold the pair"),
    ):
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            return f"{words} ({q[row]}, {column})"
    kinds = layout.kinds[layout.kinds != FULL_TILE]
    if len(kinds) and kinds.max() >= len(layout.masks):
        return "a tile has a mask that is not there"
    return None


def _sample(program: Program, n: int) -> dict[str, torch.Tensor]:
    """Inputs as a call might bring them, for a batch of one."""
    import torch

    found = {}
    for entry in program.inputs:
        if entry.kind == "tokens":
            marked = torch.rand(1, n) < 0.1
            if entry.at_most is not None:
                marked &= marked.cumsum(1) <= entry.at_most
            found[entry.name] = marked
        elif entry.kind == "ids":
            found[entry.name] = torch.arange(n)[None] // max(1, n // 3)
        else:
            found[entry.name] = torch.tensor([n // 2])
    return found


def _first(wrong: torch.Tensor) -> tuple[int, int] | None:
    """The place of the first True of [n, m]."""
    places = wrong.nonzero()
    return (int(places[0, 0]), int(places[0, 1])) if len(places) else None
