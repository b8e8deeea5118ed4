"""What is asked of numbers on a device, for which a call waits, and what is taken for granted
there instead; on the CPU everything is asked."""

from __future__ import annotations

import torch

from attnspec.backends.common.torch_modes import apart
from attnspec.graphs.relation import Relation, evaluate_pairs, takes_tensors
from attnspec.lower.cache import Cache

KEPT = 64
"""How many small tables are kept on devices."""

_kept: Cache[tuple[tuple[int | float, ...], str], torch.Tensor] = Cache(KEPT)


def asks(x: torch.Tensor) -> bool:
    """Whether numbers of a tensor are asked for: on a device the call would wait."""
    return x.is_cpu


def known(fact: torch.Tensor, otherwise: bool) -> bool:
    """A truth value, [], or what may be taken for it without asking."""
    return bool(fact) if asks(fact) else otherwise


def table_of(values: tuple[int | float, ...], device: torch.device) -> torch.Tensor:
    """Numbers [m] on a device, to which they are brought once."""
    if device.type == "cpu":
        return torch.tensor(values, device=device)

    def build() -> torch.Tensor:
        # it is kept, so the modes of this call must not reach it
        return apart(lambda: torch.tensor(values, device=device))

    return _kept.get((values, str(device)), build)


def is_assured(fact: torch.Tensor, message: str) -> bool:
    """A truth value; a GPU halts with the message where it is false, as of torch's own indexing,
    and nothing waits for it."""
    if fact.device.type not in ("cuda", "meta"):
        return bool(fact)
    torch._assert_async(fact, message)
    return True


def pairs_at(relation: Relation, q: torch.Tensor, k: torch.Tensor, n: int) -> torch.Tensor:
    """Whether a static relation holds of positions that broadcast, bool."""
    if not asks(q) and takes_tensors(relation):
        held: torch.Tensor = relation.holds(q, k, n) & (q == q) & (k == k)
        return held
    held = torch.from_numpy(evaluate_pairs(relation, q.cpu().numpy(), k.cpu().numpy(), n).copy())
    return held.to(q.device)
