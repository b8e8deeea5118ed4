"""What one call of an attention reads, found by what moves.

The output of a call is linear in its values: with unit vectors as values the output *is* the
weights, of as many keys at once as a value has elements. `weights_of` asks for all of them so, in
n / e calls. `rows_differ` asks one question of all rows at once, in a call or two: with queries of
zero every key that is read weighs the same, so that random values give, in each row, the mean of
the values that are read, which is compared with the mean over the keys of the spec. Scores are kept
within reach of a float by scaling the queries down, which changes weights but no pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch

Run: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A call again: q [B, H, n_q, d], k [B, G, n_k, d], v [B, G, n_k, e] -> [B, H, n_q, e]."""

READ = 2.0**-52
"""The weight from which on a pair is read: what is less changes no sum of float64 numbers."""

STEEPEST = 16.0
"""The largest product of a query and a key that is asked with: weights stay far above `READ`."""

MISSED = 1e-6
"""The probability with which `rows_differ` may miss one pair that differs, at most."""

_MOVED = 0.02
"""What a mean must move by, in units of one key of a row, to count; half of it is for rounding."""

_COARSE = 16
"""Roundings of a number between 1 and 4 that add up in a mean."""


@dataclass
class Call:
    """A call of an attention with q [B, H, n_q, d], k [B, G, n_k, d] and v [B, G, n_k, e]; `run`
    makes it again with other tensors, `double` in float64, `passes` counts how often.

    `sink` says that weights of a row need not sum to 1.
    """

    kind: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    run: Run
    double: Run | None = None
    sink: bool = False
    passes: int = 0

    def again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run | None = None
    ) -> torch.Tensor:
        """The output with other tensors, without gradients."""
        self.passes += 1
        with torch.no_grad():
            return (run or self.run)(q, k, v)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, n_q and n_k."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    def flat(self) -> torch.Tensor:
        """The queries, scaled down until no score is steep."""
        largest = float(self.q.norm(dim=-1).max() * self.k.norm(dim=-1).max())
        return self.q * min(1.0, STEEPEST / largest) if largest > 0 else self.q


def weights_of(call: Call, rows: torch.Tensor | None = None, double: bool = False) -> torch.Tensor:
    """The size of each weight, float [B, H, n_q, n_k], or of the `rows` (samples, heads, queries)
    alone, [rows, n_k]; NaN is 0."""
    n_k, width = call.k.shape[2], call.v.shape[3]
    q, k, run = call.flat(), call.k, call.run
    if double and call.double is not None:
        q, k, run = q.double(), k.double(), call.double
    found = []
    for first in range(0, n_k, width):
        count = min(width, n_k - first)
        v = torch.zeros(*k.shape[:3], width, dtype=k.dtype, device=k.device)
        v[:, :, first : first + count, :count] = torch.eye(count, dtype=k.dtype, device=k.device)
        out = call.again(q, k, v, run)[..., :count]
        found.append(out if rows is None else out[tuple(rows.T)])
    return torch.cat(found, -1).abs().nan_to_num(nan=0.0)


