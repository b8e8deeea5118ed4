"""What is said of sets of tokens in closed form, against which positions are in them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, product

import numpy as np

from attnspec.graphs.patterns.summary import StrideEnds
from attnspec.graphs.relation import EMPTY, FULL, SOME, Tiles
from attnspec.graphs.token_sets import (
    Every,
    First,
    Last,
    Positions,
    Runs,
    TokenComplement,
    TokenIntersection,
    TokenSet,
    TokenUnion,
    Within,
)


def sets() -> Iterator[TokenSet]:
    """Sets of every kind, small and beyond the sequence, and many of them with each other."""
    simple = [
        *(kind(count) for kind in (First, Last) for count in (0, 1, 5, 99)),
        *(Every(step, offset) for step, offset in ((1, 0), (2, 1), (3, 0), (4, 6), (50, 2))),
        *(Positions(x) for x in ((), ((3, 3),), ((6, 8), (0, 1), (7, 9)), ((2, 4), (5, 70)))),
        *(StrideEnds(stride, cells) for stride, cells in ((1, 1), (4, 1), (5, 3), (6, 6), (3, 9))),
    ]
    yield from simple
    yield from map(TokenComplement, simple)
    for term, length in product(simple, (0, 4, 11)):
        yield Within(term, length)
    for number, pair in enumerate([*product(simple, repeat=2)][::3]):
        yield (TokenUnion, TokenIntersection)[number % 2](pair)


def positions(runs: Runs) -> list[int]:
    """What progressions hold, one after the other; none of them is empty."""
    start, stop, step = runs
    each = [[*range(a, b, step)] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
    assert all(each)
    assert all(one[0] < other[0] for one, other in pairwise(each))
    return [*chain.from_iterable(each)]


def of_tiles(held: np.ndarray, tiles: Tiles) -> list[np.ndarray]:
    """Which positions of each tile are held."""
    ends = zip(tiles.start.tolist(), tiles.stop.tolist(), strict=True)
    return [held[start : stop : tiles.step] for start, stop in ends]


def kinds(held: np.ndarray, tiles: Tiles) -> list[int]:
    """The cover of tiles by the definition."""
    return [FULL if x.all() else SOME if x.any() else EMPTY for x in of_tiles(held, tiles)]


def test_what_is_known_of_sets_is_what_they_contain() -> None:
    decided = 0
    for tokens, n in product(sets(), (0, 1, 4, 6, 13)):
        at = np.arange(n)
        held = np.broadcast_to(np.asarray(tokens.contains(at, n), bool), (n,))
        members = at[held].tolist()
        assert tokens.members(n).tolist() == members, (tokens, n)
        assert tokens.size(n) == len(members), (tokens, n)
        runs, few = tokens.runs(n), tokens.progressions(n)
        assert runs is None or positions(runs) == members, (tokens, n)
        # that there is none may be said by an empty one
        if few is not None and members:
            assert sorted(positions(few)) == members, (tokens, n)
        for size, step in ((1, 1), (3, 1), (2, 3), (2, 4)):
            start = at if step > 1 else np.arange(0, n, size)
            tiles = Tiles(start, np.minimum(start + size * step, n), step)
            found, meant = tokens.cover(tiles, n), np.array(kinds(held, tiles), int)
            assert ((found == meant) | (found == SOME)).all(), (tokens, n, tiles)
            decided += (found != SOME).sum()
            # tiles of one phase, and as long, hold the same places
            places: dict[tuple[int, int], list[bool]] = {}
            phases = tokens.phase(tiles, n).tolist()
            for phase, each in zip(phases, of_tiles(held, tiles), strict=True):
                assert places.setdefault((phase, len(each)), each.tolist()) == each.tolist()
    assert decided > 5000


def test_what_is_made_of_ranges_is_known_as_the_fewest() -> None:
    """Also of a comb, as far as it has one member."""
    ranges = [
        *(kind(count) for kind in (First, Last) for count in (0, 2, 99)),
        *(Positions(x) for x in ((), ((3, 3),), ((6, 8), (0, 1)), ((2, 4), (5, 70)))),
        *(Every(1, 2), Every(5, 3), Within(First(3), 2), StrideEnds(3, 1)),
    ]
    both = [*product(ranges, repeat=2)]
    joined = (kind(pair) for kind in (TokenUnion, TokenIntersection) for pair in both)
    for tokens, n in product((*map(TokenComplement, ranges), *joined), (2, 3, 4, 7, 8)):
        held = np.asarray(tokens.contains(np.arange(n), n), bool)
        edge = np.diff(np.concatenate([[False], held, [False]]).astype(int))
        runs = tokens.runs(n)
        assert runs is not None, (tokens, n)
        start, stop, step = runs
        assert step == 1, (tokens, n)
        assert start.tolist() == np.flatnonzero(edge == 1).tolist(), (tokens, n)
        assert stop.tolist() == np.flatnonzero(edge == -1).tolist(), (tokens, n)
    assert TokenComplement(Every(5, 3)).runs(9) is None


def test_ends_of_strides_are_as_few_progressions_as_there_are_ends_or_cells() -> None:
    for stride, cells, n in product(range(1, 7), range(1, 8), range(20)):
        tokens = StrideEnds(stride, cells)
        members = [i for i in range(n) if i % stride >= stride - cells]
        found = tokens.progressions(n)
        assert sorted(positions(found)) == members
        assert len(found[0]) == min(
            len({i % stride for i in members}), len({i // stride for i in members})
        )
