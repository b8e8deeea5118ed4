"""Sums of features by chunks are those of the formula, position by position, in any frames."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from attnspec.backends.factored.features.chunks import (
    Frames,
    Room,
    gradients_of,
    gradients_of_sums,
    outputs_of,
    states_of,
    weights_of,
)

WIDE = torch.float64


@dataclass(frozen=True)
class Block:
    """A block of `count` chunks of c positions, and the same positions one after the other: frames
    [N, S c] of keys and rows that count from that of the state before them."""

    frames: Frames | None
    keys: torch.Tensor
    rows: torch.Tensor
    state: torch.Tensor
    f: torch.Tensor
    g: torch.Tensor
    w: torch.Tensor

    @property
    def given(self) -> list[torch.Tensor]:
        return [self.f, self.g, self.w, self.state]


def block_of(count: int, c: int, repeat: int, framed: bool) -> Block:
    n, m, e = 2, 3, 2
    keys, rows = torch.zeros(2, n, count * c, dtype=WIDE)
    frames = None
    if framed:
        keys = torch.randn(n, count * c, dtype=WIDE)
        # a frame is the maximum of those of keys, the first of them that of the state
        rows = keys.cummax(1).values.clamp(min=0.0)
        start = torch.cat([rows[:, :1] * 0, rows[:, c - 1 : -1 : c]], 1)[..., None]
        frames = Frames(keys.view(n, count, c) - start, rows.view(n, count, c) - start)
    shapes = (n, m, e), (n, count, repeat * c, m), (n, count, c, m), (n, count, c, e)
    drawn = (torch.randn(shape, dtype=WIDE, requires_grad=True) for shape in shapes)
    return Block(frames, keys, rows, *drawn)


def formula(block: Block, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y [N, S, R c, e], and the states [N, S + 1, m, e] before each chunk and after the last, where
    the products [N, S, R c, c] are those of queries and keys of one chunk."""
    _, count, c, _ = block.g.shape
    repeat = block.f.shape[2] // c
    keys, rows = block.keys.exp(), (-block.rows).exp()
    g, w = block.g.flatten(1, 2), block.w.flatten(1, 2)
    states, outs = [block.state], []
    for s in range(count):
        low, high = s * c, (s + 1) * c
        found = []
        for r in range(repeat):
            for i in range(low, high):
                f = block.f[:, s, r * c + i - low]
                y = (f[:, :, None] * block.state).sum(1)
                for j in range(i + 1):
                    product = (f * g[:, j]).sum(-1)
                    if j >= low:
                        product = products[:, s, r * c + i - low, j - low]
                    y = y + (keys[:, j] * product)[:, None] * w[:, j]
                found.append(y * rows[:, i, None])
        outs.append(torch.stack(found, 1))
        sums = block.state + torch.einsum(
            "nj,njm,nje->nme", keys[:, :high], g[:, :high], w[:, :high]
        )
        states.append(sums * rows[:, high - 1, None, None])
    return torch.stack(outs, 1), torch.stack(states, 1)


def compared(found: object, meant: object) -> None:
    torch.testing.assert_close(found, meant, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 2), (2, 1, 1), (3, 2, 1), (2, 3, 2)])
def test_outputs_states_and_gradients(sizes: tuple[int, int, int], framed: bool) -> None:
    torch.manual_seed(0)
    count, c, repeat = sizes
    block = block_of(count, c, repeat, framed)
    f, g, w, state = block.given
    weights = weights_of(block.frames, c, repeat, g.detach())
    own = f @ g.transpose(-1, -2)
    other = torch.randn_like(own).requires_grad_()
    room = Room()
    # products that are known have gradients of their own
    for products, known in ((own, None), (other, other.detach())):
        y, meant = formula(block, products)
        grad, after = torch.randn_like(y), torch.randn_like(state)
        asked = [*block.given, *([] if known is None else [other])]
        wanted = torch.autograd.grad([y, meant[:, -1]], asked, [grad, after], retain_graph=True)
        # without a room, with a fresh one, with one that has held other numbers
        for at in (None, room, room):
            with torch.no_grad():
                before, last = states_of(state, g, w, block.frames, at)
                out = outputs_of(f, g, w, before, weights, block.frames, known)
                compared((before, last, out), (meant[:, :-1], meant[:, -1], y))
                found = gradients_of(grad, f, g, w, before, after, weights, block.frames, known, at)
                compared(found[:4], wanted[:4])
                if known is not None:
                    compared(found[4], wanted[4])
                # what is handed on does not lie where the next block writes
                states_of(torch.ones_like(state), g, w, block.frames, at)
                gradients_of(grad, f, g, w, before, state, weights, block.frames, known, at)
                compared((last, found[3]), (meant[:, -1], wanted[3]))


@pytest.mark.parametrize("framed", [False, True])
def test_gradients_of_keys_that_are_summed_alone(framed: bool) -> None:
    torch.manual_seed(0)
    block = block_of(1, 4, 1, framed)
    _, g, w, state = block.given
    after = torch.randn_like(state)
    _, states = formula(block, torch.zeros(2, 1, 4, 4, dtype=WIDE))
    wanted = torch.autograd.grad(states[:, -1], [g, w, state], after)
    with torch.no_grad():
        compared(gradients_of_sums(after, g, w, block.frames), wanted)


def test_frames_are_rounded_after_they_are_subtracted() -> None:
    """Frames far from zero, in float64, leave the float32 of what is summed as it is."""
    torch.manual_seed(0)
    keys = torch.rand(1, 1, 4, dtype=WIDE) + 1e8
    near, far = (Frames(x, x.cummax(2).values) for x in (keys - 1e8, keys))
    g = torch.randn(1, 1, 4, 3)
    found, meant = (weights_of(frames, 4, 1, g) for frames in (far, near))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, meant)
    torch.testing.assert_close(far.staying(g.dtype), near.staying(g.dtype))
