"""The tiles of choices hold all of their pairs, each pair in one layout alone."""

from __future__ import annotations

import pytest
import torch

import attnspec
from attnspec.backends.decided.choice import TileLists

BODIES = (
    "topk(keys = 5)",
    "topk(blocks = 3, size = 4, queries = 1)",
    "topk(blocks = 2, size = 80, queries = 70)",
    "topk(mass = 0.5, size = 16, share = all)",
    "lsh(rounds = 3, chunk = 16)",
    "lsh(rounds = 3, chunk = 16, cut = bucket)",
    "lsh(rounds = 2, chunk = 80, look = 2)",
    "lsh(rounds = 2, chunk = 16, share_qk = false)",
    "lsh(rounds = 2, chunk = 16, share_qk = false, cut = bucket)",
    "lsh(rounds = 2, chunk = 16, look = 0, bucket_mask = false)",
    "cluster(count = 5)",
    "cluster(count = 5, assign = balanced)",
    "sinkhorn(size = 16)",
    "sinkhorn(size = 16, cut = 2)",
)
N = 150


def covered(layout: TileLists, n_q: int) -> torch.Tensor:
    """How often the tiles of a layout hold each pair, int [B, H, n, n]."""
    found = torch.zeros(2, 2, N, N, dtype=torch.int64)
    lists = layout.lists.expand(2, 2, -1, -1)
    natural = torch.arange(N).expand(2, 2, N)
    q_order = natural[..., layout.first :] if layout.q_order is None else layout.q_order
    q_order = q_order.expand(2, 2, -1)
    k_order = (natural if layout.k_order is None else layout.k_order).expand(2, 2, -1)
    for b in range(2):
        for h in range(2):
            for tile in range(lists.shape[2]):
                q = q_order[b, h, tile * layout.q_tile : (tile + 1) * layout.q_tile]
                for other in lists[b, h, tile].tolist():
                    if other < 0:
                        continue
                    k = k_order[b, h, other * layout.k_tile : (other + 1) * layout.k_tile]
                    found[b, h, q[q >= 0, None], k[k >= 0]] += 1
    held = layout.holds(torch.arange(N)[N - n_q :, None], torch.arange(N)[None])
    if layout.whole:
        assert not torch.any(found[:, :, N - n_q :].bool() & ~held)
    return torch.where(held, found[:, :, N - n_q :], 0)


@pytest.mark.parametrize("n_q", [N, 40])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_tiles_hold_all_pairs_once(body: str, padded: bool, n_q: int) -> None:
    module = attnspec.parse(f"attention a {{ heads 2 attend {body} }}").compile()
    padding = None
    if padded:
        padding = (torch.arange(N) >= torch.tensor([[11], [0]])) & (torch.arange(N) % 7 != 3)
    k = torch.randn(2, 2, N, 8)
    works, _, _, choices = module._looked_at(k[:, :, N - n_q :], k, 0, None, padding)
    assert len(works) == 1
    (choice,) = choices.values()
    held = choice.holds(torch.arange(N)[N - n_q :, None], torch.arange(N)[None])
    if padding is not None:
        held = held & padding[:, None, None]
    total = sum((covered(layout, n_q) for layout in choice.layouts()), torch.tensor(0))
    assert torch.equal(torch.where(held, total, 0), held.expand_as(total).to(total.dtype))
