"""Verification: what is right passes with every backend, and whatever is made wrong on purpose is
found, with the first wrong pair."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import GRAPHS
from click.testing import CliRunner
from population import BODIES, spec_of
from sweeps import checkered, few

from attnspec.backends import BACKENDS
from attnspec.cli import main
from attnspec.limits import LIMITS
from attnspec.verification.samples import sample_inputs
from attnspec.verification.verify import verify

INPUTS = (
    "input important: tokens(at_most = 9) input document: ids input size: length"
    " attend window(radius = 3) & same(document) | global(important) | prefix(size)"
)
VERIFIED = [
    # no number beside pairs
    ("heads 2 causal attend full score s * log(1 + q - k)", 20),
    ("heads 2 causal attend self + linear() score s / (1 + q - k)", 20),
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
    ("layers 2 heads 2 score bias(buckets = 4) attend full layer 1 { attend block(size = 3) }", 13),
    ("layers 2 attend synthesizer(max_length = 16) layer 1 { attend linear() }", 13),
    ("layers 2 attend linear() layer 1 { attend synthesizer(max_length = 16) }", 13),
    # expressions of scores, which read the pair, inputs and numbers of pairs
    *(
        (body, 33)
        for name, body in BODIES.items()
        if name.startswith("score") and "topk" not in body
    ),
    # scores of about one, whatever their scale
    ("scale 3.0 attend full score softcap(cap = 0.3)", 40),
    *((f"attend rbf(sigma = {sigma})", 33) for sigma in (0.1, 100)),
    # gradients are differences of equal numbers, and negative weights cancel
    ("heads 8 attend self normalize relu", 300),
    ("heads 16 attend linear(feature = identity)", 40),
    ("heads 16 attend favor(kind = trig)", 7),
    ("heads 32 attend linear(feature = relu)", 1),
    ("heads 32 attend rbf()", 1),
    ("heads 32 attend rbf()", 2),
    *(
        (f"heads 2 causal {first} head {at} {{ {other} }}", 13)
        for at in (0, 1)
        for first, other in (
            ("attend window(before = 3, after = 0)", "attend topk(keys = 3)"),
            ("attend topk(keys = 3)", "attend linear()"),
            ("attend topk(keys = 3)", "attend topk(keys = 2)"),
        )
    ),
]
STRIDED = "causal attend window(before = 20, after = 0) | residue(step = 12)"
WINDOW = "attend window(radius = 40)"
N, LONG = 600, 4100

TABLES, WEIGHED = "lies once in its tables", "is weighed once"
NUMBERS = "outputs and gradients agree with float64"

Asked = Callable[..., dict[str, Any]]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """What the command says of a body, or of a file."""

    def run(body: str | Path, n: int, *options: str, code: int | None = None) -> dict[str, Any]:
        path = tmp_path / "sample.attn" if isinstance(body, str) else body
        if isinstance(body, str):
            path.write_text(f"attention sample {{ {body} }}")
        words = ["verify", str(path), "-n", str(n), *options, "--json"]
        result = CliRunner().invoke(main, words)
        found = dict(json.loads(result.output))
        assert result.exit_code == (code if code is not None else 0 if found["ok"] else 1), found
        return found

    return run


def faults(found: dict[str, Any], what: str = "") -> list[str]:
    """The faults of the checks of one kind."""
    return [x["fault"] for x in found["checks"] if x["fault"] is not None and what in x["what"]]


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        ("attend gmlp(max_length = 20)", True),
        ("attend mixer(hidden = 5, max_length = 20)", True),
        ("attend efficient()", True),
        ("attend fourier()", True),
        ("attend synthesizer(max_length = 20)", True),
        *((f"attend {each}", False) for each in ("linear()", "full")),
    ],
)
def test_a_verdict_says_where_the_definition_itself_is_run(
    body: str, shared: bool, asked: Asked
) -> None:
    numbers = [x["what"] for x in asked(body, 20)["checks"] if "gradients agree" in x["what"]]
    assert numbers
    assert all(("whose text is what it runs" in what) == shared for what in numbers)


@pytest.mark.parametrize(("body", "n"), few(VERIFIED))
def test_compiled_specs_pass_an_exhaustive_verification(body: str, n: int, asked: Asked) -> None:
    found = asked(body, n)
    assert found["ok"], found
    assert found["exhaustive"]
    # every head is spoken of
    heads = {head for check in found["checks"] for head in check["heads"] or range(64)}
    assert heads.issuperset(range(spec_of(body).heads or 2))


@pytest.mark.parametrize(("name", "n"), checkered(GRAPHS, [1, 130, 2, 65, 7], of=3))
def test_every_backend_is_verified(name: str, n: int, asked: Asked) -> None:
    found = asked(GRAPHS[name], n, "--backend", "all")
    assert found["ok"], found
    refused = {each["backend"] for each in found["refused"]}
    looked = {check["backend"] for check in found["checks"]}
    assert looked >= {"torch", "tables", "dense"}
    assert looked | refused >= {each.name for each in BACKENDS} - {"flex", "triton"}
    assert any(TABLES in check["what"] for check in found["checks"])


@pytest.fixture
def wrong(tmp_path: Path, asked: Asked, unverified: None) -> Callable[..., dict[str, Any]]:
    """What the command says of a module whose call `lines` change, beside an `other` body's."""

    def run(body: str, n: int, lines: str, other: str = "attend full", **more: Any) -> Any:
        path = tmp_path / "sample_attn.py"
        changed = f"""
import attnspec
_Right, _other = Sample, attnspec.parse({f"attention other {{ {other} }}"!r}).compile()


class Sample(_Right):
    def forward(self, q, k, v, **more):
        def right(q, k, v):
            return super(Sample, self).forward(q, k, v, **more)

        def other(q, k, v):
            return _other(q, k, v, **more)

        {lines}
"""
        path.write_text(spec_of(body).emit(**more) + changed)
        return asked(path, n)

    return run


