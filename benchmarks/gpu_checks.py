"""Every spec of the zoo on a device, held against float64: values and gradients.

Up to `WHOLE` positions the definition of every pair is computed; beyond it the definition of some
queries, whose gradients are complete where nothing comes from the others. What the data decide and
mechanisms are held against themselves in float64 there, which the tests hold against the definition
on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from attnspec.backends import BACKENDS
from attnspec.backends.common.masks import mask_plan
from attnspec.backends.common.score_formula import Blocks, Formula
from attnspec.backends.planner import AUTO
from attnspec.elaborate import attention_names
from attnspec.graphs.bind import BindError
from attnspec.lower.lower import decided_leaves, stand_ins, works_of
from attnspec.lower.work import Call, refusal_of
from attnspec.spec import Spec, load
from attnspec.text.decoding import read_source
from attnspec.verification import sample_inputs
from attnspec.verification.numbers import error_bound
from benchmarks.measuring import Json

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

WHOLE = 8192
"""Positions up to which every pair is looked at."""

ROWS = 32
"""Queries that are looked at, spread over the sequence, the first and the last among them."""

OFF = 0.1
"""The share of these that may differ where a rounding decides which keys are read."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """On which device what is checked; `every` leaves out all files of the zoo but one in so many,
    and `heads` are those of specs that declare none."""

    device: str
    lengths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    every: int = 1
    heads: int = 4
    size: int = 64


@dataclass(frozen=True)
class Check:
    """A spec at a length in a type on one backend, or as is chosen."""

    path: str
    name: str
    n: int
    dtype: torch.dtype
    backend: str

    @property
    def key(self) -> str:
        """What tells it from others."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"check {self.path}:{self.name}, n = {self.n}, {kind}, {self.backend}"


def checks(settings: Settings) -> Iterator[Check]:
    """All of them, in the order in which they are worth most: what is chosen before each backend by
    itself, and the first type before the second; a spec of one length has that alone."""
    files = sorted(EXAMPLES.glob("*.attn"))[:: settings.every]
    named = [(path, name) for path in files for name in attention_names(read_source(path))]
    for turn, length in enumerate(settings.lengths):
        later = []
        for path, name in named:
            spec = _spec(path.name, name)
            n = spec.program.fixed_length or length
            if turn and n != length:
                continue
            for place, backend in enumerate(_backends(spec, n, settings)):
                for kind, dtype in enumerate(settings.dtypes):
                    check = Check(path.name, name, n, dtype, backend)
                    if place or kind:
                        later.append((place > 0, kind, check))
                    else:
                        yield check
        yield from (check for *_, check in sorted(later, key=lambda each: each[:2]))


@cache
def _spec(path: str, name: str) -> Spec:
    return load(EXAMPLES / path, name=name)


def _backends(spec: Spec, n: int, settings: Settings) -> list[str]:
    """What is chosen, and every backend for graphs that refuses nothing of any layer."""
    program = spec.program
    heads, layers = program.heads or 1, range(program.layers or 1)
    try:
        works = [x for i in layers for x in works_of(program, i, heads, n, n, stand_ins(program))]
    except BindError:
        return []
    able = [
        backend.name
        for backend in BACKENDS
        if all(refusal_of(backend, work, settings.device) is None for work, _ in works)
    ]
    # all pairs of a long sequence are no backend for it
    return [AUTO, *(name for name in able if name != "dense" or n <= WHOLE)]


