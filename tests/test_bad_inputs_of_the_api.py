"""Bad inputs of the Python API, by the numbers of the list: what is handed in, what is said.

Rows of the language are in `tests/elaborate/test_bad_inputs.py`, rows of the command line in
`tests/cli/test_bad_inputs_of_commands.py`, rows of a module's call in `tests/runtime`. `ELSEWHERE`
says where the rest is, or why there is nothing to try.
"""

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
import torch

import attnspec
from attnspec import SpecError
from attnspec.text.diagnostics import AttnSpecError

TEXT = "attention good(r = 3) { causal attend window(radius = r) require causal }"
EMPTY = "attention empty { attend self - full }"
BLOCKS = "attention blocks { attend block(size = 4) }"

ELSEWHERE = {
    75: "tests/integrations/test_transformers_contract.py: a name is registered once",
    76: "tests/runtime/test_runtime.py: plans of another format; what is missing says itself",
    78: "nothing takes a predicate of Python: `where` is evaluated, never called",
    116: "the number of pairs is counted at a length, and has no formula in n",
    111: "paths are not counted, only the shortest is told",
    112: "no command takes a graph that a user made",
    117: "limits of size stand before every long analysis: rows 110 and 113",
    118: "tests/cli/test_cli.py: a module that was edited is not written over, and verified anew",
    119: "there are no files of tables: a module holds its plan as text",
    120: "nothing reads archives",
    121: "benchmarks alone read pickles, of their own making",
    122: "tests/text/test_reading.py: line ends are read alike",
    123: "a module's text is written at once, and holds no time",
    124: "nothing is kept between runs but the rates of tests/bench/test_calibrate.py",
    125: "nothing compares times of files",
}


def spec(text: str = TEXT) -> attnspec.Spec:
    return attnspec.parse(text)


# --- 67 to 69: texts, paths, lengths --------------------------------------------------------------


@pytest.mark.parametrize("given", [None, b"x", 3, io.StringIO(TEXT), [TEXT]])
def test_row_67_neither_text_nor_path(given: Any) -> None:
    with pytest.raises(TypeError, match="a path is needed, got"):
        attnspec.load(given)
    with pytest.raises(TypeError, match="the text of a spec is needed, got"):
        attnspec.parse(given)


def test_row_67_a_path_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the text of a spec is needed, got"):
        attnspec.parse(tmp_path / "a.attn")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="A180"):
        attnspec.load(tmp_path / "missing.attn")


@pytest.mark.parametrize("path", [TEXT, "a\0b", "a" * 5000, ""])
def test_row_68_a_text_is_never_guessed_to_be_a_path(path: str) -> None:
    with pytest.raises(SpecError, match=r"A18\d"):
        attnspec.load(path)
    with pytest.raises(SpecError, match="A131"):
        attnspec.parse("good.attn")


@pytest.mark.parametrize("n", [np.int64(4), np.uint8(4), torch.tensor(4)])
def test_row_69_integers_of_others(n: Any) -> None:
    assert spec().mask(n).shape == (4, 4)
    assert spec().analyse(n).edges == 10
    assert spec().plan(n).steps


@pytest.mark.parametrize("n", [True, np.True_, 4.0, np.float32(4), "4", None, [4]])
def test_row_69_what_is_no_length(n: Any) -> None:
    asked: list[Callable[[Any], object]] = [spec().mask, spec().analyse, spec().plan, spec().graph]
    for ask in asked:
        with pytest.raises(TypeError, match="n must be an integer, got"):
            ask(n)


# --- 70 to 79: sizes, devices, copies -------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "x", 2**40])
@pytest.mark.parametrize("name", ["head_dim", "heads", "batch"])
def test_row_70_sizes(name: str, value: Any) -> None:
    for ask in (spec().analyse, spec().plan):
        with pytest.raises(AttnSpecError, match=f"`{name}` must be an integer from 1"):
            ask(16, **{name: value})


@pytest.mark.parametrize("device", ["warp", "cuda:x", 3])
def test_row_71_devices(device: Any) -> None:
    for ask in (lambda: spec().compile(device=device), lambda: spec().plan(16, device=device)):
        with pytest.raises(
            (AttnSpecError, TypeError), match=r"the device must be .*'cpu' or 'cuda'"
        ):
            ask()
    if not torch.cuda.is_available():
        with pytest.raises(AttnSpecError, match="one that is here, cpu, got 'cuda'"):
            spec().compile(device="cuda")


