"""Pairs between two sequences against their definition: masks and every closed form."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from relation_checks import faults

from attnspec.graphs.across import Across, reads_m
from attnspec.graphs.bind import bind_attended, situation_of
from attnspec.graphs.relation import Relation, is_of_any_length
from attnspec.graphs.stack import Stack
from attnspec.ir.crossing import crossed, evened
from attnspec.ir.program import Crossing
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError

SIZES = ((0, 5), (5, 0), (1, 1), (7, 16), (33, 20), (130, 257), (20, 20))
"""Queries and keys."""

Pair = Callable[[int, int, int, int], bool]
"""Whether query q of m reads key k of n."""

GRAPHS: dict[str, Pair] = {
    "full": lambda q, k, m, n: True,
    "self": lambda q, k, m, n: q == k,
    "where(abs(q * n - k * m) <= 2 * m)": lambda q, k, m, n: abs(q * n - k * m) <= 2 * m,
    "window(before = 2, after = m // 4)": lambda q, k, m, n: -(m // 4) <= q - k <= 2,
    "~window(radius = 4)": lambda q, k, m, n: abs(q - k) > 4,
    "full - dilated(radius = 6, step = 2)": lambda q, k, m, n: abs(q - k) > 6 or (q - k) % 2 == 1,
    "rows(last(2)) | columns(last(3))": lambda q, k, m, n: q >= m - 2 or k >= n - 3,
    "global(last(2))": lambda q, k, m, n: q >= m - 2 or k >= n - 2,
    "global(~last(2) & every(3))": lambda q, k, m, n: (
        (q < m - 2 and q % 3 == 0) or (k < n - 2 and k % 3 == 0)
    ),
    "transpose(rows(last(2)))": lambda q, k, m, n: k >= n - 2,
    "transpose(where(q < 3 and k < m - 1))": lambda q, k, m, n: k < 3 and q < m - 1,
    "shift(window(radius = 1), by = 3)": lambda q, k, m, n: q >= 3 and k >= 3 and abs(q - k) <= 1,
    "shift(rows(last(2)), by = -2)": lambda q, k, m, n: m > q + 2 >= m - 2 and k + 2 < n,
    "transpose(shift(columns(last(2)), by = 1))": lambda q, k, m, n: (
        q >= 1 and k >= 1 and q > m - 2
    ),
    "block(size = 4) | prefix(2) | summary(stride = 5, cells = 2)": lambda q, k, m, n: (
        q // 4 == k // 4 or k < 2 or k % 5 >= 3
    ),
    "powers(base = 2) & residue(step = 2)": lambda q, k, m, n: (
        (q - k) % 2 == 0 and (q == k or (abs(q - k) & (abs(q - k) - 1)) == 0)
    ),
    "strided(stride = 3) & fixed(stride = 4, cells = 1)": lambda q, k, m, n: (
        (abs(q - k) < 3 or (q - k) % 3 == 0) and (q // 4 == k // 4 or k % 4 >= 3)
    ),
}


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ cross {body} }}")


def brute(pair: Pair, m: int, n: int) -> np.ndarray:
    """bool [m, n], pair by pair."""
    rows = [[bool(pair(q, k, m, n)) for k in range(n)] for q in range(m)]
    return np.array(rows, bool).reshape(m, n)


@pytest.mark.parametrize("graph", GRAPHS)
def test_masks_are_those_of_the_definition(graph: str) -> None:
    spec = spec_of(f"attend {graph}")
    for m, n in SIZES:
        expected = brute(GRAPHS[graph], m, n)
        assert np.array_equal(spec.mask(n, m=m), expected), (m, n)
        found = spec.adjacency(n, m=m)
        assert found.shape == (m, n)
        assert found.dtype == np.dtype(bool)
        assert found.indices.dtype == np.int32
        assert found.has_canonical_format
        assert np.array_equal(found.toarray(), expected)
    assert np.array_equal(spec.mask(9), brute(GRAPHS[graph], 9, 9))


def predicate(draw: random.Random) -> str:
    """Comparisons of q, k, m and n that Python understands as they are written."""
    one = draw.choice(["q", "k", "q * n", "k * m", "q + k", "q - k", "2 * k - q", "q * k"])
    other = draw.choice(
        ["m", "n", "m - n", "3", "m * 2", "abs(m - n)", "min(m, n) // 2", "m * n // 3"]
    )
    if draw.random() < 0.3:
        return f"({one}) % {draw.randint(2, 5)} {draw.choice(['==', '<'])} {draw.randint(0, 3)}"
    return f"{one} {draw.choice(['<', '<=', '>', '==', '!='])} {other}"


def composed(draw: random.Random, depth: int = 3) -> tuple[str, str]:
    """A graph of predicates, and what it means in Python."""
    if not depth or draw.random() < 0.2:
        said = predicate(draw)
        return f"where({said})", f"({said})"
    if draw.random() < 0.2:
        graph, meaning = composed(draw, depth - 1)
        return f"~({graph})", f"(not {meaning})"
    op, word = draw.choice([("|", "or"), ("&", "and"), ("-", "and not")])
    (first, left), (second, right) = composed(draw, depth - 1), composed(draw, depth - 1)
    return f"({first} {op} {second})", f"({left} {word} {right})"


@pytest.mark.parametrize("seed", range(30))
def test_random_compositions(seed: int) -> None:
    graph, meaning = composed(random.Random(seed))
    spec, code = spec_of(f"attend {graph}"), compile(meaning, "meaning", "eval")
    for m, n in ((1, 1), (7, 16), (21, 9)):
        expected = brute(lambda q, k, m, n: eval(code, {}, {"q": q, "k": k, "m": m, "n": n}), m, n)
        assert np.array_equal(spec.mask(n, m=m), expected), graph


def relation_of(spec: Spec, crossing: Crossing) -> Relation:
    """What a call with these queries and keys computes."""
    program = crossed(spec.program, crossing.keys, crossing.queries)[0]
    at = replace(situation_of(program, crossing.length), crossing=crossing)
    graph = spec.program.attend().graph
    assert graph is not None
    return bind_attended(graph, at)


@pytest.mark.parametrize("graph", GRAPHS)
def test_closed_forms_agree_with_the_definition(graph: str) -> None:
    spec = spec_of(f"attend {graph}")
    for crossing in (
        Crossing(7, 16, first=9),
        Crossing(16, 7),
        Crossing(9, 11, first=11),
        *([] if reads_m(spec.program) else [Crossing(5, 13, start=3, first=8)]),
    ):
        relation = relation_of(spec, crossing)
        assert faults(relation, crossing.length, (1, 3, 8)) == []
        mine = [relation, *getattr(relation, "terms", ())]
        assert crossing.even or any(isinstance(part, Across) for part in mine)


def test_a_broken_closed_form_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    relation = relation_of(spec_of("attend window(radius = 2)"), Crossing(7, 16, first=9))
    monkeypatch.setattr(Across, "_queries", lambda self, tiles: tiles)
    assert faults(relation, 16, (1, 3, 8))


def test_queries_from_a_start_are_rows_of_all() -> None:
    spec = spec_of("attend window(radius = 4) | where((q + k) % 7 == 0) | columns(last(2))")
    whole = spec.mask(20, m=40)
    for start, count in ((0, 40), (3, 12), (31, 9)):
        relation = relation_of(spec, Crossing(count, 20, start))
        rows = np.zeros((count, 20), bool)
        rows[relation.rows(0, count, max(count, 20))] = True
        assert np.array_equal(rows, whole[start : start + count])


def test_two_sequences_have_lengths_of_their_own() -> None:
    spec = spec_of("attend window(radius = 2)")
    assert is_of_any_length(relation_of(spec, Crossing(300, 300)))
    assert not is_of_any_length(relation_of(spec, Crossing(300, 20)))


def test_inputs_are_the_keys() -> None:
    spec = spec_of("input x: tokens attend columns(x) | rows(last(2)) | columns(~x & last(3))")
    for m, n in SIZES:
        marked = np.arange(n) % 3 == 1
        expected = brute(
            lambda q, k, m, n: k % 3 == 1 or q >= m - 2 or (k % 3 != 1 and k >= n - 3), m, n
        )
        assert np.array_equal(spec.mask(n, m=m, inputs={"x": marked}), expected)
    with pytest.raises(AttnSpecError, match=r"must be bool \[5\], got bool \[9\]"):
        spec.mask(5, m=9, inputs={"x": np.zeros(9, bool)})


def test_choices_have_a_row_for_each_query() -> None:
    spec = spec_of("input x: choices(size = 2) attend chosen(x)")
    lists = np.array([[[0, 1], [2, -1], [3, 3]]])
    expected = [[1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
    assert spec.mask(7, m=3, inputs={"x": lists}).astype(int).tolist() == expected
    with pytest.raises(AttnSpecError, match=r"\[H or H_kv or 1, 4, c\]"):
        spec.mask(7, m=4, inputs={"x": lists})


@pytest.mark.parametrize(
    ("graph", "reads"),
    [
        ("window(radius = 3) | columns(last(2)) | prefix(2)", False),
        ("where(q * n <= k)", False),
        ("shift(window(radius = 3), by = 2)", False),
        ("transpose(rows(last(2)))", False),
        ("topk(keys = 3, within = window(radius = 9))", False),
        ("where(q < m)", True),
        ("window(radius = m)", True),
        ("rows(last(2))", True),
        ("global(first(2) | last(2))", True),
        ("transpose(columns(~last(2)))", True),
        ("shift(window(radius = 3), by = -2)", True),
        ("shift(window(radius = 3), by = n - 5)", True),
        ("topk(keys = 3, within = rows(last(2)))", True),
        ("topk(keys = m)", True),
    ],
)
def test_what_reads_m(graph: str, reads: bool) -> None:
    assert reads_m(spec_of(f"attend {graph}").program) is reads


def test_where_both_are_as_long_it_is_a_spec_of_one_sequence() -> None:
    spec = spec_of("let w = m // 8 attend where(abs(q * n - k * m) <= w * m) | rows(last(2))")
    same = parse("attention a { attend where(abs(q * n - k * n) <= n // 8 * n) | rows(last(2)) }")
    assert evened(spec.program) == same.program
    assert evened(same.program) is same.program
    found = Stack(crossed(spec.program, 33)[0]).relation(33)
    assert not any(isinstance(part, Across) for part in getattr(found, "terms", ()))
    assert np.array_equal(spec.mask(33), same.mask(33))


def test_m_is_for_two_sequences_alone() -> None:
    spec = parse("attention a { attend full }")
    for asked in (spec.mask, spec.adjacency, spec.analyse, spec.plan):
        with pytest.raises(AttnSpecError, match="`a` has one sequence"):
            asked(4, m=3)
    with pytest.raises(AttnSpecError, match="m must be between 0"):
        spec_of("attend full").mask(4, m=-1)
    with pytest.raises(TypeError, match="m must be an integer"):
        spec_of("attend full").mask(4, m=True)
    with pytest.raises(AttnSpecError, match="use `adjacency`"):
        spec_of("attend full").graph(4)
