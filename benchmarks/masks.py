"""The same patterns as FlexAttention is given them: predicates on tensors of positions."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import torch

from benchmarks.cases import CASES, HEADS

Positions = torch.Tensor
Predicate = Callable[[Positions, Positions, Positions, Positions], torch.Tensor]
"""(batch, head, query, key) -> whether the pair is kept."""


def predicate(name: str, n: int) -> Predicate:
    """The pattern's predicate at n positions; what no arithmetic says is looked up in a table."""
    if name in _ARITHMETIC:
        return _ARITHMETIC[name]
    if name.startswith("neighborhood"):
        return _neighborhood(n)
    if name == "BigBird 64, 3":
        blocks = _table(name, n)[:, ::64, ::64].contiguous()
        return lambda b, h, q, k: blocks[h, q // 64, k // 64]
    if name == "powers(2)":
        distances = _table(name, n)[0, 0].contiguous()
        return lambda b, h, q, k: distances[(q - k).abs()]
    pairs = _table(name, n)
    return lambda b, h, q, k: pairs[h, q, k]


_ARITHMETIC: dict[str, Predicate] = {
    "window(256)": lambda b, h, q, k: (q - k <= 256) & (k - q <= 256),
    "causal window(511)": lambda b, h, q, k: (k <= q) & (q - k <= 511),
    "dilated(2048, 8)": lambda b, h, q, k: ((q - k).abs() <= 2048) & ((q - k) % 8 == 0),
    "strided(128)": lambda b, h, q, k: ((q - k).abs() < 128) | ((q - k) % 128 == 0),
    "causal strided(128)": lambda b, h, q, k: (k <= q) & ((q - k < 128) | ((q - k) % 128 == 0)),
    "fixed(128, 8)": lambda b, h, q, k: (q // 128 == k // 128) | (k % 128 >= 120),
    "Longformer 256 + 64": lambda b, h, q, k: ((q - k).abs() <= 256) | (q < 64) | (k < 64),
}


def _neighborhood(n: int) -> Predicate:
    rows = next(side for side in range(isqrt(n), 0, -1) if n % side == 0)
    columns = n // rows

    def near(q: Positions, k: Positions, length: int) -> torch.Tensor:
        centre = q.clamp(10, length - 11)
        return (k - centre).abs() <= 10

    return lambda b, h, q, k: (
        near(q // columns, k // columns, rows) & near(q % columns, k % columns, columns)
    )


def _table(name: str, n: int) -> torch.Tensor:
    """bool [HEADS, n, n], one row of heads where all are the same."""
    spec = CASES[name].spec(n)
    relations = [spec.relation(n, head=head) for head in range(HEADS)]
    masks = [torch.from_numpy(spec.mask(n, head=head)) for head in range(len(set(relations)))]
    return torch.stack(masks).expand(HEADS, n, n)
