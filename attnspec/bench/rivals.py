"""What a spec is timed beside: dense attention, the same mask elsewhere, each backend by name.

A rival takes the tensors of a `Problem`; one that cannot do the work says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.masks import with_data
from attnspec.backends.common.score_formula import scale_of
from attnspec.backends.planner import AUTO, OWN, backend_of, choose
from attnspec.layout.edge_count import edges_of
from attnspec.limits import LIMITS
from attnspec.lower.costs import dense_seconds
from attnspec.lower.lower import Binder
from attnspec.lower.work import Backend, BackendError
from attnspec.runtime.module import CompiledAttention
from attnspec.spec import Spec
from attnspec.verification.samples import sample_inputs

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v -> the output."""

OURS, SDPA, MASK, FLEX = "ours", "sdpa", "mask", "flex"

RIVALS = (SDPA, MASK, FLEX, *OWN)
"""Dense attention without a mask, with the spec's mask, FlexAttention, and our backends."""

COUNTED = 1 << 30
"""Pairs that are examined to count edges; beyond, the number is estimated."""

SAME = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""The largest difference at which two results count as the same."""


class Refused(Exception):
    """Why a rival is not timed."""


@dataclass(frozen=True)
class Setting:
    """What is computed: the shape of the tensors, their type, and with gradients or without."""

    heads: int
    batch: int = 1
    size: int = 64
    dtype: torch.dtype = torch.float32
    backward: bool = False
    layer: int = 0
    backend: str = AUTO


class Problem:
    """A layer of a spec at one length, with tensors; the same numbers each time."""

    def __init__(self, spec: Spec, n: int, setting: Setting) -> None:
        self.spec, self.n, self.setting = spec, n, setting
        self._predicted: dict[str, float] = {}
        program = spec.program
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.sample = {name: x[0] for name, x in sample_inputs(program, n).items()}
        self.inputs = {
            name: x.expand(setting.batch, *x.shape).contiguous() for name, x in self.sample.items()
        }
        self.works = Binder(program).works(setting.layer, setting.heads, n, n)

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [batch, heads, n, size]."""
        setting = self.setting
        generator = torch.Generator().manual_seed(0)
        shape = (setting.batch, setting.heads, self.n, setting.size)
        drawn = (torch.randn(shape, generator=generator).to(setting.dtype) for _ in range(3))
        q, k, v = (x.requires_grad_(setting.backward) for x in drawn)
        return q, q if any(work.unit_keys for work, _ in self.works) else k, v

    @property
    def decided(self) -> bool:
        """Whether queries and keys decide pairs, those of the tensors here."""
        return any(work.decided for work, _ in self.works)

    def module(self, backend: str) -> CompiledAttention:
        """The compiled module, which starts with the same numbers each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.spec.compile(backend, head_size=self.setting.size)

    @cached_property
    def pairs(self) -> Tensor:
        """The pairs that the tensors decide, bool [batch, heads, n, n]; raises Refused."""
        if self.n > LIMITS.pairs_shown:
            raise Refused(f"its pairs are examined up to n = {LIMITS.pairs_shown:,}")
        q, k, _ = (x.detach() for x in self.tensors)
        return self.module(AUTO).pairs(q, k, layer=self.setting.layer, inputs=self.inputs or None)

    @cached_property
    def edges(self) -> float | None:
        """Pairs of one head, the mean over the heads; estimated where counting takes long. None
        where tensors decide more of them than are examined."""
        if self.decided:
            shape = self.setting.batch * self.setting.heads
            return float(self.pairs.sum()) / shape if self.n <= LIMITS.pairs_shown else None
        total = 0.0
        values = {name: x.numpy() if x.ndim else x.item() for name, x in self.sample.items()}
        for work, heads in self.works:
            relation = with_data(work.relation, values)
            few = relation.progressions(np.arange(min(self.n, 1)), self.n) is not None
            counted = few or self.n * self.n <= COUNTED
            edges = relation.edges(self.n) if counted else edges_of(relation, self.n, self.n)
            total += len(heads) * edges
        return total / self.setting.heads

    @cached_property
    def plan(self) -> list[str]:
        """The names of the backends of each group of heads; raises BackendError."""
        try:
            return [backend.name for backend in self.backends(self.setting.backend)]
        except Refused as refusal:
            message = f"the backend '{self.setting.backend}' refuses: {refusal}"
            raise BackendError(message) from None

    def backends(self, name: str) -> list[Backend]:
        """The backend of each group of heads: the named or the chosen one; raises Refused."""
        backends = []
        for work, _ in self.works:
            backend = choose(work, "cpu") if name == AUTO else backend_of(name)
            refusal = backend.refuses(work, "cpu")
            if refusal is not None:
                raise Refused(refusal)
            backends.append(backend)
        return backends

    def predicted(self, rival: str) -> float | None:
        """Estimated seconds of a rival or backend for all heads, forward, None where there is no
        estimate; raises Refused."""
        if rival == FLEX:
            return None
        if rival in self._predicted:
            return self._predicted[rival]
        costs = [dense_seconds] * len(self.works)
        if rival not in (SDPA, MASK):
            costs = [backend.cost for backend in self.backends(rival)]
        pairs = zip(costs, self.works, strict=True)
        total = sum(len(heads) * cost(work) for cost, (work, heads) in pairs)
        self._predicted[rival] = total * self.setting.batch * self.setting.size / 64
        return self._predicted[rival]

    def call(self, attention: Attention) -> Callable[[], object]:
        """One call, and where gradients are wanted those of q, k and v."""
        if not self.setting.backward:
            return lambda: self.output(attention)
        inputs = self.tensors
        upstream = torch.ones_like(inputs[0])
        return lambda: torch.autograd.grad(attention(*inputs), inputs, upstream)

    def output(self, attention: Attention) -> Tensor:
        """The output, without gradients."""
        with torch.no_grad():
            return attention(*self.tensors)


def ours(problem: Problem, backend: str) -> Attention:
    """The compiled module, by a backend or the planner's choice; raises Refused."""
    problem.predicted(backend)
    if backend == "dense" and problem.n > LIMITS.mask:
        raise Refused(f"its mask is built up to n = {LIMITS.mask:,}")
    module, layer = problem.module(backend), problem.setting.layer
    inputs = problem.inputs or None
    return lambda q, k, v: module(q, k, v, layer=layer, inputs=inputs)


