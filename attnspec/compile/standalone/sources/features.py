"""Features of rows x [B, H, n, d]: values, and the logarithm of what multiplies them."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from attnspec.compile.standalone.sources.drawing import philox
from attnspec.compile.standalone.sources.sums import exponentials, unit

SEED, FEATURES = 0, 256


def factor_of(size: int) -> float:
    """Generated for each spec: the root of the scale of scores; here the usual one."""
    return float(size**-0.25)


def elu1(x: Tensor) -> tuple[Tensor, Tensor]:
    """elu(x) + 1, which does not round to 0."""
    return torch.exp(x.masked_fill(x > 0, 0.0)) + torch.relu(x), torch.zeros_like(x[..., :1])


def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """The positive part."""
    return torch.relu(x), torch.zeros_like(x[..., :1])


def squared_relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """The square of the positive part."""
    return torch.relu(x).square(), torch.zeros_like(x[..., :1])


def exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The exponential."""
    return exponentials(x)


def identity(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row as it is."""
    return x, torch.zeros_like(x[..., :1])


def first_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """(1, x / |x|), whose products are 1 + the cosine."""
    return torch.cat([torch.ones_like(x[..., :1]), unit(x)], -1), torch.zeros_like(x[..., :1])


def second_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """(1, x, x x^T / sqrt(2)) of scaled rows, whose products are 1 + s + s^2 / 2."""
    x = x * factor_of(x.shape[3])
    squares = (x[..., None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
    one = torch.ones_like(x[..., :1])
    return torch.cat([one, x, squares], -1), torch.zeros_like(one)


def waves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(sin, cos)(w . x) / sqrt(m) of rows of length 1."""
    along = unit(x) @ w.mT
    values = torch.cat([along.sin(), along.cos()], -1) / math.sqrt(w.shape[1])
    return values, torch.zeros_like(x[..., :1])


def positive(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """exp(w . x - |x|^2 / 2) / sqrt(m)."""
    x = x * factor_of(x.shape[3])
    return exponentials(x @ w.mT - x.square().sum(-1, keepdim=True) / 2, -math.log(w.shape[1]) / 2)


def gaussian(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """exp(w . x - |x|^2) / sqrt(m), whose products estimate exp(-|x - y|^2 / 2)."""
    x = x * factor_of(x.shape[3])
    return exponentials(x @ w.mT - x.square().sum(-1, keepdim=True), -math.log(w.shape[1]) / 2)


def hyperbolic(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(exp(w . x), exp(-w . x)) exp(-|x|^2 / 2) / sqrt(2 m)."""
    x = x * factor_of(x.shape[3])
    along = torch.cat([x @ w.mT, -(x @ w.mT)], -1)
    log = -math.log(2 * w.shape[1]) / 2
    return exponentials(along - x.square().sum(-1, keepdim=True) / 2, log)


def trig(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(sin, cos)(w . x) exp(|x|^2 / 2) / sqrt(m)."""
    x = x * factor_of(x.shape[3])
    along, half = x @ w.mT, x.square().sum(-1, keepdim=True) / 2
    top = half.detach()
    values = torch.cat([along.sin(), along.cos()], -1) * torch.exp(half - top)
    return values, top - math.log(w.shape[1]) / 2


def relu_along(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """relu(w . x) / sqrt(m)."""
    x = x * factor_of(x.shape[3])
    return torch.relu(x @ w.mT) / math.sqrt(w.shape[1]), torch.zeros_like(x[..., :1])


def normals(rows: int, count: int, seed: int, place_of: tuple[int, int, int]) -> Tensor:
    """Gaussian numbers [rows, count] by Box and Muller: of two words of a counter, one is the
    length and the other the angle of two numbers."""
    row, place = torch.meshgrid(torch.arange(rows), torch.arange(-(-count // 4)), indexing="ij")
    words = philox(row, place, seed, place_of).double()
    length = torch.sqrt(-2 * torch.log((words[::2] + 1) / 2**32))
    angle = 2 * math.pi / 2**32 * words[1::2]
    z = torch.stack([length * angle.cos(), length * angle.sin()], 1).flatten(0, 1)
    return z.permute(1, 2, 0).flatten(1)[:, :count]


def independent(head: int, layer: int, size: int) -> Tensor:
    """Gaussian rows [FEATURES, size] of a head."""
    return normals(FEATURES, size, SEED, (2**31, layer, head))


def orthogonal(head: int, layer: int, size: int) -> Tensor:
    """The same, in blocks of `size` rows that are orthogonal to each other, with the lengths of
    other Gaussian rows."""
    z = normals(-(-FEATURES // size) * size, 2 * size, SEED, (2**31, layer, head))
    found, upper = torch.linalg.qr(z[:, :size].unflatten(0, (-1, size)))
    rows = (found * torch.sign(torch.diagonal(upper, dim1=1, dim2=2))[:, None]).mT.flatten(0, 1)
    return (rows * torch.linalg.vector_norm(z[:, size:], dim=1, keepdim=True))[:FEATURES]


@torch.compiler.assume_constant_result
@lru_cache(maxsize=64)
def directions(layer: int, heads: int, size: int, kind: torch.dtype, device: str) -> Tensor:
    """The rows [H, FEATURES, size] of a layer, the same on every machine."""
    with torch.inference_mode(False):
        return torch.stack([orthogonal(h, layer, size) for h in range(heads)]).to(device, kind)
