"""Which of many scores are taken: the same set on every device and type, without a full sort.

A score becomes a 64-bit number: the order of the score above, the place below, so that no two are
equal and a tie goes to the lower place. What is forced stands above all scores, NaN below every
number, and what is no candidate, -inf among them, below everything.
"""

from __future__ import annotations

import numpy as np
import torch

FORCED = 1 << 62
NONE = -(1 << 62)


def ranks(scores: torch.Tensor, forced: torch.Tensor | None) -> torch.Tensor:
    """int64 numbers of scores float32 [..., c], in their order; -inf is no candidate."""
    # -0 is 0; the bits of floats have their order, those of negative ones the reverse
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    # below every number, where -inf would be
    nan = int(torch.tensor(-torch.inf).view(torch.int32)) ^ 0x7FFFFFFF
    ordered = torch.where(scores.isnan(), nan, ordered)
    below = scores.shape[-1] - 1 - torch.arange(scores.shape[-1], device=scores.device)
    found = ordered * (1 << 31) + below
    found = torch.where(scores == -torch.inf, NONE, found)
    return found if forced is None else torch.where(forced, FORCED + below, found)


def best(ranked: torch.Tensor, budget: int) -> torch.Tensor:
    """The places of the highest of numbers [..., c], at most `budget`, but all that are forced:
    ascending lists [..., r], -1 for none."""
    forced = (ranked >= FORCED).sum(-1)
    most = min(ranked.shape[-1], max(budget, int(forced.max()) if forced.numel() else 0))
    values, places = ranked.topk(most, dim=-1)
    rank = torch.arange(most, device=ranked.device)
    taken = (values > NONE) & ((rank < budget) | (rank < forced[..., None]))
    return torch.where(taken, places, -1).sort(-1).values


def taken(scores: torch.Tensor, forced: torch.Tensor | None, budget: int) -> torch.Tensor:
    """The places of the highest of scores float32 [..., c], as `best` has them."""
    found = _without_ties(scores, forced, budget)
    return best(ranks(scores, forced), budget) if found is None else found


def _without_ties(
    scores: torch.Tensor, forced: torch.Tensor | None, budget: int
) -> torch.Tensor | None:
    """The same where plain comparisons decide; None where they do not, or that is not known."""
    if (
        not scores.numel()
        or not scores.is_cpu
        or torch.compiler.is_compiling()
        or not 0 < budget < scores.shape[-1]
    ):
        return None
    if forced is not None:
        if int(forced.sum(-1).max()) > budget or bool((scores == torch.inf).any()):
            return None
        scores = torch.where(forced, torch.inf, scores)
    values, places = scores.topk(budget + 1, dim=-1)
    last, next_one = values[..., -2], values[..., -1]
    # NaN stands first here
    if bool(values[..., 0].isnan().any()) or bool(((last == next_one) & (last > -torch.inf)).any()):
        return None
    values, places = values[..., :-1], places[..., :-1]
    return torch.where(values > -torch.inf, places, -1).sort(-1).values


def above(ranked: torch.Tensor, scores: torch.Tensor, least: float) -> torch.Tensor:
    """bool [..., c]: what scores above a number, and what is forced."""
    return (scores > least) | (ranked >= FORCED)


def prefix(ranked: torch.Tensor, shares: torch.Tensor, mass: float) -> torch.Tensor:
    """bool [..., c]: what is forced, and then the shortest prefix in falling order whose shares add
    up to a mass."""
    values, places = ranked.sort(-1, descending=True)
    share = shares.gather(-1, places)
    before = torch.nn.functional.pad(share.cumsum(-1)[..., :-1], (1, 0))
    taken = values >= FORCED if mass < 1 else values > NONE
    taken = taken | ((values > NONE) & (before < mass))
    return torch.zeros_like(taken).scatter_(-1, places, taken)


def softmax(logits: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """The shares of scores [..., c]; NaN weighs nothing, infinities share everything."""
    logits = torch.where(candidates & ~logits.isnan(), logits, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - torch.where(top.isfinite(), top, 0.0))
    weights = torch.where(top == torch.inf, (logits == torch.inf).to(logits.dtype), weights)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def first_greatest(x: torch.Tensor) -> torch.Tensor:
    """Where the greatest number of each row [..., c] stands, the first of several."""
    if x.is_cpu and not torch.compiler.is_compiling():
        # the same, several times as fast
        return torch.from_numpy(np.asarray(x.numpy().argmax(-1)))
    return x.argmax(-1)
