"""What choices are made of, against plain loops: lists of what is marked, and codes that say which
buckets and chunks are near."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from attnspec.backends.decided import lsh, ranking
from attnspec.graphs.patterns.lsh import Lsh


@pytest.mark.parametrize("lead", [(), (3,), (2, 0), (2, 5)])
@pytest.mark.parametrize("width", [0, 1, 7, 64])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_what_is_marked_is_listed(lead: tuple[int, ...], width: int, share: float) -> None:
    torch.manual_seed(width)
    table = torch.rand(*lead, width) < share
    found = ranking.listed(table)
    wanted = [row.nonzero().flatten().tolist() for row in table.reshape(-1, max(1, width))]
    most = max(map(len, wanted), default=0) if table.numel() else 0
    assert found.shape == (*lead, most)
    if most:
        assert found.reshape(-1, most).tolist() == [
            [-1] * (most - len(row)) + row for row in wanted
        ]


@pytest.mark.parametrize("count", [1, 9, 1 << 15, (1 << 31) + 1])
@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 4), (5, 17)])
def test_lists_rise_whatever_their_numbers(count: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    lists = torch.randint(-1, count, shape)
    found = ranking.rising(lists, count)
    assert found.dtype == torch.int64
    assert torch.equal(found, lists.sort(-1).values)


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_numbers_reach_those_just_below_them(kind: torch.dtype, most: int) -> None:
    far = (torch.iinfo(kind).max + 1) // 2
    x = torch.tensor([-far, -2, 0, 1, 2, 5, far - 1]).to(kind)
    found = ranking.reaches(x[:, None], x, most)
    wanted = [[0 <= a - b <= most for b in x.tolist()] for a in x.tolist()]
    assert found.tolist() == wanted


@pytest.mark.parametrize("shape", [(2, 0), (1,), (6, 200)])
@pytest.mark.parametrize("share", [None, 0.2])
def test_ranks_are_in_the_order_of_the_scores(shape: tuple[int, ...], share: float | None) -> None:
    """Of neighbours too, and of the least and the greatest numbers; of equal ones the lower place
    is first. What is forced stands before all numbers, a NaN behind."""
    torch.manual_seed(shape[-1])
    far = torch.tensor(torch.finfo(torch.float32).max)
    some = torch.tensor([0.0, 1e-45, 1e-38, 1.0, 1.5, 2.0, torch.inf, torch.nan])
    some = torch.cat([some, torch.nextafter(some, far), torch.nextafter(some, -far), far[None]])
    known = torch.cat([some, -some])
    scores = known[torch.randint(len(known), shape)]
    forced = None if share is None else torch.rand(shape) < share
    found = ranking.ranks(scores, forced)
    first = torch.zeros(shape, dtype=torch.bool) if forced is None else forced
    assert torch.equal(found >= ranking.FORCED, first)
    assert torch.equal(found == ranking.NONE, (scores == -torch.inf) & ~first)

    def behind(i: int, row: list[float], put: list[bool]) -> tuple[float, ...]:
        if put[i]:
            return 0, 0, i
        return (2, 0, i) if math.isnan(row[i]) else (1, -row[i], i)

    width = max(1, shape[-1])
    for row, put, numbers in zip(
        *(x.reshape(-1, width).tolist() for x in (scores, first, found)), strict=True
    ):
        taken = [i for i in range(width) if numbers[i] > ranking.NONE]
        assert min(numbers) >= ranking.NONE
        order = sorted(taken, key=numbers.__getitem__, reverse=True)
        assert order == sorted(taken, key=partial(behind, row=row, put=put))
        assert len({*(numbers[i] for i in taken)}) == len(taken)


CODES = [
    Lsh(chunk=4, rounds=2),
    Lsh(chunk=4, rounds=2, look=0),
    Lsh(chunk=3, rounds=1, look=2),
    Lsh(chunk=3, rounds=2, cut="bucket"),
    Lsh(chunk=3, rounds=2, look=2, cut="bucket", share_qk=False),
    Lsh(chunk=4, rounds=2, share_qk=False),
    Lsh(chunk=4, rounds=2, bucket_mask=False),
]


@pytest.mark.parametrize("leaf", CODES, ids=str)
@pytest.mark.parametrize(("n", "count"), [(1, 2), (33, 2), (60, 9), (60, 4000)])
def test_codes_say_which_buckets_and_chunks_are_near(leaf: Lsh, n: int, count: int) -> None:
    """Also where a bucket has more chunks than are looked at, and where codes are too many for two
    bytes."""
    torch.manual_seed(n + count)
    bucket = torch.randint(0, count, (2, 1, leaf.rounds, n))
    real = torch.rand(2, n) < 0.8
    side = lsh.Sorted.of(bucket, real, leaf, n)
    others = side
    if not leaf.share_qk:
        others = lsh.Sorted.of(bucket.flip(-1), real.flip(-1), leaf, n)
    found = ranking.reaches(side.code[..., None], others.code[..., None, :], leaf.look)
    back = side.chunk[..., None] - others.chunk[..., None, :]
    near = (back >= 0) & (back <= leaf.look)
    if leaf.bucket_mask:
        near = near & (side.bucket[..., None] == others.bucket[..., None, :])
    both = (side.chunk != lsh.NOWHERE)[..., None] & (others.chunk != lsh.NOWHERE)[..., None, :]
    assert torch.equal(found & both, near & both)
    # padding is near nothing that is real
    assert not (found & (both.any(-1, keepdim=True) ^ both.any(-2, keepdim=True))).any()


def test_codes_take_as_few_bytes_as_there_are_codes_for() -> None:
    chunk = torch.tensor([0, lsh.NOWHERE])
    for most, kind in ((16383, torch.int16), (16384, torch.int32), (1 << 30, torch.int64)):
        found = lsh._short(torch.tensor([most, 0]), chunk)
        assert found.dtype == kind
        assert found[0] == most
        assert found[1] < -8192


@pytest.mark.parametrize("most", [3, 1 << 15, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("behind", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (2, 1), (2, 3, 70)])
def test_numbers_stand_in_their_order(most: int, behind: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(shape[-1])
    values = torch.tensor([-most - 1, -1, 0, 2, most])
    numbers = values[torch.randint(len(values), shape)]
    last = torch.rand(shape) < behind
    found = ranking.in_order(numbers, last)
    assert found.shape == numbers.shape
    rows = zip(*(x.reshape(-1, max(1, shape[-1])).tolist() for x in (numbers, last)), strict=True)
    wanted = [sorted(range(shape[-1]), key=lambda i: (row[1][i], row[0][i], i)) for row in rows]
    if numbers.numel():
        assert found.reshape(-1, shape[-1]).tolist() == wanted
