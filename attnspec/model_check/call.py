"""One call of an attention, and what is measured of it.

The output is linear in the values: with unit vectors as values it is the weights, of as many keys
at once as a value has elements. Queries are scaled down first: no weight is then too small to see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# a pair is read where its weight is larger: a smaller one changes no sum of float64 numbers
READ = 2.0**-52
# the largest product of a query and a key: weights stay far above `READ`
STEEPEST = 16.0
# the fewest elements of values with which rows are compared: each random one misses 2 in 100 rows
# that differ by one pair, so that 4 miss fewer than 1e-6
NARROWEST = 5
# a mean differs where it moves by more, in units of one key of a row: less is rounding
_MOVED = 0.02
# the attribute of the result of a softmax, and of what is made of it, that holds its scores
_OF = "attnspec_softmax_of"
_PRODUCTS = {"matmul", "__matmul__", "bmm", "mm", "einsum"}
_NONE = torch.empty(0)


@dataclass
class Call:
    """One call of an attention, of `shape` (B, H, n_q, n_k).

    `run` repeats it with other q [B, H, n_q, d], k [B, G, n_k, d], v [B, G, n_k, e], and `cast` for
    its other arguments. Else `sizes` returns the sizes of its weights, in float64 if True.
    `together`: heads cannot be separated. `reason`: why nothing can be measured.
    """

    kind: str
    shape: tuple[int, ...] = (0, 0, 0, 0)
    q: Tensor = _NONE
    k: Tensor = _NONE
    v: Tensor = _NONE
    run: Callable[..., Tensor] = lambda *tensors, cast: _NONE
    sizes: Callable[[bool], Tensor] | None = None
    together: bool = False
    reason: str = ""
    passes: int = 0

    def outputs(self, values: Tensor, steepest: float, double: bool) -> Tensor:
        """The output with other values, and queries scaled down until no score is steeper."""
        self.passes += 1
        largest = float(self.q.norm(dim=-1).max() * self.k.norm(dim=-1).max())
        q = self.q * min(1.0, steepest / max(largest, 1e-9))

        def wider(x: Tensor) -> Tensor:
            return x.double() if double and x.is_floating_point() else x

        cast = partial(tree_map_only, Tensor, wider)
        return self.run(*cast((q, self.k, values)), cast=cast)

    def weights(self, double: bool = False) -> Tensor:
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

    def rows_differ(self, allowed: Tensor) -> Tensor:
        """Which rows read other keys than `allowed` [B | 1, H | 1, n_q, n_k]: bool [B, H, n_q, 1].

        With queries of zero all keys of a row weigh the same: random values show their mean. A row
        that differs by one pair moves by x / (keys + 1), x normal; |x| < `_MOVED` in 2 of 100
        elements. Rows whose weights are uneven differ, too.
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
        """What is wrong with the head of values that each query head reads, if anything."""
        heads, groups, v = self.shape[1], (self.v.shape * 2)[1], self.v
        if v.ndim != 4 or v.shape[3] < 2:
            return ()
        if groups == heads:
            # heads that were repeated before the call are equal
            read = [next(g for g in range(heads) if v[:, g].equal(v[:, h])) for h in range(heads)]
            groups = len(set(read))
            if read != [h % groups for h in range(heads)]:
                return ()
        else:
            numbers = torch.ones_like(v)
            numbers[..., 1] = torch.arange(groups).to(v)[:, None]
            out = self.outputs(numbers, STEEPEST, double=False).nan_to_num()
            means = (out[..., 1] / out[..., 0].clamp_min(READ)).amax((0, 2))
            read = [round(float(x)) for x in means]
        wrong = [h for h in range(heads) if read[h] != h * groups // heads][:1]
        words = "query head {} reads the values of head {}: grouped heads are repeated wrongly"
        return tuple(words.format(h, read[h]) for h in wrong)


def written_out(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None
) -> tuple[Any, Call | None]:
    """What a function of torch returns, and a call where it multiplies weights with values.

    A score that is masked after the softmax has no weight and still moves its row, through the
    denominator. So the softmax is differentiated: a pair is read where either is not 0.
    """
    name, first = getattr(function, "__name__", ""), args[0] if args else None
    if name in ("softmax", "_softmax") and isinstance(first, Tensor) and first.ndim > 1:
        scores = first.detach().requires_grad_(first.is_floating_point())
        with torch.enable_grad():
            out = function(scores, *args[1:], **kwargs)
        setattr(out, _OF, scores)
        return out, None
    by_letters = name == "einsum"
    factors: Any = args[by_letters:]
    factors = factors[0] if by_letters and isinstance(factors[0], list | tuple) else factors
    weights = next((x for x in factors if hasattr(x, _OF)), None)
    if weights is None:
        return function(*args, **kwargs), None
    if name in _PRODUCTS:
        still = [x.detach() for x in factors]
        sums_keys = weights is factors[0]
        if by_letters:
            # weights are [..., query, key]
            own, other, out = (args[0].replace(" ", "").replace("->", ",").split(",") * 3)[:3]
            sums_keys = own[-1] in {*other} - {*out} and own[-2] in {*out} - {*other}
        call = _call(weights, still[1], heads) if sums_keys else None
        return function(*(args[:1] * by_letters), *still, **kwargs), call
    try:
        with torch.enable_grad():
            out = function(*args, **kwargs)
    except RuntimeError:
        # weights are written into a view that was made without gradients
        return function(*args, **kwargs), None
    # the column of a sink may be cut off
    kept = isinstance(out, Tensor) and out.numel() == weights.numel()
    if kept or name == "__getitem__":
        setattr(out, _OF, getattr(weights, _OF))
    return out, None


def _call(weights: Tensor, v: Tensor, heads: int | None) -> Call | None:
    """The call of a product with weights [..., n_q, n_k]."""
    scores, sizes = getattr(weights, _OF), weights.detach().abs().nan_to_num(nan=0.0)
    alike = weights.requires_grad and weights.numel() == scores.numel()
    if alike:
        # weights that are overwritten in place have no slope
        with suppress(RuntimeError):
            noise = torch.randn_like(sizes)
            (slope,) = torch.autograd.grad(weights, scores, noise, retain_graph=True)
            slope = slope.abs().nan_to_num(nan=0.0).reshape(sizes.shape)
            sizes = sizes.maximum(slope * (slope > 256 * torch.finfo(slope.dtype).eps))

    def sized(double: bool) -> Tensor:
        if not (double and alike):
            return four_axes(sizes, heads)
        # what the softmax itself rounds to 0 in its own type
        fine, rounded = scores.detach().double().softmax(-1), scores.detach().softmax(-1) == 0
        return four_axes(sizes.maximum((fine * rounded).reshape(sizes.shape)), heads)

    shape = tuple(sized(False).shape)
    v = v if v.ndim == 4 and v.shape[:2] == shape[:2] else v.new_empty(0)
    return Call("softmax and a product", shape, v=v, sizes=sized) if len(shape) == 4 else None


def four_axes(x: Tensor, heads: int | None) -> Tensor:
    """A tensor [B * H, …] or of one sample with samples and heads as axes of their own."""
    if x.ndim == 2:
        return x[None, None]
    count = heads if heads and len(x) % heads == 0 else 1
    return torch.unflatten(x, 0, (-1, count)) if x.ndim == 3 else x
