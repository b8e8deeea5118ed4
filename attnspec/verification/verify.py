"""From a program to what is found of it: every layer and head, by the backends that are asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from attnspec.backends.planner import AUTO
from attnspec.backends.tables.backend import TablesBackend
from attnspec.graphs.stack import TooMuch
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.lower.lower import Binder
from attnspec.lower.work import BackendError, Works
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.numbers import SIZE
from attnspec.verification.report import Check, Verification
from attnspec.verification.samples import sample_inputs, words_of
from attnspec.verification.trial import Depth, Known, Trial

HEADS = 2
"""The heads that are tried where the spec declares none."""


def verify(
    program: Program,
    n: int,
    backends: Sequence[str] = (AUTO,),
    *,
    module: Any = None,
    depth: Depth = "whole",
    m: int | None = None,
) -> Verification:
    """Compares modules of the program with its meaning: those of backends, which are built here, or
    one `module`, a `CompiledAttention`, also of a standalone file. A fraction of the time goes into
    "pairs", tables and outputs of graphs in float64, so that the definition has no checks, and less
    into "values", where outputs and gradients of some queries are all that is compared.
    Of a program with `cross` n are the keys, and m, n if it is not given, the queries.

    Backends that refuse, or that n is too long for, are named in the report. Raises BackendError or
    TooMuch where all of them are; ValueError for n above `LIMITS.planned`, and for one that the
    spec does not have.
    """
    whole, length = crossed(program, n, m)
    n_q = n if whole.crossing is None else whole.crossing.queries
    for name, count in (("n", n), ("m", n_q)):
        if not 1 <= count <= LIMITS.planned:
            raise TooMuch(f"{name} must be between 1 and {LIMITS.planned:,}, got {count:,}")
    checks, skipped, refused = list[Check](), dict[str, None](), dict[str, Exception]()
    heads, exhaustive, known = program.heads or HEADS, True, Known(LIMITS.answers)
    # the groups of heads that layers compute, with the layers that share them
    binder, groups = Binder(whole), dict[Works, list[int]]()
    for layer in range(program.layer_count):
        groups.setdefault(tuple(binder.works(layer, heads, n_q, n)), []).append(layer)
    for backend in backends:
        forced, mine, trials = backend == TablesBackend.name, list[Check](), list[Trial]()
        try:
            tried = module or CompiledAttention(plan_data(program, backend))
            tried.make_parameters(SIZE, SIZE)
            with torch.random.fork_rng(devices=[]), learned(tried):
                data = sample_inputs(program, n, n_q)
                for works, layers in groups.items():
                    called = tried, whole, data, n_q, length, n, tuple(layers), heads, works
                    trial = Trial(*called, depth, forced, known)
                    if any(work.decided for work, _ in works):
                        mine += trial.decided_checks() if depth != "pairs" else ()
                        continue
                    mine += sorted(trial.checks(), key=lambda check: check.heads or ())
                    trials.append(trial)
        except (BackendError, TooMuch) as error:
            refused[backend] = error
            continue
        checks += mine
        for trial in trials:
            skipped |= dict.fromkeys(trial.skipped)
            exhaustive &= trial.exhaustive
    if len(refused) == len(backends):
        raise refused.popitem()[1]
    # inputs are the same for every backend
    words, m = words_of(program, data), n_q if program.cross else None
    reasons = tuple((name, str(error)) for name, error in refused.items())
    parts = tuple(checks), tuple(skipped), reasons
    return Verification(program.name, n, exhaustive, *parts, m, words)


@contextmanager
def learned(module: CompiledAttention) -> Iterator[None]:
    """Random numbers in place of what is learned, which may start as zeros and would show nothing,
    and behind them the same numbers every time; not in training, in which a call moves what is
    kept, and the next one decides something else.

    Layers of networks keep the size that they start with, so that they do not amplify roundings.
    """
    before = deepcopy(module.state_dict())
    training = module.training
    # `torch.manual_seed` would seed the users' other devices too, which nothing puts back
    torch.default_generator.manual_seed(0)
    module.eval()
    try:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                scaled = module.engine.own[name].start == "scaled"
                width = parameter.shape[-1] if scaled else 1
                parameter.normal_(std=1 / math.sqrt(max(1, width)))
        yield
    finally:
        module.load_state_dict(before)
        module.train(training)