Wrong = Callable[..., dict[str, Any]]


def test_a_module_that_is_not_changed_is_right(wrong: Wrong) -> None:
    assert wrong(WINDOW, N, "return right(q, k, v)")["ok"]


@pytest.mark.parametrize("backend", ["tables", "torch", "edges", "dense"])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("window(radius = 6)", r"query 0 reads key 6, which is not a pair"),
        ("window(before = 5, after = 4)", r"query 0 does not read key 5"),
        ("window(radius = 5) - self", r"query 0 does not read key 0"),
    ],
)
def test_a_module_of_another_graph_is_not_verified(
    backend: str, other: str, said: str, wrong: Wrong
) -> None:
    lines = "return other(q, k, v)"
    found = wrong("attend window(radius = 5)", 14, lines, f"attend {other}", backend=backend)
    assert said in faults(found, WEIGHED)
    assert faults(found, NUMBERS)


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ("heads 2 causal attend linear() head 1 {{ attend topk(keys = {}) }}", 4),
        ("heads 2 attend topk(keys = 2) head 0 {{ attend window(radius = {}) }}", 4),
        ("heads 2 attend window(radius = 9) score softcap(cap = {})", 5),
        ("attend linformer(rank = {}, max_length = 40)", 4),
    ],
)
def test_a_wrong_head_of_every_kind_is_reported(body: str, other: int, wrong: Wrong) -> None:
    lines = "return other(q, k, v)"
    assert not wrong(body.format(3), 13, lines, body.format(other))["ok"]


def test_a_layer_that_reads_what_another_has_learned_is_reported(wrong: Wrong) -> None:
    body = "layers 3 heads 2 attend window(radius = 9) score bias(buckets = 8)"
    assert not wrong(body, 20, "more['layer'] = 0; return right(q, k, v)")["ok"]


def test_learned_tables_are_drawn(wrong: Wrong) -> None:
    body = "heads 2 attend window(radius = 9) score bias(buckets = {})"
    # as they start, tables are zeros, which are the same in both
    found = wrong(body.format(8), 40, "return other(q, k, v)", body.format(16))
    assert faults(found, WEIGHED)
    assert faults(found, NUMBERS)


@pytest.mark.parametrize(
    ("single", "by", "ok"),
    [
        (True, 1e-7, True),
        (True, 3e-5, False),
        (False, 1e-12, True),
        (False, 1e-9, False),
        (True, "float('nan')", False),
        (False, "float('nan')", False),
    ],
)
@pytest.mark.parametrize("what", ["out", "q", "k", "v"])
def test_numbers_may_err_by_roundings_alone(
    single: bool, by: float | str, ok: bool, what: str, wrong: Wrong
) -> None:
    """In float64 by those of sums, in float32 by twice the definition's, gradients too."""
    kind = "float32" if single else "float64"
    hooked = f"{what} = {what} * 1.0; {what}.register_hook(lambda x: x + {by})"
    lines = f"""if q.dtype != attnspec.runtime.torch.{kind}:
            return right(q, k, v)
        if {what!r} == "out":
            return right(q, k, v) + {by}
        {hooked if what != "out" else ""}
        return right(q, k, v)"""
    lines = lines.replace("attnspec.runtime.torch", "__import__('torch')")
    found = wrong(WINDOW, 100, lines)
    assert found["ok"] == ok
    if not ok:
        (fault,) = faults(found)
        name = "output" if what == "out" else f"d{what}"
        assert f"the {name} errs by" in fault or (what == "out" and "weighs key" in fault)
        assert bool(faults(found, NUMBERS)) == single


