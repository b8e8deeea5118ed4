"""Causal sums of outer products by chunks: what a query reads of its own chunk in a dense product,
all before it through a state.

    y_i = sum over j <= i of exp(t_j - r_i) (f_i . g_j) w_j

for features f of queries and g of keys, rows w of values and frames t, r. Some chunks make a block,
whose chunks are computed at once: f [N, S, R c, m], g [N, S, c, m], w [N, S, c, e] for S chunks of
c positions, with the R query heads of one key head as more rows. A state [N, m, e] holds the sums
over all keys before a block, in the frame of the last of them; the frames of each chunk count from
that of the state before it.

The weight of a key depends on no later key, bit by bit: a frame r_i is a maximum over j <= i.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnspec.factored.products import against, outer


@dataclass(frozen=True)
class Frames:
    """t [N, S, c] and r [N, S, c] of a block, r not falling and t_j <= r_i for all j <= i.

    Their type may be wider than that of the sums: differences are rounded, not what they are of.
    """

    keys: torch.Tensor
    rows: torch.Tensor

    def entering(self, kind: torch.dtype) -> torch.Tensor:
        """What a row multiplies the state before its chunk with [N, S, c]."""
        return torch.exp((-self.rows).to(kind))

    def staying(self, kind: torch.dtype) -> torch.Tensor:
        """What a key is multiplied with in the state after its chunk [N, S, c]."""
        return torch.exp((self.keys - self.rows[..., -1:]).to(kind))

    def fades(self, kind: torch.dtype) -> torch.Tensor:
        """What the state before a chunk is multiplied with in the one after it [N, S]."""
        return torch.exp((-self.rows[..., -1]).to(kind))


def weights_of(frames: Frames | None, c: int, repeat: int, like: torch.Tensor) -> torch.Tensor:
    """exp(t_j - r_i) of the pairs of a chunk, 0 where j > i: [N, S, R c, c], or [R c, c]."""
    later = torch.ones(c, c, dtype=torch.bool, device=like.device).triu(1)
    if frames is None:
        return (~later).to(like.dtype).repeat(repeat, 1)
    pairs = frames.keys[..., None, :] - frames.rows[..., None]
    pairs = pairs.masked_fill(later, -torch.inf).to(like.dtype)
    return torch.exp(pairs).repeat(1, 1, repeat, 1)


def sums_of(g: torch.Tensor, w: torch.Tensor, frames: Frames | None) -> torch.Tensor:
    """What each chunk adds to the state after it [N, S, m, e]."""
    if frames is not None:
        w = w * frames.staying(w.dtype)[..., None]
    return outer(g, w)


def states_of(
    state: torch.Tensor, sums: torch.Tensor, frames: Frames | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before each chunk [N, S, m, e], and the one after the last."""
    found = _scanned(state, sums, frames, range(sums.shape[1]))
    return _stacked(found[:-1]), found[-1]


def outputs_of(
    f: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    states: torch.Tensor,
    weights: torch.Tensor,
    frames: Frames | None,
    pairs: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [N, S, R c, e] of a block; `pairs` are the products of f and g [N, S, R c, c] if they are
    known."""
    pairs = f @ g.transpose(-1, -2) if pairs is None else pairs
    y = (pairs * weights) @ w
    return y + _entering(against(f, states.transpose(-1, -2)), frames)


def gradients_of(
    grad: torch.Tensor,
    f: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    states: torch.Tensor,
    after: torch.Tensor,
    weights: torch.Tensor,
    frames: Frames | None,
    known: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of f, g and w, of the state before the block, and of the products of pairs,
    where `grad` is that of y, `after` that of the state after the block. If these products are
    `known`, those of f and g lack what goes through them."""
    pairs = (f @ g.transpose(-1, -2) if known is None else known) * weights
    grad_pairs = grad @ w.transpose(-1, -2) * weights
    entering = _entering(grad, frames)
    grad_states = outer(f, entering)
    found = _scanned(after, grad_states, frames, reversed(range(grad_states.shape[1])))
    grad_g, grad_w = _into_sums(_stacked(found[-2::-1]), g, w, frames)
    grad_w = pairs.transpose(-1, -2) @ grad + grad_w
    grad_f = against(entering, states)
    if known is None:
        grad_g = grad_pairs.transpose(-1, -2) @ f + grad_g
        grad_f = grad_pairs @ g + grad_f
    return grad_f, grad_g, grad_w, found[-1], grad_pairs


def gradients_of_sums(
    after: torch.Tensor, g: torch.Tensor, w: torch.Tensor, frames: Frames | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of g and w [N, 1, c, …] of a block of one chunk that nothing reads, and of the
    state before it, where `after` is that of the state after it."""
    grad_g, grad_w = _into_sums(after[:, None], g, w, frames)
    fades = None if frames is None else frames.fades(g.dtype)
    return grad_g, grad_w, after if fades is None else after * fades[..., None]


def _into_sums(
    grad: torch.Tensor, g: torch.Tensor, w: torch.Tensor, frames: Frames | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of g and w, where `grad` is that of what each chunk adds to the states."""
    to_w = grad.transpose(-1, -2)
    if frames is None:
        return against(w, grad), against(g, to_w)
    factor = frames.staying(g.dtype)[..., None]
    return against(w * factor, grad), against(g, to_w) * factor


def _scanned(
    first: torch.Tensor, parts: torch.Tensor, frames: Frames | None, order: Iterable[int]
) -> list[torch.Tensor]:
    """States [N, m, e] one after the other, each the one before, faded, and a part of parts
    [N, S, m, e]."""
    found = [first]
    fades = None if frames is None else frames.fades(parts.dtype)
    for at in order:
        before = found[-1] if fades is None else found[-1] * fades[:, at, None, None]
        found.append(before + parts[:, at])
    return found


def _stacked(states: list[torch.Tensor]) -> torch.Tensor:
    """States [N, m, e] as [N, S, m, e]."""
    return states[0][:, None] if len(states) == 1 else torch.stack(states, 1)


def _entering(f: torch.Tensor, frames: Frames | None) -> torch.Tensor:
    """Rows [N, S, R c, …] brought to the frame of the state before their chunk."""
    if frames is None:
        return f
    factor = frames.entering(f.dtype)
    return f * factor.repeat(1, 1, f.shape[2] // factor.shape[2])[..., None]
