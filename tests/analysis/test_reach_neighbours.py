"""What a set of queries reads, for every way of writing a graph, compared with its mask."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from limited import REFUSING
from pattern_samples import samples_of
from random_terms import term
from relation_checks import definition

from attnspec.analysis.counting.conjunctions import Banded, Listed, Turned, shared
from attnspec.analysis.counting.neighbours import Neighbours, neighbours
from attnspec.analysis.counting.progressions import grouped, merged
from attnspec.analysis.counting.rectangles import terms_of
from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.operators import Intersection, Shift, Union, transpose_of
from attnspec.graphs.patterns import BY_NAME, PATTERNS
from attnspec.graphs.patterns.block import Block
from attnspec.graphs.patterns.causal import Causal
from attnspec.graphs.patterns.dilated import Dilated
from attnspec.graphs.patterns.random_ import Random
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.patterns.window import Window
from attnspec.graphs.predicates.comparisons import Between
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.ir.parameters import RelationError
from attnspec.ir.scalars import Apply, Symbol
from attnspec.limits import LIMITS
from attnspec.spec import parse

Mask = npt.NDArray[np.bool_]


def assert_reads(found: Neighbours, mask: Mask, seed: int = 0) -> None:
    """What sets of several sizes read agrees with the mask."""
    n = len(mask)
    source = np.random.default_rng(seed)
    for part in (0.0, 0.05, 0.4, 1.0):
        marked = source.random(n) < part
        read = found.read(marked)
        assert np.array_equal(read, mask[marked].any(axis=0))
        # the marks lie between the ends that are said, and are all that is there
        into = np.zeros(n, bool)
        low, high = found.mark(np.flatnonzero(marked), into)
        assert np.array_equal(into, read)
        assert not read[: min(low, n)].any()
        assert not read[max(high, 0) :].any()


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if not p.data_dependent])
def test_patterns(pattern: type[Relation]) -> None:
    for relation in samples_of(pattern):
        for n in (1, 2, 35, 60) if not pattern.needs_grid else (38, 60):
            try:
                mask = definition(relation, n)
            except RelationError:
                continue
            assert_reads(neighbours([relation], n), mask)
            assert_reads(neighbours([transpose_of(relation)], n), mask.T)
            assert_reads(neighbours([relation, Window(radius=1)], n), mask | band(n))


def band(n: int) -> Mask:
    return definition(Window(radius=1), n)


PREDICATES = """k <= q
q < k
abs(q - k) < 3
abs(q - k) == 4
abs(q - k) == 0
abs(q - k) > 2
not (abs(q - k) <= 3)
(q - k) % 5 == 2
(q + k) % 5 == 1
(q - k) % 7 != 3
(q - k) % n <= 2
(q - k) % 3 <= 1
(q + 2) // 4 == (k + 2) // 4
q % 4 <= k % 6
q % 4 < k % 6 and k <= q
k // 4 == (q // 4 + 1) % 3
5 <= q and (q - 5) // 3 == (k - 5) // 3
q // 3 - k // 5 == 1
q / 3 <= k / 2
2 * q <= k + 7
q == k or q + k == 9
q - k in {1, 2, 4}
abs(q - k) in {1, 3}
q - k in -2..3
k in 3..q
q * k < n
min(q, 7) <= k % 5
isqrt(q) == isqrt(k)
abs(q % 6 - k % 6) < 2
max(q, k) < 10
(q % 3 == 1) == (k % 2 == 0)
sqrt(q) < k / 2
q - k == 0.5
abs(q - k) <= 2.5
log2(q + 1) <= k
(q - k) % 4 in 1..2""".splitlines()

ON_A_GRID = """q.row == k.row
q.col == k.col
q.col // 2 == k.col // 2 and q.row == k.row
abs(q.row - k.row) + abs(q.col - k.col) <= 2
q.row <= k.row or k > 5
not (q.row < k.row)
k.row == 2 and q > 4
abs(q.col - k.col) <= 1
(q.row - k.row) % 2 == 0
q.row + q.col == k.row + k.col""".splitlines()


@pytest.mark.parametrize(
    "around",
    [
        "%s",
        "~%s",
        "shift(%s, by = 3)",
        pytest.param("transpose(%s)", marks=pytest.mark.slow),
        pytest.param("%s & window(radius = 6)", marks=pytest.mark.slow),
    ],
)
def test_predicates(around: str) -> None:
    for predicate in PREDICATES:
        graph = around % f"where({predicate})"
        for causal in ("", "causal"):
            spec = parse(f"attention a {{ {causal} attend {graph} }}")
            for n in (1, 2, 40) if around == "%s" else (40,):
                assert_reads(neighbours([spec.relation(n)], n), spec.mask(n))
    for predicate in ON_A_GRID:
        graph = around % f"where({predicate})"
        for extents, extra in (("5, 7", 0), ("4, 6", 3), ("2, 3, 4", 1)):
            head = f"sequence grid({extents}) extra_tokens {extra}" if extra else ""
            spec = parse(f"attention a {{ {head or f'sequence grid({extents})'} attend {graph} }}")
            n = int(np.prod([int(one) for one in extents.split(",")])) + extra
            assert_reads(neighbours([spec.relation(n)], n), spec.mask(n))


@pytest.mark.parametrize(
    ("predicate", "kind"),
    [
        ("q // 4 == k // 4", Banded),
        ("q % 4 == k % 4", Banded),
        ("(q - k) % n <= 2", Banded),
        ("q - k in -2..3", Banded),
        ("abs(q % 6 - k % 6) < 2", Banded),
        ("q * k < n", Listed),
    ],
)
def test_predicates_have_the_form_that_they_can_have(predicate: str, kind: type) -> None:
    relation = parse(f"attention a {{ attend where({predicate}) }}").relation(40)
    found = neighbours([relation], 40)
    assert {type(part) for reading in found.readings for _, part in reading.counted} == {kind}


def test_a_predicate_without_a_value_is_refused_in_words() -> None:
    relation = parse("attention a { attend where(q // (n - 40) == k) }").relation(40)
    with pytest.raises(RelationError, match="no value"):
        neighbours([relation], 40).read(np.ones(40, bool))


def test_huge_numbers_stay_with_the_definition() -> None:
    q, k = Symbol("q"), Symbol("k")
    huge = Apply("**", (k, 11))
    assert Where(Apply("<=", (q, huge))).taken_apart(1000) is None
    assert isinstance(Where(Apply("<=", (q, Apply("**", (k, 2))))).taken_apart(1000), Between)


# --- progressions ---------------------------------------------------------------------------------


def test_progressions_meet_by_the_chinese_remainder_theorem() -> None:
    q = np.arange(50)
    for first, second in (
        (Residue(4), Residue(6)),
        (Residue(6), Dilated(30, 9)),
        (Dilated(40, 6), Dilated(25, 10)),
        (Shift(Residue(5), 3), Residue(7)),
        (Shift(Window(before=9, after=0), -4), Dilated(20, 3)),
    ):
        part = Intersection((first, second)).progressions(q, 50)
        assert part is not None
        found = np.zeros((50, 50), int)
        for group in grouped(part, 50):
            for row, place, count in zip(group.row, group.place, group.count, strict=True):
                residue, at = divmod(int(place), group.width)
                for index in range(count):
                    found[row, residue + (at + index) * group.step] += 1
        assert np.array_equal(found, definition(first, 50) & definition(second, 50))


def test_ranges_merge() -> None:
    begin, end = merged(np.array([5, 0, 3, 9]), np.array([7, 2, 5, 11]))
    assert (begin.tolist(), end.tolist()) == ([0, 3, 9], [2, 7, 11])


@pytest.mark.parametrize("kind", ["band", "listed", "turned", "ordered"])
def test_conjunctions_count(kind: str) -> None:
    n = 45
    value = Apply("%", (Symbol("k"), 7))
    relation: Relation = Between(Apply("%", (Symbol("q"), 5)), value, 5)
    if kind != "ordered":
        relation = Dilated(20, 3)
    mask = definition(relation, n)
    made = {
        "band": Banded((relation,), n),
        "ordered": shared((relation,), n),
        "listed": Listed(relation, n),
        "turned": Turned(Banded((relation,), n), n),
    }[kind]
    if kind == "turned":
        mask = mask.T
    queries = np.array([0, 3, 4, 11, 30, 44])
    marked = np.zeros(n, bool)
    marked[queries] = True
    assert np.array_equal(made.tally(queries), mask[queries].sum(axis=0))
    assert np.array_equal(made.sums(marked), mask[:, marked].sum(axis=1))
    weights = np.arange(1, 7)
    assert np.array_equal(made.tally(queries, weights), weights @ mask[queries])


# --- limits ---------------------------------------------------------------------------------------


def test_too_many_terms_are_one() -> None:
    parts = tuple(Union((Residue(2 + i), Block(3 + i))) for i in range(7))
    relation = parse("attention a { attend self }").relation(9)
    assert len(terms_of(relation, 9)) == 1
    crossed = parse(
        "attention a { attend "
        + " & ".join(f"(residue(step = {2 + i}) | block(size = {3 + i}))" for i in range(7))
        + " }"
    )
    assert 2 ** len(parts) > LIMITS.terms
    assert len(terms_of(crossed.relation(60), 60)) == 1
    assert_reads(neighbours([crossed.relation(60)], 60), crossed.mask(60))


def test_terms_that_are_plainly_empty_are_left_out() -> None:
    draw, several = random.Random(0), 0
    for turn in range(120):
        n = (1, 6, 11)[turn % 3]
        relation = bind(term(draw), Situation(n=n, patterns=BY_NAME))
        terms = terms_of(relation, n)
        several += len(terms) > 1
        found = np.zeros((n, n), bool)
        for each in terms:
            assert not each.empty, relation
            pairs = np.ones((n, n), bool)
            for held in each.held:
                pairs &= definition(held, n)
            for left_out in each.left_out:
                pairs &= ~definition(left_out, n)
            rows, columns = (
                np.ones(n, bool) if side is None else side for side in (each.rows, each.columns)
            )
            found |= pairs & rows[:, None] & columns
        assert np.array_equal(found, definition(relation, n)), relation
    assert several > 20
    none = Intersection(tuple(Where(Apply("==", (Symbol(side), 3))) for side in "qqkk"))
    assert len(terms_of(none, 9)) == 1
    apart = Intersection(tuple(Where(Apply("==", (Symbol("q"), at))) for at in (2, 3)))
    assert terms_of(apart, 9) == ()


def test_much_left_out_is_listed() -> None:
    spec = parse(
        "attention a { attend full - residue(step = 3) - residue(step = 5)"
        " - window(radius = 2) - dilated(radius = 30, step = 7) - random(keys = 2) }"
    )
    assert_reads(neighbours([spec.relation(50)], 50), spec.mask(50))


def test_what_has_no_form_is_refused_where_it_is_long() -> None:
    q, k = Symbol("q"), Symbol("k")
    product = Where(Apply("<", (Apply("*", (q, k)), Symbol("n"))))
    with pytest.raises(TooMuch, match="not looked at"):
        neighbours([product], 1 << 16)
    # drawn graphs are listed, alone and with others
    found = neighbours([Random(2, seed=1), Random(3, causal=True)], 1 << 16)
    assert found.read(np.ones(1 << 16, bool)).sum() > 1 << 15


@pytest.mark.limits(REFUSING)
def test_the_number_of_listed_edges_is_limited() -> None:
    with pytest.raises(TooMuch, match="1,000,000 pairs"):
        Listed(Causal(), 2048)
