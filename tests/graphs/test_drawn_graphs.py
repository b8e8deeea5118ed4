"""What is drawn is frozen: published vectors, golden rows, statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attention_checks import tensors
from oracle.drawn import philox
from population import spec_of
from scipy.special import chdtrc

ONES = 0xFFFFFFFF

# from the known-answer tests of Random123, the authors' own library
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_the_oracle_has_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(counter, key[0] + 2**32 * key[1]) == words


def rows_of(body: str, n: int, layer: int = 0, head: int = 0) -> list[list[int]]:
    mask = spec_of(body).mask(n, layer, head)
    return [np.flatnonzero(row).tolist() for row in mask]


def digest(*arrays: np.ndarray) -> str:
    text = b"".join(np.ascontiguousarray(a, dtype="<i8").tobytes() for a in arrays)
    return hashlib.sha256(text).hexdigest()[:16]


PLACES = "layers 2 heads 3 attend"


def test_frozen_draws() -> None:
    # worked out from the page of the generator alone, in plain integers
    assert rows_of(f"causal {PLACES} random(keys = 3, seed = 7)", 9, 1, 2) == [
        *([0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 4]),
        *([1, 2, 4], [2, 3, 4], [0, 1, 5], [0, 2, 5]),
    ]
    blocks = f"{PLACES} random_blocks(size = 2, blocks = 2, seed = 7)"
    assert rows_of(f"causal {blocks}", 11, 1, 2)[1::2] == [
        *([0, 1], [0, 1, 2, 3], [0, 1, 2, 3]),
        *([0, 1, 6, 7], [2, 3, 4, 5]),
    ]
    assert rows_of(blocks, 11, 1, 2)[::2] == [
        *([0, 1, 10], [2, 3, 4, 5], [0, 1, 4, 5]),
        *([0, 1, 10], [2, 3, 6, 7], [2, 3, 10]),
    ]
    places = "layers 4 heads 6 attend random(keys = 4, seed = 7)"
    assert rows_of(places, 100, 3, 5)[:3] == [[3, 17, 97, 98], [0, 32, 64, 66], [0, 13, 59, 85]]
    cycle = [4, 7, 8, 6, 9, 5, 0, 2, 1, 3]
    turned = {frozenset(pair) for pair in zip(cycle, [*cycle[1:], cycle[0]], strict=True)}
    found = np.argwhere(spec_of("attend expander(degree = 2, seed = 7)").mask(10)).tolist()
    assert {frozenset(pair) for pair in found} == turned


def test_draws_of_many_rows_are_those_of_few() -> None:
    """Tables are drawn in batches: of long sequences as of the definition."""
    n = 20_000
    pairs = spec_of(f"causal attend random(keys = 4, seed = {2**40 + 3})").adjacency(n)
    few = spec_of(f"causal attend random(keys = 4, seed = {2**40 + 3})").adjacency(100)
    assert np.array_equal(pairs[:100, :100].toarray(), few.toarray())
    counts = np.diff(pairs.indptr)
    assert counts.tolist() == [min(q + 1, 4) for q in range(n)]
    assert digest(pairs.indices) == "9ef013cd4cb1e99f"
    ring = spec_of("attend expander(degree = 4, seed = 9223372036854775)").adjacency(n)
    assert np.diff(ring.indptr).max() == 4
    assert digest(ring.indices) == "7fe1b25a6e14040e"


def chi_square(counts: Sequence[int] | np.ndarray) -> float:
    """The probability of counts at least as uneven as these."""
    found = np.asarray(counts)
    # of `scipy.stats`, which takes half a second to load
    statistic = ((found - found.mean()) ** 2 / found.mean()).sum()
    return float(chdtrc(len(found) - 1, statistic))


def test_members_and_pairs_are_uniform() -> None:
    n, keys = 30_000, 3
    table = spec_of("attend random(keys = 3, seed = 2)").adjacency(n).indices.reshape(n, keys)
    assert (np.diff(table, axis=1) > 0).all()
    every = table * 6 // n
    _, counts = np.unique(table.ravel() * 64 // n, return_counts=True)
    assert chi_square(counts) > 1e-3
    # subsets are sorted: of each three sixths in all orders
    order = every[:, 0] * 36 + every[:, 1] * 6 + every[:, 2]
    apart = order[(np.diff(every, axis=1) > 0).all(1)]
    _, counts = np.unique(apart, return_counts=True)
    assert len(counts) == 20
    assert chi_square(counts) > 1e-3
    # rows are unrelated
    _, counts = np.unique(every[1:, 0] * 6 + every[:-1, 2], return_counts=True)
    first, last = (np.bincount(each, minlength=6) / n for each in (every[:, 0], every[:, 2]))
    meant = n * (first[:, None] * last).ravel()
    assert chdtrc(25, ((counts - meant[meant > 0]) ** 2 / meant[meant > 0]).sum()) > 1e-3


def test_cycles_are_uniform() -> None:
    counts: dict[str, int] = {}
    for seed in range(240):
        mask = spec_of(f"attend expander(degree = 2, seed = {seed})").mask(5)
        counts[str(mask.astype(int))] = counts.get(str(mask.astype(int)), 0) + 1
    # 4! / 2 rings of five
    assert len(counts) == 12
    assert chi_square(list(counts.values())) > 1e-3


def test_the_test_of_uniformity_can_fail() -> None:
    skewed = np.arange(30_000) * np.arange(30_000) % 11
    assert chi_square(np.bincount(skewed, minlength=11)) < 1e-3


def test_a_layer_draws_for_itself_beside_heads_that_do_not_draw() -> None:
    spec = spec_of("layers 2 heads 2 attend full head 1 { attend random(keys = 2) }")
    module, (q, k, _) = spec.compile(), tensors(1, 2, 9, 9)
    for layer in (0, 1):
        weights = module(q, k, torch.eye(9, dtype=q.dtype).expand(1, 2, 9, 9), layer=layer)
        pairs = [spec.mask(9, layer=layer, head=head) for head in (0, 1)]
        assert ((weights[0] != 0).numpy() == np.array(pairs)).all()
