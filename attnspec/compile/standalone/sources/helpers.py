"""Functions that masks call: each is taken over where a mask does."""

from __future__ import annotations

import torch
from torch import Tensor

INPUTS: dict[str, tuple[str, int | None]] = {"time": ("numbers", None)}


def required(name: str, value: int, least: int = 0, most: int = 2**62) -> None:
    """Refuses a size that depends on n where it has no admissible value."""
    if not least <= value <= most:
        raise ValueError(f"`{name}` must be between {least} and {most}, got {value}")


def isqrt(x: Tensor) -> Tensor:
    """The root of whole numbers, rounded down."""
    root = torch.sqrt(x.double()).long()
    root = root - (root * root > x).long()
    return root + ((root + 1) * (root + 1) <= x).long()


def is_power(distance: Tensor, base: int, n: int) -> Tensor:
    """Whether a distance, below n, is 0, 1, base, base**2, …"""
    held, power = distance == 0, 1
    while power < 2**31:
        held, power = held | (distance == power), power * base
    return held


def listed(tables: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether k stands in row q of the table of head h, [H, rows, keys]."""
    held = (q != q) & (k != k)
    for place in range(tables.shape[2]):
        held = held | (tables[h, q, q - q + place] == k)  # vmap indexes by tensors alone
    return held


def numbers(
    name: str, x: dict[str, Tensor], most: int | None = None, whole: bool = False
) -> Tensor:
    """An input as int64 or float64, one of a real key at padding; refuses what is not exact."""
    found, real = x[name], x.get("key padding")
    found = found.double() if found.is_floating_point() else found.long()
    if INPUTS[name][0] == "length":
        # no position lies before one below 0
        found = found.clamp(min=0)
    if INPUTS[name][0] == "numbers" and real is not None and found.numel():
        known = found.flatten()[real.flatten().to(torch.uint8).argmax()]
        found = torch.where(real, found, torch.where(real.any(), known, 1).to(found.dtype))
    if found.is_floating_point() and whole:
        raise ValueError(f"`//` and `%` divide whole numbers, and what `{name}` says is real")
    if most is not None and not found.is_floating_point():
        exact = ((found >= -most) & (found <= most)).all()
        words = f"`{name}` must be within {most}, where whole numbers are exact"
        if torch.compiler.is_compiling():
            torch._assert_async(exact, words)
        elif not exact:
            raise ValueError(words)
    return found
