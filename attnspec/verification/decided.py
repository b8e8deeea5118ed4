"""Data-dependent graphs, for random data: what a module computes beside the dense definition
of the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnspec.backends.planner import AUTO
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.meaning import Run, Works
from attnspec.verification.numbers import NAMES
from attnspec.verification.report import Check

CLOSE = 1e-9
"""How far float64 numbers may be apart, for numbers of about 1."""


def decided_checks(program: Program, run: Run, works: Works) -> Iterator[Check]:
    """What is compared of the heads of some layers, together, with what the program means."""
    module = run.module
    k = run.drawn(run.n)
    shared = any(work.unit_keys for work, _ in works)
    q = k[:, :, run.first :].clone() if shared else run.drawn(run.n_q)
    formulas = any(work.mechanism is not None for work, _ in works)
    backend = AUTO if formulas else "dense"
    definition = CompiledAttention(plan_data(replace(program, crossing=None), backend)).eval()
    definition.make_parameters(q.shape[3], q.shape[3])
    definition.load_state_dict(module.state_dict())
    meant = replace(run, module=definition)
    what = "keys are read that were decided, and no others"
    yield run.check(None, module.backend, what, run.n_q, _pairs_fault(run, meant, works, q, k))
    what = "outputs and gradients agree with the definition"
    yield run.check(None, module.backend, what, run.n_q, _numbers_fault(run, meant, q, k))


def _pairs_fault(run: Run, meant: Run, works: Works, q: Tensor, k: Tensor) -> str | None:
    """With the unit vectors as values, the output is the weights themselves."""
    v = torch.eye(run.n, dtype=torch.float64).expand(1, run.heads, -1, -1)
    read = run(q, k, v)[0].detach() != 0
    pairs = meant.module.pairs(q, k, layer=run.layers[0], inputs=run.data)[0]
    for work, heads in works:
        for head in heads:
            few = read[head] & ~pairs[head]
            wrong = few if work.normalize == "relu" else read[head] != pairs[head]
            if bool(wrong.any()):
                at, key = (int(x) for x in wrong.nonzero()[0])
                verb = "is read" if bool(read[head, at, key]) else "is not read"
                return f"head {head}: key {key} {verb} by query {at + max(0, run.first)}"
    return None


def _numbers_fault(run: Run, meant: Run, q: Tensor, k: Tensor) -> str | None:
    v, grad = run.drawn(run.n), run.drawn(run.n_q)
    grads = [x.differentiated((q, k, v), grad, x.module.parameters()) for x in (run, meant)]
    names = [*NAMES, *(name for name, _ in meant.module.named_parameters())]
    for name, one, other in zip(names, *grads, strict=True):
        size, apart = (float(x.abs().max()) if x.numel() else 0.0 for x in (other, one - other))
        if not apart <= CLOSE * max(1.0, size):
            return f"{name} differs by {apart:.3g}"
    return None