def checked(check: Check, settings: Settings) -> dict[str, Json]:
    """The largest errors of values and gradients in parts of what is allowed: ok up to 1."""
    spec, device, n = _spec(check.path, check.name), settings.device, check.n
    torch.manual_seed(0)
    heads = spec.program.heads or settings.heads
    data = {name: x.to(device) for name, x in sample_inputs(spec.program, n).items()}
    given = [torch.randn(1, heads, n, settings.size).to(device, check.dtype) for _ in range(3)]
    works = works_of(spec.program, 0, heads, n, n, stand_ins(spec.program))
    if any(work.unit_keys for work, _ in works):
        # what hashes keys that are the queries
        given[1] = given[0].clone()
    places = np.unique(np.linspace(0, n - 1, min(n, ROWS)).round().astype(np.int64))
    rows = torch.from_numpy(places).to(device)
    upstream = torch.randn(1, heads, len(rows), settings.size).to(device, check.dtype)
    module = spec.compile(check.backend, device, settings.size).to(check.dtype)
    found = _with_gradients(lambda *x: module(*x, inputs=data)[:, :, rows], given, upstream)
    exact = _exact(spec, module, given, upstream, rows, data)
    largest = max(float(x.abs().max()) for x in exact)
    errors: dict[str, Json] = {}
    off = 0
    for name, mine, right in zip(("out", "q", "k", "v"), found, exact, strict=True):
        allowed = error_bound(right, right.to(check.dtype).double(), check.dtype, largest)
        error = (mine.double() - right).abs()
        errors[name] = float(error.max()) / allowed
        if name == "out":
            off = int((error.amax((0, 1, 3)) > allowed).sum())
    decides = bool(decided_leaves(spec.program)) and off <= OFF * len(rows)
    ok = all(isinstance(x, float) and x <= 1 for x in errors.values())
    return {"ok": ok or decides, "errors": errors, "queries_off": off, "queries": len(rows)}


def _with_gradients(run: object, given: Tensors, upstream: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in given]
    out = run(*inputs)  # type: ignore[operator]
    grads = torch.autograd.grad(out, inputs, upstream.to(out.dtype), allow_unused=True)
    known: list[torch.Tensor | None] = [*grads]
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, known, strict=True)]
    return [out.detach(), *filled]


def _exact(
    spec: Spec,
    module: torch.nn.Module,
    given: Tensors,
    upstream: torch.Tensor,
    rows: torch.Tensor,
    data: Mapping[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Outputs of the rows and gradients in float64."""
    wide = [x.double() for x in given]
    n, program = given[0].shape[2], spec.program
    by_rows = not decided_leaves(program) and not any(x.mechanism for x in program.attends)
    if by_rows and n > WHOLE:
        return _with_gradients(lambda *x: _rows(spec, x, rows, data, module), wide, upstream)
    known = {name: x.double() for name, x in module.state_dict().items()}
    backend, size = "dense" if by_rows else AUTO, given[0].shape[-1]
    slow = spec.compile(backend, rows.device, size).double()
    slow.load_state_dict(known)
    return _with_gradients(lambda *x: slow(*x, inputs=data)[:, :, rows], wide, upstream)


def _rows(
    spec: Spec,
    parts: Tensors,
    rows: torch.Tensor,
    data: Mapping[str, torch.Tensor],
    module: torch.nn.Module,
) -> torch.Tensor:
    """The definition of some queries [1, H, rows, d] of the first layer."""
    q, k, v = parts
    n, device = q.shape[2], q.device
    program = spec.program
    q_at, k_at = rows.cpu().numpy()[:, None], np.arange(n)[None]
    distance = torch.from_numpy((q_at - k_at)[None]).to(device)
    outs = q.new_zeros(1, q.shape[1], len(rows), v.shape[-1])
    learned = {name: x.double() for name, x in module.named_parameters()}
    for work, heads in works_of(program, 0, q.shape[1], n, n, stand_ins(program)):
        mask = mask_plan(work.relation, q_at, k_at, n, device).mask(data, n)
        mine = list(heads)
        tables = {
            name: (x[0] if x.dim() > 2 else x)[mine] for name, x in learned.items() if x.dim() > 1
        }
        blocks = Blocks(distance, mask.reshape(-1, 1, 1, 1, *mask.shape[-2:]))
        part = [x[:, mine].unsqueeze(2) for x in (q[:, :, rows], k, v)]
        formula = Formula(replace(work, n_q=len(rows)), heads, device)
        out = formula(part[0].unsqueeze(3), part[1], part[2], blocks, Call(tables=tables))
        outs = outs.index_copy(1, torch.tensor(mine, device=device), out[:, :, 0, 0])
    return outs