def rows_differ(call: Call, allowed: torch.Tensor) -> torch.Tensor | None:
    """bool [B, H, n_q]: the rows whose keys are not those that are allowed, bool [B | 1, H | 1,
    n_q, n_k]; None where this cannot tell, as weights are not even or numbers too coarse.

    A row that differs in one pair is missed with a probability of at most `MISSED`: the values are
    normal, so that its mean moves by sigma / (keys + 1) at least with sigma normal, and in each of
    the elements of a value, less than 1 / 50 of that is taken for rounding.
    """
    batch, heads, _, n_k = call.sizes
    width, degree, run, q, k = call.v.shape[3] - 1, allowed.sum(-1), call.run, call.q, call.k
    if _COARSE * torch.finfo(q.dtype).eps * (1 + int(degree.max())) > _MOVED:
        if call.double is None:
            return None
        run, q, k = call.double, q.double(), k.double()
    if width < 1:
        return None
    generator, group = torch.Generator().manual_seed(0), heads // k.shape[1]
    differs = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    for _ in range(math.ceil(math.log(MISSED) / (width * math.log(_MOVED)))):
        values = torch.randn(batch, k.shape[1], n_k, width, generator=generator).to(k)
        out = call.again(
            torch.zeros_like(q),
            k,
            torch.cat([values.new_ones(1).expand_as(values[..., :1]), values], -1),
            run,
        )
        total = out[..., 0]
        for b, h in product(range(batch), range(heads)):
            pairs, count = (
                x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1)] for x in (allowed, degree)
            )
            wanted = pairs.to(k.dtype) @ values[b, h // group] / count.clamp_min(1)[:, None]
            means = out[b, h, :, 1:] / total[b, h, :, None].clamp_min(READ)
            moved = ((means - wanted) * (count + 1)[:, None]).abs().amax(-1)
            reads = total[b, h] > READ
            differs[b, h] |= torch.where(count > 0, ~((moved < _MOVED) & reads), reads)
    return differs


def groups_at_fault(call: Call) -> Iterator[str]:
    """What is wrong with the heads of keys that query heads read: each group of them its own."""
    heads, groups = call.q.shape[1], call.k.shape[1]
    if 1 < groups < heads:
        wanted = torch.arange(heads) // (heads // groups)
        for what, found in (("values", _value_groups(call)), ("keys", _key_groups(call))):
            wrong = (found != wanted).nonzero()
            if len(wrong):
                head = int(wrong[0])
                yield (
                    f"query head {head} reads the {what} of head {int(found[head])}, of"
                    f" {int(wanted[head])} is right: grouped heads are repeated wrongly"
                )
    elif groups == heads:
        for what, x in (("values", call.v), ("keys", call.k)):
            same = [next(g for g in range(heads) if x[:, g].equal(x[:, h])) for h in range(heads)]
            count = len(set(same))
            if (
                1 < count < heads
                and heads % count == 0
                and same == [*range(count)] * (heads // count)
            ):
                yield (
                    f"query heads 0 and {count} share the {what} of one head, 0 and 1 are right:"
                    " grouped heads are repeated wrongly"
                )


def _value_groups(call: Call) -> torch.Tensor:
    """int64 [H]: the head of values that each query head reads most of."""
    groups, width, parts = call.k.shape[1], call.v.shape[3], []
    for first in range(0, groups, width):
        v = torch.zeros_like(call.v)
        for at in range(first, min(first + width, groups)):
            v[:, at, :, at - first] = 1
        parts.append(call.again(call.flat(), call.k, v)[..., : groups - first])
    return torch.cat(parts, -1).abs().nan_to_num().sum((0, 2)).argmax(-1).cpu()


def _key_groups(call: Call) -> torch.Tensor:
    """int64 [H]: the head of keys that each query head reads, from which outputs move with which
    keys; -1 where none moves."""
    groups, noise = call.k.shape[1], torch.Generator().manual_seed(0)
    k, v = (torch.randn(x.shape, generator=noise).to(x) for x in (call.k, call.v))
    q = torch.randn(call.q.shape, generator=noise).to(call.q)
    before, found = call.again(q, call.k, v), torch.full((call.q.shape[1],), -1)
    for bit in range(groups.bit_length()):
        chosen = torch.tensor([(g + 1) >> bit & 1 for g in range(groups)], dtype=torch.bool)
        moved = torch.where(chosen.to(k.device)[:, None, None], k, call.k)
        change = (call.again(q, moved, v) - before).abs().nan_to_num().amax((0, 2, 3))
        found += (change > 1e-3 * before.abs().nan_to_num().max()).long().cpu() << bit
    return found


def moved_rows(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """bool [B, n_q, n]: which rows of an output [B, n_q, …] move with which positions of x [B, n,
    …], in n + 1 calls: what moves by less than rounding is taken to stand still."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape[0], x.shape[2], generator=generator).to(x) * x.std()
    with torch.no_grad():
        before = run(x)
        still = 4 * torch.finfo(before.dtype).eps * before.abs().nan_to_num().max()
        columns = []
        for at in range(x.shape[1]):
            moved = x.clone()
            moved[:, at] += noise
            change = (run(moved) - before).abs().nan_to_num().flatten(2).amax(-1)
            columns.append(change > still)
    return torch.stack(columns, -1)


def in_double(value: Any) -> Any:
    """Arguments with their floating point tensors in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(in_double(each) for each in value)
    return {n: in_double(x) for n, x in value.items()} if type(value) is dict else value