def test_a_key_that_is_given_what_belongs_to_its_neighbour_is_found(wrong: Wrong) -> None:
    lines = """v = v * 1.0
        if v.requires_grad:
            v.register_hook(lambda x: x.index_select(2, _swapped(x.shape[2])))
        return right(q, k, v)


def _swapped(n):
    import torch
    found = torch.arange(n)
    found[100:102] = torch.tensor([101, 100])
    return found"""
    assert all("the dv errs by" in fault for fault in faults(wrong(WINDOW, 320, lines), ""))
    assert faults(wrong(WINDOW, 320, lines), WEIGHED)


NEAR = {
    WINDOW: ("attend window(before = 40, after = 39)", "attend window(before = 41, after = 40)"),
    STRIDED: ("causal attend window(before = 20, after = 0)", f"{STRIDED} | residue(step = 6)"),
    "attend random(keys = 3, seed = 5)": (
        "attend random(keys = 3, seed = 5) - columns(first(9))",
        "attend random(keys = 3, seed = 5) | columns(first(1))",
    ),
}
"""Graphs with some pairs less, and with some more."""


@pytest.mark.parametrize(
    ("case", "backend"),
    checkered([*((body, N) for body in NEAR), (WINDOW, LONG)], ["tables", "edges"]),
)
def test_tables_of_other_pairs_are_found_by_their_pairs(
    case: tuple[str, int], backend: str
) -> None:
    body, n = case
    program = spec_of(body).program
    for other, said in zip(
        NEAR[body], ("no block holds", r"a block holds .* not an edge"), strict=True
    ):
        found = verify(program, n, module=spec_of(other).compile(backend), depth="pairs")
        pairs = [str(check.fault) for check in found.faults if TABLES in check.what]
        assert pairs
        assert all(re.match(rf"{said}", text) for text in pairs), pairs
        assert any(WEIGHED in check.what for check in found.faults)
    module = spec_of(body).compile("tables")
    if backend != "tables":
        return
    for group in module.engine.prepare(0, *torch.empty(2, 1, 2, n, 1)).groups:
        kernel: Any = group.kernel
        batches = kernel.tables.batches
        object.__setattr__(kernel.tables, "batches", (*batches, batches[0]))
    found = verify(program, n, module=module, depth="pairs")
    assert {"2 blocks hold the pair" in str(check.fault) for check in found.faults} == {True}


def test_pairs_alone_and_values_alone_are_what_a_compile_asks() -> None:
    program, kept = spec_of("causal heads 3 attend window(radius = 4) score alibi()").program, []
    for backend in ("tables", "torch", "edges"):
        found = verify(program, 193, [backend], depth="pairs")
        assert found.ok
        kept.append([check.what.split(",")[0] for check in found.checks])
    weighed = "each pair is weighed once"
    assert kept[::2] == [["each pair lies once in its tables", weighed]] * 2
    assert kept[1::2] == [[weighed]]
    # the definition is what is compared with
    assert verify(program, 193, ["dense"], depth="pairs").checks == ()
    values = verify(program, 320, ["tables"], depth="values")
    assert [(each.what, each.queries) for each in values.checks] == [
        (NUMBERS, LIMITS.queries_sampled)
    ]
    other = spec_of("causal heads 3 attend window(radius = 3) score alibi()").compile("tables")
    for depth in ("pairs", "values"):
        assert not verify(program, 320, module=other, depth=depth).ok


MIXED = """
layers 2 heads 2 causal
attend window(before = 20, after = 0) | residue(step = 12)
head 1 { attend linear() }
layer 1 { head 0 { attend window(before = 5, after = 0) + favor(features = 8) } }
"""


def test_graphs_and_mechanisms_of_one_spec_are_verified_apart() -> None:
    said = " ".join(spec_of(MIXED).emit().split())
    assert (
        "Verified when it was compiled, graphs and mechanisms apart: at n = 65 every pair, values"
        " and gradients of torch, dense, tables, edges, factored;" in said
    )
    assert "; at n = 193 every pair of torch, tables, edges, factored." in said


def test_a_spec_of_one_length_is_verified_there_alone() -> None:
    text = spec_of("sequence grid(6, 7) attend neighborhood(3, 5)").emit()
    assert "Verified when it was compiled: at n = 42 every pair" in text
    assert "193" not in text
    # where all values would take long, those of some queries are
    said = " ".join(spec_of("sequence grid(16, 20) attend neighborhood(3, 5)").emit().split())
    assert "Verified when it was compiled: at n = 320 every pair of" in said
    assert "values and gradients of 64 queries of torch, dense, tables, edges." in said
    # where weights would take long, the pairs are
    said = " ".join(spec_of("sequence grid(16, 70) attend neighborhood(3, 5)").emit().split())
    assert "compiled: at n = 1,120 every pair of torch, tables, edges. " in said
    text = spec_of("sequence grid(90, 90) attend neighborhood(3, 5)").emit()
    assert "Not verified when it was compiled: it has one length, 8,100." in text


