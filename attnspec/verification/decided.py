"""Data-dependent graphs, for random data: what a module computes beside the dense definition
of the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnspec.backends.planner import AUTO
from attnspec.ir.serial import plan_data
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.meaning import Numbers
from attnspec.verification.numbers import NAMES
from attnspec.verification.report import Check
from attnspec.verification.trial import Trial

CLOSE = 1e-9
"""How far float64 numbers may be apart, for numbers of about 1."""


def decided_checks(trial: Trial) -> Iterator[Check]:
    """What is compared of the heads of some layers, together, with what the program means."""
    module, works = trial.module, trial.works
    k = trial.drawn(trial.n)
    shared = any(work.unit_keys for work, _ in works)
    q = k[:, trial.first :].clone() if shared else trial.drawn(trial.n_q)
    formulas = any(work.mechanism is not None for work, _ in works)
    backend = AUTO if formulas else "dense"
    definition = CompiledAttention(plan_data(replace(trial.program, crossing=None), backend)).eval()
    definition.make_parameters(q.shape[2], q.shape[2])
    definition.load_state_dict(module.state_dict())
    # with the unit vectors as values, the output is the weights themselves
    units = torch.eye(trial.keys, dtype=q.dtype).expand(trial.heads, -1, -1)
    read = trial.called(module, q, k, units).detach() != 0
    parts = q[None], k[None, :, : trial.keys]
    pairs = definition.pairs(*parts, layer=trial.layers[0], inputs=trial.data)[0]
    what, fault = "keys are read that were decided, and no others", None
    for work, heads in works:
        for head in heads:
            wrong = read[head] & ~pairs[head]
            if work.normalize != "relu":
                wrong = read[head] != pairs[head]
            if fault is None and bool(wrong.any()):
                at, key = wrong.nonzero()[0].tolist()
                verb = "is read" if bool(read[head, at, key]) else "is not read"
                fault = f"head {head}: key {key} {verb} by query {at + trial.first}"
    yield trial.check(None, module.backend, what, trial.n_q, fault)
    given = trial.drawn(trial.n_q), q, k, trial.drawn(trial.n)
    mine, meant = (
        trial.results(each, Numbers(given, dict(each.named_parameters())), slice(None))
        for each in (module, definition)
    )
    what, fault = "outputs and gradients agree with the definition", None
    both = zip(mine.heads, meant.heads, strict=True)
    named = dict(zip(NAMES, both, strict=True))
    named |= {name: (mine.learned[name], x) for name, x in meant.learned.items()}
    for name, (one, other) in named.items():
        size, apart = (float(x.abs().max()) if x.numel() else 0.0 for x in (other, one - other))
        if fault is None and not apart <= CLOSE * max(1.0, size):
            fault = f"{name} differs by {apart:.3g}"
    yield trial.check(None, module.backend, what, trial.n_q, fault)
