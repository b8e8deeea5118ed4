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

from dataclasses import dataclass

import torch


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
    return g.transpose(-1, -2) @ w


def states_of(
    state: torch.Tensor, sums: torch.Tensor, frames: Frames | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before each chunk [N, S, m, e], and the one after the last."""
    found = [state]
    fades = None if frames is None else frames.fades(sums.dtype)
    for at in range(sums.shape[1]):
        before = found[-1] if fades is None else found[-1] * fades[:, at, None, None]
        found.append(before + sums[:, at])
    return torch.stack(found[:-1], 1), found[-1]


def outputs_of(
    f: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    states: torch.Tensor,
    weights: torch.Tensor,
    frames: Frames | None,
) -> torch.Tensor:
    """y [N, S, R c, e] of a block."""
    y = (f @ g.transpose(-1, -2) * weights) @ w
    return y + _entering(f, frames) @ states


def gradients_of(
    grad: torch.Tensor,
    f: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor,
    states: torch.Tensor,
    after: torch.Tensor,
    weights: torch.Tensor,
    frames: Frames | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of f, g and w, and of the state before the block, where `grad` is that of y,
    `after` that of the state after the block."""
    pairs = f @ g.transpose(-1, -2) * weights
    grad_pairs = grad @ w.transpose(-1, -2) * weights
    entering = _entering(f, frames)
    grad_states = entering.transpose(-1, -2) @ grad
    found = [after]
    fades = None if frames is None else frames.fades(grad.dtype)
    for at in reversed(range(grad_states.shape[1])):
        later = found[-1] if fades is None else found[-1] * fades[:, at, None, None]
        found.append(later + grad_states[:, at])
    grad_g, grad_w = _into_sums(torch.stack(found[-2::-1], 1), g, w, frames)
    grad_g = grad_pairs.transpose(-1, -2) @ f + grad_g
    grad_w = pairs.transpose(-1, -2) @ grad + grad_w
    through = grad @ states.transpose(-1, -2)
    grad_f = grad_pairs @ g + (through if frames is None else _entering(through, frames))
    return grad_f, grad_g, grad_w, found[-1]


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
    if frames is None:
        return w @ grad.transpose(-1, -2), g @ grad
    factor = frames.staying(g.dtype)[..., None]
    return (w * factor) @ grad.transpose(-1, -2), (g @ grad) * factor


def _entering(f: torch.Tensor, frames: Frames | None) -> torch.Tensor:
    """Rows [N, S, R c, …] brought to the frame of the state before their chunk."""
    if frames is None:
        return f
    factor = frames.entering(f.dtype)
    return f * factor.repeat(1, 1, f.shape[2] // factor.shape[2])[..., None]
