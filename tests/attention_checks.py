"""What the tests of the back half share: modules from texts, and the definition in plain words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from population import BODIES, spec_of
from torch import Tensor

from attnspec.runtime import CompiledAttention, composed

ALONG: dict[str, Any] = {"fast_mode": True, "rtol": 1e-5, "atol": 1e-7}
"""How torch.autograd's checks compare: along random directions, which is soon done, and as sharply
as float64 allows, since an error of one derivative is a small part of what they add up."""

SOME = (
    "full causal window strided blocks random difference complement shifted where nothing".split()
)
GRAPHS = {name: BODIES[name] for name in (*SOME, "causal window", "random blocks", "empty rows")}
"""Bodies of attentions: sample relations and compositions."""


def module_of(body: str, backend: str = "auto") -> CompiledAttention:
    return spec_of(body).compile(backend=backend)


def learner_of(body: str, size: int = 8, backend: str = "auto") -> Any:
    """The module of an attention in float64, with normal numbers in place of what is learned."""
    module = spec_of(body).compile(backend, head_size=size).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v that ask for gradients."""
    key_heads = heads if key_heads is None else key_heads
    shapes = (
        (batch, heads, n_q, size),
        (batch, key_heads, n_k, size),
        (batch, key_heads, n_k, size if out_size is None else out_size),
    )
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


def with_gradients(out: Tensor, given: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """The output and the gradients of a fixed random weighing of it."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def check_transforms(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
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


def imported(text: str, folder: Path) -> Any:
    """The module of a file's text: tracing looks the names of functions up in their module."""
    name = f"written_{sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    found: Any = spec_from_file_location(name, path)
    sys.modules[name] = module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Positional(torch.nn.Module):
    """An attention whose inputs are positional, as torch.export asks for."""

    def __init__(self, attention: torch.nn.Module, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, q: Any, k: Any, v: Any, inputs: Any) -> Any:
        return self.attention(q, k, v, inputs=inputs, **self.options)


def exported(
    module: torch.nn.Module,
    inputs: Mapping[str, Tensor] | None = None,
    strict: bool = False,
    **options: Any,
) -> Any:
    """A program of torch's operations alone, for every length."""
    n, inputs = torch.export.Dim("n", min=2, max=4096), inputs or {}
    shapes: dict[str, Any] = {name: {2: n} for name in "qkv"}
    shapes["inputs"] = {name: {1: n} if x.dim() > 1 else None for name, x in inputs.items()}
    given, positional = (*torch.randn(3, 1, 2, 33, 8), inputs), Positional(module, **options)
    with torch.no_grad(), composed():
        program = torch.export.export(positional, given, dynamic_shapes=shapes, strict=strict)
    assert "attnspec" not in str(program.graph)
    return program.module()