@pytest.mark.parametrize(
    ("body", "backend"),
    checkered([STRIDED, "attend random_blocks(size = 50, blocks = 2) | self"], ["tables", "edges"]),
)
def test_a_long_sequence_is_sampled(body: str, backend: str, asked: Asked) -> None:
    found = asked(body, LONG, "--backend", backend)
    assert found["ok"], found
    assert not found["exhaustive"]
    for check in found["checks"]:
        assert check["queries"] == (LONG if TABLES in check["what"] else 64)
    assert any(TABLES in check["what"] for check in found["checks"])


@pytest.mark.limits("tiny")
def test_every_pair_is_compared_up_to_a_length(asked: Asked) -> None:
    most = LIMITS.every_pair
    for n in (most, 5 * most):
        found = asked("attend window(radius = 3)", n, "--backend", "tables")
        assert found["ok"], found
        assert {check["queries"] for check in found["checks"]} == (
            {n} if n == most else {n, LIMITS.queries_sampled}
        )
        assert found["exhaustive"] == (n == most)
    text = f"mechanisms: their formulas are written out up to n = {most}"
    for n in (most - 1, most, most + 1, 2 * most):
        found = asked("attend linear()", n)
        checked = any("formula" in check["what"] for check in found["checks"])
        assert (checked, text in found["skipped"], found["exhaustive"]) == (
            n <= most,
            n > most,
            n <= most,
        )
    found = asked("cross attend where(abs(q - k) <= 9)", 300, "-m", "40")
    assert found["ok"], found
    assert not found["exhaustive"]
    assert {check["asked"] for check in found["checks"]} == {40}


def test_verification_does_not_depend_on_the_global_generator(asked: Asked) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        found.append(asked("input m: tokens input d: ids attend columns(m) & same(d)", 40))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert found[0] == found[1]


def test_generators_of_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # also where torch would only do it once such a device is there
    seeded: list[int] = []
    for device in (torch.cuda, torch.xpu, torch.mtia):
        monkeypatch.setattr(device, "manual_seed_all", seeded.append, raising=False)
    assert verify(spec_of("attend window(radius = 2)").program, 8).ok
    assert seeded == []


def test_a_report_says_which_inputs_were_drawn(asked: Asked) -> None:
    text = """input p: length input d: ids input m: tokens(at_most = 3)
        input t: numbers input c: choices(size = 2)
        attend (prefix(p) | columns(m)) & same(d) & where(t(q) <= t(k)) | chosen(c)"""
    named, words = zip(*(x.split(" ", 1) for x in asked(text, 40)["inputs"]), strict=True)
    assert named == ("`p`", "`d`", "`m`", "`t`", "`c`")
    assert words[0] == "20"
    assert re.fullmatch(r"[0-3] of 40 tokens", words[2])
    assert words[4].startswith("random choices [1, 1, 40, ")


def test_inputs_are_drawn_from_all_that_they_may_be() -> None:
    text = """heads 4 causal input p: length input d: ids input m: tokens
        input few: tokens(at_most = 3) input t: numbers input c: choices(size = 2)
        input b: buckets input s: scores(size = 3)
        attend (prefix(p) | columns(m) | columns(few)) & same(d) & where(t(q) <= t(k))
        head 0 { attend chosen(c) } head 1 { attend lsh(b) }
        head 2 { attend topk(blocks = 1, size = 3, score = s) }"""
    program = spec_of(text).program
    for n in (1, 6, 23):
        n_q = max(1, n - 2)
        torch.manual_seed(n)
        draws = [sample_inputs(program, n, n_q) for _ in range(200)]
        drawn = {name: torch.stack([each[name] for each in draws]) for name in draws[0]}
        whole = {
            "c": ((1, 1, n_q, 3), -1, -(-n // 2) - 1),
            "b": ((1, 1, 2, n), 0, max(2, n // 5) - 1),
            "t": ((1, n), 0, max(2, n // 2) - 1),
        }
        for name, (shape, least, most) in whole.items():
            assert drawn[name].shape[1:] == shape
            assert np.unique(drawn[name]).tolist() == list(range(least, most + 1))
        assert drawn["s"].shape[1:] == (1, 1, n, -(-n // 3))
        assert np.unique(drawn["p"]).tolist() == [n // 2]
        # labels of runs, about five of them where there are more tokens than that
        runs = 1 + torch.diff(drawn["d"], dim=-1).sum(-1).double().mean().item()
        assert runs == pytest.approx(1 + min(5 / n, 1) * (n - 1), abs=0.6)
        assert drawn["m"].double().mean().item() == pytest.approx(0.1, abs=0.07)
        assert int(drawn["few"].sum(-1).max()) <= 3
