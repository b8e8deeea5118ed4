"""Large texts and large numbers are answered, or refused by the limit that they reach, at once."""

from __future__ import annotations

import random
import re
import tracemalloc
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from limited import REFUSING
from random_terms import tokens

from attnspec.analysis.cost.cost import LONGEST_BREAK, MOST_BREAK, longest_break
from attnspec.analysis.counting.degrees import degrees_of
from attnspec.analysis.quality import Unknown
from attnspec.cli.files import write_result
from attnspec.graphs.bind import Situation, bind_tokens
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.patterns.residue import Residue
from attnspec.graphs.patterns.where import Where
from attnspec.graphs.relation import Edges, Elementwise
from attnspec.layout.orders import orders_of
from attnspec.limits import LIMITS
from attnspec.lower.lower import require_built
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, SpecError


def wheres(count: int, operator: str) -> Spec:
    parts = (f"where(q * {i + 3} % {i + 7} == k % {i + 2})" for i in range(count))
    return parse(f"attention a {{ attend {f' {operator} '.join(parts)} }}")


@pytest.mark.parametrize("text", ["@" * (1 << 20), "'a " * (1 << 18), ";" * (1 << 20)])
def test_a_text_of_mistakes_is_not_read_to_its_end(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert len(caught.value.diagnostics) == LIMITS.problems


def test_a_text_of_unknown_names_is_not_elaborated_to_its_end() -> None:
    with pytest.raises(SpecError) as caught:
        parse(f"attention a {{ attend {' | '.join(f'y{i}' for i in range(5000))} }}")
    assert len(caught.value.diagnostics) == LIMITS.problems


@pytest.mark.parametrize("operator", ["|", "&"])
def test_graphs_of_many_patterns_are_refused_by_their_limit(operator: str) -> None:
    require_built(wheres(LIMITS.patterns, operator).program)
    large = wheres(LIMITS.patterns + 1, operator)
    for work in (
        lambda: require_built(large.program),
        lambda: large.plan(8),
        large.compile,
        large.emit,
    ):
        with pytest.raises(SpecError) as caught:
            work()
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.code == "A196"
        assert f"at most {LIMITS.patterns} patterns" in diagnostic.message
    # a pattern that is said again is none more
    parse(f"attention a {{ attend {' | '.join(['self'] * 2000)} }}").plan(8)


@pytest.mark.parametrize("operator", ["|", "&"])
def test_graphs_of_many_patterns_are_not_looked_into(operator: str) -> None:
    large = wheres(LIMITS.patterns + 1, operator)
    report = large.analyse(64)
    for name in ("edges", "causal", "order", "depth", "spectral_gap", "kv_cache"):
        said = report.figure(name)
        assert isinstance(said, Unknown)
        assert f"at most {LIMITS.patterns} patterns" in said.reason
    text = large.source.replace("}", "require degree <= 3 }")
    (warning,) = parse(text).check()
    assert warning.code == "A609"
    assert large.mask(9).shape == (9, 9)
    assert wheres(LIMITS.patterns, operator).analyse(8).edges is not None


@pytest.mark.parametrize("operator", ["|", "&"])
@pytest.mark.limits(REFUSING)
def test_pairs_of_many_patterns_are_looked_at_a_few_times(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, patterns = 256, 20
    looks: list[int] = []
    holds = Where.holds

    def counted(self: Where, q: Elementwise, k: Elementwise, length: int) -> Elementwise:
        looks.append(np.broadcast(q, k).size)
        return holds(self, q, k, length)

    monkeypatch.setattr(Where, "holds", counted)
    report = wheres(patterns, operator).analyse(n)
    # once for both sides, once row by row to find a later key, once for the cache, and some rows to
    # see how many keys they have
    figures = ("edges", "readers", "empty_rows", "unread_keys", "causal", "kv_cache", "eviction")
    for name in figures:
        report.figure(name)
    assert sum(looks) < 7 * patterns * n * n
    # the growth is not measured at lengths beyond what looks at all their pairs allow
    looks.clear()
    report.figure("order")
    assert sum(looks) < 2 * LIMITS.looks_grown


def test_a_union_of_dense_terms_is_not_listed_term_by_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed: list[int] = []
    rows = Where.rows

    def counted(self: Where, first: int, last: int, n: int) -> Edges:
        listed.append(last - first)
        return rows(self, first, last, n)

    relation = parse(
        "attention a { attend where((q * 3 + k) % 7 < 4) | where((q * 5 + k) % 11 < 6) }"
    ).relation(301)
    assert isinstance(relation, Union)
    monkeypatch.setattr(Where, "rows", counted)
    q, k = relation.rows(100, 200, 301)
    assert max(listed, default=1) == 1
    held = np.asarray(relation.holds(np.arange(100, 200)[:, None], np.arange(301), 301))
    assert np.array_equal(np.argwhere(held), np.stack([q - 100, k], 1))


def test_orders_and_lengths_of_many_patterns_are_few() -> None:
    strided = " & ".join(f"where(q % {i} != k % {i + 1})" for i in range(3, 43))
    spec = parse(f"attention a {{ attend {strided} }}")
    assert len(orders_of(spec.relation(64), 64)) == LIMITS.orders
    assert longest_break(spec.program) == MOST_BREAK // 40
    assert longest_break(parse("attention a { attend self }").program) == LONGEST_BREAK


@pytest.mark.parametrize(
    "steps", [(2**40, 6), (6, 2**62), tuple(range(50, 90)), (2**31 - 1, 2**31)]
)
def test_steps_beyond_every_sequence(steps: tuple[int, ...]) -> None:
    n = 97
    graph = Intersection(tuple(Residue(step) for step in steps))
    i = np.arange(n)
    held = graph.holds(i[:, None], i[None], n)
    assert np.array_equal(degrees_of(graph, n), np.asarray(held).sum(axis=1))


LONGEST = 2**31 - 1
HUGE = 2**62


@pytest.mark.parametrize(
    "graph",
    [
        f"columns(first({HUGE}))",
        f"global(last({HUGE}))",
        f"columns(every({HUGE}, offset = 3))",
        f"rows(positions(0..{HUGE}))",
        f"columns(~first({HUGE}) | last(5))",
        f"shift(window(radius = {HUGE}), by = 5)",
        "columns(every(2) | every(3))",
    ],
)
def test_token_sets_at_the_longest_length_take_no_memory(graph: str) -> None:
    spec = parse(f"attention a {{ attend {graph} require causal at n = {LONGEST} }}")
    tracemalloc.start()
    spec.check()
    assert spec.analyse(LONGEST).to_dict()["n"] == LONGEST
    for refused in (spec.adjacency, spec.mask, spec.plan, spec.graph):
        with pytest.raises(AttnSpecError, match="up to"):
            refused(LONGEST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 30


def test_token_sets_are_counted_and_listed_as_they_are_defined() -> None:
    for seed, n in product(range(120), (1, 2, 7, 13)):
        found = bind_tokens(tokens(random.Random(seed)), Situation(n=13, patterns=BY_NAME), None)
        held = np.flatnonzero(np.broadcast_to(found.contains(np.arange(n), n), n))
        assert found.members(n).tolist() == held.tolist(), (seed, n)
        assert found.size(n) == len(held), (seed, n)
        runs = found.progressions(n)
        if runs is not None:
            start, stop, step = runs
            listed = [i for a, b in zip(start, stop, strict=True) for i in range(a, b, step)]
            assert sorted(listed) == held.tolist(), (seed, n)


def test_numbers_beyond_the_largest_real_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (diagnostic,) = parse("attention a { attend where(1e308 * q > 3) }").check()
    assert "beyond every limit" in diagnostic.message


@pytest.mark.parametrize(
    "body",
    [
        "scale «1e308» attend full",
        "scale «-1e31» attend full",
        "scale «1e-320» attend full",
        "attend full score softcap(cap = «1e39»)",
        "attend rfa(floor = «1e308»)",
        "attend rbf(sigma = «1e-24»)",
        "heads 2 head 1 { scale «1e308» } attend full",
    ],
)
def test_numbers_that_float32_cannot_compute_with_are_refused(body: str) -> None:
    text = f"attention a {{ {body} }}"
    before, at, after = re.split("[«»]", text)
    with pytest.raises(SpecError) as caught:
        parse(before + at + after)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "A306"
    assert diagnostic.span is not None
    assert diagnostic.span.text == at
    assert "float32" in diagnostic.message


@pytest.mark.parametrize("body", ["scale 1e30 * n", "heads 2 scale 1e16 ** (head + 1)"])
def test_they_are_refused_as_soon_as_they_are_known(body: str) -> None:
    spec = parse(f"attention a {{ {body} attend full }}")
    for work in (lambda: spec.plan(64), lambda: spec.analyse(64).flops):
        with pytest.raises(SpecError, match=r"between 2\*\*-100 and 2\*\*100") as caught:
            work()
        assert caught.value.diagnostics[0].span is not None


@pytest.mark.parametrize(
    "body",
    [
        "scale 2.0 ** 100 attend window(radius = 3)",
        "scale 1e4 attend residue(step = 3) + linear()",
        "scale 1e30 attend taylor(order = 2)",
        "attend full score softcap(cap = 1e-4)",
        "attend full score softcap(cap = 1e30)",
        "attend rbf(sigma = 1e-18)",
        "attend rfa(floor = 1e30)",
    ],
)
def test_large_numbers_of_formulas_are_verified(body: str) -> None:
    assert "class A" in parse(f"attention a {{ {body} }}").emit()


@pytest.mark.parametrize(
    ("items", "way_out"),
    [("5-3", "`3..5`"), ("0 - 2", "`0..2`"), ("1+1", "`1, 1`"), ("0, 4-6", "`4, 6`")],
)
def test_layers_are_no_arithmetic(items: str, way_out: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(f"attention a {{ layers 8 attend full layer {items} {{ attend self }} }}")
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "A307"
    assert way_out in (diagnostic.help or "")
    # sizes of the spec may be computed with
    text = "attention a(r = 3) { layers 8 heads 8 attend full layer layers - 1"
    assert parse(f"{text} {{ head r + 1..2*r {{ attend causal }} }} }}").layers == 8


def test_a_link_to_a_file_that_is_not_there_is_not_followed(tmp_path: Path) -> None:
    link, missing = tmp_path / "out.py", tmp_path / "missing.py"
    link.symlink_to(missing)
    with pytest.raises(FileExistsError, match="is a link to a file that is not there"):
        write_result(str(link), "x = 1\n", force=False)
    assert not missing.exists()
    write_result(str(link), "x = 1\n", force=True)
    assert missing.read_text() == "x = 1\n"
