"""Verification: what is right passes with every backend, and whatever is made wrong on purpose is
found by the check that is there for it, which names the first wrong pair."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import BACKEND_NAMES, GRAPHS, module_of, spec_of
from sweeps import checkered

import attnspec.layout.edge_list
from attnspec.compile.compiler import emit_spec
from attnspec.graphs.stack import TooMuch
from attnspec.ir.program import Program
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.work import BackendError
from attnspec.text.diagnostics import InternalError
from attnspec.verification import Verification, verify, verify_each
from attnspec.verification.numbers import SIZE
from attnspec.verification.trial import CHOICES, Known, sample_inputs
from attnspec.verification.verify import Depth

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
N, LONG = 600, 4100

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
        found = verify(program, n, backend="tables")
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


@pytest.mark.parametrize(
    ("body", "n", "seeds"),
    [
        # each weight is a score divided by itself: gradients are differences of equal numbers
        ("heads 2 attend self normalize relu", 300, 8),
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

NEAR = {
    WINDOW: ("attend window(before = 40, after = 39)", "attend window(before = 41, after = 40)"),
    STRIDED: (
        "causal attend window(before = 20, after = 0)",
        "causal attend window(before = 20, after = 0) | residue(step = 6)",
    ),
    RANDOM: (f"{RANDOM} - columns(first(9))", f"{RANDOM} | columns(first(1))"),
}
"""Graphs with some pairs less, and with some more."""


PAIR = r"(no (tile|place) holds|holds) the pair \(\d+, \d+\)"
COUNT = r"query \d+ has \d+ keys, and \d+ in the graph"


@pytest.mark.parametrize("backend", ["tables", "scattered"])
@pytest.mark.parametrize(("body", "n"), [*((body, N) for body in NEAR), (WINDOW, LONG)])
def test_a_layout_of_other_pairs_is_found_by_its_pairs(body: str, n: int, backend: str) -> None:
    """The reading of what a kernel holds names the pair; of long sequences counts are compared."""
    program = spec_of(body).program
    for other, missing in zip(NEAR[body], (True, False), strict=True):
        module = module_of(other, backend)
        found = verify(program, n, module=module, depth="pairs")
        said = [str(check.fault) for check in found.faults]
        assert any(re.search(PAIR if n == N else f"{PAIR}|{COUNT}", text) for text in said), said
        if n == N:
            assert all(text.startswith("no ") == missing for text in said), said
            assert faults(verify(program, n, module=module), WEIGHTS)


@pytest.mark.parametrize("n", [N, LONG])
def test_a_pair_that_is_held_twice_is_found(n: int) -> None:
    module = module_of(STRIDED, "tables")
    assert verify(module.program, n, module=module, depth="pairs").ok
    for group in module.engine.prepare(0, 2, 2, n, n, "cpu").groups:
        kernel: Any = group.kernel
        batches = kernel.attention.steps[-1].batches
        batches.append(batches[0])
    said = faults(verify(module.program, n, module=module, depth="pairs"), "pair")
    assert any(re.search(r"2 tiles hold the pair \(\d+, \d+\)", text) for text in said), said


def test_a_list_that_is_wrong_on_the_way_back_alone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = attnspec.layout.edge_list.edge_layout

    def wrong(*given: Any) -> Any:
        found = replace(right(*given))
        starts, queries, places = found.by_key
        found.__dict__["by_key"] = starts, np.roll(queries, 1), places
        return found

    monkeypatch.setattr(attnspec.layout.edge_list, "edge_layout", wrong)
    found = verify(spec_of(RANDOM).program, N, backend="scattered")
    assert all("by key" in check.what for check in found.faults if LAYOUT in check.what)
    assert not faults(found, WEIGHTS)
    assert faults(found, LAYOUT)
    assert faults(found, GRADIENTS)


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


@pytest.mark.parametrize(
    ("body", "backend"),
    checkered(
        [STRIDED, "attend random_blocks(size = 50, blocks = 2) | self"],
        ["tables", "scattered"],
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


# --- what is not run -----------------------------------------------------------------------------


def test_verification_has_limits() -> None:
    program = spec_of("attend self").program
    for n in (0, LIMITS.planned + 1):
        with pytest.raises(ValueError, match="n must be between 1 and 1,048,576"):
            verify(program, n)
    with pytest.raises(TooMuch, match="too long for the backend dense"):
        verify(program, 20_000, backend="dense")
    with pytest.raises(TooMuch, match="a head is estimated to take"):
        verify(spec_of("attend full").program, 1 << 16, backend="tables")


def test_what_refuses_is_named() -> None:
    found = verify_each(spec_of("attend full normalize relu").program, 64, BACKEND_NAMES)
    assert [name for name, _ in found.refused] == ["torch"]
    assert "not run: the backend torch refuses: torch knows no `relu`" in str(found)
    with pytest.raises(BackendError, match="torch knows no `relu`"):
        verify_each(spec_of("attend full normalize relu").program, 64, ["torch"])


def test_what_is_not_affordable_is_named() -> None:
    found = verify(spec_of("heads 40 attend self").program, 60_000, backend="scattered")
    assert found.ok
    assert any("weights, outputs and gradients" in what for what in found.skipped)
    assert "not looked at: weights, outputs and gradients" in str(found)
    assert all("its edges" in check.what for check in found.checks)


def test_heads_that_are_not_declared_are_every_head() -> None:
    assert "every head" in str(verify(spec_of("attend full").program, 9))
    assert "head 0..2," in str(verify(spec_of("heads 3 attend full").program, 9))


@pytest.mark.parametrize("scale", ["0.5", "0.5 + layer"])
def test_layers_of_the_same_pairs_are_run_once(scale: str) -> None:
    text = f"layers 4 scale {scale} attend window(before = 60 * (1 + layer), after = 0)"
    program = spec_of(text).program

    def layers(n: int, part: str) -> list[tuple[int, ...]]:
        found = verify(program, n, backend="tables", depth="once")
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
        " torch, dense, tables, scattered, factored: every pair, values and gradients;" in said
    )
    assert "; at n = 193 every pair of torch, tables, scattered, factored." in said


@pytest.mark.parametrize("wrong", ["factored", "tables"])
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


def test_a_spec_of_one_length_is_verified_there_alone() -> None:
    text = emit_spec(spec_of("sequence grid(6, 7) attend neighborhood(3, 5)").elaborated)
    assert "Verified at n = 42 when it was compiled" in text
    assert "193" not in text
    # where all values would take long, those of some queries are
    long = spec_of("sequence grid(16, 20) attend neighborhood(3, 5)").elaborated
    said = " ".join(emit_spec(long).split())
    assert "Verified at n = 320, its one length, when it was compiled, every pair of" in said
    assert "values and gradients of 64 queries of torch, dense, tables, scattered." in said
    # where weights would take long, the pairs are
    longer = spec_of("sequence grid(16, 70) attend neighborhood(3, 5)")
    said = " ".join(emit_spec(longer.elaborated).split())
    assert "Verified at n = 1,120, its one length" in said
    assert "every pair of torch, tables, scattered; no values." in said
    text = emit_spec(spec_of("sequence grid(90, 90) attend neighborhood(3, 5)").elaborated)
    assert "Not verified when it was compiled: it has one length, 8,100." in text


def test_values_of_some_queries_show_a_fault_in_all() -> None:
    module = module_of("attend window(radius = 9)", "tables")
    found = verify(module.program, 320, module=module, depth="values")
    assert found.ok
    assert {check.queries for check in found.checks} == {LIMITS.queries_sampled}
    right = module.forward

    def large(*given: Any, **named: Any) -> Any:
        return right(*given, **named) * 1.001

    def astray(q: Any, k: Any, v: Any, **named: Any) -> Any:
        if v.requires_grad:
            v = v * 1.0
            # what one key is given goes to its neighbour
            v.register_hook(
                lambda x: torch.cat(
                    [x[..., :100, :], x[..., 100:102, :].flip(-2), x[..., 102:, :]], -2
                )
            )
        return right(q, k, v, **named)

    for wrong in (large, astray):
        module.forward = wrong  # type: ignore[method-assign]
        assert not verify(module.program, 320, module=module, depth="values").ok


def test_a_compile_finds_what_goes_wrong_at_the_longer_length_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, asked = spec_of(STRIDED), verify

    def found(program: Any, n: int, **more: Any) -> Verification:
        report = asked(program, n, **more)
        wrong = n == 193 and more["backend"] == "tables"
        return replace(
            report, checks=tuple(replace(c, fault="wrong" * wrong or None) for c in report.checks)
        )

    monkeypatch.setattr("attnspec.compile.compiler.verify", found)
    with pytest.raises(InternalError, match=r"n = 193[\s\S]*wrong"):
        spec.emit()


def test_the_pairs_alone_are_looked_at_without_running_anything() -> None:
    module = module_of(STRIDED, "tables")
    module.forward = None  # type: ignore[assignment,method-assign]
    found = verify(module.program, 193, module=module, depth="pairs")
    assert found.ok
    assert [check.what for check in found.checks] == [
        f"each pair lies once in its tiles{way}, no other pair" for way in ("", " on the way back")
    ]
    # the definition evaluates every pair, and has no layout
    assert verify(module.program, 193, backend="dense", depth="pairs").checks == ()
    assert verify(module.program, 193, backend="rows", depth="pairs").ok


def test_what_the_definition_says_is_known_to_the_next_backend() -> None:
    program = spec_of("causal heads 3 attend window(radius = 4) score alibi()").program
    known: Known = Cache(64)
    apart = [verify(program, 33, backend=name) for name in ("dense", "tables")]
    first = verify(program, 33, backend="dense", known=known)
    kept = set(known.kept)
    second = verify(program, 33, backend="tables", known=known)
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
