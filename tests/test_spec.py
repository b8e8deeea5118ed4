"""A spec in Python: its text, its identity, its pairs, and what it refuses."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import zoo
from click.testing import CliRunner
from population import spec_of
from torch import Tensor

import attnspec
from attnspec import AttnSpecError, Spec, SpecError, load, parse
from attnspec.cli import main
from attnspec.limits import LIMITS

NEAR = "attention a { layers 2 heads 3 attend window(radius = 1 + head + layer) }"


def test_the_source_of_the_zoo_says_the_same() -> None:
    for path, name in zoo.ATTENTIONS:
        spec = zoo.loaded(path, name)
        again = parse(spec.source)
        for what in ("source", "fingerprint", "parameters", "name", "layers", "heads", "inputs"):
            assert getattr(again, what) == getattr(spec, what)


def test_the_source_is_canonical_text() -> None:
    spec = parse("#c\nattention  a(r=3){attend\twindow(radius=r)|self#d\n}", r=4)
    assert spec.source == (
        "#c\nattention a(r = 4) {\n    attend window(radius = r) | self  #d\n}\n"
    )
    assert repr(spec) == "<Spec a, r=4>"
    text = "graph g = full graph unused = self attention a { attend g } attention b { attend self }"
    alone = parse(text, name="a")
    assert "unused" not in alone.source
    assert "attention b" not in alone.source


BASE = "attention a { attend window(radius = 3) | global(first(2) | last(1)) }"

SAME = [
    "# a comment\nattention a {\n\n attend (global(first(2)|last(1))) | window(radius = 1 + 2) }",
    "attention a { attend ~~window(radius = 3) | global(first(count = 2) | last(1)) & full }",
    "graph g(r) = window(radius = r) attention a { attend g(3) | global(first(2) | last(1)) }",
    "attention a(r = 3) { let t = first(r - 1) | last(1) attend window(radius = r) | global(t) }",
]

OTHER = [
    BASE.replace(*change)
    for change in (
        ("attention a", "attention b"),
        ("= 3", "= 4"),
        (") | g", ") & g"),
        ("global", "rows"),
        (" | last(1)", " & last(1)"),
        ("{", "{ causal"),
        ("{", "{ layers 2"),
        ("{", "{ heads 1"),
        ("{", "{ extra_tokens 1"),
        ("{", "{ input x: ids"),
        ("}", "scale 2 }"),
        ("}", "score alibi() }"),
        ("}", "normalize relu }"),
        ("| global(first(2) | last(1))", "+ linear()"),
    )
]

ALIKE = [
    ("attend full scale 1", "attend full scale 1.0"),
    ("attend full scale 0", "attend full scale -0.0"),
    ("attend full score softcap(cap = 30)", "attend full score softcap(cap = 30.0)"),
    ("attend rbf(sigma = 2)", "attend rbf(sigma = 2.0)"),
    ("heads 2 attend full scale [1, 2][head]", "heads 2 attend full scale [1.0, 2][head]"),
    ("attend full scale n * 2", "attend full scale n * 2.0"),
    ("attend where(q < 2) | where(q < 1.5)", "attend where(q < 2.0) | where(q < 1.5)"),
    ("attend where(q in {1, 1e3})", "attend where(q in {1.0, 1000})"),
    ("attend full require degree <= 2 * 5", "attend full require 10.0 >= degree"),
    (
        "attend full require self subset (self | full)",
        "attend full require self subset (full|self)",
    ),
]


def test_specs_are_equal_where_they_mean_the_same() -> None:
    pairs = [(spec_of(one), spec_of(other)) for one, other in ALIKE]
    for one, other in [*pairs, *((parse(BASE), parse(text)) for text in SAME)]:
        assert one == other
        assert (hash(one), one.fingerprint) == (hash(other), other.fingerprint)
    specs = [parse(text) for text in (BASE, *OTHER)]
    assert len({spec.fingerprint for spec in specs}) == len({*specs}) == len(specs)
    claims = ["degree <= 8", "degree <= 8 at n = 9", "degree <= 9"]
    # claims change no module
    assert len({specs[0], *(spec_of(f"attend full require {x}") for x in claims)}) == 4
    assert specs[0] != BASE


LARGER = """
attention b(r = isqrt(n)) {
    causal
    heads 2
    attend residue(step = r)
    scale 0.5
    head 1 { attend window(before = r, after = 0) - self  score softcap(cap = 30) }
}
"""


def test_fingerprints_depend_on_neither_the_process_nor_the_version() -> None:
    """They are part of what emitted modules say."""
    wanted = [
        "136f834b016051f2210ed975e6bb41974f861f132550dfdf4e21ab8576e33148",
        "a31fca00a4e222a565f2cbbfb4c9ef1755dfcc3e42c0df055d4cfa843361fce2",
    ]
    assert [parse(text).fingerprint for text in (BASE, LARGER)] == wanted
    script = "import sys, attnspec; print(*(attnspec.parse(x).fingerprint for x in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, BASE, LARGER], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == wanted


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_specs_modules_reports_and_errors_are_copied_and_pickled() -> None:
    spec, q = parse(NEAR), torch.randn(1, 3, 9, 4)
    module = spec.compile()
    ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickled]
    for made in ways:
        other = made(spec)
        assert (other, hash(other), other.source) == (spec, hash(spec), spec.source)
        assert torch.equal(made(module)(q, q, q), module(q, q, q))
        assert made(spec.analyse(8)).edges == spec.analyse(8).edges
    with pytest.raises(SpecError) as caught:
        parse("attention a { attend ful }")
    assert str(pickled(caught.value)) == str(caught.value)


@pytest.mark.slow
def test_a_spec_goes_to_another_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(Spec.mask, (parse(BASE), 20)).sum() == parse(BASE).mask(20).sum()


def test_a_spec_hands_out_copies() -> None:
    spec, radii = parse("attention a(r = 3) { input d: ids attend window(radius = r) }"), [1, 2]
    listed: Any = parse("attention a(r = [0, 0]) { attend window(radius = r[1]) }", r=radii)  # type: ignore[arg-type]
    radii[1] = 0
    spec.parameters["r"] = 99
    spec.inputs.clear()
    spec.mask(5)[:] = False
    assert (spec.parameters, [*spec.inputs]) == ({"r": 3}, ["d"])
    assert spec.mask(5).any()
    assert (listed.parameters, listed.mask(5)[0].sum()) == ({"r": "[1, 2]"}, 3)
    with pytest.raises(AttributeError):
        spec.name = "b"  # type: ignore[misc]


def test_threads_see_the_same() -> None:
    text = (zoo.EXAMPLES / "bigbird.attn").read_text(encoding="utf-8")
    spec, q = parse(text), torch.randn(1, 12, 65, 4)
    module = spec.compile()

    def run(number: int) -> tuple[bytes, Tensor]:
        mine = spec if number % 2 else parse(text)
        return mine.mask(65 + number % 4).tobytes(), (module if number % 2 else mine.compile())(
            q, q, q
        )

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(run, range(24)))
    for number, (mask, out) in enumerate(found):
        assert mask == found[number % 4][0]
        assert torch.equal(out, found[0][1])


def test_a_parameter_of_any_name_can_be_set(tmp_path: Path) -> None:
    names = ("text", "path", "name", "parameters", "entry", "source", "self")
    head = ", ".join(f"{name} = 1" for name in names)
    text = f"attention a({head}) {{ attend window(radius = {' + '.join(names)}) }}"
    file = tmp_path / "a.attn"
    file.write_text(text, encoding="utf-8")
    for read, first in ((parse, text), (load, str(file))):
        for name in names:
            assert read(first, parameters={name: 3}).parameters[name] == 3
        spec = read(first, name="a", parameters={"name": 2, "parameters": 5}, text=4, self=6)
        assert [spec.parameters[name] for name in names] == [4, 1, 2, 5, 1, 1, 6]
        with pytest.raises(TypeError, match="`text` is set twice"):
            read(first, parameters={"text": 2}, text=3)
        with pytest.raises(TypeError, match="maps names to values, got list"):
            read(first, parameters=[1])  # type: ignore[arg-type]
    assert attnspec.zoo("bigbird", parameters={"block": 32}) == attnspec.zoo("bigbird", block=32)
    settings = [f"--set={name}=3" for name in names]
    shown = CliRunner().invoke(main, ["show", str(file), "-n", "30", *settings])
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize("wrong", [None, b"attention a { attend full }", 3, io.StringIO(), [BASE]])
def test_neither_text_nor_path(wrong: Any) -> None:
    with pytest.raises(TypeError, match="the text of a spec is needed, got"):
        parse(wrong)
    with pytest.raises(TypeError, match="a path is needed, got"):
        load(wrong)


def test_texts_and_paths_are_not_confused(tmp_path: Path) -> None:
    for path in (BASE, "a\0b", "a" * 5000, "", tmp_path, tmp_path / "missing.attn"):
        with pytest.raises(SpecError, match=r"A18\d"):
            load(path)
    with pytest.raises(TypeError, match="the text of a spec is needed"):
        parse(tmp_path / "a.attn")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="A131"):
        parse("a.attn")
    for name in ("with spaces", 'it\'s "quoted"', "smile 🙂", "x" * 100):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "near.attn").write_text("graph near = window(radius = 2)")
        file = folder / "a.attn"
        file.write_text('from "near.attn" import near attention a { attend near }')
        assert load(file).mask(4).sum() == load(str(file)).mask(4).sum() == 14


def asked(spec: Spec) -> tuple[Callable[..., Any], ...]:
    return spec.mask, spec.adjacency, spec.graph, spec.relation


@pytest.mark.parametrize("integer", [int, np.int64, np.uint8, torch.tensor])
def test_integers_of_others(integer: Callable[[int], Any]) -> None:
    spec = parse(NEAR)
    assert spec.mask(integer(9), integer(1), integer(2)).sum() == spec.mask(9, 1, 2).sum()
    assert len(spec.graph(integer(9))) == spec.adjacency(integer(9)).shape[0] == 9
    assert spec.analyse(integer(9)).edges == spec.analyse(9).edges
    assert spec.plan(integer(9)).steps


@pytest.mark.parametrize("wrong", [True, np.True_, 4.0, np.float32(4), "4", None, [4]])
def test_only_integers_are_lengths_layers_and_positions(wrong: Any) -> None:
    spec = parse(NEAR)
    report = spec.analyse(9)
    every: list[Callable[..., Any]] = [*asked(spec), spec.analyse, spec.plan]
    for ask in every:
        with pytest.raises(TypeError, match="n must be an integer, got"):
            ask(wrong)
    for ask in asked(spec):
        for what in ("layer", "head"):
            with pytest.raises(TypeError, match=f"{what} must be an integer, got"):
                ask(4, **{what: wrong})
    for ask in (report.hops, report.eccentricity, lambda x: report.path(x, 0)):
        with pytest.raises(TypeError, match="must be an integer, got"):
            ask(wrong)


@pytest.mark.parametrize("n", [-1, 2**31, 2**63, 10**40])
def test_lengths_have_limits(n: int) -> None:
    for ask in asked(parse(NEAR)):
        with pytest.raises(AttnSpecError, match=r"n must be between 0 and 2\*\*31 - 1, got -?\d"):
            ask(n)


def test_layers_heads_and_positions_have_limits() -> None:
    spec = parse(NEAR)
    for ask in asked(spec):
        for n in (0, 5):
            with pytest.raises(AttnSpecError, match="`layer` must be between 0 and 1, got 2"):
                ask(n, layer=2)
            with pytest.raises(AttnSpecError, match="`head` must be between 0 and 2, got -1"):
                ask(n, head=-1)
    free = spec_of("attend window(radius = head)")
    assert free.mask(9, head=3)[0].sum() == 4
    with pytest.raises(AttnSpecError, match="`head` must be at least 0"):
        free.mask(0, head=-1)
    report = spec.analyse(9)
    for ask in (report.hops, report.told, report.eccentricity, lambda x: report.path(0, x)):
        for position in (-1, 9):
            with pytest.raises(AttnSpecError, match=f"between 0 and 8, got {position}"):
                ask(position)
    with pytest.raises(AttnSpecError, match="no position at n = 0"):
        spec.analyse(0).hops(0)
    for layers, code in (("0", "A306"), ("1_000_000_000", "A194")):
        with pytest.raises(SpecError, match=code):
            spec_of(f"layers {layers} attend full")


def test_matrices_that_are_too_large_are_refused_with_a_way_out() -> None:
    spec, full = parse(NEAR), spec_of("attend full")
    for n in (LIMITS.mask + 1, 10**6):
        with pytest.raises(AttnSpecError, match=r"up to n = 32,768, got .*: use `adjacency`"):
            spec.mask(n)
    with pytest.raises(AttnSpecError, match="up to n = 4,096, got 4,097: use `adjacency`"):
        spec.graph(LIMITS.matrix + 1)
    with pytest.raises(AttnSpecError, match=r"up to 2,147,483,647 edges, .* 10,000,000,000"):
        full.adjacency(100_000)
    found = spec.adjacency(100_000)
    assert isinstance(found, scipy.sparse.csr_array)
    assert found.nnz == 299_998
    assert (found.dtype, found.indices.dtype) == (np.dtype(bool), np.dtype(np.int32))
    assert found.has_canonical_format
    assert full.analyse(10**6).edges == 10**12


@pytest.mark.parametrize("size", ["n", "4 // n", "n - 1"])
def test_no_positions_have_no_pairs_whatever_the_sizes_are_worth(size: str) -> None:
    spec = spec_of(f"attend window(radius = {size}) | residue(step = {size})")
    assert spec.mask(0).shape == spec.adjacency(0).shape == (0, 0)
    assert len(spec.graph(0)) == 0
    report = spec.analyse(0)
    assert (report.edges, report.empty_rows, report.diameter, report.depth) == (0, 0, 0, 0)
    assert not report.per_head


def test_mechanisms_and_choices_have_no_mask_before_a_call() -> None:
    for body, code in (("topk(keys = 2)", "A706"), ("linear()", "A707")):
        with pytest.raises(SpecError, match=code):
            spec_of(f"attend {body}").mask(4)
    assert spec_of("attend window(radius = 1) + linear()").mask(4).sum() == 10
    grid = spec_of("sequence grid(4, 4) attend axial")
    every: list[Callable[..., Any]] = [*asked(grid), grid.analyse, grid.plan]
    for ask in every:
        with pytest.raises(AttnSpecError, match="16 cells, got n = 0"):
            ask(0)


INPUTS = spec_of(
    "input t: tokens(at_most = 3) input i: ids input l: length"
    " heads 3 attend columns(t) head 1 { attend same(i) } head 2 { attend prefix(l) }"
)


@pytest.mark.parametrize(
    ("head", "values", "keys"),
    [
        (0, {"t": np.arange(6) == 4}, 6),
        (0, {"t": torch.arange(6) < 2}, 12),
        (0, {"t": [4, 0]}, 12),
        (0, {"t": np.zeros(0, int)}, 0),
        (0, {"t": 2}, 12),
        (1, {"i": [0, 0, 1, 1, 1, -7]}, 4 + 9 + 1),
        (1, {"i": np.zeros(6, np.uint8)}, 36),
        (2, {"l": 2}, 12),
        (2, {"l": 100}, 36),
    ],
)
def test_inputs_of_one_sample(head: int, values: Any, keys: int) -> None:
    assert INPUTS.mask(6, head=head, inputs=values).sum() == keys


@pytest.mark.parametrize(
    ("head", "values", "message"),
    [
        (0, None, r"`sample` needs its input `t` \(tokens\)"),
        (0, {"t": 1, "x": 1}, "`sample` declares no input `x`, its inputs are t, i, l"),
        (0, {"T": 1}, "no input `T`, .*: did you mean `t`"),
        (0, {"t": [True] * 5}, r"`t` must be bool \[6\], got bool \[5\]"),
        (0, {"t": [1.0] * 6}, r"got float64 \[6\]"),
        (0, {"t": [0, 1, 0, 0, 0, 0]}, "6 integers could be positions or marks"),
        (0, {"t": [6]}, "`t` must be positions between 0 and 5 at n = 6"),
        (0, {"t": -1}, "`t` must be a count between 0 and 6"),
        (0, {"t": [True] * 6}, "may mark at most 3 tokens, got 6"),
        (0, {"t": [[1], [1, 2]]}, "`t` must be an array"),
        (1, {"i": [True] * 6}, "got bool"),
        (1, {"i": 3}, r"got int64 \[\]"),
        (2, {"l": [2]}, "a length: one integer is needed"),
        (2, [1], "inputs must map names to arrays, got"),
    ],
)
def test_other_inputs_are_refused(head: int, values: Any, message: str) -> None:
    with pytest.raises((AttnSpecError, TypeError), match=message):
        INPUTS.mask(6, head=head, inputs=values)


def test_a_length_below_0_is_one_of_0() -> None:
    """As in a call, which would have to wait for the numbers to refuse them."""
    spec = spec_of("input p: length attend prefix(p) | self")
    q, lengths = torch.randn(3, 1, 5, 4), [-7, 0, 2]
    pairs = spec.compile().pairs(q, q, inputs={"p": torch.tensor(lengths)}).numpy()
    for sample, length in enumerate(lengths):
        assert (spec.mask(5, inputs={"p": length}) == pairs[sample, 0]).all()
        assert spec.analyse(5, inputs={"p": length}).edges == pairs[sample].sum()
    assert (pairs[0] == pairs[1]).all()


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "x", 2**40])
@pytest.mark.parametrize("name", ["head_dim", "heads", "batch"])
def test_sizes_have_limits(name: str, value: Any) -> None:
    spec = parse(BASE)
    for ask in (spec.analyse, spec.plan):
        with pytest.raises(AttnSpecError, match=f"`{name}` must be an integer from 1"):
            ask(16, **{name: value})


@pytest.mark.parametrize("wrong", ["warp", "cuda:x", 3, None])
def test_devices_and_backends_that_there_are_not(wrong: Any) -> None:
    spec = parse(BASE)
    if wrong is not None:
        for ask in (lambda: spec.compile(device=wrong), lambda: spec.plan(16, device=wrong)):
            with pytest.raises((AttnSpecError, TypeError), match=r"the device must be .*'cuda'"):
                ask()
    with pytest.raises(ValueError, match=r"the backend must be one of auto, .*torch"):
        spec.compile(backend=wrong)
    if not torch.cuda.is_available():
        with pytest.raises(AttnSpecError, match=r"available on this machine \(cpu\), got 'cuda'"):
            spec.compile(device="cuda")


@pytest.mark.parametrize(
    "wrong", [torch.ones(1, 3, 4, 4).to_sparse(), np.zeros((1, 3, 4, 4)), None, [[1.0]]], ids=type
)
def test_tensors_of_other_kinds(wrong: Any) -> None:
    with pytest.raises(TypeError, match="q must be a"):
        parse(NEAR).compile()(wrong, wrong, wrong)
    with pytest.raises(TypeError, match=r"tensors must be a pair \(q, k\)"):
        parse(NEAR).analyse(4, tensors=(wrong,))  # type: ignore[arg-type]
    q = torch.empty(1, 3, 9, 4, device="meta")
    assert parse(NEAR).compile()(q, q, q).shape == q.shape


@pytest.mark.parametrize(
    "body",
    [
        "rfa()",
        "topk(keys = 2) + rfa()",
        "sinkhorn(size = 4, max_blocks = 8)",
        "synthesizer(kind = dense, max_length = 16)",
        "mixer(max_length = 16, hidden = 4)",
    ],
)
def test_heads_of_another_size_than_learned_are_refused(body: str) -> None:
    module = spec_of(f"attend {body}").compile(head_size=8)
    q = torch.zeros(1, 1, 16, 4)
    with pytest.raises(ValueError, match=r"for heads of 8 numbers: . must be \[B, H, n, 8\], got"):
        module(q, q, q)


def test_thousands_of_layers_are_composed() -> None:
    many = spec_of("layers 4096 causal attend window(before = 1, after = 0)")
    assert many.analyse(64).depth == 63


@pytest.mark.parametrize("body", ["self - full", "block(size = 4)", "full", "favor(features = 8)"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_reports_are_strict_json(body: str, n: int) -> None:
    def refuse(constant: str) -> object:
        raise AssertionError(constant)

    report = spec_of(f"attend {body}").analyse(n)
    assert json.loads(report.to_json(), parse_constant=refuse)["n"] == n
    assert str(report)


def test_results_are_readable_at_a_prompt() -> None:
    spec = attnspec.parse(
        "attention a { attend causal require causal require degree <= 5 at n = 9 }"
    )
    proven, refuted = spec.verdicts
    assert str(proven) == "`causal` is proven for every n"
    assert str(refuted) == str(spec.check()[0])
    message = "`degree <= 5` does not hold at n = 9: degree is 9, must be <= 5"
    assert repr(spec.check()).startswith(f"[<error A606: {message}")
    assert spec.plan(9).to_dict()["n"] == 9
    assert repr(spec.analyze(3)) == "<Report a, n = 3>"
