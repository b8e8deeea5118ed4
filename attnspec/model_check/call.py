"""One call of an attention, and the questions that are asked of it.

The output of a call is linear in its values: with unit vectors as values the output *is* the
weights, of as many keys at once as a value has elements. Queries are scaled down before, so that no
weight is too small for a float, which changes weights but no pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

READ = 2.0**-52
"""The weight from which on a pair is read: what is less changes no sum of float64 numbers."""

STEEPEST = 16.0
"""The largest product of a query and a key that is asked with: weights stay far above `READ`."""

NARROWEST = 5
"""The fewest elements of values with which rows are compared: each random one misses 2 in 100 rows
that differ by one pair, so that 4 miss fewer than 1e-6."""

_MOVED = 0.02
"""What a mean must move by, in units of one key of a row, to count: what is less is rounding."""

_NONE = torch.empty(0)


@dataclass
class Call:
    """What an attention computes for `shape`, B, H, n_q and n_k, and can be asked of again.

    `run` makes the call with other q [B, H, n_q, d], k [B, G, n_k, d] and v [B, G, n_k, e], `cast`
    changing its other arguments. What cannot be run so has the sizes of its weights,
    [B, H, n_q, n_k], as `sizes`, in float64 if asked. `together` says that heads cannot be told
    apart, `reason` why nothing can be asked; `passes` counts calls.
    """

    kind: str
    shape: tuple[int, ...] = (0, 0, 0, 0)
    q: torch.Tensor = _NONE
    k: torch.Tensor = _NONE
    v: torch.Tensor = _NONE
    run: Callable[..., torch.Tensor] = lambda *tensors, cast: _NONE
    sizes: Callable[[bool], torch.Tensor] | None = None
    together: bool = False
    reason: str | None = None
    passes: int = 0

    def outputs(self, values: torch.Tensor, steepest: float, double: bool) -> torch.Tensor:
        """The output with other values, and queries scaled down until no score is steeper."""
        self.passes += 1
        largest = float(self.q.norm(dim=-1).max() * self.k.norm(dim=-1).max())
        q = self.q * min(1.0, steepest / max(largest, 1e-9))
        cast = in_double if double else lambda x: x
        return self.run(cast(q), cast(self.k), cast(values), cast=cast)

    def weights(self, double: bool = False) -> torch.Tensor:
        """The size of each weight, [B, H, n_q, n_k]; NaN is 0."""
        if self.sizes is not None:
            self.passes += 1
            return self.sizes(double)
        columns = []
        for keys in torch.split(torch.arange(self.v.shape[2]), self.v.shape[3]):
            unit = torch.zeros_like(self.v)
            unit[:, :, keys, keys - keys[0]] = 1
            columns.append(self.outputs(unit, STEEPEST, double)[..., : len(keys)])
        return torch.cat(columns, -1).abs().nan_to_num(nan=0.0)

    def rows_differ(self, allowed: torch.Tensor) -> torch.Tensor:
        """bool [B, H, n_q, 1]: the rows whose keys are not those allowed, bool [B | 1, H | 1, n_q,
        n_k], or whose weights are uneven.

        With queries of zero every key that is read weighs the same, so that random values give in
        each row the mean of those that are read. A row that differs by one pair moves by
        x / (keys + 1), x normal in each element, and less than `_MOVED` of that comes by chance in
        2 of 100.
        """
        allowed = allowed.to(self.v.device)
        degree = allowed.sum(-1, keepdim=True)
        double = 16 * torch.finfo(self.v.dtype).eps * (1 + int(degree.max())) > _MOVED
        values = torch.randn(self.v.shape, generator=torch.Generator().manual_seed(0)).to(self.v)
        # the sum of the weights, by which sinks are divided out
        values[..., 0] = 1
        values = values.double() if double else values
        out = self.outputs(values, 0.0, double)
        sums = allowed.to(values) @ values.repeat_interleave(out.shape[1] // values.shape[1], 1)
        means = out / out[..., :1].clamp_min(READ)
        moved = (means - sums / degree.clamp_min(1)) * (degree + 1)
        still = moved[..., 1:].abs().amax(-1) < _MOVED
        reads, reading = out[..., 0] > READ, degree[..., 0] > 0
        return torch.where(reading, ~(still & reads), reads)[..., None].cpu()

    def grouped_wrongly(self) -> tuple[str, ...]:
        """What is wrong with the head of values that each query head reads: as outputs show, or as
        heads are equal that were repeated before the call."""
        heads, groups, v = self.shape[1], (self.v.shape * 2)[1], self.v
        if v.ndim != 4 or v.shape[3] < 2:
            return ()
        if groups == heads:
            equal = [next(g for g in range(heads) if v[:, g].equal(v[:, h])) for h in range(heads)]
            groups = len(set(equal))
            read = [h % groups for h in range(heads)]
            wrong = groups < heads and equal == read
        else:
            numbers = torch.ones_like(v)
            numbers[..., 1] = torch.arange(groups).to(v)[:, None]
            out = self.outputs(numbers, STEEPEST, double=False).nan_to_num()
            means = (out[..., 1] / out[..., 0].clamp_min(READ)).amax((0, 2))
            read, wrong = [round(float(x)) for x in means], True
        at = [h for h in range(heads) if read[h] != h * groups // heads and wrong][:1]
        words = "query head {} reads the values of head {}: grouped heads are repeated wrongly"
        return tuple(words.format(h, read[h]) for h in at)


def in_double(value: Any) -> Any:
    """Arguments with their floating point tensors in float64."""
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, value)
