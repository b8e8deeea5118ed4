"""What there is to decide by: the tensors of a call, for the heads of one graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Given:
    """q [B, H, n_q, d] and k [B, H_kv, n_k, d] of some heads, with their numbers, those of the key
    heads that they read, and the factors of their scores; H_kv divides H.

    `data` has the inputs as a call has them, of those about heads the part of these heads, and the
    choices of graphs that are arguments; `tables` what is learned or kept, [H or 1, *shape].
    `keys` is None where queries are positions of the keys; else they are another sequence, which
    stands behind so many keys, and none of them is padding.
    `shared` are the inputs that say the same of heads that share keys, as far as their shape tells.
    """

    q: Tensor
    k: Tensor
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    scales: tuple[float, ...]
    padding: Tensor | None = None
    data: Mapping[Any, Any] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    keys: int | None = None
    shared: frozenset[str] = frozenset()

    @property
    def grouped(self) -> bool:
        """Whether heads share keys."""
        return len(set(self.groups)) < len(self.groups)

    @property
    def keys_by_head(self) -> Tensor:
        """The keys that each head reads, [B, H, n_k, d]."""
        ratio = self.q.shape[1] // self.k.shape[1]
        return self.k if ratio == 1 else self.k.repeat_interleave(ratio, 1)

    @property
    def n_q(self) -> int:
        return self.q.shape[2]

    @property
    def n_k(self) -> int:
        return self.k.shape[2]

    @property
    def first_query(self) -> int:
        """The position of the first query."""
        return self.n_k - self.n_q

    @property
    def real(self) -> Tensor:
        """Which keys are real, bool [B, n_k]."""
        if self.padding is not None:
            return self.padding
        return torch.ones(len(self.q), self.n_k, dtype=torch.bool, device=self.q.device)
