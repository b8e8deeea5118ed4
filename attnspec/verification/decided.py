"""Graphs that the data decide, for random data: what kernels read and give, held against what is
decided and the dense definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from attnspec.backends.planner import AUTO
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.lower.work import Work
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.definition import gradients
from attnspec.verification.formulas import Run
from attnspec.verification.report import Check
from attnspec.verification.trial import Shape

CLOSE = 1e-9
"""How far float64 numbers may be apart, for numbers of about 1."""


def decided_checks(
    program: Program,
    module: CompiledAttention,
    shape: Shape,
    works: Sequence[tuple[Work, tuple[int, ...]]],
    data: Mapping[str, torch.Tensor],
) -> Iterator[Check]:
    """What is compared of the heads of some layers, together, with what the program means."""
    shape = shape.apart()
    run = shape.run(module, data)
    before = module.training
    # a call in training moves what is kept, and the next one decides something else
    module.eval()
    k = run.drawn(shape.n)
    shared = any(work.unit_keys for work, _ in works)
    q = k[:, :, shape.n - shape.n_q :].clone() if shared else run.drawn(shape.n_q)
    place = shape.layers, None, module.backend
    formulas = any(work.mechanism is not None for work, _ in works)
    backend = AUTO if formulas else "dense"
    definition = CompiledAttention(plan_data(replace(program, crossing=None), backend)).eval()
    definition.make_parameters(q.shape[3], q.shape[3])
    definition.load_state_dict(module.state_dict())
    for what, fault in (
        (
            "keys are read that were decided, and no others",
            _pairs_fault(run, definition, works, q, k),
        ),
        (
            "outputs and gradients agree with the definition",
            _numbers_fault(run, definition, q, k),
        ),
    ):
        yield Check(*place, what, shape.n_q, shape.n_q, fault)
    module.train(before)


def _pairs_fault(
    run: Run,
    definition: CompiledAttention,
    works: Sequence[tuple[Work, tuple[int, ...]]],
    q: torch.Tensor,
    k: torch.Tensor,
) -> str | None:
    """With the unit vectors as values, the output is the weights themselves."""
    v = torch.eye(run.n, dtype=torch.float64).expand(1, run.heads, -1, -1)
    weights = run(q, k, v)[0].detach()
    first = 0 if run.keys is not None else run.n - run.n_q
    held = definition.pairs(q, k, layer=run.layer, inputs=run.data)[0]
    for work, heads in works:
        for head in heads:
            read = weights[head] != 0
            wrong = read & ~held[head] if work.normalize == "relu" else read != held[head]
            if bool(wrong.any()):
                at, key = (int(x) for x in wrong.nonzero()[0])
                said = "is read" if bool(read[at, key]) else "is not read"
                return f"head {head}: key {key} {said} by query {at + first}"
    return None


def _numbers_fault(
    run: Run, definition: CompiledAttention, q: torch.Tensor, k: torch.Tensor
) -> str | None:
    v, grad = run.drawn(run.n), run.drawn(run.n_q)
    found = []
    for module in (run.module, definition):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = module(*leaves, layer=run.layer, inputs=run.data)
        found.append((out.detach(), *gradients(out, grad, [*leaves, *module.parameters()])))
    names = ["output", "dq", "dk", "dv", *(name for name, _ in definition.named_parameters())]
    for name, one, other in zip(names, *found, strict=True):
        size = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        apart = float((one - other).abs().max()) if other.numel() else 0.0
        if not apart <= CLOSE * size:
            return f"{name} differs by {apart:.3g}"
    return None
