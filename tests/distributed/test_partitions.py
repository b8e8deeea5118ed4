"""Partitions that are worth a plan, each held against loops over positions and pairs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from random_specs import spec_text
from relation_checks import definition

import attnspec
from attnspec.distributed.partitions import (
    CHUNKS,
    EVEN,
    ROOM,
    Partition,
    by_residue,
    candidates,
    contiguous,
    free_cuts,
    head_tail,
    in_chunks,
    in_parts,
)
from attnspec.graphs.relation import Relation

Run = tuple[int, int]


def relation_of(graph: str, n: int) -> Relation:
    return attnspec.parse(f"attention a {{ attend {graph} }}").relation(n)


def balance(partition: Partition, work: np.ndarray) -> float:
    sums = [float(work[partition.positions(rank)].sum()) for rank in range(partition.ranks)]
    return max(sums) / float(np.mean(sums))


def crosses(partition: Partition, held: np.ndarray) -> bool:
    """Whether a pair joins positions of two ranks."""
    owner = np.empty(len(held), int)
    for rank in range(partition.ranks):
        owner[partition.positions(rank)] = rank
    return bool((held & (owner[:, None] != owner[None])).any())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_partitions_that_cannot_be_better_are_not_tried(ranks: int) -> None:
    for n in (0, 2 * ranks - 1, 2 * ranks, 40):
        relation = relation_of("full", n)
        work = definition(relation, n).sum(1)
        few = [contiguous(n, ranks)]
        assert list(candidates([relation], n, ranks, [work])) == few
        triangle = relation_of("causal", n)
        found = list(candidates([triangle], n, ranks, [definition(triangle, n).sum(1)]))
        assert (found == few) == (ranks == 1 or n < 2 * ranks)
        # of rows that nobody counts a triangle may be
        unknown = list(candidates([triangle], n, ranks, []))
        assert unknown == (few if len(found) == 1 else [*few, head_tail(n, ranks)])


def test_work_is_dealt_out_where_it_comes_out_more_evenly() -> None:
    n = 256
    for seed in range(12):
        draw = np.random.Generator(np.random.PCG64(seed))
        several = [
            np.cumsum(draw.integers(0, 3, n)) + draw.integers(0, 40, n) * (draw.random(n) < 0.1)
            for _ in range(1 + seed % 2)
        ]
        for ranks in (2, 3, 4):
            plain, *more = candidates([relation_of("causal", n)], n, ranks, several)
            assert plain == contiguous(n, ranks)
            tried = [head_tail(n, ranks)]
            if n >= 2 * CHUNKS * ranks:
                tried.append(in_chunks(n, ranks, np.sum(several, 0, dtype=float)))
            least, worth = max(balance(plain, work) for work in several), []
            for each in tried if least > EVEN else []:
                one = max(balance(each, work) for work in several)
                if one * EVEN < least:
                    worth.append(each)
                    least = one
            assert more == worth


@pytest.mark.parametrize(
    ("graphs", "steps"),
    [
        (["residue(step = 6)"], {6}),
        # of several heads
        (["residue(step = 6)", "residue(step = 4)", "full"], {2, 4, 6}),
        (["dilated(radius = 9, step = 3)"], {3}),
        (["residue(step = 5)", "residue(step = 3)"], {3, 5}),
        (["window(radius = 3)"], set()),
    ],
)
def test_classes_of_positions_stay_together(graphs: Sequence[str], steps: set[int]) -> None:
    for n, ranks in ((60, 2), (60, 3), (61, 4), (60, 6)):
        relations = [relation_of(graph, n) for graph in graphs]
        work = [definition(relation, n).sum(1) for relation in relations]
        wanted = [by_residue(n, ranks, step) for step in sorted(steps)]
        residues = [each for each in candidates(relations, n, ranks, work) if each.step > 1]
        assert residues == [each for each in wanted if each is not None]


def test_residues_are_whole_classes_or_equal_parts_of_them() -> None:
    for n in (0, 1, 7, 24, 50, 61):
        for ranks in (1, 2, 3, 4, 6):
            for step in range(1, 30):
                found = by_residue(n, ranks, step)
                even = (
                    step % ranks == 0 or step >= 4 * ranks if step >= ranks else ranks % step == 0
                )
                assert (found is not None) == even
                if found is None:
                    continue
                held = [found.positions(rank) for rank in range(ranks)]
                assert sorted(np.concatenate(held).tolist()) == list(range(n))
                for rank, mine in enumerate(held):
                    if step >= ranks:
                        low, high = rank * step // ranks, (rank + 1) * step // ranks
                        assert set(mine.tolist()) == {x for x in range(n) if low <= x % step < high}
                    else:
                        residue, parts = rank * step // ranks, ranks // step
                        assert len(set((mine % step).tolist())) <= 1
                        same = len(range(residue, n, step))
                        assert len(mine) in (same // parts, -(-same // parts))
                        assert (np.diff(mine) == step).all()


def test_shards_of_two_ends_are_even_and_triangles_too() -> None:
    for n in (0, 1, 5, 24, 50, 61):
        for ranks in (1, 2, 3, 5):
            found = head_tail(n, ranks)
            pieces = [len(range(*run)) for runs in found.runs for run in runs]
            assert max(pieces, default=0) <= n // (2 * ranks) + 1
            if n % (2 * ranks) == 0 and n:
                assert found.sums(np.arange(n) + 0.5).tolist() == [n * n / 2 / ranks] * ranks


def test_cuts_are_free_where_no_pair_crosses_them() -> None:
    seen = 0
    graphs = ["block(size = 5)", "causal & block(size = 7)", "shift(block(size = 6), by = 2)"]
    graphs += ["window(before = 2, after = 0) & block(size = 9)", "self", "full"]
    for n in (1, 2, 17, 40):
        for relation in (
            *(relation_of(graph, n) for graph in graphs),
            *(attnspec.parse(spec_text(seed)).relation(n) for seed in range(20)),
        ):
            held = definition(relation, n)
            wanted = [not (held[:cut, cut:].any() or held[cut:, :cut].any()) for cut in range(1, n)]
            found = free_cuts(relation, n, np.inf)
            if found is None:
                assert any(closed is None for _, closed in relation.closed_rows(n))
                continue
            assert found.tolist() == wanted, relation
            seen += any(wanted)
            # what is seen to be joined further than is of use is not looked into
            q, k = np.nonzero(held)
            longest = int(np.abs(q - k).max(initial=0))
            reach = max(
                int(max(x, y.max(initial=x)) - min(x, y.min(initial=x)))
                for x, y in ((x, np.flatnonzero(held[x])) for x in range(n))
            )
            assert longest <= reach
            assert free_cuts(relation, n, reach) is None
            again = free_cuts(relation, n, reach + 1)
            assert again is not None
            assert again.tolist() == wanted
    assert seen > 10


def test_documents_stay_whole_where_they_fit() -> None:
    for n, size, ranks in ((60, 5, 3), (64, 4, 4), (63, 3, 2), (60, 30, 2)):
        relation = relation_of(f"causal & block(size = {size})", n)
        held = definition(relation, n)
        # documents in the front are heavier
        work = held.sum(1) + 50 * (np.arange(n) < n // 3)
        found = list(candidates([relation], n, ranks, [work]))
        whole = [each for each in found if each.name == "whole documents"]
        assert len(whole) == 1, (n, size)
        assert not crosses(whole[0], held)
        assert max(whole[0].lengths) <= ROOM * n / ranks + size
    # a document that is longer than a share is not
    relation = relation_of("causal & block(size = 40)", 60)
    work = definition(relation, 60).sum(1) + 50 * (np.arange(60) < 20)
    assert "whole documents" not in map(str, candidates([relation], 60, 2, [work]))


def dealt(
    ends: Sequence[Run], work: Sequence[float], ranks: int, most: int, room: float
) -> list[list[Run]]:
    """The heaviest first, each to the rank with the least work that takes it."""
    mine: list[list[int]] = [[] for _ in range(ranks)]

    def load(rank: int) -> float:
        return sum(work[i] for i in mine[rank])

    def held(rank: int) -> int:
        return sum(ends[i][1] - ends[i][0] for i in mine[rank])

    for i in sorted(range(len(ends)), key=lambda i: (-work[i], i)):
        size = ends[i][1] - ends[i][0]
        free = [r for r in range(ranks) if len(mine[r]) < most and held(r) + size <= room]
        order = sorted(range(ranks), key=lambda r: (load(r), r))
        if free:
            rank = min(free, key=lambda r: (load(r), r))
        else:
            rank = min(order, key=held)
        mine[rank].append(i)
    return [sorted(ends[i] for i in each) for each in mine]


def test_what_weighs_most_goes_to_whom_has_least() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        n, ranks = draw.randint(2, 90), draw.randint(1, 4)
        work = np.array([draw.randint(0, 9) for _ in range(n)], float)
        chunk = n / (CHUNKS * ranks)
        found = in_chunks(n, ranks, work)
        sizes = {len(range(*run)) for runs in found.runs for run in runs}
        assert all(size >= int(chunk) for size in sizes)
        edges = sorted({round(x) for x in np.linspace(0, n, CHUNKS * ranks + 1)})
        assert len(edges) > 1
        cuts = np.array(sorted(draw.sample(range(1, n), draw.randint(0, n - 1))), np.int64)
        ends = list(zip([0, *cuts.tolist()], [*cuts.tolist(), n], strict=True))
        parts = in_parts(n, ranks, work, cuts)
        fits = len(ends) >= ranks and max(b - a for a, b in ends) <= n / ranks
        assert (parts is not None) == fits
        if parts is None:
            continue
        sums = [float(work[a:b].sum()) for a, b in ends]
        wanted = dealt(ends, sums, ranks, n + 1, ROOM * n / ranks)
        for rank in range(ranks):
            assert parts.positions(rank).tolist() == [
                x for run in wanted[rank] for x in range(*run)
            ]
            # runs that touch are one
            assert all(
                a[1] < b[0] for a, b in zip(parts.runs[rank], parts.runs[rank][1:], strict=False)
            )


def test_chunks_go_by_work_and_by_number() -> None:
    for seed in range(20):
        draw = np.random.Generator(np.random.PCG64(seed))
        n, ranks = int(draw.integers(1, 120)), int(draw.integers(1, 5))
        work = draw.integers(0, 9, n).astype(float)
        each, more = divmod(n, CHUNKS * ranks)
        ends, start = [], 0
        for at in range(CHUNKS * ranks):
            stop = start + each + (at < more)
            ends += [(start, stop)] if stop > start else []
            start = stop
        sums = [float(work[a:b].sum()) for a, b in ends]
        wanted = dealt(ends, sums, ranks, CHUNKS, np.inf)
        found = in_chunks(n, ranks, work)
        for rank in range(ranks):
            assert found.positions(rank).tolist() == [
                x for run in wanted[rank] for x in range(*run)
            ]


def test_ranks_are_in_order_where_positions_ascend_from_each_to_the_next() -> None:
    for partition in (
        *(contiguous(n, ranks) for n in (0, 1, 9) for ranks in (1, 3)),
        *(head_tail(n, ranks) for n in (1, 2, 9) for ranks in (1, 2, 3)),
        *(by_residue(12, ranks, 3) for ranks in (1, 3)),
        Partition("turned", 7, (((4, 7), (0, 4)),)),
        Partition("behind", 7, (((4, 7),), ((0, 4),))),
        Partition("whole", 7, (((0, 4), (4, 7)), ())),
    ):
        assert partition is not None
        ascends = bool((np.diff(partition.order) > 0).all())
        assert partition.in_order == (ascends and partition.step == 1)
