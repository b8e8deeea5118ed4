"""Small tables and static pairs on the device of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import apart
from attnspec.graphs.relation import Relation, evaluate_pairs, takes_tensors
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache

_kept: Cache[tuple[tuple[int | float, ...], str], Tensor] = Cache(LIMITS.layouts)


def table_of(values: tuple[int | float, ...], device: torch.device) -> Tensor:
    """Numbers [m] on a device, to which they are brought once."""
    if device.type == "cpu":
        return torch.tensor(values, device=device)

    def build() -> Tensor:
        # it is kept, so the modes of this call must not reach it
        return apart(lambda: torch.tensor(values, device=device))

    return _kept.get((values, str(device)), build)


def pairs_at(relation: Relation, q: Tensor, k: Tensor, n: int) -> Tensor:
    """Whether a static relation holds of positions that broadcast, bool."""
    if not q.is_cpu and takes_tensors(relation):
        pairs: Tensor = relation.holds(q, k, n) & (q == q) & (k == k)
        return pairs
    pairs = torch.from_numpy(evaluate_pairs(relation, q.cpu().numpy(), k.cpu().numpy(), n).copy())
    return pairs.to(q.device)
