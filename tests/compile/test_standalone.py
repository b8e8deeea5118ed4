"""Files that stand alone: short, exact, and of torch alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import GRAPHS, spec_of
from torch.nn.attention.flex_attention import create_mask, flex_attention
from zoo import ATTENTIONS, IDS, loaded, sample

from attnspec.backends.factored.features.directions import one_head
from attnspec.compile.compiler import emit_spec
from attnspec.compile.emit import ALONE, SEAL, check_module, class_name, emit, sealed
from attnspec.compile.standalone import StandaloneError, standalone_module
from attnspec.compile.standalone.sources import drawing, features
from attnspec.graphs.counter_rng import (
    EXPANDER,
    FEATURES,
    RANDOM,
    Stream,
    distinct,
    normals,
    permutation,
)
from attnspec.lower.lower import decided_leaves
from attnspec.spec import Spec, load, parse
from attnspec.verification import beyond, mask_alone, verify_alone

SIZE = 4

REFUSED = {
    "based": "its heads or layers have different mechanisms",
    "lolcats": "it weighs some pairs exactly and others by a mechanism",
}
"""What no short file of the zoo says, and why."""

SMALL = {"height": 9, "width": 8, "frames": 4, "max_length": 150}
"""What is made smaller, so that grids are quick."""


@cache
def zoo() -> dict[str, Spec]:
    """The specs of the zoo that can be run and said, small."""
    found = {}
    for (path, name), label in zip(ATTENTIONS, IDS, strict=True):
        spec = loaded(path, name)
        small = {key: value for key, value in SMALL.items() if key in spec.parameters}
        spec = load(path, name=name, parameters=small) if small else spec
        if not decided_leaves(spec.program) and path.stem not in REFUSED:
            found[label] = spec
    return found


def is_graph(spec: Spec) -> bool:
    return all(attend.mechanism is None for attend in spec.program.attends)


@cache
def body_of(spec: Spec) -> str:
    return standalone_module(spec.program, class_name(spec.name))


def run(spec: Spec, text: str | None = None) -> dict[str, Any]:
    """The names of the file."""
    space: dict[str, Any] = {"__name__": "alone"}
    exec(compile(text or body_of(spec), spec.name, "exec"), space)
    return space


def inputs_of(spec: Spec, n: int, batch: int) -> dict[str, torch.Tensor] | None:
    one = {name: torch.as_tensor(np.asarray(x)) for name, x in sample(spec, n).items()}
    turned = {name: x.flip(0) if x.dim() else x // 2 for name, x in one.items()}
    return {name: torch.stack([x, turned[name]])[:batch] for name, x in one.items()} or None


def made(spec: Spec, space: Mapping[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The module of the file and that of the package, with the same random parameters."""
    kind = space[class_name(spec.name)]
    alone = kind(SIZE) if "PARTS" in space else kind()
    backend = "dense" if is_graph(spec) else "factored"
    twin = spec.compile(backend, head_size=SIZE)
    shapes = [{k: x.shape for k, x in each.state_dict().items()} for each in (alone, twin)]
    assert shapes[0] == shapes[1]
    for parameter in twin.parameters():
        torch.nn.init.normal_(parameter)
    alone.load_state_dict(twin.state_dict())
    return alone.double(), twin.double()


def compared(spec: Spec, space: Mapping[str, Any], n_q: int, n: int, padded: bool) -> None:
    """Values and gradients of the file are those of the package, in float64."""
    alone, twin = made(spec, space)
    heads, key_heads = spec.heads or 4, 2 if (spec.heads or 4) % 2 == 0 else 1
    shapes = (heads, n_q), (key_heads, n), (key_heads, n)
    given = [torch.randn(2, h, m, SIZE, dtype=torch.float64, requires_grad=True) for h, m in shapes]
    padding = torch.rand(2, n) < 0.8 if padded else None
    if padding is not None:
        padding[1, : n // 2] = False
    more = {"layer": spec.layers - 1, "key_padding_mask": padding, "inputs": inputs_of(spec, n, 2)}
    results = []
    for module in (alone, twin):
        out = module(*given, **more)
        wanted = [*given, *module.parameters()]
        grads: Sequence[torch.Tensor | None] = torch.autograd.grad(
            out.square().sum(), wanted, allow_unused=True
        )
        zeros = [
            torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)
        ]
        results.append([out.detach(), *zeros])
    for one, other in zip(*results, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=1e-9)


