"""Attention that is written out: a softmax, and a product of what comes of it with values."""

from __future__ import annotations

from typing import Any

import torch

from attnspec.model_check.call import Call

_PRODUCTS = {"matmul", "__matmul__", "bmm", "mm", "einsum"}
_OF = "attnspec_softmax_of"
"""The attribute by which what comes of a softmax has the scores that it was of."""


def written_out(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None
) -> tuple[Any, Call | None]:
    """What a function of torch returns, and a call where it is such a product.

    A score that is masked after the softmax weighs nothing and still moves its row, by the
    denominator: so the softmax is differentiated, and a pair is read where either is not 0.
    """
    name, first = getattr(function, "__name__", ""), args[0] if args else None
    if name in ("softmax", "_softmax") and isinstance(first, torch.Tensor) and first.ndim > 1:
        scores = first.detach().requires_grad_(first.is_floating_point())
        with torch.enable_grad():
            out = function(scores, *args[1:], **kwargs)
        setattr(out, _OF, scores)
        return out, None
    by_letters = name == "einsum"
    listed = by_letters and isinstance(args[1], list | tuple)
    factors = (args[1] if listed else args[1:]) if by_letters else args
    weights = next((x for x in factors if hasattr(x, _OF)), None)
    if weights is None:
        return function(*args, **kwargs), None
    if name in _PRODUCTS:
        still = [x.detach() for x in factors]
        sums_keys = _sums_keys(args[0]) if by_letters else weights is factors[0]
        call = _call(weights, still[1], heads) if sums_keys else None
        return function(*(args[:1] * by_letters), *still, **kwargs), call
    with torch.enable_grad():
        out = function(*args, **kwargs)
    # the column of a sink may be cut off
    cut = name == "__getitem__"
    if isinstance(out, torch.Tensor) and (cut or out.numel() == weights.numel()):
        setattr(out, _OF, getattr(weights, _OF))
    return out, None


def _call(weights: torch.Tensor, v: torch.Tensor, heads: int | None) -> Call | None:
    """The call of a product with weights [..., n_q, n_k]."""
    scores, sizes = getattr(weights, _OF), weights.detach().abs().nan_to_num(nan=0.0)
    alike = weights.requires_grad and weights.numel() == scores.numel()
    try:
        noise = torch.randn_like(sizes)
        slope = torch.autograd.grad(weights, scores, noise, retain_graph=True)[0] if alike else None
    except RuntimeError:
        # written over in place: the weights alone are left to look at
        slope = None
    if slope is not None:
        slope = slope.abs().nan_to_num(nan=0.0).reshape(sizes.shape)
        sizes = sizes.maximum(slope * (slope > 256 * torch.finfo(slope.dtype).eps))

    def sized(double: bool) -> torch.Tensor:
        if not (double and alike):
            return four_axes(sizes, heads)
        # what the softmax itself rounds to 0 in its own type
        fine, rounded = scores.detach().double().softmax(-1), scores.detach().softmax(-1) == 0
        return four_axes(sizes.maximum((fine * rounded).reshape(sizes.shape)), heads)

    shape = tuple(sized(False).shape)
    v = v if v.ndim == 4 and v.shape[:2] == shape[:2] else v.new_empty(0)
    return Call("softmax and a product", shape, v=v, sizes=sized) if len(shape) == 4 else None


def four_axes(x: torch.Tensor, heads: int | None) -> torch.Tensor:
    """A tensor [B * H, …] or of one sample with samples and heads as axes of their own."""
    if x.ndim == 2:
        return x[None, None]
    count = heads if heads and len(x) % heads == 0 else 1
    return torch.unflatten(x, 0, (-1, count)) if x.ndim == 3 else x


def _sums_keys(equation: str) -> bool:
    """Whether a product by letters is that of weights, whose last axes are queries and keys, with
    values: the key is summed over, and the query is none of the values'."""
    own, other, out = (equation.replace(" ", "").replace("->", ",").split(",") * 3)[:3]
    query, key = own[-2], own[-1]
    return key in other and key not in out and query in out and query not in other