@pytest.mark.parametrize("backend", ["nope", None, 3])
def test_row_71_backends(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"the backend must be one of auto, .*torch"):
        spec().compile(backend=backend)


def test_row_72_what_is_handed_out_is_a_copy() -> None:
    one = spec()
    one.parameters["r"] = 99
    radii = [1, 2]
    listed = attnspec.parse(
        "attention a(radii = [0, 0]) { attend window(radius = radii[1]) }",
        radii=radii,  # type: ignore[arg-type]
    )
    before = listed.mask(5)
    radii[1] = 0
    assert one.parameters == {"r": 3}
    assert np.array_equal(listed.mask(5), before)
    assert listed.parameters == {"radii": "[1, 2]"}


def test_row_73_copies_and_pickles() -> None:
    one, module, q = spec(), spec().compile(), torch.randn(1, 2, 9, 4)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(other(q, q, q), module(q, q, q))
    assert pickle.loads(pickle.dumps(one.analyse(8))).edges == one.analyse(8).edges
    with pytest.raises(SpecError) as caught:
        attnspec.parse("attention a { attend windw }")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.slow
def test_row_73_a_process_of_its_own() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_edges, (spec(), 20)) == spec().analyse(20).edges


def _edges(one: attnspec.Spec, n: int) -> int | None:
    return one.analyse(n).edges


def test_row_74_threads() -> None:
    q = torch.randn(1, 2, 33, 4)
    module = spec().compile()

    def run(number: int) -> torch.Tensor:
        mine = module if number % 2 else attnspec.parse(TEXT).compile()
        out: torch.Tensor = mine(q, q, q)
        return out

    with ThreadPoolExecutor(8) as threads:
        outs = list(threads.map(run, range(16)))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_row_77_specs_are_values() -> None:
    script = f"import attnspec; print(attnspec.parse({TEXT!r}).fingerprint)"
    elsewhere = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.strip() == spec().fingerprint
    spaced = attnspec.parse(TEXT.replace(" = 3", "=3"))
    assert (spaced == spec(), hash(spaced) == hash(spec())) == (True, True)
    assert spec() != attnspec.parse(TEXT, r=4)
    assert spec() != 3


@pytest.mark.parametrize(
    "given",
    [
        torch.randn(1, 2, 4, 4).to_sparse(),
        np.zeros((1, 2, 4, 4)),
        None,
        [[1.0]],
    ],
    ids=["sparse", "numpy", "none", "list"],
)
def test_row_79_tensors_of_other_kinds(given: Any) -> None:
    with pytest.raises(TypeError, match="q must be a"):
        spec().compile()(given, given, given)


def test_row_79_shapes_alone_are_enough_for_shapes() -> None:
    q = torch.empty(1, 2, 9, 4, device="meta")
    assert spec().compile()(q, q, q).shape == q.shape


@pytest.mark.parametrize("tensors", [3, (), np.zeros((2, 4, 4)), (np.zeros((1, 4, 4)),)])
def test_row_79_analysis_takes_a_pair_of_tensors(tensors: Any) -> None:
    with pytest.raises(TypeError, match=r"tensors must be a pair \(q, k\)"):
        spec().analyse(4, tensors=tensors)


# --- 108 to 117: analysis -------------------------------------------------------------------------


def test_row_108_no_positions_and_one() -> None:
    none, one, nothing = spec().analyse(0), spec().analyse(1), spec(EMPTY).analyse(5)
    assert (none.edges, none.diameter, none.depth, none.spectral_gap) == (0, 0, 0, None)
    assert (one.edges, one.diameter, one.depth) == (1, 0, 0)
    assert (nothing.edges, nothing.density, nothing.diameter, nothing.depth) == (0, 0, None, None)
    assert spec().graph(0).number_of_nodes() == 0
    assert spec(EMPTY).graph(3).number_of_edges() == 0
    assert all(str(report) for report in (none, one, nothing))