# --- the zoo -------------------------------------------------------------------------------------


def test_what_the_zoo_has_is_said_or_refused_with_the_way_out() -> None:
    for path, name in ATTENTIONS:
        if path.stem in REFUSED:
            with pytest.raises(StandaloneError) as raised:
                loaded(path, name).emit(standalone=True)
            text = f"{REFUSED[path.stem]}; compile it without --standalone"
            assert str(raised.value).endswith(text)
    assert len(zoo()) > 75


def test_files_are_short_and_read_well() -> None:
    for label, spec in zoo().items():
        text = body_of(spec)
        check_module(text, standalone=True)
        # three lines say what torch.export cannot take
        length = text.count("\n") - 3 * ("torch.compiler.is_exporting()" in text)
        assert length <= (150 if is_graph(spec) else 400), label
        tree = ast.parse(text)
        assert all(len(line) <= 100 and line == line.rstrip() for line in text.splitlines()), label
        # nothing is imported or defined that is not used
        used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                defined += [alias.asname or alias.name for alias in node.names]
            elif isinstance(node, ast.Assign):
                defined += [x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)]
        constants = {"HEADS", "LAYERS", "INPUTS"}
        for name in set(defined) - constants:
            read = [x for x in used if x == name]
            assert len(read) > (name in {"kept"} or name.isupper()), (label, name)
        documented = [
            node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        assert all(ast.get_docstring(node) for node in documented), label


def test_flex_attention_is_given_the_pairs_of_the_spec() -> None:
    bodies = [spec_of(body) for body in GRAPHS.values()]
    for spec in [*(x for x in zoo().values() if is_graph(x)), *bodies]:
        space = run(spec)
        n = spec.program.fixed_length or 40
        heads, layer = spec.heads or 2, spec.layers - 1
        x = inputs_of(spec, n, 1)
        mask_mod = space["mask_mod_of"](layer, (1, heads, n, n), "cpu", x or {})
        held = create_mask(mask_mod, 1, heads, n, n, device="cpu")[0]
        masks = [spec.mask(n, layer, head, sample(spec, n) or None) for head in range(heads)]
        assert np.array_equal(held.numpy(), np.stack(masks)), spec.name


ON_GPU = (
    "causal attend window(before = isqrt(n), after = 0) | residue(step = isqrt(n))",
    "heads 4 attend full score bias(buckets = 8, max_distance = 20) head 1 { attend self }",
    "causal attend full score alibi()",
    "attend random(keys = 3) & where(k > q) score softcap(cap = 2)",
    "input t: tokens layers 2 attend rows(t) layer 1 { attend prefix(9) } scale 1 / n",
)


@pytest.mark.parametrize(
    "body", ["attend full", "heads 3 attend full score alibi(slopes = [0.5, 0, -0.1])"]
)
def test_a_file_has_the_slopes_of_alibi(body: str) -> None:
    spec = spec_of(f"causal {body} score alibi()")
    ours, alone = spec.compile().double(), run(spec)["Sample"]().double()
    for heads in {spec.heads or 4, spec.heads or 6}:
        q, k, v = torch.randn(3, 1, heads, 9, 4, dtype=torch.float64)
        torch.testing.assert_close(alone(q, k, v), ours(q, k, v))


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without",
    # torch's own tracing of indices makes one where other tests have traced before
    "ignore:.*should not be instantiated:DeprecationWarning",
)
@pytest.mark.parametrize(
    "body", [*ON_GPU[::4], *(pytest.param(body, marks=pytest.mark.slow) for body in ON_GPU[1:4])]
)
@torch.no_grad()
def test_flex_attention_computes_the_same(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # what is done on a GPU, traced as there and run here
    spec = spec_of(body)
    text = body_of(spec).replace("not q.is_cuda", "False").replace("q.is_cuda", "True")
    space = run(spec, text)
    traced = torch.compile(flex_attention, dynamic=False, backend="eager")
    space["flex"] = lambda: traced
    # tracing looks the names of functions up in their module
    space["__name__"] = f"alone_{ON_GPU.index(body)}"
    module = ModuleType(space["__name__"])
    monkeypatch.setitem(sys.modules, space["__name__"], module)
    module.__dict__.update(space)
    there, here = space["Sample"](), run(spec)["Sample"]()
    for parameter in here.parameters():
        torch.nn.init.normal_(parameter)
    there.load_state_dict(here.state_dict())
    for n_q, n in ((70, 70), (40, 150)):
        q, k, v = (torch.randn(2, h, m, 16) for h, m in ((4, n_q), (2, n), (2, n)))
        padding = torch.rand(2, n) < 0.8
        more = {"layer": spec.layers - 1, "inputs": {"t": torch.rand(2, n) < 0.3}}
        more = more if spec.inputs else {}
        for mask in (None, padding):
            outs = [each(q, k, v, key_padding_mask=mask, **more) for each in (there, here)]
            torch.testing.assert_close(*outs)


SCRIPT = """
import copy, importlib, pickle, sys
sys.modules["attnspec"] = None
import torch
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
given = torch.load(f"{folder}/given.pt")
found = {}
for name in names:
    heads, size, inputs = given["calls"][name]
    kind = getattr(importlib.import_module(name), given["classes"][name])
    torch.manual_seed(0)
    module = kind(size) if size else kind()
    q = given["q"][:, :heads, : given["n"][name]]
    out = module(q, q, q, inputs=inputs)
    if name.endswith("0"):
        assert torch.equal(copy.deepcopy(module)(q, q, q, inputs=inputs), out), name
        assert torch.equal(pickle.loads(pickle.dumps(module))(q, q, q, inputs=inputs), out), name
    found[name] = out.detach()
torch.save(found, f"{folder}/found.pt")
"""


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
)
def test_files_need_no_package(part: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "q": torch.randn(1, 12, 288, SIZE),
        "calls": {},
        "classes": {},
        "n": {},
    }
    meant = {}
    for number, spec in enumerate([*zoo().values()][part::5]):
        name, n = f"alone_{number}", spec.program.fixed_length or 20
        (tmp_path / f"{name}.py").write_text(body_of(spec), encoding="utf-8")
        space, heads = run(spec), spec.heads or 2
        size = SIZE if "PARTS" in space else 0
        inputs = inputs_of(spec, n, 1)
        given["calls"][name], given["n"][name] = (heads, size, inputs), n
        given["classes"][name] = class_name(spec.name)
        torch.manual_seed(0)
        kind = space[class_name(spec.name)]
        q = given["q"][:, :heads, :n]
        meant[name] = (kind(size) if size else kind())(q, q, q, inputs=inputs).detach()
    torch.save(given, tmp_path / "given.pt")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *meant],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    assert all(torch.equal(found[name], out) for name, out in meant.items())


