"""Compiled mechanisms held against their written-out formulas, in values and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attention_checks import spec_of, tensors, with_gradients

from attnspec.backends.factored.definitions import OUTPUTS
from attnspec.backends.factored.low_rank_definitions import OneHead
from attnspec.lower.lower import stand_ins, works_of
from attnspec.runtime import CompiledAttention


def learner_of(body: str, size: int = 6, out_size: int = 5) -> CompiledAttention:
    """The module of an attention in float64, with normal numbers in place of what is learned."""
    module = spec_of(body).compile().double()
    module.make_parameters(size, out_size)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def formula_of(
    module: CompiledAttention,
    given: Sequence[torch.Tensor],
    *,
    layer: int = 0,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the formulas of a module's mechanisms say, sample by sample and head by head."""
    q, k, v = given
    program, repeat = module.program, q.shape[1] // k.shape[1]
    outs: dict[int, list[torch.Tensor]] = {}
    for work, heads in works_of(
        program, layer, q.shape[1], q.shape[2], k.shape[2], stand_ins(program)
    ):
        assert work.mechanism is not None
        for head in heads:
            parts = {}
            for called, name in module.engine.tables_of(work):
                table = module.get_parameter(name)
                rows = table[layer if len(table) > 1 else 0]
                parts[called] = rows[head if len(rows) > 1 else 0]
            outs[head] = [
                OUTPUTS[work.mechanism.name](
                    OneHead(
                        work,
                        q[sample, head],
                        k[sample, head // repeat],
                        v[sample, head // repeat],
                        parts,
                        None if padding is None else padding[sample],
                    )
                )
                for sample in range(len(q))
            ]
    return torch.stack([torch.stack(outs[head]) for head in sorted(outs)], 1)


def assert_follows_formula(
    body: str,
    n: int,
    *,
    n_q: int | None = None,
    heads: int = 4,
    key_heads: int | None = None,
    size: int = 6,
    out_size: int = 5,
    layer: int = 0,
    padding: torch.Tensor | None = None,
    tolerance: float = 1e-9,
) -> None:
    """A module agrees with its formulas in output, gradients of q, k, v and of what it learns."""
    module = learner_of(body, size, out_size)
    batch = 1 if padding is None else len(padding)
    given = tensors(
        batch,
        heads,
        n if n_q is None else n_q,
        n,
        key_heads=key_heads,
        size=size,
        out_size=out_size,
    )
    leaves = [*given, *module.parameters()]
    found = module(*given, layer=layer, key_padding_mask=padding)
    meant = formula_of(module, given, layer=layer, padding=padding)
    assert found.shape == meant.shape
    # what a formula does not read has no gradient, so all are read in vain
    results = [
        with_gradients(out + 0 * sum(leaf.sum() for leaf in leaves), leaves)
        for out in (found, meant)
    ]
    pairs = zip(*results, strict=True)
    for place, (one, other) in enumerate(pairs):
        scale = max(1.0, other.abs().max().item())
        assert torch.isfinite(one).all(), place
        worst = (one - other).abs().max().item() / scale
        assert worst <= tolerance, (place, worst)


def assert_errs_by_roundings(body: str, dtype: torch.dtype) -> None:
    """The output of a narrow type is that of float64 for the same numbers, but for roundings."""
    module = learner_of(body, 8, 8)
    # projections of size 1 give scores that no narrow type can hold to a digit
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.div_(math.sqrt(parameter.shape[-1]))
    given = [x.detach().to(dtype) for x in tensors(1, 2, 33, 33)]
    meant = module(*(x.double() for x in given))
    found = module.float()(*given)
    assert found.dtype == dtype
    error = (found.double() - meant).abs().max().item()
    assert error <= 40 * torch.finfo(dtype).eps * max(1.0, meant.abs().max().item())


def ragged(n: int) -> torch.Tensor:
    """Padding bool [4, n]: none, most of the end, scattered, everything."""
    generator = torch.Generator().manual_seed(n)
    at = torch.arange(n)
    return torch.stack(
        [at >= 0, at < max(1, n // 4), torch.rand(n, generator=generator) < 0.6, at < 0]
    )
