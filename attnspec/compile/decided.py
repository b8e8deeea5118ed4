"""The pairs that the tensors and inputs of one sample decide, for what is said of graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnspec.backends.planner import AUTO
from attnspec.elaborate import Elaborated
from attnspec.graphs.forms.stability import bound_choice
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Sample, Stack, decides
from attnspec.graphs.written_pairs import WrittenPairs
from attnspec.ir.api_checks import length_of
from attnspec.ir.program import Attend, Program
from attnspec.ir.serial import plan_data
from attnspec.limits import LIMITS
from attnspec.runtime.call_checks import PER_HEAD
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError
from attnspec.verification.samples import drawn

SIZE = 16
"""The size of a head in samples that are drawn."""

Tensors = tuple[npt.ArrayLike, npt.ArrayLike]

Pairs: TypeAlias = "Mapping[tuple[int, int], Relation]"
"""The pairs of layers and heads."""


def decided_pairs(
    program: Program, n: int, inputs: Sample | None, tensors: Tensors | None
) -> Pairs | None:
    """The pairs of every layer and head whose graph tensors decide; None where there is none, or
    where there are no tensors and inputs do not decide alone. Raises ValueError for tensors that do
    not fit."""
    n = length_of(n)
    # whoever calls from outside may hand in anything
    pair: object = tensors
    if pair is not None and not (isinstance(pair, list | tuple) and len(pair) == 2):
        raise TypeError(f"tensors must be a pair (q, k), got {type(pair).__name__}")
    sides = list[Tensor]()
    for name, array in zip("qk", tensors or (), strict=False):
        try:
            tensor = torch.as_tensor(array).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            kind = type(array).__name__
            raise TypeError(f"{name} of `tensors` must be an array, got {kind}") from None
        if tensor.dim() != 3 or tensor.shape[1] != n or not tensor.is_floating_point():
            raise AttnSpecError(
                f"`tensors` must be q and k of one sample, real numbers [H, {n}, d], got {name}"
                f" with the shape {list(tensor.shape)} of {tensor.dtype}"
            )
        sides.append(tensor[None])
    decided = [attend for attend in program.attends if _is_decided(attend)]
    if not decided or not n:
        return None
    data = _batched(inputs or {})
    if any(x.shape[1:2] == (0,) for x in data.values()):
        return None
    if tensors is None:
        chosen = (leaf for attend in decided for leaf in attend.leaves if decides(leaf))
        bound = (bound_choice(program, leaf, n) for leaf in chosen)
        if not all(one is not None and one.given_choice for one in bound):
            return None
        # no query and key decides anything
        heads = max([x.shape[1] for x in data.values() if x.ndim == 4], default=1)
        q = k = torch.zeros(1, program.heads or heads, n, 1)
    else:
        q, k = sides
    return _pairs(program, range(program.layer_count), q, k, data)


def sample_pairs(program: Program, n: int, layers: Iterable[int], inputs: Sample) -> Pairs:
    """The pairs of some layers, beside mechanisms too, for queries and keys that wander at random,
    the same every time, and for random inputs where choices, scores or buckets are not given; none
    where inputs say all that is decided."""
    heads = program.head_count
    chosen = [attend for layer in layers for attend in program.attends_of(layer)]
    later = Stack(program, inputs).decides_later
    if not n or not any(later(leaf) for attend in chosen for leaf in attend.leaves):
        return {}
    if n > LIMITS.pairs_shown:
        raise AttnSpecError(
            f"samples of choices are drawn up to n = {LIMITS.pairs_shown:,}, got {n:,}"
        )
    data = _batched(inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        q = torch.randn(1, heads, n, SIZE)
        for entry in program.inputs:
            if entry.name not in data and entry.kind in PER_HEAD:
                data[entry.name] = drawn(entry, n, n)
    # neighbours are alike, as tokens are
    q = q + 0.5 * q.cumsum(2)
    bare = tuple(replace(x, mechanism=None) if x.graph else x for x in program.attends)
    return _pairs(replace(program, attends=bare), layers, q, q, data)


def _pairs(
    program: Program, layers: Iterable[int], q: Tensor, k: Tensor, inputs: Mapping[str, Tensor]
) -> Pairs:
    """The pairs of the layers and heads where tensors decide some, and no mechanism is."""
    with torch.random.fork_rng(devices=[]):
        # what is learned starts the same every time
        torch.manual_seed(0)
        module = CompiledAttention(plan_data(program, AUTO), q.shape[3]).eval()
    pairs: dict[tuple[int, int], Relation] = {}
    for layer in layers:
        heads = [x for x in range(q.shape[1]) if _is_decided(program.attend(layer, x))]
        if heads:
            masks = module.pairs(q, k, layer=layer, inputs=inputs or None)[0].numpy()
            pairs |= {(layer, head): WrittenPairs(masks[head]) for head in heads}
    return pairs


def _is_decided(attend: Attend) -> bool:
    """Whether tensors decide pairs of a graph that stands alone."""
    return attend.mechanism is None and attend.graph is not None and decides(attend.graph)


def _batched(inputs: Sample) -> dict[str, Tensor]:
    return {name: torch.as_tensor(np.asarray(x))[None] for name, x in inputs.items()}


def told_apart(spec: Elaborated, heads: int) -> Elaborated:
    """A spec that has so many heads, for each of which something else was decided."""
    program = spec.program
    if program.heads is not None:
        return spec
    slots = tuple(row * heads for row in program.slots)
    return replace(spec, program=replace(program, heads=heads, slots=slots))
