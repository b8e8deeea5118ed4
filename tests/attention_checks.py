"""What the tests of the back half share: modules from texts, and the definition in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from population import BODIES, spec_of

from attnspec.runtime import CompiledAttention
from attnspec.spec import Spec
from attnspec.verification import error_bound

ALONG: dict[str, Any] = {"fast_mode": True, "rtol": 1e-5, "atol": 1e-7}
"""How torch.autograd's checks compare: along random directions, which is soon done, and as sharply
as float64 allows, since an error of one derivative is a small part of what they add up."""

_NAMES = (
    "full,causal,window,causal window,strided,blocks,random,random blocks,difference,complement"
    ",shifted,where,empty rows,nothing"
)
GRAPHS = {name: BODIES[name] for name in _NAMES.split(",")}
"""Bodies of attentions: sample relations and compositions."""


def module_of(body: str, backend: str = "auto") -> CompiledAttention:
    return spec_of(body).compile(backend=backend)


def learner_of(body: str, size: int, out_size: int) -> CompiledAttention:
    """The module of an attention in float64, with normal numbers in place of what is learned."""
    module = spec_of(body).compile().double()
    module.make_parameters(size, out_size)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def tensors(
    batch: int,
    heads: int,
    n_q: int,
    n_k: int,
    *,
    key_heads: int | None = None,
    size: int = 8,
    out_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k, v that ask for gradients."""
    key_heads = heads if key_heads is None else key_heads
    shapes = (
        (batch, heads, n_q, size),
        (batch, key_heads, n_k, size),
        (batch, key_heads, n_k, size if out_size is None else out_size),
    )
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


def defined(
    spec: Spec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layer: int = 0,
    padding: torch.Tensor | None = None,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> torch.Tensor:
    """Softmax attention under the spec's masks, sample by sample and head by head."""
    repeat = q.shape[1] // k.shape[1]
    n_q, n_k = q.shape[2], k.shape[2]
    outs = []
    # what reads no input is the same for every sample
    masks: dict[int, np.ndarray] = {}
    for sample in range(q.shape[0]):
        for head in range(q.shape[1]):
            if inputs is not None or head not in masks:
                given = None if inputs is None else inputs[sample]
                masks[head] = spec.mask(n_k, layer, head, given)
            held = torch.from_numpy(masks[head])[n_k - n_q :]
            if padding is not None:
                held = held & padding[sample]
            queries, keys = q[sample, head], k[sample, head // repeat]
            scores = queries @ keys.T / math.sqrt(q.shape[3])
            scores = torch.where(held, scores, torch.full_like(scores, -1e30))
            weights = torch.softmax(scores, -1) * held
            outs.append(weights @ v[sample, head // repeat])
    return torch.stack(outs).view(*q.shape[:3], v.shape[3])


def with_gradients(
    out: torch.Tensor, given: Sequence[torch.Tensor], seed: int = 1
) -> list[torch.Tensor]:
    """The output and the gradients of a fixed random weighing of it."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def assert_agree(
    found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]
) -> None:
    """Found errs no more than architecture allows where `dense` is the definition in its type."""
    largest = max((x.abs().max().item() for x in exact if x.numel()), default=0.0)
    for name, given, right, base in zip(
        ("out", "dq", "dk", "dv"), found, exact, dense, strict=True
    ):
        assert given.shape == right.shape, name
        assert torch.isfinite(given).all(), name
        if given.numel():
            error = (given.double() - right.double()).abs().max().item()
            bound = error_bound(right.double(), base.double(), given.dtype, largest)
            assert error <= bound, f"{name} errs by {error}, allowed {bound}"


def check_transforms(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """vmap, jvp and grad of torch.func agree with plain calls, differences and autograd."""
    out = module(q, k, v)
    many = torch.func.vmap(lambda *x: module(*(y[None] for y in x))[0])(q, k, v)
    torch.testing.assert_close(many, out)
    direction = torch.randn_like(q)
    moved = torch.func.jvp(lambda x: module(x, k, v), (q,), (direction,))[1]
    step = 1e-6
    slope = (module(q + step * direction, k, v) - module(q - step * direction, k, v)) / (2 * step)
    torch.testing.assert_close(moved, slope, rtol=1e-6, atol=1e-7)
    found = torch.func.grad(lambda x: module(x, k, v).square().sum())(q)
    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(leaf, k, v).square().sum(), leaf)
    torch.testing.assert_close(found, wanted)
