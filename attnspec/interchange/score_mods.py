"""`attnspec.from_score_mod`: a score function of FlexAttention as a spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnspec.graphs.forms.written import written_scalar
from attnspec.interchange.mask_mods import (
    HEADS,
    LENGTHS,
    LONGEST,
    errors_of,
    mask_of,
    reading_captured,
    require_positions,
    written_as,
)
from attnspec.interchange.traced import entries, graph, trace, trace_score
from attnspec.ir.program import Leaf
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError, first_line

CLOSE = 1e-4
"""How far weights of the function and of the spec may be apart."""


def from_score_mod(
    score_mod: Callable[..., Any],
    *,
    mask_mod: Callable[..., Any] | None = None,
    name: str | None = None,
    heads: int | None = None,
) -> Spec:
    """The spec of a score function f(score, b, h, q, k) of torch, over the pairs of a mask
    function, of all pairs without one.

    It is read as `from_mask_mod` reads a mask; beside that, captured tensors of at most 256 numbers
    are lists, and one that is read at [b, h, q, k], with or without its first axes, is an input of
    kind `pairs`. torch.where(…, score, -inf) hides a pair from the softmax. What it makes of
    scores is then held against the spec at several lengths. Raises AttnSpecError with the reason
    for what no spec says.
    """
    if not callable(score_mod):
        raise TypeError(
            f"a function of (score, b, h, q, k) is needed, got {type(score_mod).__name__}"
        )
    called, captured = reading_captured(score_mod, name, "score")
    with errors_of(called):
        value = trace_score(score_mod, captured)
        mask = True if mask_mod is None else trace(mask_mod, captured)
        term = Leaf("full", ()) if mask is True else graph(mask)
        require_positions(term)
        kinds = {each.source: "numbers" if each.side else "length" for each in entries(value)}
        kinds |= dict.fromkeys(captured.pairs, "pairs")
        count, score = captured.heads if heads is None else heads, written_scalar(value)
    tensors = {**captured.tensors, **captured.lengths, **captured.pairs}
    lengths = {x.shape[-1] for name, x in tensors.items() if name not in captured.lengths}
    with written_as(called, term, count, kinds, f"score {score}") as spec:
        for n in [min(LONGEST, *lengths)] if lengths else LENGTHS:
            try:
                inputs = {name: tensors[name] for name in spec.inputs}
                _hold(spec, score_mod, mask_mod, inputs, n)
            except (IndexError, RuntimeError) as error:
                if isinstance(error, IndexError) and n > LENGTHS[0] and not lengths:
                    # its lists end with these lengths
                    break
                raise AttnSpecError(
                    f"`{called}` has no scores at n = {n:,}: {first_line(error)}"
                ) from error
    return spec


def _hold(
    spec: Spec,
    score_mod: Callable[..., Any],
    mask_mod: Callable[..., Any] | None,
    tensors: dict[str, Tensor],
    n: int,
) -> None:
    """Raise AttnSpecError where the weights of function and spec differ at a length."""
    heads, kinds = spec.heads or HEADS, {name: x.kind for name, x in spec.inputs.items()}
    # a number of each position may be that of all samples
    sizes = [len(x) for name, x in tensors.items() if x.dim() != 1 or kinds[name] == "length"]
    batch = max(sizes, default=1)
    draw = torch.Generator().manual_seed(n)
    q, k = (torch.randn(batch, heads, n, 8, generator=draw).double() for _ in range(2))
    scores = (q @ k.mT) / 8**0.5
    at = [x.flatten() for x in torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")]
    meant = torch.vmap(score_mod)(scores.flatten(), *at).view_as(scores).double()
    if mask_mod is not None:
        meant = meant.masked_fill(~mask_of(mask_mod, batch, heads, n), -torch.inf)
    inputs = {
        name: x.expand(batch, *x.shape[1:]).double()
        if kinds[name] == "pairs"
        else x.expand(batch)
        if kinds[name] == "length"
        else x[..., :n].expand(batch, n)
        for name, x in tensors.items()
    }
    values = torch.eye(n, dtype=torch.float64).expand(batch, heads, n, n)
    weights = spec.compile("dense")(q, k, values, inputs=inputs or None)
    if (weights - meant.softmax(-1).nan_to_num(0.0)).abs().max() > CLOSE:
        raise AttnSpecError(
            f"the spec found for `{spec.name}` is not its score: their weights differ at"
            f" n = {n:,}; the function may depend on something besides its arguments"
        )
