"""Which of many scores are taken: the same set on every device and type, without a full sort.

A score becomes a 64-bit number: the order of the score above, the place below, so that no two are
equal and a tie goes to the lower place. What is forced stands above all scores, NaN below every
number, and what is not a candidate, -inf among them, below everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.torch_modes import array_of
from attnspec.limits import LIMITS

FORCED = 1 << 62
NONE = -(1 << 62)


def ranks(scores: Tensor, forced: Tensor | None) -> Tensor:
    """int64 numbers of scores float32 [..., c], in their order; -inf is not a candidate."""
    # -0 is 0; the bits of floats have their order, those of negative ones the reverse
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    # below every number, and above what is none
    ordered = torch.where(scores.isnan(), 1 - (1 << 31), ordered)
    below = scores.shape[-1] - 1 - torch.arange(scores.shape[-1], device=scores.device)
    rank = ordered * (1 << 31) + below
    rank = torch.where(scores == -torch.inf, NONE, rank)
    return rank if forced is None else torch.where(forced, FORCED + below, rank)


def best(scores: Tensor, forced: Tensor | None, budget: int) -> Tensor:
    """Where the highest scores float32 [..., c] stand, at most `budget`, but all that are forced,
    bool [..., c]: ascending lists [..., r], -1 for none."""
    count = min(scores.shape[-1], budget)
    raised = scores if forced is None else scores.masked_fill(forced, torch.inf)
    few, places = _few(raised, count + 1)
    # there is a rule neither for ties nor for NaN: rows where they matter are ranked
    least, unclear = _last_taken(few, count)
    if forced is not None:
        unclear |= forced.sum(-1) > budget
    least, any_unclear = least.clamp_min(torch.finfo(few.dtype).min), bool(unclear.any())
    if any_unclear:
        least = least.masked_fill(unclear[..., None], torch.nan)
    lists = listed(few >= least)
    if places is not None:
        positions = places.gather(-1, lists.clamp_min(0))
        lists = torch.where(lists >= 0, positions, -1).sort(-1).values
    if not any_unclear:
        return lists
    exact = _ranked_best(
        ranks(scores[unclear], None if forced is None else forced[unclear]), budget
    )
    lists, exact = equally_long([lists, exact])
    lists[unclear] = exact
    return lists


def equally_long(lists: Sequence[Tensor]) -> list[Tensor]:
    """Lists [..., r] with -1 before the numbers of shorter ones."""
    width = max(x.shape[-1] for x in lists)
    return [functional.pad(x, (width - x.shape[-1], 0), value=-1) for x in lists]


def _last_taken(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The least of so many highest scores of rows [..., c], [..., 1], and bool [...], for
    which of them that says too little: where the next one is as high, or there is a NaN."""
    more = min(scores.shape[-1], count + 1)
    if scores.is_cpu:
        # to sort whole rows takes a fraction of torch's search
        values = torch.from_numpy(np.sort(array_of(scores), axis=-1)[..., -more:])
    else:
        # NaN are the highest either way
        values = scores.topk(more, dim=-1).values.flip(-1)
    least, unclear = values[..., -count, None], values[..., -1].isnan()
    if more > count:
        unclear |= ((least == values[..., :1]) & (least > -torch.inf))[..., 0]
    return least, unclear


def _few(scores: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Some of the scores of long rows [..., c] among which so many highest are, and more than so
    many equal ones if there are, with their places; of short rows all, and None.

    They lie in as many groups as they are, those with the greatest maxima.
    """
    size = math.isqrt(scores.shape[-1] // max(1, count))
    if size < LIMITS.grouped:
        return scores, None
    # a group has every so many-th score: maxima are those of long rows
    scores = functional.pad(scores, (0, -scores.shape[-1] % size), value=-math.inf)
    grouped = torch.unflatten(scores, -1, (size, -1))
    groups = grouped.amax(-2).topk(count, dim=-1, sorted=False).indices
    few = grouped.take_along_dim(groups[..., None, :], -1)
    turns = torch.arange(size, device=scores.device)[:, None] * grouped.shape[-1]
    return few.flatten(-2), (turns + groups[..., None, :]).flatten(-2)


def marked(numbers: Tensor, count: int) -> Tensor:
    """bool [..., count]: which numbers stand in lists [..., r]; those below 0 are none."""
    table = numbers.new_zeros(*numbers.shape[:-1], count + 1, dtype=torch.bool)
    return table.scatter_(-1, numbers + 1, True)[..., 1:]


def listed(table: Tensor) -> Tensor:
    """The numbers of what is marked in a table [..., count], ascending, after -1 for none; as many
    as the longest list has."""
    lead, width = table.shape[:-1], max(1, table.shape[-1])
    places, count = table.flatten().nonzero()[:, 0], math.prod(lead)
    rows, numbers = places // width, places % width
    short = torch.bincount(rows, minlength=count)
    most = int(short.max())
    # every number stands behind those before it, and what their lists and its own have too few
    short = (most - short).cumsum(0)
    lists = numbers.new_full((count * most,), -1)
    lists[torch.arange(len(numbers), device=lists.device) + short[rows]] = numbers
    return lists.view(*lead, most)


def _ranked_best(ranked: Tensor, budget: int) -> Tensor:
    """The same of numbers that differ."""
    forced = (ranked >= FORCED).sum(-1)
    most = min(ranked.shape[-1], max(budget, int(forced.max())))
    values, places = ranked.topk(most, dim=-1)
    rank = torch.arange(most, device=ranked.device)
    taken = (values > NONE) & ((rank < budget) | (rank < forced[..., None]))
    return torch.where(taken, places, -1).sort(-1).values


def prefix(ranked: Tensor, shares: Tensor, mass: float) -> Tensor:
    """bool [..., c]: what is forced, and then the shortest prefix in falling order whose shares add
    up to a mass."""
    values, places = ranked.sort(-1, descending=True)
    share = shares.gather(-1, places)
    before = functional.pad(share.cumsum(-1)[..., :-1], (1, 0))
    taken = values >= FORCED if mass < 1 else values > NONE
    taken = taken | ((values > NONE) & (before < mass))
    return torch.zeros_like(taken).scatter_(-1, places, taken)


def softmax(logits: Tensor, candidates: Tensor) -> Tensor:
    """The shares of scores [..., c]; NaN weighs nothing, infinities share everything."""
    logits = torch.where(candidates & ~logits.isnan(), logits, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - torch.where(top.isfinite(), top, 0.0))
    weights = torch.where(top == torch.inf, (logits == torch.inf).to(logits.dtype), weights)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