def rival(problem: Problem, name: str) -> Attention:
    """The attention of a rival; raises Refused."""
    if name == SDPA:
        return functional.scaled_dot_product_attention
    if name == MASK:
        return _masked(problem)
    return _flex(problem) if name == FLEX else ours(problem, name)


def _masked(problem: Problem) -> Attention:
    """Dense attention with the spec's mask."""
    scale = _scale(problem)
    mask = problem.pairs if problem.decided else _mask(problem)
    return lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale
    )


def _mask(problem: Problem) -> Tensor:
    """The mask of the spec, bool [1, heads or 1, n, n]; raises Refused."""
    n, size = problem.n, problem.n**2 * len(problem.works)
    if n > LIMITS.mask or size > LIMITS.mask_bytes:
        raise Refused(f"its masks take {size / 2**30:,.1f} GiB, and the limit is 1 GiB")
    inputs = {name: x.numpy() for name, x in problem.sample.items()}
    masks = torch.empty(len(problem.works), n, n, dtype=torch.bool)
    for mask, (_, heads) in zip(masks, problem.works, strict=True):
        dense = problem.spec.mask(n, problem.setting.layer, heads[0], inputs)
        mask.copy_(torch.from_numpy(dense))
    # with four dimensions torch keeps to its fast kernel
    if len(masks) == 1:
        return masks[None]
    numbers = torch.zeros(problem.setting.heads, dtype=torch.int64)
    for number, (_, heads) in enumerate(problem.works):
        numbers[list(heads)] = number
    return masks[None, numbers]


def _flex(problem: Problem) -> Attention:
    """FlexAttention, compiled, with the mask of `Spec.to_flex`."""
    scale, setting = _scale(problem), problem.setting
    if setting.backward:
        raise Refused("FlexAttention has no backward on the CPU")
    if problem.decided:
        raise Refused("its block mask is made before a call, and the pairs are chosen in each call")
    if problem.n > LIMITS.mask:
        raise Refused(f"its block mask is made up to n = {LIMITS.mask:,} here")
    from torch.nn.attention.flex_attention import flex_attention

    # one mask serves heads that are alike
    heads = None if len(problem.works) == 1 else setting.heads
    inputs = problem.inputs or None
    torch.compiler.reset()
    try:
        mask = problem.spec.to_flex(problem.n, setting.layer, inputs, heads).block_mask()
        with warnings.catch_warnings():
            # what a compiler has to say about another package's kernel helps nobody here
            warnings.simplefilter("ignore")
            compiled = torch.compile(flex_attention, dynamic=False)
            with torch.no_grad():
                compiled(*problem.tensors, block_mask=mask, scale=scale)
    except Exception as error:
        raise Refused(f"it cannot be compiled here: {_reason(error)}") from None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = compiled(q, k, v, block_mask=mask, scale=scale)
        return output

    return run


def _scale(problem: Problem) -> float:
    """The one scale of all heads; Refused where a mask is not all there is to the work."""
    formula = next((w.mechanism for w, _ in problem.works if w.mechanism is not None), None)
    if formula is not None:
        raise Refused(f"`{formula.name}` is a formula, and a mask is not")
    changed = any(leaf.weighs for work, _ in problem.works for leaf in work.decided)
    if changed or not all(work.plain for work, _ in problem.works):
        raise Refused("the spec changes its scores or their normaliser, and a mask cannot")
    scales = {scale_of(work, problem.setting.size) for work, _ in problem.works}
    if len(scales) > 1:
        raise Refused("the heads have different scales")
    return scales.pop()


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."
