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
    listed = len(args) > 1 and isinstance(args[1], list | tuple)
    factors = (args[1] if listed else args[1:]) if name == "einsum" else args
    at = next((at for at, x in enumerate(factors) if hasattr(x, _OF)), None)
    if at is None:
        return function(*args, **kwargs), None
    weights = factors[at]
    if name in _PRODUCTS:
        still = [x.detach() for x in factors]
        if name == "einsum":
            order = _order(args[0], at, len(factors))
            return function(args[0], *still), order and _call(weights, None, order, heads)
        call = None if at else _call(weights, still[1], "...qk->...qk", heads)
        return function(*still, **kwargs), call
    with torch.enable_grad():
        out = function(*args, **kwargs)
    if isinstance(out, torch.Tensor) and out.numel() == weights.numel():
        setattr(out, _OF, getattr(weights, _OF))
    return out, None


def _call(weights: torch.Tensor, v: Any, order: str, heads: int | None) -> Call | None:
    """The call of a product with weights whose axes an einsum puts in `order`."""
    scores, sizes = getattr(weights, _OF), weights.detach().abs().nan_to_num(nan=0.0)
    alike = weights.requires_grad and weights.shape[-2:] == scores.shape[-2:]
    try:
        noise = torch.randn_like(sizes)
        slope = torch.autograd.grad(weights, scores, noise, retain_graph=True)[0] if alike else None
    except RuntimeError:
        # written over in place: the weights alone are left to look at
        slope = None
    if slope is not None:
        slope = slope.abs().nan_to_num(nan=0.0).reshape(sizes.shape)
        sizes = sizes.maximum(slope * (slope > 256 * torch.finfo(slope.dtype).eps))

    def ordered(double: bool) -> torch.Tensor:
        found = sizes
        if double and alike:
            # what the softmax itself rounds to 0 in its own type
            rounded = scores.detach().softmax(-1) == 0
            fine = (scores.detach().double().softmax(-1) * rounded).reshape(sizes.shape)
            found = sizes.double().where(~rounded.reshape(sizes.shape), fine)
        return four_axes(torch.einsum(order, found), heads)

    shape = ordered(False).shape
    if len(shape) != 4:
        return None
    v = v if isinstance(v, torch.Tensor) and v.shape[:2] == shape[:2] else None
    return Call("softmax and a product", tuple(shape), v=v, sizes=ordered)


def four_axes(x: torch.Tensor, heads: int | None) -> torch.Tensor:
    """A tensor [B * H, …] or of one sample with samples and heads as axes of their own."""
    if x.ndim == 2:
        return x[None, None]
    count = heads if heads and len(x) % heads == 0 else 1
    return x.unflatten(0, (-1, count)) if x.ndim == 3 else x


def _order(equation: str, at: int, count: int) -> str | None:
    """The einsum that puts the axes of weights, a factor of a product by letters, in the order of
    samples and heads, queries, keys; None where they are no weights of rows."""
    left, _, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if count != 2 or len(terms) != 2:
        return None
    own, other = terms[at], terms[1 - at]
    keys = [x for x in own if x in other and x not in out]
    queries = [x for x in own if x not in other and x in out]
    rest = [x for x in out if x in own and x in other and x != "."]
    if len(keys) != 1 or len(queries) != 1:
        return None
    return f"{own}->{'...' * ('...' in own)}{''.join((*rest, *queries, *keys))}"