# --- other specs ---------------------------------------------------------------------------------


ACROSS = (
    "cross attend where(abs(q * n - k * m) <= 2 * m and q < n) | rows(last(2))",
    "cross attend shift(full, by = -3) & ~window(radius = 4) | transpose(columns(last(3)))",
    "cross input t: numbers input x: tokens heads 2 attend where(t(k) * 2 < q) | columns(x)"
    " head 1 { attend powers(base = 2) } score softcap(cap = 3)",
    "cross attend block(size = 4) | global(last(2) | first(1)) normalize sigmoid",
    "cross attend linear()",
)


@pytest.mark.parametrize("body", ACROSS)
def test_two_sequences_are_computed_as_the_package_does(body: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(body)
    assert "are another sequence than keys" in body_of(spec)
    for m, n in ((7, 7), (5, 20), (20, 5), (9, 1)):
        compared(spec, run(spec), m, n, padded=m > n)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    inputs = {"t": torch.zeros(1, 0), "x": torch.zeros(1, 0, dtype=torch.bool)}
    out = run(spec)["Sample"]()(q, k, k, inputs={name: inputs[name] for name in spec.inputs})
    assert out.abs().sum() == 0


NUMBERS = (
    "where(t(k) <= t(q) and t(k) == t(k))",
    "where(abs(t(q) - t(k)) <= 1.5 or 2 * t(k) + 1 > 2 * t(k))",
    "where(max(t(q), 3, t(k) / 2) ** 3 < 40 or ceil(t(k) / 3) == 1) & where(q - k < t(q))",
    "where(t(k) in {1, 2, 7} or min(t(q), 2.5) in 0..t(k))",
)


@pytest.mark.parametrize("graph", NUMBERS)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32, torch.float64])
def test_numbers_are_compared_as_the_package_does(graph: str, kind: torch.dtype) -> None:
    spec = spec_of(f"input t: numbers attend {graph}")
    n, generator = 23, torch.Generator().manual_seed(4)
    times = torch.randint(-4, 9, (2, n), generator=generator).to(kind)
    if kind.is_floating_point:
        times = times + 0.3
        times[:, 3:5], times[:, 9], times[:, 12] = torch.nan, torch.inf, -torch.inf
    real = torch.rand(2, n, generator=generator) < 0.8
    q = torch.randn(2, 2, n, 4, generator=generator, dtype=torch.float64)
    alone, twin = run(spec)["Sample"](), spec.compile("dense")
    for padding in (None, real):
        more = {"inputs": {"t": times}, "key_padding_mask": padding}
        for first in (0, 15):
            given = q[:, :, first:], q, q
            torch.testing.assert_close(alone(*given, **more), twin(*given, **more))


