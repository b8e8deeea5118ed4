"""Rows that are the same pairs at every length: proofs, differences and modules against brute
force."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest
from pattern_samples import samples_of
from random_terms import mask, term
from sweeps import thinned

from attnspec import parse
from attnspec.analysis.growth.stable import (
    _sample,
    changed_by_padding,
    difference,
    difference_of,
    head_is_stable,
    head_is_steady,
    is_stable,
)
from attnspec.graphs.bind import BindError
from attnspec.graphs.forms.dnf import Place
from attnspec.graphs.forms.stability import bound_choice, fault_of, unsteady
from attnspec.graphs.forms.written import written
from attnspec.graphs.patterns import PATTERNS
from attnspec.graphs.patterns.topk import TopK
from attnspec.graphs.relation import DataDependent, Relation
from attnspec.ir.program import Attend, Leaf, Program, Term
from attnspec.ir.scalars import Apply, Scalar, Symbol

LONGEST = 24


def program_of(graph: Term, causal: bool) -> Program:
    return Program("a", (Attend(graph),), ((0,),), causal=causal)


def masks_of(graph: Term, causal: bool) -> dict[int, np.ndarray]:
    """The pairs at every length up to LONGEST that the graph has, by definition."""
    found = {}
    for n in range(1, LONGEST + 1):
        try:
            pairs = mask(graph, n, causal)
        except BindError:
            continue
        found[n] = pairs & np.tri(n, dtype=bool) if causal else pairs
    return found


def rows_differ(masks: dict[int, np.ndarray], whole: bool) -> bool:
    """Whether any row of any length differs at any longer one; then it does from one length to the
    next somewhere."""
    for short, long in pairwise(masks[n] for n in sorted(masks)):
        m = len(short)
        if (short != long[:m, :m]).any() or (whole and long[:m, m:].any()):
            return True
    return False


# --- graphs against brute force -------------------------------------------------------------------


def judged(graph: Term, causal: bool, found: dict[str, int]) -> None:
    program, masks = program_of(graph, causal), masks_of(graph, causal)
    for whole, proven in ((True, head_is_stable), (False, head_is_steady)):
        differ = rows_differ(masks, whole)
        shown = difference_of(program, 0, 0, LONGEST, whole=whole)
        assert (shown is not None) == differ, (written(graph), causal, whole)
        if proven(program, 0, 0):
            assert not differ, (written(graph), causal, whole)
            found["proven"] += 1
        elif not differ:
            found["neither"] += 1
        if shown is None:
            continue
        found["refuted"] += 1
        ends = [
            shown.key < n and bool(masks[n][shown.query, shown.key])
            for n in (shown.shorter, shown.longer)
        ]
        assert ends == [not shown.reads, shown.reads]
        assert shown.fault.term in written(graph)


@pytest.mark.parametrize("part", thinned(range(4)))
def test_random_graphs_are_judged_as_brute_force_judges_them(part: int) -> None:
    found = dict.fromkeys(("proven", "refuted", "neither"), 0)
    for seed in range(part * 40, part * 40 + 40):
        graph = term(random.Random(seed), depth=2)
        for causal in (False, True):
            judged(graph, causal, found)
    # what is neither proven nor refuted is rare: sizes that read n where that changes nothing
    assert found["proven"] > 20
    assert found["refuted"] > 20
    assert found["neither"] < found["proven"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_patterns_say_of_themselves_is_so(pattern: type[Relation]) -> None:
    if pattern.data_dependent or pattern.needs_grid:
        return
    for sample in samples_of(pattern):
        masks: dict[int, np.ndarray] = {}
        for n in range(1, LONGEST + 1):
            q = np.arange(n)
            try:
                masks[n] = np.broadcast_to(sample.holds(q[:, None], q[None], n), (n, n))
            except (IndexError, ValueError):
                # samples of inputs have a length of their own
                return
        causal = bool(vars(sample).get("causal"))
        if causal:
            masks = {n: pairs & np.tri(n, dtype=bool) for n, pairs in masks.items()}
        read = any(name in repr(sample) for name in ("Last(", "Symbol(name='n')"))
        if pattern.changing(causal) is None and not read:
            assert not rows_differ(masks, whole=False), sample
        # labels move with the tokens, those of a sample do not
        if not pattern.anchored and "Data" not in repr(sample):
            for n, pairs in masks.items():
                assert np.array_equal(pairs[1:, 1:], masks.get(n - 1, pairs[1:, 1:])), sample


def test_patterns_that_change_do() -> None:
    # the other way round: nothing that is stable is called otherwise
    for body in ("random(keys = 3)", "random_blocks(size = 2, blocks = 1)", "expander(degree = 4)"):
        graph = parse(f"attention a {{ attend {body} }}").program.attends[0].graph
        assert graph is not None
        assert unsteady(graph, Place()) is not None
        assert rows_differ(masks_of(graph, causal=False), whole=False)


# --- the zoo --------------------------------------------------------------------------------------


# --- claims and figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("causal attend full", "proven", ""),
        (
            "attend full",
            "refuted",
            "at n = 2: query 0 reads the later key 1 at n = 2, but not at n = 1",
        ),
        (
            "causal attend window(radius = isqrt(n))",
            "refuted",
            "query 2 reads 0 at n = 4, but not at n = 3; `window(radius = isqrt(n))` has a size"
            " that reads n: write a number in place of `isqrt(n)`",
        ),
        (
            "heads 2 causal attend self head 1 { attend columns(last(2)) }",
            "refuted",
            "query 0 reads 0 at n = 2, but not at n = 3 in head 1; `columns(last(2))` reads"
            " `last(2)`, other tokens at every length",
        ),
        ("causal attend expander(degree = 2)", "refuted", "`random(keys = …)` under the statement"),
        ("attend random(keys = 2) & causal", "refuted", "draws among all n keys: under the"),
        ("causal attend random(keys = 2)", "proven", ""),
        ("causal attend random_blocks(size = 3, blocks = 1)", "proven", ""),
        ("causal attend shift(self, by = -2)", "refuted", "loses pairs at the last positions"),
        ("causal attend where((q - k) % n < 3)", "checked", ""),
        ("causal attend linear()", "proven", ""),
        ("attend linear()", "refuted", "`linear` mixes all positions: write the statement"),
        ("attend fourier()", "refuted", "mixes all positions: it has no causal form"),
        ("causal attend window(radius = 1) + linear()", "proven", ""),
        (
            "causal attend window(radius = isqrt(n)) + linear()",
            "refuted",
            "has a size that reads n",
        ),
        ("causal attend favor(features = n)", "unchecked", "has a size that reads n"),
        ("causal input x: tokens attend global(x)", "proven", ""),
        ("causal input x: tokens attend global(x - last(1))", "refuted", "`last(1)`"),
        ("causal input x: ids attend same(x) & window(radius = n)", "unchecked", "run-time inputs"),
        ("sequence grid(4, 5) attend neighborhood(3, 3)", "proven", ""),
        ("sequence grid(n // 5, 5) causal attend axial", "proven", ""),
    ],
)
def test_claims_say_what_is_known(body: str, status: str, words: str) -> None:
    spec = parse(f"attention a {{ {body} require stable }}")
    (verdict,) = spec.verdicts
    assert verdict.status == status
    assert words in " ".join(d.message for d in verdict.diagnostics)
    report = spec.analyse(20)
    assert report.stable == {"refuted": False, "unchecked": None}.get(status, True)
    assert report.quality["stable"] == {"checked": "estimate", "unchecked": None}.get(
        status, "exact"
    )


def test_many_heads_are_proven_and_bounded() -> None:
    heads = "attention a { causal layers 64 heads 64 attend %s require stable }"
    assert parse(heads % "random(keys = 1)").verdicts[0].status == "proven"
    few = heads.replace("64", "8")
    assert parse(few % "random(keys = 1) | expander(degree = 2)").verdicts[0].status == "refuted"
    assert parse(heads % "window(radius = 64 * layer + head)").verdicts[0].status == "unchecked"


@pytest.mark.parametrize("seed", range(6))
def test_the_first_head_that_differs_is_named_whatever_was_drawn_in_it(seed: int) -> None:
    spec = parse(
        f"attention a {{ heads 4 attend random(keys = 1, seed = {seed}) & columns(first(1)) }}"
    )
    masks = {n: [spec.mask(n, 0, head) for head in range(4)] for n in (1, 2, 3)}
    differ = [
        head
        for head in range(4)
        if any((masks[n + 1][head][:n, :n] != masks[n][head]).any() for n in (1, 2))
        or any(masks[n + 1][head][:n, n:].any() for n in (1, 2))
    ]
    found = difference(spec.program, 3)
    assert (None if found is None else found.head) == (differ[0] if differ else None)


def test_heads_of_other_sizes_are_looked_at_one_by_one() -> None:
    body = "heads 4 causal attend shift(causal, by = 2 - head) require stable"
    (verdict,) = parse(f"attention a {{ {body} }}").verdicts
    assert verdict.status == "refuted"
    assert "in head 3; `shift(causal, by = -1)` loses" in verdict.diagnostics[0].message


def test_a_claim_at_a_length_is_about_the_lengths_up_to_it() -> None:
    text = (
        "attention a { causal attend window(before = n // 9, after = 0) require stable at n = %d }"
    )
    assert parse(text % 8).verdicts[0].status == "checked"
    assert parse(text % 9).verdicts[0].status == "refuted"


def test_reports_have_it_in_every_form() -> None:
    report = parse("attention a { causal attend window(radius = isqrt(n)) }").analyse(30)
    assert report.to_dict()["figures"]["stable"]["value"] is False
    assert '"stable"' in report.to_json()
    for page in (str(report), report._repr_html_()):
        assert "the same rows at every n" in page
    assert "isqrt(n)" in str(report)


def test_choices_are_bound_where_they_stand() -> None:
    program = parse(
        "attention a { layers 2 heads 3 attend topk(keys = 1 + layer + 2 * head, queries = 1) }"
    ).program

    def bound(keys: Scalar, n: int, *place: int) -> DataDependent | None:
        leaf = Leaf("topk", (("keys", keys), ("queries", 1)))
        return bound_choice(program, leaf, n, *place)

    keys = Apply("+", (Apply("*", (2, Symbol("head"))), Apply("+", (1, Symbol("layer")))))
    for n, layer, head in product((4, 9), range(2), range(3)):
        assert bound(keys, n, layer, head) == TopK(keys=1 + layer + 2 * head, queries=1)
    # those of the first layer and head, if nothing else is said
    assert bound(keys, 9) == TopK(keys=1, queries=1)
    # there is none where it has no value, or where nothing is chosen
    fewer = Apply("-", (Symbol("n"), 5))
    assert (bound(fewer, 5), bound(fewer, 9)) == (None, TopK(keys=4, queries=1))
    assert bound_choice(program, Leaf("full", ()), 4) is None


def test_samples_of_inputs_are_of_their_kinds_and_go_on() -> None:
    words = "input d: ids input x: numbers input m: tokens(at_most = 3)"
    body = "attend same(d) & where(x(q) <= x(k)) | global(m)"
    for entry in parse(f"attention a {{ {words} {body} }}").program.inputs:
        found = _sample(entry, 90)
        assert np.array_equal(found[:40], _sample(entry, 40)), entry.name
        runs = 1 + np.count_nonzero(np.diff(found))
        # ids are alike for a while, marks few, numbers rise and fall
        assert (found.dtype == bool) == (entry.name == "m")
        assert runs == {"d": 30, "x": 90, "m": 7}[entry.name]


@pytest.mark.parametrize(
    "graph", ["topk(keys = 7, queries = 3)", "lsh(chunk = 8, buckets = 4)", "cluster(count = 4)"]
)
def test_choices_that_look_ahead_are_not_stable_and_padding_leaves_them_alone(graph: str) -> None:
    program = parse(f"attention a {{ causal attend {graph} }}").program
    assert not is_stable(program)
    assert "looks ahead" in str(fault_of(program))
    assert head_is_steady(program, 0, 0)


@pytest.mark.parametrize("beside", ["", " & window(radius = 3)", " | columns(last(2))"])
@pytest.mark.parametrize("causal", ["", "causal "])
@pytest.mark.parametrize(
    "graph", ["lsh(chunk = 8)", "cluster", "cluster(count = 4, assign = balanced)"]
)
def test_choices_that_count_by_length_are_changed_by_padding(
    graph: str, causal: str, beside: str
) -> None:
    program = parse(f"attention a {{ {causal}attend {graph}{beside} }}").program
    assert not head_is_stable(program, 0, 0)
    assert not head_is_steady(program, 0, 0)
    # that later keys are read is none of padding's doing
    fault = changed_by_padding(program, 0, 1)
    assert fault is not None
    assert fault.term == ("columns(last(2))" if "last" in beside else graph)


@pytest.mark.parametrize("where", ["always", "within"])
def test_a_graph_within_a_choice_may_be_what_is_not_stable(where: str) -> None:
    body = "causal attend topk(blocks = 3, size = 2, queries = 1, {} = columns({}(2)))"
    last, first = (parse(f"attention a {{ {body.format(where, x)} }}") for x in ("last", "first"))
    assert "`last(2)`" in str(fault_of(last.program))
    assert fault_of(first.program) is None
