"""Verification: what is right passes with every backend, and whatever is made wrong on purpose is
found by the check that is there for it, which names the first wrong pair."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import BACKEND_NAMES, GRAPHS, module_of, spec_of
from relation_checks import definition
from sweeps import checkered

import attnspec.backends.bands.attention
import attnspec.layout.edge_list
from attnspec.backends.common.merging import Partial, merge
from attnspec.compile.compiler import VERIFIED as VERIFIED_AT
from attnspec.compile.compiler import emit_spec
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import TooMuch
from attnspec.ir.program import Program
from attnspec.layout.edge_list import EdgeLayout
from attnspec.layout.steps import _layouts, _whole
from attnspec.layout.tile_layout import StepLayout, step_layout
from attnspec.layout.tiling import Classified
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import BackendError
from attnspec.text.diagnostics import InternalError
from attnspec.verification import Verification, pairs, verify, verify_each
from attnspec.verification.kernel_pairs import Blocks, Layout, layouts_of
from attnspec.verification.numbers import SIZE
from attnspec.verification.pairs import (
    counts_fault,
    counts_of,
    held_rows,
    is_counted,
    list_fault,
    rows_fault,
)
from attnspec.verification.trial import CHOICES, Known, sample_inputs, sample_rows
from attnspec.verification.verify import Depth, learned

INPUTS = (
    "input important: tokens(at_most = 9) input document: ids input size: length"
    " attend window(radius = 3) & same(document) | global(important) | prefix(size)"
)
VERIFIED = [
    *[(body, 64) for body in GRAPHS.values()],
    (INPUTS, 40),
    ("layers 2 heads 2 attend full head 1 { attend self } score bias() normalize softmax1", 33),
    ("sequence grid(6, 7) attend neighborhood(3, 5) normalize relu score alibi()", 42),
    # a learned table that heads with a mechanism share with others: each has rows of its own
    (
        "heads 3 score bias(buckets = 4, max_distance = 8) attend full"
        " head 0 { attend window(radius = 2) + linear() }",
        13,
    ),
    # what each layer has of a learned table, and several learned tables of one mechanism
    (
        "layers 2 heads 2 score bias(buckets = 4) attend full layer 1 { attend block(size = 3) }",
        13,
    ),
    ("layers 2 attend synthesizer(max_length = 16) layer 1 { attend linear() }", 13),
    ("layers 2 attend linear() layer 1 { attend synthesizer(max_length = 16) }", 13),
]
STRIDED = "causal attend window(before = 20, after = 0) | residue(step = 12)"
WINDOW = "attend window(radius = 40)"
RANDOM = "attend random(keys = 3, seed = 5)"
N = 600

LAYOUT, WEIGHTS = "each pair lies once", "weighed once"
GRADIENTS, NUMBERS = "gradients reach", "agree with float64"


def faults(found: Verification, what: str) -> list[str]:
    """The faults of the checks of one kind."""
    return [str(check.fault) for check in found.faults if what in check.what]


@pytest.mark.parametrize(("body", "n"), VERIFIED)
def test_what_is_compiled_is_verified(body: str, n: int) -> None:
    found = verify(spec_of(body).program, n)
    assert found.ok, str(found)
    assert found.exhaustive
    assert len(found.checks) >= 3


BESIDE = [
    f"heads 2 causal {first} head {at} {{ {other} }}"
    for at in (0, 1)
    for first, other in (
        ("attend window(before = 3, after = 0)", "attend topk(keys = 3)"),
        ("attend topk(keys = 3)", "attend linear()"),
        ("attend topk(keys = 3)", "attend topk(keys = 2)"),
    )
]


@pytest.mark.parametrize("body", BESIDE)
def test_heads_that_data_decide_are_verified_with_those_beside_them(body: str) -> None:
    program = spec_of(body).program
    found = verify(program, 13)
    assert found.ok, str(found)
    assert [check.what[:4] for check in found.checks] == ["keys", "outp"]
    # each kind of head is looked at: either is found where it is another
    for was, wrong in (
        ("before = 3", "before = 2"),
        ("keys = 3", "keys = 4"),
        ("linear()", "topk(keys = 1)"),
    ):
        if was in body:
            other = module_of(body.replace(was, wrong))
            assert not verify(program, 13, module=other).ok, (was, wrong)


@pytest.mark.limits("tiny")
def test_formulas_of_long_sequences_are_said_to_be_left_out() -> None:
    most = LIMITS.every_pair
    program, body = spec_of("attend linear()").program, f"formulas are written out up to n = {most}"
    for n in (most - 1, most, most + 1, 2 * most):
        found = verify(program, n)
        checked = any("formula" in check.what for check in found.checks)
        said = any(body in line for line in found.skipped)
        assert (checked, said, found.exhaustive) == (n <= most, n > most, n <= most)


@pytest.mark.limits("tiny")
def test_every_pair_is_looked_at_up_to_a_length() -> None:
    """Longer ones by the pairs of some queries, and how many keys each of all has."""
    most = LIMITS.every_pair
    program = spec_of("attend window(radius = 3)").program
    for n in (most, 5 * most):
        found = verify(program, n, backend="tiles")
        assert found.ok, str(found)
        laid = [check.queries for check in found.checks if LAYOUT in check.what]
        assert laid == [n] if n <= most else min(laid) >= LIMITS.queries_sampled
        assert any("as many keys" in check.what for check in found.checks) == (n > most)
        assert found.exhaustive == (n <= most)


@pytest.mark.parametrize(("name", "n"), checkered(GRAPHS, [1, 130, 2, 65, 7]))
def test_every_backend_is_verified(name: str, n: int) -> None:
    found = verify_each(spec_of(GRAPHS[name]).program, n, BACKEND_NAMES)
    assert found.ok, str(found)
    assert not found.refused
    assert {check.backend for check in found.checks} == set(BACKEND_NAMES)
    looked = {check.backend for check in found.checks if LAYOUT in check.what}
    assert looked == set(BACKEND_NAMES) - {"dense"}


@pytest.mark.parametrize("n", [1, 50, 300])
def test_bands_of_run_time_inputs_are_looked_into(n: int) -> None:
    found = verify(spec_of(INPUTS).program, n, backend="bands")
    assert found.ok, str(found)
    assert any(LAYOUT in check.what for check in found.checks)


def test_learned_tables_are_drawn_and_left_as_they_were() -> None:
    body = "heads 2 attend window(radius = 9) score bias(buckets = {})"
    meant = spec_of(body.format(8)).program
    module, other = module_of(body.format(8)), module_of(body.format(16))
    assert verify(meant, 40, module=module).ok
    assert not any(parameter.any() for parameter in module.parameters())
    module.forward = other.forward  # type: ignore[method-assign]
    # zeros are the same in both
    found = verify(meant, 40, module=module)
    assert faults(found, WEIGHTS)
    assert faults(found, NUMBERS)


def test_what_is_learned_is_as_large_as_it_starts_and_biases_are_about_one() -> None:
    bodies = (
        "attend synthesizer(max_length = 64)",
        "attend synthesizer(kind = factorized_dense, max_length = 4096)",
        "heads 8 attend full score bias(buckets = 128)",
    )
    for body in bodies:
        module = module_of(body)
        torch.manual_seed(0)
        module.make_parameters(32, 32)
        before = {name: each.detach().clone() for name, each in module.named_parameters()}
        with learned(module):
            for name, each in module.named_parameters():
                # networks start at another size than 0, and what starts at 0 is about 1
                size = before[name].std().item() or 1.0
                assert each.std().item() == pytest.approx(size, rel=6 * each.numel() ** -0.5), name
                assert abs(each.mean().item()) < 6 * size * each.numel() ** -0.5
                assert not torch.equal(each, before[name])
        assert all(torch.equal(each, before[name]) for name, each in module.named_parameters())


def test_what_is_tried_does_not_depend_on_the_global_generator() -> None:
    body = "heads 2 attend window(radius = 3) score bias(buckets = 8)"
    module = module_of(body)
    seen: list[torch.Tensor] = []
    run = module.forward

    def watched(*given: torch.Tensor, **rest: object) -> torch.Tensor:
        seen.extend(x.detach().clone() for x in (*given, *module.parameters()))
        return run(*given, **rest)  # type: ignore[arg-type,no-any-return]

    module.forward = watched  # type: ignore[method-assign]
    for seed in (1, 2):
        torch.manual_seed(seed)
        assert verify(spec_of(body).program, 20, module=module).ok
    half = len(seen) // 2
    assert half
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


def test_generators_of_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # also where torch would only do it once such a device is there
    asked: list[int] = []
    for device in (torch.cuda, torch.xpu, torch.mtia):
        monkeypatch.setattr(device, "manual_seed_all", asked.append, raising=False)
    assert verify(spec_of("attend window(radius = 2)").program, 8).ok
    assert asked == []


@pytest.mark.parametrize("seed", range(8))
def test_gradients_that_cancel_may_leave_the_roundings_of_their_parts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each weight is a score divided by itself, so that the gradient is the difference of two equal
    # numbers, which are the larger the smaller the score is
    generator = torch.default_generator
    seeded = SimpleNamespace(manual_seed=lambda _: generator.manual_seed(seed))
    monkeypatch.setattr(torch, "default_generator", seeded)
    found = verify(spec_of("heads 2 attend self normalize relu").program, 300)
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("body", "n", "seeds"),
    [
        # negative weights: the sum that divides a row may be far less than its parts
        ("attend linear(feature = identity)", 40, 8),
        ("attend favor(kind = trig)", 7, 8),
        # weights that are divided by themselves
        ("attend linear(feature = relu)", 1, 12),
        ("attend rbf()", 1, 8),
        ("attend rbf()", 2, 20),
    ],
)
def test_formulas_that_cancel_may_leave_the_roundings_of_their_parts(
    body: str, n: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, seed = torch.default_generator, iter(range(seeds))
    seeded = SimpleNamespace(manual_seed=lambda _: generator.manual_seed(next(seed)))
    monkeypatch.setattr(torch, "default_generator", seeded)
    program = spec_of(body).program
    for _ in range(seeds):
        found = verify(program, n)
        assert found.ok, str(found)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_module_of_another_graph_is_not_verified(backend: str) -> None:
    meant = spec_of("attend window(radius = 5)").program
    for body in (
        "window(radius = 6)",
        "window(before = 5, after = 4)",
        "window(radius = 5) - self",
    ):
        found = verify(meant, 14, module=module_of(f"attend {body}", backend))
        assert faults(found, WEIGHTS)
        assert "FAIL" in str(found)
        assert re.search("reads key|does not read", str(found))


# --- wrong on purpose ----------------------------------------------------------------------------


@cache
def assert_right(body: str, backend: str) -> None:
    """What is made wrong below is right before."""
    assert verify(spec_of(body).program, N, module=module_of(body, backend)).ok


def tampered(body: str, backend: str, wrong: Callable[[Any], None]) -> Verification:
    """What is found of a module whose kernel of all heads was made wrong."""
    assert_right(body, backend)
    spec = spec_of(body)
    module = module_of(body, backend)
    for group in module.engine.prepare(0, 2, 2, N, N, "cpu").groups:
        wrong(group.kernel)
    return verify(spec.program, N, module=module)


def flip(mask: torch.Tensor, held: float, to: float) -> None:
    """Change the first of the numbers that equal `held`."""
    place = tuple((mask == held).nonzero()[0].tolist())
    mask[place] = to


def strips_with(kernel: Any, what: str) -> Any:
    strips = [strip for step in kernel.attention.steps for strip in step.strips]
    return next(strip for strip in strips if getattr(strip, what) is not None)


def bands_drop(kernel: Any) -> None:
    kernel.attention.steps[0].strips.pop()


def bands_repeat(kernel: Any) -> None:
    strips = kernel.attention.steps[-1].strips
    strips.append(strips[0])


def bands_full(kernel: Any) -> None:
    strips_with(kernel, "bias").bias = None


def bands_rows(kernel: Any) -> None:
    strip = next(s for s in kernel.attention.steps[-1].strips if s.rows.min() > 0)
    strip.rows = strip.rows - 1
    strip._pieces.clear()


def bands_columns(kernel: Any) -> None:
    strip = next(s for s in kernel.attention.steps[-1].strips if s.columns.min() > 0)
    strip.columns = strip.columns - 1
    strip._pieces.clear()


def tiles_drop(kernel: Any) -> None:
    kernel.runs.pop()
    # its queries are those without a key
    rows = sum(run.blocks * run.height for run in kernel.runs)
    kernel.order, kernel.in_order = kernel.order.clamp_max(rows), False


def tiles_repeat(kernel: Any) -> None:
    kernel.runs.append(kernel.runs[0])


def tiles_full(kernel: Any) -> None:
    run = next(run for run in kernel.runs if run.shared is not None or run.kinds is not None)
    run.shared = run.kinds = None


def tiles_rows(kernel: Any) -> None:
    run = next(run for run in kernel.runs if run.queries.min() > 0)
    run.queries = run.queries - 1
    if run.first_query is not None:
        run.first_query -= 1


def tiles_mask(kernel: Any) -> None:
    run = next(run for run in kernel.runs if run.shared is not None)
    flip(run.shared, True, False)


WRONG: dict[str, tuple[str, str, Callable[[Any], None], str]] = {
    "a bit of a mask is lost": (
        STRIDED,
        "bands",
        lambda kernel: flip(strips_with(kernel, "bias").bias, 0.0, -math.inf),
        r"no tile holds the pair",
    ),
    "a mask has a bit too many": (
        STRIDED,
        "bands",
        lambda kernel: flip(strips_with(kernel, "bias").bias, -math.inf, 0.0),
        r"a mask of step \d holds the pair {}, which is no edge|2 tiles hold the pair",
    ),
    "a tile is dropped": (STRIDED, "bands", bands_drop, r"no tile holds the pair"),
    "a tile is repeated": (STRIDED, "bands", bands_repeat, r"2 tiles hold the pair {}: a \w+"),
    "a mask is forgotten": (
        STRIDED,
        "bands",
        bands_full,
        r"a FULL tile of step \d holds the pair {}, which is no edge|2 tiles hold the pair",
    ),
    "rows are shifted": (STRIDED, "bands", bands_rows, r"holds? the pair"),
    "columns are shifted": (STRIDED, "bands", bands_columns, r"holds? the pair"),
    "a run is dropped": (WINDOW, "tiles", tiles_drop, r"no tile holds the pair"),
    "a run is repeated": (WINDOW, "tiles", tiles_repeat, r"2 tiles hold the pair {}: a \w+"),
    "a run's mask is forgotten": (
        WINDOW,
        "tiles",
        tiles_full,
        r"a FULL tile of run \d+ holds the pair {}, which is no edge",
    ),
    "a run's mask has a wrong bit": (WINDOW, "tiles", tiles_mask, r"no tile holds the pair"),
    "a run's rows are shifted": (WINDOW, "tiles", tiles_rows, r"holds? the pair"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layout_is_found_by_its_pairs(name: str) -> None:
    body, backend, wrong, words = WRONG[name]
    found = tampered(body, backend, wrong)
    said = faults(found, LAYOUT)
    assert said, str(found)
    pair = r"\(\d+, \d+\)"
    for text in said:
        assert re.search(words.format(pair), text), text
        assert re.search(pair, text), text


def test_the_pair_that_is_named_is_the_first_one_wrong() -> None:
    def lose(kernel: Any) -> None:
        run = next(run for run in kernel.runs if run.shared is not None)
        first = run.queries.view(run.blocks, run.height)[0, 5]
        wanted.append(int(first))
        run.shared[5] = False

    wanted: list[int] = []
    found = tampered(WINDOW, "tiles", lose)
    query = wanted[0]
    assert faults(found, LAYOUT) == [f"no tile holds the pair ({query}, {max(0, query - 40)})"]
    assert faults(found, WEIGHTS) == [f"query {query} does not read key {max(0, query - 40)}"]


def without_edge(layout: EdgeLayout) -> EdgeLayout:
    rows = layout.rows[0]
    held = np.ones((rows.last - rows.first, rows.width), bool)
    if rows.held is not None:
        held = rows.held.copy()
    held[3, 0] = False
    return replace(layout, rows=(replace(rows, held=held), *layout.rows[1:]))


def with_edge_twice(layout: EdgeLayout) -> EdgeLayout:
    keys = layout.keys.copy()
    keys[1] = keys[0]
    return replace(layout, keys=keys)


def with_other_rows(layout: EdgeLayout) -> EdgeLayout:
    order = np.arange(layout.n_q) if layout.order is None else layout.order
    return replace(layout, order=np.roll(order, 1))


def with_wrong_keys(layout: EdgeLayout) -> EdgeLayout:
    starts, queries, places = layout.by_key
    wrong = replace(layout)
    wrong.__dict__["by_key"] = starts, queries, np.roll(places, 1)
    return wrong


def with_wrong_queries(layout: EdgeLayout) -> EdgeLayout:
    starts, queries, places = layout.by_key
    wrong = replace(layout)
    wrong.__dict__["by_key"] = starts, np.roll(queries, 1), places
    return wrong


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (without_edge, "no place holds the pair"),
        (with_edge_twice, "2 places hold the pair|no place holds the pair"),
        (with_other_rows, "holds? the pair"),
        (with_wrong_queries, "holds? the pair"),
    ],
)
def test_wrong_edges_are_found_by_their_pairs(
    wrong: Callable[[EdgeLayout], EdgeLayout], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attnspec.layout.edge_list.edge_layout
    monkeypatch.setattr(
        attnspec.layout.edge_list, "edge_layout", lambda *given: wrong(right(*given))
    )
    found = verify(spec_of(RANDOM).program, N, backend="scattered")
    said = faults(found, LAYOUT)
    assert said
    assert all(re.search(words + r" \(\d+, \d+\)", text) for text in said), said
    if wrong is with_wrong_queries:
        # forward is as it should be
        assert all("by key" in check.what for check in found.faults if LAYOUT in check.what)
        assert not faults(found, WEIGHTS)
        assert faults(found, GRADIENTS)


def test_places_of_other_edges_are_found_by_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attnspec.layout.edge_list.edge_layout
    monkeypatch.setattr(
        attnspec.layout.edge_list, "edge_layout", lambda *given: with_wrong_keys(right(*given))
    )
    found = verify(spec_of(RANDOM).program, N, backend="scattered")
    assert not faults(found, LAYOUT)
    assert not faults(found, WEIGHTS)
    assert re.match(r"the gradient of query \d+ is wrong at key \d+", faults(found, GRADIENTS)[0])
    assert faults(found, NUMBERS)


def test_a_wrong_merge_is_found_by_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    program = spec_of(STRIDED).program

    def wrong(into: Partial, more: Partial) -> None:
        merge(into, (more[0] / 2, more[1]))

    monkeypatch.setattr(attnspec.backends.bands.attention, "merge", wrong)
    found = verify(program, N, backend="bands")
    assert not faults(found, LAYOUT)
    assert re.match(r"query \d+ weighs key \d+ with", faults(found, WEIGHTS)[0])
    assert faults(found, NUMBERS)


def test_a_coarse_kernel_is_found_by_the_numbers() -> None:
    module = module_of(WINDOW)
    right = module.forward

    def coarse(*given: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = right(*given, **named)
        return out.bfloat16().float() if out.dtype == torch.float32 else out

    module.forward = coarse  # type: ignore[method-assign]
    found = verify(module.program, N, module=module)
    assert [check.what for check in found.faults] == ["outputs and gradients agree with float64"]
    assert re.match("the output errs by .* in row", str(found.faults[0].fault))


def test_a_wrong_gradient_is_found() -> None:
    module = module_of(WINDOW)
    right = module.forward

    def steep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        if q.requires_grad:
            q = q * 1.0
            q.register_hook(lambda grad: grad * 1.001)  # type: ignore[no-untyped-call]
        out: torch.Tensor = right(q, k, v, **named)
        return out

    module.forward = steep  # type: ignore[method-assign]
    found = verify(module.program, N, module=module)
    assert [check.what for check in found.faults] == ["outputs and gradients agree with float64"]
    assert "dq errs" in str(found.faults[0].fault)


# --- long sequences ------------------------------------------------------------------------------

LONG = 4100


def long_layout(body: str, backend: str) -> Layout:
    kernel = module_of(body, backend).engine.prepare(0, 2, 2, LONG, LONG, "cpu").groups[0].kernel
    layouts = layouts_of(kernel, LONG, LONG, {})
    assert layouts is not None
    return layouts[0]


@pytest.mark.parametrize(
    ("body", "backend"),
    checkered(
        [STRIDED, "attend random_blocks(size = 50, blocks = 2) | self"],
        ["tiles", "bands", "scattered"],
    ),
)
def test_a_long_sequence_is_sampled(body: str, backend: str) -> None:
    found = verify(spec_of(body).program, LONG, backend=backend)
    assert found.ok, str(found)
    assert not found.exhaustive
    backward = [check.queries for check in found.checks if GRADIENTS in check.what]
    assert backward == [SIZE] * len(backward)
    sampled = [check for check in found.checks if LAYOUT in check.what]
    assert all(check.queries == 64 and check.asked == LONG for check in sampled)
    whole = [check.what for check in found.checks if check.queries == LONG]
    assert any("as many keys of each query" in what for what in whole)
    assert any("none twice" in what for what in whole)
    assert "not every pair was looked at" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["exhaustive"] is False


@pytest.mark.parametrize("backend", ["tiles", "bands", "scattered"])
def test_one_wrong_tile_of_a_long_sequence_is_found(backend: str) -> None:
    relation = spec_of(WINDOW).relation(LONG)
    layout = long_layout(WINDOW, backend)
    rows = sample_rows(LONG, 64, layout.parts)
    held = held_rows(relation, rows, LONG)
    assert rows_fault(layout, rows, held) is None
    assert counts_fault(counts_of(layout, LONG), relation, LONG) is None
    assert list_fault(layout, relation, LONG) is None

    part = max(layout.parts, key=lambda blocks: len(blocks.queries))
    others = tuple(blocks for blocks in layout.parts if blocks is not part)
    block = len(part.queries) // 2
    first = int(part.queries[block, 0])

    queries = part.queries.copy()
    queries[block] = -1
    dropped = replace(layout, parts=(*others, replace(part, queries=queries)))
    fault = counts_fault(counts_of(dropped, LONG), relation, LONG)
    assert fault is not None
    assert re.match(rf"query {first} has \d+ keys, and 81 in the graph", fault)

    alone = np.full_like(part.queries, -1)
    alone[block] = part.queries[block]
    twice = replace(layout, parts=(*layout.parts, replace(part, queries=alone)))
    assert counts_fault(counts_of(twice, LONG), relation, LONG) is not None
    fault = list_fault(twice, relation, LONG)
    assert fault is not None
    assert re.match(rf"2 (tile|place)s hold the pair \({first}, \d+\): a", fault)

    def moved(low: int, high: int) -> np.ndarray:
        keys = np.array(part.keys(low, high))
        if low <= block < high:
            keys[block - low] = (keys[block - low] + 100) % LONG
        return keys

    elsewhere = replace(layout, parts=(*others, replace(part, keys=moved)))
    assert counts_fault(counts_of(elsewhere, LONG), relation, LONG) is None
    fault = list_fault(elsewhere, relation, LONG)
    assert fault is not None
    assert re.search(r"holds the pair \(\d+, \d+\), which is no edge", fault)


def test_sampled_rows_see_what_the_others_do_not() -> None:
    """A pair moved inside its row, to a key that the row reads already."""
    relation = spec_of(WINDOW).relation(LONG)
    layout = long_layout(WINDOW, "tiles")
    rows = np.array([0, LONG // 2, LONG - 1])
    held = held_rows(relation, rows, LONG)
    held[1, LONG // 2] = False
    assert rows_fault(layout, rows, held) is not None
    assert f"({LONG // 2}, {LONG // 2})" in str(rows_fault(layout, rows, held))


@pytest.mark.parametrize("n_q", [20, 5, 1])
@pytest.mark.parametrize("graph", ["causal", "window(radius = 3)", "random(keys = 3)"])
def test_numbers_of_keys_are_those_of_the_last_queries(graph: str, n_q: int) -> None:
    relation = spec_of(f"attend {graph}").relation(20)
    counts = np.where(np.arange(20) >= 20 - n_q, definition(relation, 20).sum(1), 0)
    assert pairs.counts_fault(counts, relation, n_q) is None
    counts[19] += 1
    assert f"query 19 has {counts[19]} keys, and {counts[19] - 1}" in str(
        pairs.counts_fault(counts, relation, n_q)
    )


@pytest.mark.limits("", "tiny")
def test_rows_are_looked_at_some_at_a_time() -> None:
    for graph in ("random(keys = 3)", "causal", "block(size = 6)"):
        relation = spec_of(f"attend {graph}").relation(20)
        for rows in (np.arange(20), np.array([3, 0, 17, 17, 4]), np.zeros(0, np.int64)):
            assert (held_rows(relation, rows, 20) == definition(relation, 20)[rows]).all()


@pytest.mark.parametrize(
    ("graph", "counted"),
    [
        ("window(radius = 3)", True),
        ("expander(degree = 4) & causal", True),
        ("window(radius = 3) - residue(step = 3)", True),
        ("~window(radius = 3)", True),
        ("where((q + k) % 7 == 0) | self", True),
        # the keys of one term are looked at in the other
        ("expander(degree = 4) & ~where(q * k % 7 == 1)", True),
        ("expander(degree = 4) & where(q * k % 7 == 1)", False),
        ("shift(expander(degree = 4), by = 3)", True),
        ("shift(where(q * k % 7 == 1), by = 3)", False),
        ("where(q * k % 7 == 1)", False),
        ("where(q * k % 7 == 1) | self", False),
    ],
)
def test_the_keys_of_a_graph_are_counted_where_it_lists_them(graph: str, counted: bool) -> None:
    relation = spec_of(f"attend {graph}").relation(300)
    assert is_counted(relation, 300) == counted
    held = held_rows(relation, np.arange(300), 300)
    assert (relation.degrees(300) == held.sum(1)).all()


@pytest.mark.parametrize(("most", "there"), [(64, 20), (64, 3), (16, 20), (4, 20)])
def test_samples_have_both_ends_of_some_blocks(most: int, there: int) -> None:
    """Of an eighth as many blocks as there are samples, which lie evenly among them, each has the
    first and the last query of one of its rows among the samples."""
    count, first, none = 100_000, 5, np.zeros((0, 1), np.int64)
    parts = []
    for number in range(there):
        queries = np.full((3, 9), -1)
        queries[:, 2:7] = first + 1000 * (number + 1) + np.arange(15).reshape(3, 5)
        parts.append(Blocks("tiles", queries, 1, lambda *_: none, lambda *_: None, True, (9, 1)))
    torch.manual_seed(0)
    rows = set(sample_rows(count, most, parts, first).tolist())
    assert len(rows) == most
    ends = [[{int(row[2]), int(row[6])} <= rows for row in part.queries] for part in parts]
    seen = [number for number, found in enumerate(ends) if any(found)]
    assert len(seen) == min(most // 8, there)
    if len(seen) > 1:
        assert (seen[0], seen[-1]) == (0, there - 1)
        apart = np.diff(seen)
        assert apart.max() - apart.min() <= 1


def test_samples_have_the_ends_and_are_all_of_few() -> None:
    assert sample_rows(100, 64).tolist() == list(range(100))
    rows = sample_rows(10_000, 64, first=7)
    assert len(rows) == len(set(rows.tolist())) == 64
    assert {7, 8, 10_005, 10_006} <= set(rows.tolist())
    assert (np.diff(rows) > 0).all()
    blocks = long_layout(WINDOW, "bands").parts
    ends = {int(q) for part in blocks for q in (*part.queries[:, 0], *part.queries[:, -1])}
    assert len(ends & set(sample_rows(LONG, 64, blocks).tolist())) >= min(8, len(blocks))


# --- what is not run -----------------------------------------------------------------------------


def test_verification_has_limits() -> None:
    program = spec_of("attend self").program
    for n in (0, LIMITS.planned + 1):
        with pytest.raises(ValueError, match="n must be between 1 and 1,048,576"):
            verify(program, n)
    with pytest.raises(TooMuch, match="too long for the backend dense"):
        verify(program, 20_000, backend="dense")
    with pytest.raises(TooMuch, match="a head is estimated to take"):
        verify(spec_of("attend full").program, 1 << 16, backend="bands")


def test_what_refuses_is_named() -> None:
    found = verify_each(spec_of("attend full normalize relu").program, 64, BACKEND_NAMES)
    assert [name for name, _ in found.refused] == ["torch", "bands"]
    assert "not run: the backend bands refuses: results that `relu` normalises" in str(found)
    with pytest.raises(BackendError, match="results that `relu` normalises"):
        verify_each(spec_of("attend full normalize relu").program, 64, ["bands"])


def test_what_is_not_affordable_is_named() -> None:
    found = verify(spec_of("heads 40 attend self").program, 60_000, backend="scattered")
    assert found.ok
    assert any("weights, outputs and gradients" in what for what in found.skipped)
    assert "not looked at: weights, outputs and gradients" in str(found)
    assert all("its edges" in check.what for check in found.checks)


def test_heads_that_are_not_declared_are_every_head() -> None:
    assert "every head" in str(verify(spec_of("attend full").program, 9))
    assert "head 0..2," in str(verify(spec_of("heads 3 attend full").program, 9))


def test_the_pairs_alone_are_looked_at_without_running_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = spec_of(STRIDED).program

    def never(*_: object) -> None:
        raise AssertionError("nothing is to be run")

    monkeypatch.setattr(attnspec.backends.bands.attention.SteppedAttention, "forward", never)
    found = verify(program, 193, backend="bands", depth="pairs")
    assert found.ok
    assert [check.what for check in found.checks] == [
        f"each pair lies once in its tiles{way}, no other pair" for way in ("", " on the way back")
    ]
    # the definition evaluates every pair, and has no layout
    assert verify(program, 193, backend="dense", depth="pairs").checks == ()
    assert verify(program, 193, backend="rows", depth="pairs").ok


@pytest.mark.parametrize("scale", ["0.5", "0.5 + layer"])
def test_layers_of_the_same_pairs_are_run_once(scale: str) -> None:
    text = f"layers 4 scale {scale} attend window(before = 60 * (1 + layer), after = 0)"
    program = spec_of(text).program

    def layers(n: int, part: str) -> list[tuple[int, ...]]:
        found = verify(program, n, backend="bands", depth="once")
        assert found.ok
        return [check.layers for check in found.checks if part in check.what]

    every = [(layer,) for layer in range(4)]
    # the pairs that kernels hold are looked at all the same
    assert layers(40, "each pair lies once in its tiles,") == every
    alike = scale == "0.5"
    # up to 61 positions each window is all that is behind, up to 121 all but the first
    assert layers(40, "outputs and gradients") == (every[:1] if alike else every)
    assert layers(100, "outputs and gradients") == (every[:2] if alike else every)
    assert layers(100, "each pair is weighed once") == (every[:2] if alike else every)


MIXED = """
layers 2 heads 2 causal
attend window(before = 20, after = 0) | residue(step = 12)
head 1 { attend linear() }
layer 1 { head 0 { attend window(before = 5, after = 0) + favor(features = 8) } }
"""


def test_graphs_and_mechanisms_of_one_spec_are_verified_apart() -> None:
    said = " ".join(emit_spec(spec_of(MIXED).elaborated).split())
    assert (
        "Verified at n = 65 when it was compiled, graphs and mechanisms apart, by the backends"
        " torch, dense, tiles, bands, scattered, factored: every pair, values and gradients;"
        in said
    )
    assert "; at n = 193 every pair of torch, tiles, bands, scattered, factored." in said


@pytest.mark.parametrize("wrong", ["factored", "bands"])
def test_a_fault_of_either_kind_is_found_in_a_mixed_spec(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = verify

    def found(
        program: Program, n: int, *, backend: str, depth: Depth, known: Known
    ) -> Verification:
        """As if one backend were wrong, with every head that it runs."""
        report = asked(program, n, backend=backend, depth=depth, known=known)
        if backend != wrong:
            return report
        return replace(report, checks=tuple(replace(c, fault="wrong") for c in report.checks))

    monkeypatch.setattr("attnspec.compile.compiler.verify", found)
    with pytest.raises(InternalError, match=rf"{wrong}[\s\S]*wrong"):
        emit_spec(spec_of(MIXED).elaborated)


def test_a_compile_finds_what_goes_wrong_with_several_tiles_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(STRIDED)
    said = " ".join(emit_spec(spec.elaborated).split())
    assert "; at n = 193 every pair of torch, tiles, bands, scattered." in said
    laid_out = step_layout

    def wrong(found: Classified, relation: Relation, n: int) -> StepLayout:
        layout = laid_out(found, relation, n)
        if n <= VERIFIED_AT or not len(layout.masks):
            return layout
        masks = layout.masks.copy()
        masks[-1] = ~masks[-1]
        return replace(layout, masks=masks)

    monkeypatch.setattr("attnspec.layout.steps.step_layout", wrong)
    for kept in (_layouts, _whole):
        kept.cache_clear()
    try:
        with pytest.raises(InternalError, match=r"n = 193[\s\S]*the pair \(\d+, \d+\)"):
            emit_spec(spec.elaborated)
    finally:
        for kept in (_layouts, _whole):
            kept.cache_clear()


def test_a_spec_of_one_length_is_verified_there_alone() -> None:
    text = emit_spec(spec_of("sequence grid(6, 7) attend neighborhood(3, 5)").elaborated)
    assert "Verified at n = 42 when it was compiled" in text
    assert "193" not in text
    # where all values would take long, those of some queries are
    long = spec_of("sequence grid(16, 20) attend neighborhood(3, 5)").elaborated
    said = " ".join(emit_spec(long).split())
    assert "Verified at n = 320, its one length, when it was compiled, every pair of" in said
    assert "values and gradients of 64 queries of torch, dense, tiles, bands, scattered." in said
    # where weights would take long, the pairs are
    longer = spec_of("sequence grid(16, 70) attend neighborhood(3, 5)")
    said = " ".join(emit_spec(longer.elaborated).split())
    assert "Verified at n = 1,120, its one length" in said
    assert "every pair of torch, tiles, bands, scattered; no values." in said
    text = emit_spec(spec_of("sequence grid(90, 90) attend neighborhood(3, 5)").elaborated)
    assert "Not verified when it was compiled: it has one length, 8,100." in text


def test_values_of_some_queries_show_a_fault_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = spec_of("attend window(radius = 9)").program
    found = verify(program, 320, backend="bands", depth="values")
    assert found.ok
    assert {check.queries for check in found.checks} == {LIMITS.queries_sampled}
    forward = attnspec.backends.bands.attention.SteppedAttention.forward

    def wrong(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(*given)
        return out * 1.001, lse

    with monkeypatch.context() as changed:
        changed.setattr(attnspec.backends.bands.attention.SteppedAttention, "forward", wrong)
        assert not verify(program, 320, backend="bands", depth="values").ok
    backward = attnspec.backends.bands.attention.SteppedAttention.backward

    def astray(*given: Any) -> tuple[Any, ...]:
        found: list[Any] = [*backward(*given)]
        # what one key is given goes to its neighbour
        grad = next(x for x in reversed(found) if x is not None)
        grad[..., 100:102, :] = grad[..., 100:102, :].flip(-2)
        return tuple(found)

    monkeypatch.setattr(attnspec.backends.bands.attention.SteppedAttention, "backward", astray)
    assert not verify(program, 320, backend="bands", depth="values").ok


def test_what_the_definition_says_is_known_to_the_next_backend() -> None:
    program = spec_of("causal heads 3 attend window(radius = 4) score alibi()").program
    known: Known = Cache(64)
    apart = [verify(program, 33, backend=name) for name in ("dense", "bands")]
    first = verify(program, 33, backend="dense", known=known)
    kept = set(known.kept)
    second = verify(program, 33, backend="bands", known=known)
    assert [first, second] == apart
    assert first.ok
    assert kept
    assert known.kept.keys() == kept


@pytest.mark.parametrize("m", [150, 40])
@pytest.mark.limits("tiny")
def test_some_queries_of_a_longer_sequence_are_sampled_where_they_are(m: int) -> None:
    found = verify(spec_of("cross attend where(abs(q - k) <= 9)").program, 300, m=m)
    assert found.ok, str(found)
    laid = [check.queries for check in found.checks if LAYOUT in check.what]
    # those beside the borders of tiles are more
    assert min(laid) >= min(LIMITS.queries_sampled, m)
    assert not found.exhaustive
    assert {check.asked for check in found.checks} == {m}


def test_a_report_says_which_inputs_were_drawn() -> None:
    text = """input p: length input d: ids input m: tokens(at_most = 3)
        input t: numbers input c: choices(size = 2)
        attend (prefix(p) | columns(m)) & same(d) & where(t(q) <= t(k)) | chosen(c)"""
    found = verify(spec_of(text).program, 40)
    named, words = zip(*(each.split(" ", 1) for each in found.inputs), strict=True)
    assert named == ("`p`", "`d`", "`m`", "`t`", "`c`")
    assert words[0] == "20"
    assert re.fullmatch(r"[0-3] of 40 tokens", words[2])
    assert words[4].startswith("random choices [1, 1, 40, ")
    assert f"\ninputs drawn: {', '.join(found.inputs)}\n" in str(found)
    assert found.to_dict()["inputs"] == list(found.inputs)
    assert "inputs drawn" not in str(verify(spec_of("attend self").program, 9))


def test_inputs_are_drawn_from_all_that_they_may_be() -> None:
    text = """heads 4 causal input p: length input d: ids input m: tokens
        input few: tokens(at_most = 3) input t: numbers input c: choices(size = 2)
        input b: buckets input s: scores(size = 3)
        attend (prefix(p) | columns(m) | columns(few)) & same(d) & where(t(q) <= t(k))
        head 0 { attend chosen(c) } head 1 { attend lsh(b) }
        head 2 { attend topk(blocks = 1, size = 3, score = s) }"""
    program = spec_of(text).program
    for n in (1, 2, 6, 9, 10, 23):
        n_q = max(1, n - 2)
        torch.manual_seed(n)
        draws = [sample_inputs(program, n, n_q) for _ in range(200)]
        drawn = {name: torch.stack([each[name] for each in draws]) for name in draws[0]}
        whole = {
            "c": ((1, 1, n_q, CHOICES), -1, -(-n // 2) - 1),
            "b": ((1, 1, 2, n), 0, max(2, n // 5) - 1),
            "t": ((1, n), 0, max(2, n // 2) - 1),
        }
        for name, (shape, least, most) in whole.items():
            assert drawn[name].shape[1:] == shape
            assert np.unique(drawn[name]).tolist() == list(range(least, most + 1))
        assert drawn["s"].shape[1:] == (1, 1, n, -(-n // 3))
        assert drawn["s"].std().item() == pytest.approx(1.0, abs=0.3)
        assert np.unique(drawn["p"]).tolist() == [n // 2]
        # labels of runs, about five of them where there are more tokens than that
        steps = torch.diff(drawn["d"], dim=-1)
        assert np.unique(steps).tolist() == ([] if n < 2 else [1] if n < 6 else [0, 1])
        runs = 1 + steps.sum(-1).double().mean().item()
        assert runs == pytest.approx(1 + min(5 / n, 1) * (n - 1), abs=0.6)
        for name in ("m", "few"):
            assert drawn[name].dtype == torch.bool
        assert drawn["m"].double().mean().item() == pytest.approx(0.1, abs=0.07)
        assert int(drawn["few"].sum(-1).max()) <= 3