def test_numbers_that_are_not_exact_are_refused() -> None:
    q, large = torch.randn(1, 1, 3, 4), torch.tensor([[0, 1, 2**61 + 1]])
    spec = spec_of("input t: numbers attend where(t(k) - t(q) < 3)")
    module = run(spec)["Sample"]()
    with pytest.raises(ValueError, match=rf"`t` must be within {2**60}, where whole numbers"):
        module(q, q, q, inputs={"t": large})
    module(q, q, q, inputs={"t": large.double()})
    compared_as_given = run(spec_of("input t: numbers attend where(t(k) < t(q))"))["Sample"]()
    compared_as_given(q, q, q, inputs={"t": large * 2})
    divided = run(spec_of("input t: numbers attend where(t(k) % 3 == 0)"))["Sample"]()
    divided(q, q, q, inputs={"t": large})
    with pytest.raises(ValueError, match="divide whole numbers, and what `t` says is real"):
        divided(q, q, q, inputs={"t": large.double()})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("cross attend full scale 1 / log2(m + 2)", "weighed by the number of queries"),
        ("input t: numbers attend where(t(q) / t(k) < 2)", "may be 0"),
        ("input t: numbers attend where(t(q) / 2 % 3 < 2)", "what it makes of `t` is real"),
        ("layers 2 attend full layer 1 { attend linear() }", "different mechanisms"),
        ("heads 2 attend full head 1 { attend full normalize relu }", "in different ways"),
        ("attend favor(redraw = 9)", "drawn anew while it is trained"),
        ("attend linformer(rank = isqrt(n), projection = mean)", "arguments of its mechanism"),
        ("attend where(q < log2(k + 1))", "differs in its last bits"),
        ("attend where(q % k == 1)", "which divides, may be 0"),
        ("attend shift(full, by = n // 2)", "must be known before n is"),
        ("sequence grid(4, n // 4) attend axial", "the extents of its grid depend on n"),
        ("attend full score softcap(cap = 2 * n)", "the cap of its scores depends on n"),
        ("attend full scale head + 1", "by the number of the head"),
        ("heads 2 attend full score bias() score bias(buckets = 8)", "several learned tables"),
    ],
)
def test_refusals(body: str, why: str) -> None:
    with pytest.raises(StandaloneError, match=why):
        body_of(spec_of(body))


