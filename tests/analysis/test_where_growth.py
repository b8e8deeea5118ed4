"""The growth of the pairs of predicates against counts, of single comparisons and of every two."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from attnspec.analysis.growth.size_growth import Growth
from attnspec.analysis.growth.where_growth import predicate_growth
from attnspec.ir.program import Leaf
from attnspec.ir.scalars import Apply, Scalar, evaluate
from attnspec.spec import parse

NUMBERS = (
    *("q", "k", "n - k", "3 - q", "2 * k", "q + k", "q - k", "k - q + 1", "2 * q - 2 * k"),
    *("abs(q - k)", "abs(q - k + 1)", "abs(q - 2)", "q // 4 - k // 4", "k // 4 - q // 4"),
    *("q // 4 + k // 4", "q % 4", "(q - k) % 4", "(k - q + 1) % 4"),
)

OF_EACH = ("== -1", "== 0", "== 4", "< 0", "<= 3", "> 3", ">= 4", "in {-2, -1}", "in {0, 3}")

OTHERS = (
    *("q != k", "k in 3..9", "k < isqrt(n)", "k > isqrt(n)", "q >= n - isqrt(n)"),
    *("q % isqrt(n) == 1", "q % isqrt(n) == isqrt(n)", "k % isqrt(n) > isqrt(n) - 1"),
    *("k % isqrt(n) >= isqrt(n) - 1", "q // isqrt(n) == k // isqrt(n)", "q - k <= isqrt(n)"),
    "q // 4 - k // 5 <= 0",
)

LENGTHS = 144, 576


def predicate(text: str) -> Scalar:
    graph = parse(f"attention a {{ attend where({text}) }}").program.attends[0].graph
    assert isinstance(graph, Leaf)
    return dict(graph.arguments)["predicate"]  # type: ignore[return-value]


def pairs_of(scalar: Scalar) -> tuple[np.ndarray, ...]:
    """The pairs at each of the lengths, by definition."""
    found = []
    for n in LENGTHS:
        q, k = np.ogrid[:n, :n]
        held = evaluate(scalar, {"q": q, "k": k, "n": n})
        found.append(np.broadcast_to(np.asarray(held, bool), (n, n)))
    return tuple(found)


def is_true(most: Growth, few: int, many: int) -> bool:
    """Whether counts grow no faster; of a few pairs, some of which begin late, any number that a
    line soon passes may come."""
    return many <= 4 ** float(most[0]) * 1.7 * max(few, LENGTHS[0])


@pytest.fixture(scope="module")
def parts() -> dict[str, tuple[Scalar, tuple[np.ndarray, ...]]]:
    texts = [*(f"{number} {said}" for number in NUMBERS for said in OF_EACH), *OTHERS]
    scalars = {text: predicate(text) for text in texts}
    return {text: (each, pairs_of(each)) for text, each in scalars.items()}


def test_the_growth_of_comparisons_is_true_of_counts(
    parts: dict[str, tuple[Scalar, tuple[np.ndarray, ...]]],
) -> None:
    for text, (scalar, masks) in parts.items():
        most = predicate_growth(scalar)
        assert is_true(most, *(int(mask.sum()) for mask in masks)), (text, most)


def test_the_growth_of_every_two_comparisons_is_true_of_counts(
    parts: dict[str, tuple[Scalar, tuple[np.ndarray, ...]]],
) -> None:
    # of the many that are alike some, other ones of each number
    chosen = [*parts.items()][::4]
    for (one, (left, some)), (other, (right, more)) in combinations(chosen, 2):
        known = predicate_growth(Apply("and", (left, right)))
        counts = (int(np.count_nonzero(a & b)) for a, b in zip(some, more, strict=True))
        assert is_true(known, *counts), (one, other, known)
