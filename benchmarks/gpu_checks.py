"""Every spec of the zoo on a GPU, in half precision, beside its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from attnspec.lower.lower import decided_leaves
from attnspec.spec import Spec
from attnspec.verification.numbers import error_bound
from attnspec.verification.samples import sample_inputs
from benchmarks.measuring import Json

Row = dict[str, Json]

Tensors = Sequence[torch.Tensor]

WHOLE = 8192
"""Positions up to which queries of the whole sequence are checked, by the definition of every pair;
of longer ones the last are."""

ROWS = 32
"""Queries that are checked."""

OFF = 0.1
"""The share of these that may differ where a rounding decides which keys are read."""


def able(spec: Spec, n: int, device: str) -> list[str]:
    """Every backend that refuses no layer, but that of all pairs for a long sequence; none where
    the spec has no such length."""
    try:
        steps = spec.plan(n, device).steps
    except ValueError:
        return []
    each = [{x.backend.name for x in step.candidates if x.refusal is None} for step in steps]
    return sorted(name for name in set.intersection(*each) if name != "dense" or n <= WHOLE)


def checked(device: str, spec: Spec, n: int, dtype: torch.dtype, backend: str) -> Row:
    """The largest errors of values and gradients in parts of what is allowed: ok up to 1. Held
    against the definition in float64; data-dependent graphs and mechanisms, beyond the lengths of
    which every pair is compared, against themselves."""
    torch.manual_seed(0)
    heads, size = spec.program.heads or 4, 64
    data = {name: x.to(device) for name, x in sample_inputs(spec.program, n).items()}
    given = [torch.randn(1, heads, n, size).to(device, dtype) for _ in range(3)]
    # what hashes keys that are the queries
    given[1] = given[0].clone() if "lsh" in spec.source else given[1]
    first = 0 if n <= WHOLE else n - ROWS
    places = np.unique(np.linspace(first, n - 1, min(n, ROWS)).round().astype(np.int64))
    at_rows = torch.from_numpy(places).to(device)
    upstream = torch.randn(1, heads, len(places), size).to(device, dtype)
    module = spec.compile(backend, device, size).to(dtype)
    decided = bool(decided_leaves(spec.program))
    summed = any(attend.mechanism for attend in spec.program.attends)
    alone = summed or (decided and n > WHOLE)
    meant = spec.compile("auto" if alone else "dense", device, size).double()
    meant.load_state_dict({name: x.double() for name, x in module.state_dict().items()})

    def run(module: Any, low: int, *x: torch.Tensor, turned: bool = False) -> torch.Tensor:
        # of a long graph the last queries alone are asked for
        out: torch.Tensor = module(x[0][:, :, low:], *x[1:], inputs=data or None)
        if not turned:
            return out[:, :, at_rows - low]
        # as models read it, so that the gradient has the strides of [B, n, H, d]
        return out.transpose(1, 2)[:, at_rows - low].transpose(1, 2)

    # one of each layout: no kernel may take the second for the first
    found = with_gradients(partial(run, module, 0), given, upstream)
    found = with_gradients(partial(run, module, 0, turned=True), given, upstream)
    low = 0 if alone or decided else first
    exact = with_gradients(partial(run, meant, low), [x.double() for x in given], upstream.double())
    largest = max(float(x.abs().max()) for x in exact)
    errors: dict[str, Json] = {}
    off = 0
    for name, mine, right in zip(("out", "q", "k", "v"), found, exact, strict=True):
        allowed = error_bound(right, right.to(dtype).double(), dtype, largest)
        error = (mine.double() - right).abs()
        worst = float(error.max()) / allowed
        errors[name] = worst if math.isfinite(worst) else str(worst)
        if name == "out":
            off = int((error.amax((0, 1, 3)) > allowed).sum())
    ok = all(isinstance(x, float) and x <= 1 for x in errors.values())
    decides = decided and off <= OFF * len(places)
    return {"ok": ok or decides, "errors": errors, "queries_off": off, "queries": len(places)}


def with_gradients(run: Callable[..., torch.Tensor], given: Tensors, upstream: Any) -> Tensors:
    inputs = [x.detach().requires_grad_() for x in given]
    out = run(*inputs)
    grads = torch.autograd.grad(out, inputs, upstream, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]