def test_sizes_are_checked_whenever_they_are_known() -> None:
    module = run(spec_of("attend window(radius = n - 10)"))["Sample"]()
    q = torch.randn(1, 1, 12, 4)
    assert module(q, q, q).shape == q.shape
    with pytest.raises(ValueError, match=r"`radius` must be between 0 and .*, got -1"):
        module(q[:, :, :9], q[:, :, :9], q[:, :, :9])
    spec = spec_of("attend where(q * k * k * k <= n)")
    space = run(spec)
    assert "if n > 32768:" in body_of(spec)
    with pytest.raises(ValueError, match="64 bits up to n = 32768, got 40000"):
        space["mask_mod_of"](0, (1, 1, 1, 40000), "cpu", {})
    grid = run(spec_of("sequence grid(3, 4) attend axial"))["Sample"]()
    with pytest.raises(ValueError, match="the grid has 12 positions, got n = 9"):
        grid(q[:, :, :9], q[:, :, :9], q[:, :, :9])


def test_calls_that_do_not_fit_are_refused() -> None:
    spec = spec_of("heads 4 layers 2 input t: tokens(at_most = 2) attend global(t)")
    module = run(spec)["Sample"]()
    q, marked = torch.randn(1, 4, 9, 4), torch.zeros(1, 9, dtype=torch.bool)
    module(q, q, q, inputs={"t": marked})
    for error, given, more in (
        ("are needed, H_kv dividing H", (q[:, :3], q, q), {}),
        ("are needed, H_kv dividing H", (q, q[:, :3], q[:, :3]), {}),
        ("are needed, H_kv dividing H", (q, q[:, :, :5], q[:, :, :5]), {}),
        ("of one type", (q, q.double(), q), {}),
        ("layer must be from 0 on and below 2, got 2", (q, q, q), {"layer": 2}),
        (r"inputs are \['t'\], got \[\]", (q, q, q), {"inputs": None}),
        ("t must be tokens", (q, q, q), {"inputs": {"t": marked[:, 1:]}}),
        ("promises at most 2", (q, q, q), {"inputs": {"t": ~marked}}),
        ("key padding must be tokens", (q, q, q), {"key_padding_mask": marked[0]}),
    ):
        with pytest.raises(ValueError, match=error):
            module(*given, **{"inputs": {"t": marked}, **more})
    with pytest.raises(ValueError, match="n is at most 8, got 9"):
        run(spec_of("attend gmlp(max_length = 8)"))["Sample"](4)(q, q, q)
    with pytest.raises(ValueError, match="no weights to drop"):
        run(spec_of("attend linear()"))["Sample"]()(q, q, q, dropout_p=0.1)


def test_sums_in_frames_that_are_far_are_numbers() -> None:
    module = run(parse("attention a { attend rbf(features = 32) }"))["A"]()
    q, k, v = torch.randn(3, 1, 1, 50, 64)
    assert module(q, k, v).isfinite().all()


def test_edges_of_shapes() -> None:
    for body in (
        "attend window(radius = 2)",
        "heads 2 attend full score bias()",
        "attend linear()",
    ):
        module = run(spec_of(body))["Sample"]()
        for batch, n_q, n in ((0, 5, 5), (1, 0, 0), (1, 0, 5)):
            q, k, v = (torch.randn(batch, 2, m, 4, requires_grad=True) for m in (n_q, n, n))
            out = module(q, k, v)
            assert out.shape == (batch, 2, n_q, 4)
            out.sum().backward()
        q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True).transpose(1, 2) for _ in range(3))
        torch.testing.assert_close(module(q, k, v), module(q.contiguous(), k.clone(), v.clone()))


def test_masks_are_kept_by_length_and_nothing_of_a_mode_reaches_the_next_call() -> None:
    space = run(spec_of(GRAPHS["random"]))
    module = space["Sample"]()
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    with torch.inference_mode():
        out = module(q, q, q)
    assert torch.equal(module(q, q, q), out)
    module(q, q, q).sum().backward()
    assert space["kept"].cache_info().misses == 1
    for n in range(10, 30):
        short = torch.randn(1, 2, n, 4)
        module(short, short, short)
    assert space["kept"].cache_info().currsize == 8


