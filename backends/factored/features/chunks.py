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

from collections.abc import Sequence
from dataclasses import dataclass

import torch


class Room:
    """Tensors of one computation that each block writes anew.

    Fresh ones of some megabytes cost more to be handed out, page by page, than to be filled.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """What was taken by this name and shape before, whatever it holds now."""
        key = name, torch.Size(shape), like.dtype
        if key not in self._held:
            self._held[key] = like.new_empty(shape)
        return self._held[key]


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
    weights = torch.exp(pairs.masked_fill(later, -torch.inf).to(like.dtype))
    return weights if repeat == 1 else weights.repeat(1, 1, repeat, 1)


def states_of(
    state: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    frames: Frames | None,
    room: Room | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before each chunk [N, S, m, e], where `state` is the first, and the one after the
    last. The former lie in the `room`, where there is one, until it is used again."""
    if frames is not None:
        w = w * frames.staying(w.dtype)[..., None]
    found = _scanned(state, g, w, frames, room)
    return found[:, :-1], found[:, -1].clone()


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
    return y + _entering(f @ states, frames)


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
    room: Room | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of f, g and w, of the state before the block, and of the products of pairs,
    where `grad` is that of y, `after` that of the state after the block. If these products are
    `known`, those of f and g lack what goes through them."""
    pairs = (f @ g.transpose(-1, -2) if known is None else known) * weights
    grad_pairs = grad @ w.transpose(-1, -2) * weights
    entering = _entering(grad, frames)
    found = _scanned(after, f, entering, frames, room, backwards=True)
    grad_g, grad_w = _into_sums(found[:, 1:], g, w, frames)
    grad_w = pairs.transpose(-1, -2) @ grad + grad_w
    grad_f = entering @ states.transpose(-1, -2)
    if known is None:
        grad_g = grad_pairs.transpose(-1, -2) @ f + grad_g
        grad_f = grad_pairs @ g + grad_f
    return grad_f, grad_g, grad_w, found[:, 0].clone(), grad_pairs


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
        return w @ to_w, g @ grad
    factor = frames.staying(g.dtype)[..., None]
    return (w * factor) @ to_w, (g @ grad) * factor


def _scanned(
    first: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    frames: Frames | None,
    room: Room | None,
    backwards: bool = False,
) -> torch.Tensor:
    """States [N, S + 1, m, e] one after the other, each the one before, faded, and g^T w of a
    chunk; `backwards` the first is behind all chunks and stands last."""
    count = g.shape[1]
    order = range(count)[:: -1 if backwards else 1]
    fades = None if frames is None else frames.fades(g.dtype)[..., None, None].unbind(1)
    if room is None or count == 1:
        parts, found = (g.transpose(-1, -2) @ w).unbind(1), [first]
        for at in order:
            before = found[-1] if fades is None else found[-1] * fades[at]
            found.append(before + parts[at])
        return torch.stack(found[::-1] if backwards else found, 1)
    into = room.take(f"states {backwards}", (len(g), count + 1, *first.shape[1:]), g)
    into[:, count if backwards else 0] = first
    torch.matmul(g.transpose(-1, -2), w, out=into[:, :-1] if backwards else into[:, 1:])
    states = into.unbind(1)
    for at in order:
        to, source = (at, at + 1) if backwards else (at + 1, at)
        if fades is None:
            states[to].add_(states[source])
        else:
            states[to].addcmul_(states[source], fades[at])
    return into


def _entering(f: torch.Tensor, frames: Frames | None) -> torch.Tensor:
    """Rows [N, S, R c, …] brought to the frame of the state before their chunk."""
    if frames is None:
        return f
    factor = frames.entering(f.dtype)
    return f * factor.repeat(1, 1, f.shape[2] // factor.shape[2])[..., None]
