"""The generator is frozen: published vectors, own vectors, both versions, and its statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import chdtrc

from attnspec.graphs.counter_rng import (
    EXPANDER,
    RANDOM,
    RANDOM_BLOCKS,
    Stream,
    Words,
    bounded,
    bounded_array,
    distinct,
    permutation,
    philox,
    philox_array,
)

ONES = 0xFFFFFFFF

# from the known-answer tests of Random123, the authors' own library
PUBLISHED: list[tuple[Words, tuple[int, int], Words]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_vectors(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert philox(counter, key) == words


@pytest.mark.parametrize(
    "stream",
    [Stream(0, RANDOM), Stream(2**64 - 1, ONES, 65535, 65535), Stream(2**40 + 3, EXPANDER, 2, 9)],
)
def test_arrays_hold_the_same_numbers(stream: Stream) -> None:
    row = np.array([0, 1, 77, 2**31, 2**32 - 1])[:, None]
    place = np.array([0, 5, 2**32 - 1])[None, :]
    words = philox_array(row, place, stream)
    assert words.shape == (4, 5, 3)
    for at in np.ndindex(5, 3):
        counter = (int(row[at[0], 0]), int(place[0, at[1]]), *stream.tail)
        assert tuple(words[:, at[0], at[1]].tolist()) == philox(counter, stream.key)


def test_arrays_longer_than_a_batch() -> None:
    row = np.arange(40_000)
    words = philox_array(row, np.asarray(3), Stream(1, RANDOM))
    for at in (0, 16_383, 16_384, 39_999):
        assert tuple(words[:, at].tolist()) == philox((at, 3, 0, RANDOM), (1, 0))


def test_the_published_mapping_of_counters() -> None:
    seed, layer, head, row, draw, bound = 2**33 + 5, 3, 7, 11, 6, 1000
    words = philox((row, draw // 4, layer + 2**16 * head, RANDOM_BLOCKS), (5, 2))
    stream = Stream(seed, RANDOM_BLOCKS, layer, head)
    assert bounded(stream, row, draw, bound) == words[draw % 4] * bound // 2**32


def test_a_rejected_word_gives_way_to_the_next_attempt() -> None:
    stream, bound = Stream(8, RANDOM), 2**31 + 1
    rows = np.arange(200)
    rejected = 0
    for row in rows.tolist():
        attempt = 0
        while True:
            word = philox((row, attempt * 2**24, 0, RANDOM), (8, 0))[0]
            if word * bound % 2**32 >= 2**32 % bound:
                break
            attempt += 1
        rejected += attempt > 0
        assert bounded(stream, row, 0, bound) == word * bound // 2**32
    assert 50 < rejected < 150
    table = bounded_array(stream, rows, np.full((1, 200), bound))
    assert table[0].tolist() == [bounded(stream, row, 0, bound) for row in rows.tolist()]


def test_bounds_at_the_ends() -> None:
    stream = Stream(3, RANDOM)
    assert {bounded(stream, row, 0, 1) for row in range(20)} == {0}
    word = philox((4, 0, 0, RANDOM), (3, 0))[2]
    assert bounded(stream, 4, 2, 2**32) == word


def floyd(stream: Stream, row: int, population: int, count: int) -> list[int]:
    taken: set[int] = set()
    if population <= count:
        return list(range(population))
    for draw in range(count):
        top = population - count + draw
        value = bounded(stream, row, draw, top + 1)
        taken.add(top if value in taken else value)
    return sorted(taken)


@pytest.mark.parametrize("count", [0, 1, 3, 9, 40])
def test_subsets_are_those_of_the_definition(count: int) -> None:
    stream = Stream(12, RANDOM, 1, 2)
    row = np.array([0, 1, 2, 5, 8, 9, 10, 39, 40, 41, 1000, 4_000_000])
    population = row + 1
    table = distinct(stream, row, population, count)
    assert table.shape == (len(row), count)
    for at, (r, p) in enumerate(zip(row.tolist(), population.tolist(), strict=True)):
        wanted = floyd(stream, r, p, count)
        assert table[at].tolist() == [-1] * (count - len(wanted)) + wanted


def test_subsets_do_not_depend_on_the_batch() -> None:
    stream = Stream(1, RANDOM)
    row = np.arange(9000)
    table = distinct(stream, row, np.full(9000, 50), 4)
    assert np.array_equal(table[5000:5003], distinct(stream, row[5000:5003], np.full(3, 50), 4))
    assert (np.diff(table, axis=1) > 0).all()
    assert table.min() == 0
    assert table.max() == 49


def chi_square(counts: Sequence[int] | np.ndarray) -> float:
    """The probability of counts at least as uneven as these."""
    found = np.asarray(counts)
    # of `scipy.stats`, which takes half a second to load
    statistic = ((found - found.mean()) ** 2 / found.mean()).sum()
    return float(chdtrc(len(found) - 1, statistic))


def test_members_and_pairs_are_uniform() -> None:
    rows, population = 30_000, 11
    table = distinct(Stream(2, RANDOM), np.arange(rows), np.full(rows, population), 3)
    every = table[:, 0] * 121 + table[:, 1] * 11 + table[:, 2]
    _, counts = np.unique(every, return_counts=True)
    assert len(counts) == 165  # 11 choose 3
    assert chi_square(counts) > 1e-3


def test_the_test_of_uniformity_can_fail() -> None:
    skewed = np.arange(30_000) * np.arange(30_000) % 11
    assert chi_square(np.bincount(skewed, minlength=11)) < 1e-3


@pytest.mark.parametrize("draw", range(4))
def test_words_are_uniform_and_unrelated(draw: int) -> None:
    row = np.arange(50_000)
    words = philox_array(row, np.asarray(0), Stream(7, RANDOM))[draw]
    assert chi_square(np.bincount((words >> np.uint64(26)).astype(int), minlength=64)) > 1e-3
    assert chi_square(np.bincount((words % np.uint64(64)).astype(int), minlength=64)) > 1e-3
    high = (words >> np.uint64(29)).astype(int)
    assert chi_square(np.bincount(high[1:] * 8 + high[:-1], minlength=64)) > 1e-3


def test_permutations() -> None:
    stream = Stream(5, EXPANDER)
    for n in (0, 1, 2, 37, 20_000):
        assert np.array_equal(np.sort(permutation(stream, 0, n)), np.arange(n))
    keys = []
    for item in range(37):
        low, high, _, _ = philox((item, 2, 0, EXPANDER), (5, 0))
        keys.append((low + 2**32 * high, item))
    assert permutation(stream, 2, 37).tolist() == [item for _, item in sorted(keys)]
    assert permutation(stream, 1, 37).tolist() != permutation(stream, 2, 37).tolist()


def test_equal_numbers_keep_the_order_of_their_items(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = philox_array

    def few(row: np.ndarray, place: np.ndarray, stream: Stream) -> np.ndarray:
        """Numbers that differ in two bits alone, so that many are equal."""
        return np.asarray(drawn(row, place, stream) & np.uint64(3))

    monkeypatch.setattr("attnspec.graphs.counter_rng.philox_array", few)
    for n in (2, 3, 40, 1000, 20_000):
        low, high, _, _ = few(np.arange(n), np.asarray(1), Stream(5, EXPANDER)).tolist()
        keys = sorted(
            (a + 2**32 * b, item) for item, (a, b) in enumerate(zip(low, high, strict=True))
        )
        assert permutation(Stream(5, EXPANDER), 1, n).tolist() == [item for _, item in keys]


def test_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for index in range(2400):
        order = tuple(permutation(Stream(9, EXPANDER), index, 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert chi_square(list(counts.values())) > 1e-3


def test_limits() -> None:
    for wrong in ((-1, RANDOM), (2**64, RANDOM), (0, RANDOM, 2**16), (0, RANDOM, 0, 2**16)):
        with pytest.raises(ValueError, match="must be at least 0 and below"):
            Stream(*wrong)


def digest(*arrays: np.ndarray) -> str:
    text = b"".join(np.ascontiguousarray(a, dtype="<i8").tobytes() for a in arrays)
    return hashlib.sha256(text).hexdigest()[:16]


def test_frozen_draws() -> None:
    stream = Stream(7, RANDOM, 3, 5)
    row = np.arange(1000)
    assert distinct(stream, row[:3], np.full(3, 100), 4).tolist() == [
        [3, 17, 97, 98],
        [0, 32, 64, 66],
        [0, 13, 59, 85],
    ]
    assert permutation(Stream(7, EXPANDER), 0, 10).tolist() == [4, 7, 8, 6, 9, 5, 0, 2, 1, 3]
    table = distinct(stream, row, row + 1, 8)
    assert digest(table, permutation(Stream(2**63, EXPANDER), 1, 1000)) == "a43cb39c11cbdae6"