def test_draws_are_those_of_the_package() -> None:
    place = 3, 5
    for n, count in ((1, 3), (5, 7), (300, 4), (97, 97), (64, 0)):
        rows, stream = np.arange(n), Stream(2**64 - 9, RANDOM, *place)
        for causal in (False, True):
            population = rows + 1 if causal else np.full(n, n)
            meant = distinct(stream, rows, population, min(count, n))
            found = drawing.distinct(n, count, 2**64 - 9, (RANDOM, *place), causal)
            assert np.array_equal(np.sort(found.clamp_min(-1).numpy(), 1), meant)
    for n in (1, 2, 50):
        cycle = permutation(Stream(7, EXPANDER, *place), 1, n)
        found = drawing.cycles(n, 4, 7, (EXPANDER, *place))
        assert np.array_equal(found[cycle, 2].numpy(), np.roll(cycle, -1))
    meant = normals(Stream(7, FEATURES, *place), np.arange(9), 6)
    found = features.normals(9, 6, 7, (FEATURES, *place))
    np.testing.assert_allclose(found.numpy(), meant, rtol=1e-12)
    assert abs(float(normals(Stream(1, FEATURES), np.arange(400), 50).std()) - 1) < 0.02
    assert one_head(0, 0, 1, 0, 7, 3, True).shape == (7, 3)


def test_a_draw_that_is_rejected_is_drawn_again() -> None:
    # two thirds of 2**32 as a bound rejects a third of all words
    row = torch.arange(200)
    words = drawing.philox(row, torch.zeros_like(row), 0, (RANDOM, 0, 0))[0]
    bound = 3 * 2**30
    rejected = (words * bound & 0xFFFFFFFF) < 2**32 % bound
    assert 20 < int(rejected.sum()) < 120


def test_a_wrong_mask_is_found() -> None:
    spec = spec_of("attend window(radius = 3)")
    right = body_of(spec)
    assert verify_alone(spec.program, 20, run(spec)["Sample"]).ok
    wrong = right.replace("k - q <= 3", "k - q <= 4")
    assert wrong != right
    assert not verify_alone(spec.program, 20, run(spec, wrong)["Sample"]).ok


@pytest.mark.parametrize("size", [4, 64, 512])
def test_a_wrong_mask_is_found_beyond_all_sizes(size: int) -> None:
    spec = spec_of(f"causal input t: length attend random_blocks(size = {size}, blocks = 3)")
    right = body_of(spec)
    n = beyond(spec.program)
    assert mask_alone(spec.program, n, run(spec)["mask_mod_of"])[1] is None
    wrong = run(spec, right.replace(", head), True)", ", head), False)"))["mask_mod_of"]
    assert "layer 0, head 0" in (mask_alone(spec.program, n, wrong)[1] or "")


def test_the_docstring_has_what_was_found() -> None:
    spec = parse("attention a_graph { attend window(radius = 3) }")
    text = emit_spec(spec.elaborated, standalone=True)
    document = ast.get_docstring(ast.parse(text))
    assert document is not None
    assert "attention = AGraph()" in document
    assert "Verified at n = 65 when it was compiled: every pair, values and gradients" in document
    assert "attend window(radius = 3)" in document
    assert spec.fingerprint in document
    bare = emit(spec.program, text="", fingerprint="", version="", body=body_of(spec))
    assert text == sealed(text.rpartition(f"\n{SEAL}")[0])
    assert text.rpartition(f"\n{SEAL}")[0].endswith(body_of(spec))
    assert bare.rpartition(f"\n{SEAL}")[0].endswith(body_of(spec))
    assert {"math", "functools", "torch"} == ALONE


def test_elu1_has_a_slope_of_1_at_0() -> None:
    x = torch.zeros(3, requires_grad=True)
    (slope,) = torch.autograd.grad(features.elu1(x)[0].sum(), x)
    assert torch.equal(slope, torch.ones(3))