def test_row_109_pairs_that_are_never_joined() -> None:
    report = spec(BLOCKS).analyse(9)
    assert (report.diameter, report.depth, report.path(0, 8)) == (None, None, None)
    assert report.hops(0).tolist() == [0, 1, 1, 1, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("position", [True, 1.5, "1", None])
def test_row_109_what_is_no_position(position: Any) -> None:
    report = spec().analyse(9)
    asked: list[Callable[[], object]] = [
        lambda: report.hops(position),
        lambda: report.path(position, 0),
        lambda: report.path(0, position),
        lambda: report.eccentricity(position),
    ]
    for ask in asked:
        with pytest.raises(TypeError, match="must be an integer, got"):
            ask()


@pytest.mark.parametrize("position", [-1, 9])
def test_row_109_positions_that_are_not_there(position: int) -> None:
    with pytest.raises(AttnSpecError, match=f"between 0 and 8, got {position}"):
        spec().analyse(9).hops(position)
    with pytest.raises(AttnSpecError, match="no position at n = 0"):
        spec().analyse(0).hops(0)


def test_row_110_a_million_tokens() -> None:
    full = spec("attention f { attend full }")
    assert full.analyse(10**6).edges == 10**12
    with pytest.raises(AttnSpecError, match=r"up to n = 32,768, got 1,000,000: use `adjacency`"):
        full.mask(10**6)
    with pytest.raises(AttnSpecError, match=r"up to n = 4,096"):
        full.graph(10**6)
    with pytest.raises(AttnSpecError, match=r"edges, this one has 1,000,000,000,000"):
        full.adjacency(10**6)


def test_row_113_numbers_of_layers() -> None:
    for layers, code in (("0", "A306"), ("1_000_000_000", "A194")):
        with pytest.raises(SpecError, match=code):
            spec(f"attention a {{ layers {layers} attend full }}")
    many = "attention a { layers 4096 causal attend window(before = 1, after = 0) }"
    assert spec(many).analyse(64).depth == 63


def test_row_114_directions_are_those_of_reading() -> None:
    ahead = spec("attention a { attend where(k == q + 1) | self }")
    report = ahead.analyse(4)
    assert report.path(0, 3) is not None
    assert report.path(3, 0) is None
    assert sorted(ahead.graph(4).edges) == sorted(
        [*((i, i) for i in range(4)), *((i, i + 1) for i in range(3))]
    )
    assert report.hops(1).tolist() == [-1, 0, 1, 2]


def test_row_115_layers_are_composed_and_joined() -> None:
    layers = spec(
        "attention a { layers 2 layer 0 { attend block(size = 4) }"
        " layer 1 { attend residue(step = 4) } }"
    ).analyse(16)
    assert (layers.depth, layers.diameter) == (2, 2)
    first = spec("attention a { attend block(size = 4) }").analyse(16)
    assert (first.depth, first.diameter) == (None, None)


# --- 118 to 127: files ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with spaces", 'it\'s "quoted"', "smile 🙂", "x" * 100])
def test_row_126_folders_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "near.attn").write_text("graph near = window(radius = 2)")
    text = 'from "near.attn" import near attention a { attend near }'
    (folder / "a.attn").write_text(text)
    assert attnspec.load(folder / "a.attn").mask(4).sum() == 14


def test_row_127_reports_are_strict_json() -> None:
    def refuse(constant: str) -> object:
        raise AssertionError(constant)

    for text in (EMPTY, BLOCKS, TEXT, "attention a { attend favor(features = 8) }"):
        found = json.loads(spec(text).analyse(5).to_json(), parse_constant=refuse)
        assert found["n"] == 5


def test_every_row_is_tried_or_explained() -> None:
    tried = {int(name.split("_")[2]) for name in globals() if name.startswith("test_row_")}
    wanted = {*range(67, 80), *range(108, 128)}
    assert tried | ELSEWHERE.keys() == wanted
    assert not tried & ELSEWHERE.keys()


@pytest.mark.parametrize(
    "body",
    [
        "attend rfa()",
        "attend topk(keys = 2) + rfa()",
        "attend sinkhorn(size = 4, max_blocks = 8)",
        "attend synthesizer(kind = dense, max_length = 16)",
        "attend mixer(max_length = 16, hidden = 4)",
    ],
)
def test_heads_of_another_size_than_learned_are_refused(body: str) -> None:
    module = attnspec.parse(f"attention a {{ {body} }}").compile(head_size=8)
    q = torch.zeros(1, 1, 16, 4)
    with pytest.raises(ValueError, match=r"for heads of 8 numbers: . must be \[B, H, n, 8\], got"):
        module(q, q, q)
