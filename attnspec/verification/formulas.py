"""Mechanisms held against their formulas: weights where pairs have them, outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from attnspec.backends.factored.definitions import (
    defined,
    divided,
    has_weights,
    magnitudes_of,
    totals_of,
    weights_of,
)
from attnspec.limits import LIMITS
from attnspec.lower.work import Work
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.definition import NAMES, Results, gradients
from attnspec.verification.numbers import ROUNDINGS, SIZE, Heads, moderate, numbers_fault


@dataclass(frozen=True, eq=False)
class Run:
    """Calls of a layer of a module with the last `n_q` of `n` positions, for a batch of one. The
    first `keys` of them are keys, where queries are another sequence."""

    module: CompiledAttention
    layer: int
    n_q: int
    n: int
    heads: int
    data: Mapping[str, torch.Tensor]
    keys: int | None = None

    def drawn(self, length: int) -> torch.Tensor:
        """Random rows of all heads, [1, heads, length, SIZE]."""
        return torch.randn(1, self.heads, length, SIZE, dtype=torch.float64)

    def scored(self, works: Heads) -> tuple[torch.Tensor, torch.Tensor]:
        """Random queries and keys of heads that compute these works, whose scores are moderate."""
        factors = moderate(works, self.heads)
        return self.drawn(self.n_q) * factors[0], self.drawn(self.n) * factors[1]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x[:, :, : self.keys] for x in (k, v))
        out: torch.Tensor = self.module(q, k, v, layer=self.layer, inputs=self.data)
        return out


class FormulaTrial:
    """The heads of a layer that run mechanisms."""

    def __init__(self, run: Run, works: Heads) -> None:
        self.run, self.module, self.works, self.drawn = run, run.module, works, run.drawn

    def weights(self) -> Iterator[tuple[Work, tuple[int, ...], str | None]]:
        """What is wrong with the weights of the heads of each work that has weights."""
        weighed = [(work, heads) for work, heads in self.works if has_weights(work)]
        if not weighed:
            return
        q, k = self.run.scored(self.works)
        parts = []
        for low in range(0, self.run.n, LIMITS.unit_vectors):
            v = torch.eye(self.run.n, dtype=torch.float64)[:, low : low + LIMITS.unit_vectors]
            parts.append(self.run(q, k, v.expand(1, self.run.heads, -1, -1))[0])
        found = torch.cat(parts, -1)
        for work, heads in weighed:
            faults = []
            for head in heads:
                tables = self._tables(work, head, self._learned(torch.float64))
                meant = weights_of(work, head, q[0, head], k[0, head], tables)
                faults.append(self._weights_fault(found[head], meant))
            yield work, heads, next((fault for fault in faults if fault is not None), None)

    def numbers(self) -> Iterator[tuple[Work, tuple[int, ...], str | None]]:
        """What is wrong with the outputs and gradients of the heads of each work."""
        (q, k), v = self.run.scored(self.works), self.drawn(self.run.n)
        tried = sorted(head for _, heads in self.works for head in heads)
        grad = torch.zeros_like(q)
        grad[:, tried] = self.drawn(self.run.n_q)[:, tried]
        learned = dict(self.module.named_parameters())
        narrow = [x.float().requires_grad_() for x in (q, k, v)]
        out = self.run(*narrow)
        found = gradients(out, grad.float(), [*narrow, *learned.values()])
        meant = [self._meant(q, k, v, grad, kind) for kind in (torch.float64, torch.float32)]
        for work, heads in self.works:
            names = [name for _, name in self.module.engine.tables_of(work)]
            fault = None
            for head in heads:
                mine = [out.detach()[0, head], *(x[0, head] for x in found[:3])]
                mine += [found[3 + list(learned).index(name)].flatten() for name in names]
                results = []
                for outs, grads in meant:
                    tensors = [outs[head], *(x[0, head] for x in grads[:3])]
                    tensors += [grads[3 + list(learned).index(name)].flatten() for name in names]
                    results.append(tuple(tensors))
                largest = max(x.abs().max().item() for x in results[0][:4])
                largest = max(largest, self._added(work, head, q, k, v, grad))
                labels = (*NAMES, *(f"gradient of {name}" for name in names))
                exact = Results(labels, results[0], largest)
                fault = numbers_fault(
                    Results(labels, tuple(mine)), exact, Results(labels, results[1])
                )
                if fault is not None:
                    break
            yield work, heads, fault

    def _meant(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        grad: torch.Tensor,
        kind: torch.dtype,
    ) -> tuple[dict[int, torch.Tensor], tuple[torch.Tensor, ...]]:
        """The outputs of all heads by the definition, and the gradients of q, k, v and of what is
        learned."""
        given = [x.to(kind).requires_grad_() for x in (q, k, v)]
        learned = self._learned(kind)
        outs, total = {}, torch.zeros((), dtype=kind)
        for work, heads in self.works:
            for head in heads:
                tables = self._tables(work, head, learned)
                q, k, v = (x[0, head] for x in given)
                out = defined(work, head, q, k, v, tables)
                outs[head] = out.detach()
                total = total + (out * grad[0, head].to(kind)).sum()
        leaves = [*given, *learned.values()]
        return outs, torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    def _added(
        self,
        work: Work,
        head: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        grad: torch.Tensor,
    ) -> float:
        """The largest of the numbers that are added up: negative weights cancel in the output, and
        the two parts of a gradient, one of them through the sums of weights, in each other."""
        if not has_weights(work):
            return 0.0
        tables = self._tables(work, head, self._learned(torch.float64))
        q, k = (x[0, head].detach().requires_grad_() for x in (q, k))
        weights = weights_of(work, head, q, k, tables, steady=True)
        found = torch.autograd.grad(
            (weights @ v[0, head] * grad[0, head]).sum(), (q, k), materialize_grads=True
        )
        sizes = magnitudes_of(work, head, q, k, tables).detach()
        cancelled = divided(work, sizes, totals_of(work, head, q, k, tables).detach()).abs()
        most = cancelled.sum(-1).max().item()
        return max(most, *(x.abs().max().item() for x in found)) * max(1.0, most)

    def _learned(self, kind: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().to(kind).requires_grad_()
            for name, parameter in self.module.named_parameters()
        }

    def _tables(
        self, work: Work, head: int, learned: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        found = {}
        for called, name in self.module.engine.tables_of(work):
            table = learned[name]
            rows = table[self.run.layer if len(table) > 1 else 0]
            found[called] = rows[head if len(rows) > 1 else 0]
        return found

    def _weights_fault(self, found: torch.Tensor, meant: torch.Tensor) -> str | None:
        """The first pair that weighs something else; all sums are of numbers of the row's size."""
        allowed = ROUNDINGS * 1e-12 * meant.abs().amax(-1, keepdim=True).clamp(min=1.0)
        wrong = ~((found - meant).abs() <= allowed)
        if not wrong.any():
            return None
        row, key = wrong.nonzero()[0].tolist()
        query = row + self.run.n - self.run.n_q
        return (
            f"query {query} weighs key {key} with {found[row, key]:.6g}, not {meant[row, key]:.6g}"
        )
