"""From a program to what is found of it: every layer and head, by the backends that are asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from attnspec.backends.planner import AUTO
from attnspec.backends.tables.backend import TablesBackend
from attnspec.graphs.stack import TooMuch
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import Binder
from attnspec.lower.mechanism_sizes import learned_parts
from attnspec.lower.work import BackendError
from attnspec.runtime.module import CompiledAttention
from attnspec.verification.numbers import SIZE
from attnspec.verification.report import Check, Verification
from attnspec.verification.samples import sample_inputs, words_of
from attnspec.verification.trial import Depth, Known, Trial, Works

HEADS = 2
"""The heads that are tried where the spec declares none."""


def verify(
    program: Program,
    n: int,
    *,
    backend: str = AUTO,
    module: nn.Module | None = None,
    depth: Depth = "whole",
    known: Known | None = None,
    m: int | None = None,
) -> Verification:
    """Compares a module of the program, by default one that is built here, with the spec's meaning.

    The module must be a `CompiledAttention`, also one of a standalone file. A fraction of the
    time goes into "pairs", tables and outputs of graphs in float64, so that the definition has no
    checks, and less into "values", where outputs and gradients of some queries are all that is
    compared.
    Of a program with `cross` n are the keys, and m, n if it is not given, the queries.
    With `known` of another call what the definition says is not computed again.

    Raises ValueError for n above `LIMITS.planned`, for one that the spec does not have, and where
    it is too long for what would run it; BackendError for a backend that refuses.
    """
    forced = module is None and backend == TablesBackend.name
    compiled = CompiledAttention(plan_data(program, backend)) if module is None else module
    attention = cast(CompiledAttention, compiled)
    # an empty one is kept, too
    meant = Cache(LIMITS.layouts) if known is None else known
    program, length = crossed(program, n, m)
    n_q = n if program.crossing is None else program.crossing.queries
    for name, count in (("n", n), ("m", n_q)):
        if not 1 <= count <= LIMITS.planned:
            raise TooMuch(f"{name} must be between 1 and {LIMITS.planned:,}, got {count:,}")
    attention.make_parameters(SIZE, SIZE)
    heads, checks, skipped = program.heads or HEADS, list[Check](), dict[str, None]()
    exhaustive = True
    # the groups of heads that layers compute, with the layers that share them
    binder, groups = Binder(program), dict[Works, list[int]]()
    for layer in range(program.layer_count):
        groups.setdefault(tuple(binder.works(layer, heads, n_q, n)), []).append(layer)
    with torch.random.fork_rng(devices=[]), learned(attention):
        data = sample_inputs(program, n, n_q)
        for works, layers in groups.items():
            called = attention, program, data, n_q, length, n, tuple(layers), heads, works
            trial = Trial(*called, depth, forced, meant)
            if any(work.decided for work, _ in works):
                checks.extend(trial.decided_checks() if depth != "pairs" else ())
                continue
            checks.extend(sorted(trial.checks(), key=lambda check: check.heads or ()))
            skipped |= dict.fromkeys(trial.skipped)
            exhaustive &= trial.exhaustive
    m = n_q if program.crossing else None
    words = words_of(program, data)
    return Verification(program.name, n, exhaustive, tuple(checks), tuple(skipped), (), m, words)


def verify_each(
    program: Program,
    n: int,
    backends: Sequence[str],
    m: int | None = None,
    depth: Depth = "whole",
) -> Verification:
    """The same with each of these backends; those that refuse, or that n is too long for, are
    named in the report. Raises BackendError or TooMuch where all of them are."""
    verifications: list[Verification] = []
    refused: dict[str, Exception] = {}
    answers: Known = Cache(LIMITS.layouts)
    for backend in backends:
        try:
            found = verify(program, n, backend=backend, depth=depth, known=answers, m=m)
            verifications.append(found)
        except (BackendError, TooMuch) as error:
            refused[backend] = error
    if refused and not verifications:
        raise refused.popitem()[1]
    return replace(
        verifications[0],
        exhaustive=all(each.exhaustive for each in verifications),
        checks=tuple(check for each in verifications for check in each.checks),
        skipped=tuple(dict.fromkeys(what for each in verifications for what in each.skipped)),
        refused=tuple((name, str(error)) for name, error in refused.items()),
    )


@contextmanager
def learned(module: CompiledAttention) -> Iterator[None]:
    """Random numbers in place of what is learned, which may start as zeros and would show nothing,
    and behind them the same numbers every time; not in training, in which a call moves what is
    kept, and the next one decides something else.

    Layers of networks keep the size that they start with, so that they do not amplify roundings.
    """
    parts = learned_parts(module.program)
    scaled = {name for (_, part), name in parts.items() if part.start == "scaled"}
    before = deepcopy(module.state_dict())
    training = module.training
    # `torch.manual_seed` would seed the users' other devices too, which nothing puts back
    torch.default_generator.manual_seed(0)
    module.eval()
    try:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                width = parameter.shape[-1] if name in scaled else 1
                parameter.normal_(std=1 / math.sqrt(max(1, width)))
        yield
    finally:
        module.load_state_dict(before)
        module.train(training)
