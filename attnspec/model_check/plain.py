"""Attention that is written out: a softmax, and a product of what comes of it with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_PRODUCTS = {"matmul", "__matmul__", "bmm", "mm", "einsum"}


@dataclass
class Weights:
    """The weights of a softmax that were multiplied with values: the size of each, and of the
    influence of each score on its row, [B, H, n_q, n_k], whichever is larger. `scores` are those
    that the softmax was of."""

    sizes: torch.Tensor
    scores: torch.Tensor
    kind: str = "softmax and a product"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, n_q and n_k."""
        batch, heads, n_q, n_k = self.sizes.shape
        return batch, heads, n_q, n_k

    def tiny(self) -> torch.Tensor:
        """bool [B, H, n_q, n_k]: the weights that the softmax itself rounds to 0 in its own type,
        and not in float64."""
        if self.scores.shape[-2:] != self.sizes.shape[-2:]:
            return torch.zeros_like(self.sizes, dtype=torch.bool)
        small = (self.scores.softmax(-1) == 0) & (self.scores.double().softmax(-1) > 0)
        return small.reshape(self.sizes.shape)


class WrittenOut:
    """Follows what comes of each softmax until it is multiplied.

    A score that is masked after the softmax weighs nothing and still moves its row, by the
    denominator: so the softmax is differentiated, and a pair is read where either is not 0.
    """

    def __init__(self) -> None:
        self.scores: Any = WeakIdKeyDictionary()

    def called(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None
    ) -> tuple[Any, Weights | None]:
        """What a function of torch returns, and weights where it is such a product."""
        name = getattr(function, "__name__", "")
        if name in ("softmax", "_softmax") and isinstance(args[0] if args else None, torch.Tensor):
            return self._softmax(function, args, kwargs), None
        held = next((x for x in args if self._has(x)), None)
        if held is None and name != "einsum":
            return function(*args, **kwargs), None
        if name in _PRODUCTS:
            found = self._product(name, args, heads)
            return function(*map(_still, args), **kwargs), found
        with torch.enable_grad():
            out = function(*args, **kwargs)
        if isinstance(out, torch.Tensor) and held is not None and out.numel() == held.numel():
            self.scores[out] = self.scores[held]
        return out, None

    def _softmax(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0]
        if scores.ndim < 2 or not scores.is_floating_point():
            return function(*args, **kwargs)
        scores = scores.detach().requires_grad_()
        with torch.enable_grad():
            out = function(scores, *args[1:], **kwargs)
        self.scores[out] = scores
        return out

    def _has(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self.scores

    def _product(self, name: str, args: tuple[Any, ...], heads: int | None) -> Weights | None:
        """The weights of a product, where they are its first factor."""
        factors: Sequence[Any] = args
        axes = None
        if name == "einsum":
            factors = args[1] if isinstance(args[1], list | tuple) else args[1:]
            order = _order(args[0], [self._has(x) for x in factors])
            if order is None:
                return None
            factors, axes = factors[order[0] :], order[1]
        if not self._has(factors[0]):
            return None
        sizes, scores = self._sizes(factors[0]), self.scores[factors[0]].detach()
        sizes = sizes if axes is None else sizes.permute(axes)
        while sizes.ndim < 4:
            count = heads if sizes.ndim == 3 and heads and sizes.shape[0] % heads == 0 else 1
            sizes = torch.unflatten(sizes, 0, (-1, count)) if sizes.ndim == 3 else sizes[None]
        return Weights(sizes, scores) if sizes.ndim == 4 else None

    def _sizes(self, weights: torch.Tensor) -> torch.Tensor:
        sizes, scores = weights.detach().abs().nan_to_num(nan=0.0), self.scores[weights]
        if not weights.requires_grad or weights.shape[-2:] != scores.shape[-2:]:
            return sizes
        try:
            noise = torch.randn_like(sizes)
            (slope,) = torch.autograd.grad(weights, scores, noise, retain_graph=True)
        except RuntimeError:
            # written over in place: the weights alone are left to look at
            return sizes
        slope = slope.abs().nan_to_num(nan=0.0).reshape(sizes.shape)
        rounding = 256 * torch.finfo(slope.dtype).eps
        return sizes.maximum(torch.where(slope > rounding, slope, 0.0))


def _still(value: Any) -> Any:
    """A factor without what was recorded of it."""
    if isinstance(value, list | tuple):
        return type(value)(map(_still, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def _order(equation: str, held: list[bool]) -> tuple[int, list[int]] | None:
    """Of a product by letters: which factor are the weights, and the order of their axes that has
    samples and heads, queries, keys; None where they are no weights of rows."""
    sides = equation.replace(" ", "").replace("...", "").split("->")
    factors = sides[0].split(",")
    if len(sides) != 2 or len(factors) != 2 or sum(held) != 1:
        return None
    at = held.index(True)
    own, other, out = factors[at], factors[1 - at], sides[1]
    keys = [x for x in own if x in other and x not in out]
    queries = [x for x in own if x not in other and x in out]
    rest = sorted((x for x in own if x in other and x in out), key=out.index)
    if len(keys) != 1 or len(queries) != 1 or len(rest) + 2 != len(own):
        return None
    if "..." in equation:
        return (at, [0, 1, 2, 3]) if own.endswith(queries[0] + keys[0]) else None
    return at, [own.index(x) for x in (*rest, queries[0], keys[0])]
