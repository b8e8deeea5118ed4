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
from typing import Any

import torch

READ = 2.0**-52
"""The weight from which on a pair is read: what is less changes no sum of float64 numbers."""

STEEPEST = 16.0
"""The largest product of a query and a key that is asked with: weights stay far above `READ`."""

MISSED = 1e-6
"""The probability with which `rows_differ` may miss a row that differs by one pair, at most."""

_MOVED = 0.02
"""What a mean must move by, in units of one key of a row, to count: what is less is rounding."""

_COARSE = 16
"""Roundings of a number between 1 and 4 that add up in a mean."""


@dataclass
class Call:
    """A call of an attention with q [B, H, n_q, d], k [B, G, n_k, d] and v [B, G, n_k, e]; `run`
    makes it again with other tensors, `cast` changing its other arguments, and `passes` counts.

    `sink` says that weights of a row need not sum to 1.
    """

    kind: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    run: Callable[..., torch.Tensor]
    sink: bool = False
    passes: int = 0

    def again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, double: bool = False
    ) -> torch.Tensor:
        """The output with other tensors, all in float64 with `double`."""
        self.passes += 1
        cast = {"cast": in_double} if double else {}
        return self.run(q, k, v, **cast)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, n_q and n_k."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def flat(self) -> torch.Tensor:
        """The queries, scaled down until no score is steep."""
        largest = float(self.q.norm(dim=-1).max() * self.k.norm(dim=-1).max())
        return self.q * min(1.0, STEEPEST / largest) if largest > 0 else self.q


def in_double(value: Any) -> Any:
    """Arguments with their floating point tensors in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(in_double(each) for each in value)
    return {n: in_double(x) for n, x in value.items()} if type(value) is dict else value


def weights_of(call: Call, rows: torch.Tensor | None = None, double: bool = False) -> torch.Tensor:
    """The size of each weight, [B, H, n_q, n_k], or of the `rows` (samples, heads, queries) alone,
    [rows, n_k]; NaN is 0."""
    width = call.v.shape[3]
    q, k = in_double((call.flat, call.k)) if double else (call.flat, call.k)
    found = []
    for keys in torch.split(torch.arange(k.shape[2], device=k.device), width):
        v = k.new_zeros(*k.shape[:3], width)
        v[:, :, keys, keys - keys[0]] = 1
        out = call.again(q, k, v, double)[..., : len(keys)]
        found.append(out if rows is None else out[tuple(rows.T)])
    return torch.cat(found, -1).abs().nan_to_num(nan=0.0)


def rows_differ(call: Call, allowed: torch.Tensor) -> torch.Tensor | None:
    """bool [B, H, n_q]: the rows whose keys are not those that are allowed, bool [B | 1, H | 1,
    n_q, n_k]; None where values are too narrow to tell.

    A row that differs in one pair is missed with a probability of at most `MISSED`: the values are
    normal, so that its mean moves by x / (keys + 1) with x normal in each element, and less than
    `_MOVED` of that, which is rounding, comes by chance in 2 of 100 elements.
    """
    degree, width = allowed.sum(-1), call.v.shape[3] - 1
    if width < 1:
        return None
    double = _COARSE * torch.finfo(call.q.dtype).eps * (1 + int(degree.max())) > _MOVED
    q, k = in_double((call.q, call.k)) if double else (call.q, call.k)
    generator, group = torch.Generator().manual_seed(0), q.shape[1] // k.shape[1]
    differs = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    for _ in range(math.ceil(math.log(MISSED) / (width * math.log(_MOVED)))):
        values = torch.randn(*k.shape[:3], width + 1, generator=generator).to(k)
        # the sum of the weights, by which sinks are divided out
        values[..., 0] = 1
        out = call.again(torch.zeros_like(q), k, values, double)
        for b, h in product(*map(range, q.shape[:2])):
            at = min(b, len(allowed) - 1), min(h, allowed.shape[1] - 1)
            count = degree[at][:, None]
            wanted = allowed[at].to(k) @ values[b, h // group] / count.clamp_min(1)
            means = out[b, h] / out[b, h, :, :1].clamp_min(READ)
            moved = ((means - wanted) * (count + 1))[:, 1:].abs().amax(-1)
            reads, reading = out[b, h, :, 0] > READ, degree[at] > 0
            differs[b, h] |= torch.where(reading, ~((moved < _MOVED) & reads), reads)
    return differs


def groups_at_fault(call: Call) -> Iterator[str]:
    """What is wrong with the heads of keys and values that query heads read: each group has one."""
    heads, groups = call.q.shape[1], call.k.shape[1]
    for at, what in ((1, "keys"), (2, "values")):
        if 1 < groups < heads:
            found, size = _groups(call, at), heads // groups
            wrong = [h for h in range(heads) if found[h] != h // size]
            if wrong:
                yield (
                    f"query head {wrong[0]} reads the {what} of head {found[wrong[0]]},"
                    f" {wrong[0] // size} is right: grouped heads are repeated wrongly"
                )
        elif groups == heads:
            x = (call.k, call.v)[at - 1]
            same = [next(g for g in range(heads) if x[:, g].equal(x[:, h])) for h in range(heads)]
            count = len(set(same))
            if 1 < count < heads and same == [h % count for h in range(heads)]:
                yield (
                    f"query heads 0 and {count} share the {what} of one head, 0 and 1 are right:"
                    " grouped heads are repeated wrongly"
                )


def _groups(call: Call, at: int) -> list[int]:
    """The head of keys (`at` 1) or values (2) that each query head reads, by which outputs move
    with which, a bit of its number at a time; -1 where none moves."""
    groups, noise = call.k.shape[1], torch.Generator().manual_seed(0)
    given = [torch.randn(x.shape, generator=noise).to(x) for x in (call.q, call.k, call.v)]
    other = torch.randn(given[at].shape, generator=noise).to(given[at])
    before, found = call.again(given[0], given[1], given[2]), [-1] * call.q.shape[1]
    still = 1e-3 * before.abs().nan_to_num().max()
    for bit in range(groups.bit_length()):
        chosen = torch.tensor([(g + 1) >> bit & 1 for g in range(groups)], device=call.k.device)
        moved = [*given]
        moved[at] = torch.where(chosen.bool()[:, None, None], other, given[at])
        change = (call.again(moved[0], moved[1], moved[2]) - before).abs().nan_to_num().amax(
            (0, 2, 3)
        ) > still
        found = [f + (int(c) << bit) for f, c in zip(found, change, strict=True)]
    return found


def moved_rows(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """bool [B, n, n]: which rows of an output [B, n, …] move with which positions of x [B, n, D],
    in n + 1 calls: what moves by less than rounding is taken to stand still."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape[0], x.shape[2], generator=generator).to(x) * x.std()
    before = run(x)
    still = 4 * torch.finfo(before.dtype).eps * before.abs().nan_to_num().max()
    columns = []
    for at in range(x.shape[1]):
        moved = x.clone()
        moved[:, at] += noise
        change = (run(moved) - before).abs().nan_to_num().flatten(2).amax(-1)
        columns.append(change > still)
    return torch.stack(columns, -1)
