"""Keys that generation keeps: those that may still be read, in order or in a ring, each where it is
said to be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attention_checks import spec_of
from relation_checks import definition

from attnspec.backends.common.kv_keeper import Keeper, Kept
from attnspec.backends.common.kv_ring import Ring, Rows
from attnspec.graphs.look_back import look_back
from attnspec.limits import LIMITS
from attnspec.lower.work import Alibi, Call, Work

N = 60
GRAPHS = {
    "window": "window(before = 3, after = 0)",
    "window and sinks": "window(before = 4, after = 0) | columns(first(2))",
    "sinks alone": "columns(first(3))",
    "self": "self",
    "dilated": "dilated(radius = 9, step = 3) | columns(positions(1, 4))",
}


def graph(name: str) -> tuple[Work, Keeper, np.ndarray]:
    """The work of a graph whose scores ask for distances, what keeps its keys, and its pairs."""
    relation = spec_of(f"causal attend {GRAPHS[name]}").relation(N)
    reach = look_back(relation)
    assert reach is not None
    keeper = Keeper(reach, (0,), torch.device("cpu"))
    return Work(relation, 1, N, changes=(Alibi((0.00390625,)),)), keeper, definition(relation, N)


def numbered(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of 2 samples that say which position they are of."""
    at = torch.arange(low, high, dtype=torch.float64).view(1, 1, -1, 1).expand(2, 1, -1, 1)
    return at, -at


def real(low: int, high: int) -> torch.Tensor:
    return torch.arange(low, high) * torch.tensor([[1], [2]]) % 5 != 1


def states(name: str, padded: bool) -> Iterator[Kept]:
    """What is kept after each of some steps, which are looked at."""
    work, keeper, held = graph(name)
    kept: Kept | None = None
    low = 0
    for size in (1, 1, 2, 7, 1, 16, 1, 1):
        high = low + size
        call = Call(padding=real(low, high) if padded else None)
        seen = keeper.seen(work, *numbered(low, high), call, kept)
        at = seen.every.positions
        assert seen.keys[0, 0, :, 0].tolist() == at.tolist()
        assert seen.values[0, 0, :, 0].tolist() == (-at).tolist()
        # the new positions read what they read in one call, and how far it is behind them
        mask = torch.from_numpy(held[low:high, at])
        wanted = mask & real(0, high)[:, None, at] if padded else mask[None]
        found, distance = seen.blocks.mask, seen.blocks.distance
        assert found is not None
        assert distance is not None
        assert torch.equal(found.flatten(1, 3)[:, 0], wanted)
        assert distance[0].tolist() == (np.arange(low, high)[:, None] - at).tolist()
        # nothing is given up that a later position reads
        assert set(np.flatnonzero(held[high:, :high].any(0))) <= set(seen.kept.positions.tolist())
        assert sorted([*seen.kept.positions, *seen.left.positions]) == at.tolist()
        kept, low = seen.kept, high
        assert len(kept.positions) <= keeper.reach.first + keeper.reach.before
        if padded:
            assert kept.padding is not None
            assert torch.equal(kept.padding, real(0, high)[:, kept.positions])
        yield kept


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_kept_may_still_be_read(name: str, padded: bool) -> None:
    counts = [kept.count for kept in states(name, padded)]
    assert counts == [1, 2, 4, 11, 12, 28, 29, 30]


@pytest.mark.parametrize("since", [None, 0, 33], ids=["no padding", "padded", "padded later"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.limits("", "tiny")
def test_a_ring_is_read_as_the_keys_in_order(name: str, since: int | None) -> None:
    work, keeper, held = graph(name)
    first, before = keeper.reach.first, keeper.reach.before
    *_, kept = states(name, padded=since == 0)
    ring = Ring.of(kept, keeper)
    assert ring is not None
    # which are real; nothing is said of positions before `since`
    every = real(0, N)
    every[:, : N if since is None else since] = True
    for at in range(kept.count, N):
        padded = since is not None and at >= since
        ring = ring.written(*numbered(at, at + 1), every[:, at : at + 1] if padded else None)
        assert ring.count == at + 1
        rows = Rows.of(work, keeper, at // LIMITS.ring)
        blocks = rows.blocks(ring)
        assert ring.keys.shape[2] == first + before + 1
        # the last position reads each key that it should, at one place
        mask = torch.ones(1, dtype=torch.bool) if blocks.mask is None else blocks.mask
        mask = mask.expand(2, 1, 1, 1, 1, first + before + 1).flatten(1)
        assert blocks.distance is not None
        for sample in range(2):
            places = mask[sample].nonzero()[:, 0]
            found = ring.keys[sample, 0, places, 0].long()
            wanted = np.flatnonzero(held[at])
            wanted = wanted[every[sample].numpy()[wanted]]
            assert sorted(found.tolist()) == wanted.tolist()
            assert (ring.values[sample, 0, places, 0] == -found).all()
            assert (blocks.distance.flatten()[places] == at - found).all()
        if since is None:
            assert (blocks.mask is None) == bool(mask.all())
        same = ring.kept()
        positions = [*range(first), *range(at + 1 - before, at + 1)]
        assert (same.count, same.positions.tolist()) == (at + 1, positions)
        assert same.keys[1, 0, :, 0].tolist() == positions
        assert same.values[1, 0, :, 0].tolist() == [-p for p in positions]
        if padded:
            assert same.padding is not None
            assert torch.equal(same.padding, every[:, positions])


def test_a_ring_is_of_as_many_keys_as_a_graph_looks_back_alone() -> None:
    _, keeper, _ = graph("window and sinks")
    every = [*states("window and sinks", padded=False)]
    # two sinks and the four last positions
    assert [Ring.of(kept, keeper) is not None for kept in every] == [
        kept.count >= 6 for kept in every
    ]
    with torch.inference_mode():
        ring = Ring.of(every[-1], keeper)
        assert ring is not None
        inside = ring.is_writable
    assert (inside, ring.is_writable) == (True, False)
    other = Ring.of(every[-1], keeper)
    assert other is not None
    assert other.is_writable
