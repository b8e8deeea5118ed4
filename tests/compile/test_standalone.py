"""Files that stand alone, whose values the views hold: short, of torch alone; what they refuse."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_checks import imported
from population import BODIES, population, small, spec_of
from sweeps import few
from torch.nn.attention.flex_attention import create_mask, flex_attention
from views import Call, Case, numbers
from zoo import ATTENTIONS, loaded

import attnspec
from attnspec import AttnSpecError, Spec
from attnspec.compile.emit import check_module
from attnspec.compile.standalone import StandaloneError, standalone_module
from attnspec.graphs.counter_rng import RANDOM
from attnspec.lower.lower import decided_leaves
from attnspec.verification.alone import Alone, beyond, mask_alone
from attnspec.verification.verify import verify

REFUSED = {
    "based": "its heads or layers have different mechanisms",
    "lolcats": "it adds a mechanism to a graph",
}
"""What no short file of the zoo says, and why."""

ZOO = {
    f"{path.stem}:{name}": small(path, name)
    for path, name in ATTENTIONS
    if path.stem not in REFUSED and not decided_leaves(loaded(path, name).program)
}


@cache
def body_of(spec: Spec) -> str:
    return standalone_module(spec.program, "Sample")


def run(spec: Spec, text: str | None = None) -> dict[str, Any]:
    """The names of the file."""
    space: dict[str, Any] = {"__name__": "alone"}
    exec(compile(text or body_of(spec), spec.name, "exec", dont_inherit=True), space)
    return space


def is_verified(spec: Spec, kind: type[torch.nn.Module]) -> bool:
    return verify(spec.program, 20, module=Alone(spec.program, kind)).ok


def module_of(body: str) -> torch.nn.Module:
    found: torch.nn.Module = run(spec_of(body))["Sample"]()
    return found


@pytest.mark.parametrize("heads", ["", "heads 3 "])
def test_files_have_the_slopes_of_any_number_of_heads(heads: str) -> None:
    body = f"{heads}attend full score alibi({'slopes = [0.5, 2, 0.1]' * bool(heads)})"
    parts = torch.randn(3, 1, 3, 9, 8)
    torch.testing.assert_close(module_of(body)(*parts), spec_of(body).compile()(*parts))


def test_standalone_zoo_files_are_refused_with_the_way_out() -> None:
    for path, name in ATTENTIONS:
        if path.stem in REFUSED:
            with pytest.raises(StandaloneError) as raised:
                loaded(path, name).emit(standalone=True)
            text = f"{REFUSED[path.stem]}; leave `standalone` out"
            assert str(raised.value).endswith(text)
    assert len(ZOO) > 75


@pytest.mark.parametrize("part", few(range(4)))
def test_files_are_short_and_read_well(part: int) -> None:
    for label, spec in [*ZOO.items()][part::4]:
        text = body_of(spec)
        check_module(text, standalone=True)
        # three lines say what torch.export cannot take
        length = text.count("\n") - 3 * ("torch.compiler.is_exporting()" in text)
        mechanisms = any(attend.mechanism for attend in spec.program.attends)
        assert length <= (400 if mechanisms else 160), label
        assert all(len(line) <= 100 and line == line.rstrip() for line in text.splitlines()), label
        tree = ast.parse(text)
        # nothing is imported or defined that is not used
        used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                defined += [alias.asname or alias.name for alias in node.names]
            elif isinstance(node, ast.Assign):
                defined += [x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)]
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert ast.get_docstring(node), label
        for name in {*defined} - {"HEADS", "LAYERS", "INPUTS"}:
            assert used.count(name) > (name == "kept" or name.isupper()), (label, name)


def test_lines_are_broken_within_calls() -> None:
    text = body_of(attnspec.zoo("neighborhood_dilated"))
    assert max(len(line) for line in text.splitlines()) <= 100


SCRIPT = """
import copy, importlib, pickle, sys
sys.modules["attnspec"] = None
import torch
sys.path.insert(0, sys.argv[1])
given, found = torch.load(f"{sys.argv[1]}/given.pt"), {}
for name, (heads, n, sized, inputs) in given["calls"].items():
    torch.manual_seed(0)
    kind = importlib.import_module(name).Sample
    module = kind(4) if sized else kind()
    q = given["q"][:, :heads, :n]
    out = module(q, q, q, inputs=inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(q, q, q, inputs=inputs), out), name
    found[name] = out.detach()
torch.save(found, f"{sys.argv[1]}/found.pt")
"""


def test_files_need_no_package(tmp_path: Path) -> None:
    q, calls, meant = torch.randn(1, 12, 64, 4), {}, {}
    names = [name for name in ZOO if name in population()]
    for number, name in enumerate(names[::5]):
        spec, called = ZOO[name], f"alone_{number}"
        (tmp_path / f"{called}.py").write_text(body_of(spec), encoding="utf-8")
        n, heads = spec.program.fixed_length or 20, spec.heads or 2
        given = Call(Case(spec, n), "plain", torch.float32).keywords.get("inputs", {})
        inputs = {name: x[:1] for name, x in given.items()} or None
        space, part = run(spec), q[:, :heads, :n]
        calls[called] = heads, n, "PARTS" in space, inputs
        torch.manual_seed(0)
        module = space["Sample"](4) if "PARTS" in space else space["Sample"]()
        meant[called] = module(part, part, part, inputs=inputs).detach()
    torch.save({"q": q, "calls": calls}, tmp_path / "given.pt")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    assert all(torch.equal(found[name], out) for name, out in meant.items())


ON_GPU = (
    "causal attend window(before = isqrt(n), after = 0) | residue(step = isqrt(n))",
    "heads 4 causal attend full score s * 2 ** -head - [3, 1, 2][min(q - k, 2)] / 4",
    "heads 4 input near: pairs input t: tokens attend full score near(q, k) + tanh(s)",
    "input t: tokens layers 2 attend rows(t) layer 1 { attend prefix(9) } scale 1 / n",
    "heads 4 attend full score bias(buckets = 8, max_distance = 20) head 1 { attend self }",
    "causal attend full score alibi()",
    "attend random(keys = 3) & where(k > q) score softcap(cap = 2)",
)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("body", few(ON_GPU, ON_GPU[:1]))
@torch.no_grad()
def test_flex_attention_computes_the_same(body: str, tmp_path: Path) -> None:
    # what is done on a GPU, traced as there and run here
    spec = spec_of(body)
    text = body_of(spec).replace("not q.is_cuda", "False").replace("q.is_cuda", "True")
    space = imported(text, tmp_path).__dict__
    traced = torch.compile(flex_attention, dynamic=False, backend="eager")
    space["flex"] = lambda: traced
    there, here = space["Sample"](), run(spec)["Sample"]()
    for parameter in here.parameters():
        torch.nn.init.normal_(parameter)
    there.load_state_dict(here.state_dict())
    for n_q, n in ((70, 70), (40, 150)):
        q, k, v = (torch.randn(2, h, m, 16) for h, m in ((4, n_q), (2, n), (2, n)))
        more: dict[str, Any] = {"layer": spec.layers - 1}
        if spec.inputs:
            every = {"t": torch.rand(2, n) < 0.3, "near": torch.randn(2, 4, n_q, n)}
            more["inputs"] = {name: every[name] for name in spec.inputs}
        for mask in (None, torch.rand(2, n) < 0.8):
            outs = [each(q, k, v, key_padding_mask=mask, **more) for each in (there, here)]
            torch.testing.assert_close(*outs)


def compared(body: str, n_q: int, n: int, padded: bool, **more: Any) -> None:
    """Values and gradients of the file are those of the package, in float64."""
    spec = spec_of(body)
    given = [numbers((2, h, m, 4), m).requires_grad_() for h, m in ((4, n_q), (2, n), (2, n))]
    given = [x if body.count("heads") == 0 else x[:, :2] for x in given]
    more["key_padding_mask"] = torch.arange(n) % 5 < torch.tensor([[4], [2]]) if padded else None
    inputs = (more.get("inputs") or {}).values()
    leaves, both = [*given, *(x for x in inputs if x.requires_grad)], []
    for module in (module_of(body).double(), spec.compile().double()):
        out = module(*given, **more)
        grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        both.append([out.detach(), *grads])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


ACROSS = (
    "cross attend where(abs(q * n - k * m) <= 2 * m and q < n) | rows(last(2))",
    "cross attend shift(full, by = -3) & ~window(radius = 4) | transpose(columns(last(3)))",
    "cross attend block(size = 4) | global(last(2) | first(1)) normalize sigmoid",
    "cross input t: numbers input x: tokens heads 2 attend where(t(k) * 2 < q) | columns(x)"
    " head 1 { attend powers(base = 2) } score softcap(cap = 3)",
    "cross attend linear()",
)


@pytest.mark.parametrize("body", ACROSS)
def test_two_sequences_are_computed_as_the_package_does(body: str) -> None:
    for m, n in ((7, 7), (5, 20), (20, 5), (9, 1), (3, 0)):
        inputs = {"t": numbers((2, n), 3), "x": numbers((2, n), 4) > 1} if "input" in body else None
        compared(body, m, n, padded=m > n > 0, inputs=inputs)


NUMBERS = (
    "where(t(k) <= t(q) and t(k) == t(k))",
    "where(abs(t(q) - t(k)) <= 1.5 or 2 * t(k) + 1 > 2 * t(k))",
    "where(max(t(q), 3, t(k) / 2) ** 3 < 40 or ceil(t(k) / 3) == 1) & where(q - k < t(q))",
    "where(t(k) in {1, 2, 7} or min(t(q), 2.5) in 0..t(k))",
)


@pytest.mark.parametrize("graph", NUMBERS)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32, torch.float64])
def test_numbers_are_compared_as_the_package_does(graph: str, kind: torch.dtype) -> None:
    times = (6 * numbers((2, 23), 4)).to(kind)
    if kind.is_floating_point:
        times[:, 3:5], times[:, 9], times[:, 12] = torch.nan, torch.inf, -torch.inf
    for n_q in (23, 8):
        compared(f"input t: numbers attend {graph}", n_q, 23, n_q < 23, inputs={"t": times})


SCORES = (
    "causal attend full score s * 2 ** -head score s + 0.5 ** head * (q - k) score tanh(s)",
    "causal attend window(before = 5, after = 0) score s - log2(1 + q - k) + [1, 0.5][k % 2]",
    "attend full score near(q, k) + [s, 2 * s, near(q, k)][(q - k) % 3] normalize relu",
    "attend full score s + (q > k) + (q > 2 or k < 3) - (k in {1, 7}) + [n, 2, n // 2][q % 3] / n",
    "attend self | prefix(4) score s - abs(t(q) - t(k)) / 7 + (d(q) == d(k)) * 0.7 + (k < p) / 2",
    "attend full score s + [1, 2, 5][min(max(floor(t(q) / 2), 0), 2)] - (t(k) < 2) ** 2",
    "attend full score near(q, k) * s / (abs(t(k)) + 1) - t(k) // 3 score softcap(cap = 2 * n)",
    "attend full score s + isqrt(abs(q - k)) - ceil((q - k) / 3) score s * exp(-abs(q - k))",
    "attend full score s + log(k // 4) score s / 2 scale 2",
    "causal attend full score 0.1 * (q - k) score max(s, near(q, k)) - sqrt(n) normalize softmax1",
    "attend full score 3",
)


@pytest.mark.parametrize("body", SCORES)
def test_scores_are_changed_as_the_package_does(body: str) -> None:
    kinds = {"near": "pairs", "t": "numbers", "d": "ids", "p": "length"}
    read = [x for x in kinds if re.search(rf"\b{x}\b", body)]
    body = f"heads 2 {' '.join(f'input {x}: {kinds[x]}' for x in read)} {body}"
    for n_q, n, real in ((13, 13, False), (5, 13, True)):
        near = numbers((2, 1 + real, n_q, n), 5).requires_grad_()
        t, d = numbers((2, n), 3) * 3, numbers((2, n), 4).long()
        every = {"near": near, "t": t if real else t.long(), "d": d, "p": torch.tensor([4, 7])}
        compared(body, n_q, n, real, inputs={x: every[x] for x in read})


def test_a_list_has_no_number_beyond_its_ends_and_only_pairs_read_it() -> None:
    q, k, v = (x.double().requires_grad_() for x in torch.randn(3, 1, 1, 9, 4))
    near = "causal attend window(before = 3, after = 0) score s * [4, 3, 2, 1][q - k]"
    out = module_of(near)(q, k, v)
    torch.testing.assert_close(out, spec_of(near).compile()(q, k, v))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    far = module_of("causal attend full score s * [4, 3, 2, 1][q - k]")(q, k, v)
    assert (far.isnan().all(-1)[0, 0] == (torch.arange(9) > 3)).all()


def test_a_wrong_score_is_found() -> None:
    spec = spec_of("heads 2 attend full score s - 0.1 * abs(q - k)")
    assert is_verified(spec, run(spec)["Sample"])
    wrong = body_of(spec).replace("0.1", "0.1000001")
    assert not is_verified(spec, run(spec, wrong)["Sample"])


LISTS = (
    "heads 3 attend where(abs(q - k) <= [1, 5, 0][head] or [2, 7, 0.5, 3][k % 4] < q)",
    "layers 2 attend window(radius = [3, 1][layer]) | where(q - k == [n // 2, 2][q % 2])",
)


@pytest.mark.parametrize("body", LISTS)
def test_masks_read_lists(body: str) -> None:
    spec = spec_of(body)
    for layer in range(spec.layers):
        mask_mod = run(spec)["mask_mod_of"](layer, (1, 3, 12, 12), "cpu", {})
        held = create_mask(mask_mod, 1, 3, 12, 12, device="cpu")[0].numpy()
        heads = range(spec.heads or 1)
        assert all((held[head] == spec.mask(12, layer, head)).all() for head in heads)


def test_sizes_are_checked_whenever_they_are_known() -> None:
    q = torch.randn(1, 1, 12, 4)
    module = module_of("attend window(radius = n - 10)")
    assert module(q, q, q).shape == q.shape
    with pytest.raises(ValueError, match=r"`radius` must be between 0 and .*, got -1"):
        module(q[:, :, :9], q[:, :, :9], q[:, :, :9])
    space = run(spec_of("attend where(q * k * k * k <= n)"))
    with pytest.raises(ValueError, match="64 bits up to n = 32768, got 40000"):
        space["mask_mod_of"](0, (1, 1, 1, 40000), "cpu", {})
    with pytest.raises(ValueError, match="the grid has 12 positions, got n = 9"):
        module_of("sequence grid(3, 4) attend axial")(q[:, :, :9], q[:, :, :9], q[:, :, :9])


LONG = " + ".join(f"isqrt(n + {more})" for more in range(8))
AWKWARD = (
    *(
        f"input {name}: tokens heads 2 attend columns({name})"
        " head 1 { attend random(keys = 3) | expander(degree = 4) }"
        for name in ("mask_mod", "SLOTS", "range", "distinct", "cycles")
    ),
    "attend where(k <= isqrt(q + 3))",
    f"heads 2 attend full head 0 {{ attend window(radius = {LONG}) }}",
)


@pytest.mark.parametrize("body", AWKWARD)
def test_names_and_long_sizes_are_written_so_that_a_file_runs(body: str) -> None:
    assert "Verified" in spec_of(body).emit(standalone=True)


def test_a_spec_of_some_heads_is_traced_at_free_lengths() -> None:
    module, q = module_of("heads 2 attend window(radius = 2)"), torch.randn(1, 2, 9, 4)
    traced = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(traced(q, q, q), module(q, q, q))


@pytest.mark.parametrize("standalone", [True, False])
def test_a_score_without_a_value_is_the_fault_of_the_spec(standalone: bool) -> None:
    spec = spec_of("attend window(radius = 5) score s + [0.5, 1.5, 2.5][abs(q - k) % 4]")
    with pytest.raises(AttnSpecError, match="no output for query 0 in head 0 at n = 65"):
        spec.emit(standalone=standalone)


def test_sums_in_frames_that_are_far_are_numbers_and_elu1_has_a_slope_of_1_at_0() -> None:
    q, k, v = torch.randn(3, 1, 1, 50, 64)
    assert module_of("attend rbf(features = 32)")(q, k, v).isfinite().all()
    q, k = torch.zeros(2, 1, 1, 2, 1, dtype=torch.float64, requires_grad=True)
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).double()
    (slope,) = torch.autograd.grad(module_of("attend linear(feature = elu1)")(q, k, v).sum(), k)
    # (g(k1)) / (g(k0) + g(k1)) of both queries
    torch.testing.assert_close(
        slope.flatten(), torch.tensor([-0.5, 0.5]).double(), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    "body", ["heads 1 attend full score bias()", "causal attend gmlp(max_length = 9)"]
)
def test_parameters_may_be_passed_to_a_functional_call(body: str) -> None:
    module, q = run(spec_of(body))["Sample"](4), torch.randn(1, 1, 9, 4)
    other = {name: torch.randn_like(x) for name, x in module.named_parameters()}
    out = torch.func.functional_call(module, other, (q, q, q))
    module.load_state_dict(other)
    torch.testing.assert_close(module(q, q, q), out)


def test_edges_of_shapes() -> None:
    for body in (
        "attend window(radius = 2)",
        "heads 2 attend full score bias()",
        "attend linear()",
    ):
        module = module_of(body)
        for batch, n_q, n in ((0, 5, 5), (1, 0, 0), (1, 0, 5)):
            q, k, v = (torch.randn(batch, 2, m, 4, requires_grad=True) for m in (n_q, n, n))
            out = module(q, k, v)
            assert out.shape == (batch, 2, n_q, 4)
            out.sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        "attend where(abs(q - k) < max(n, 3)) | self",
        "attend transpose(summary(stride = max(1, isqrt(n)), cells = 1)) & full | self",
        "attend random_blocks(size = max(1, n // 4) + 1, blocks = 1) | self",
    ],
)
def test_numbers_of_n_within_others_are_written(body: str) -> None:
    q, k, v = torch.randn(3, 2, 1, 11, 4)
    assert torch.allclose(module_of(body)(q, k, v), spec_of(body).compile()(q, k, v))


def test_masks_are_kept_by_length_and_nothing_of_a_mode_reaches_the_next_call() -> None:
    space = run(spec_of(BODIES["random"]))
    module, q = space["Sample"](), torch.randn(1, 2, 9, 4, requires_grad=True)
    with torch.inference_mode():
        out = module(q, q, q)
    torch.testing.assert_close(module(q, q, q), out)
    module(q, q, q).sum().backward()
    assert space["kept"].cache_info().misses == 1
    for n in range(10, 30):
        module(*torch.randn(3, 1, 2, n, 4))
    assert space["kept"].cache_info().currsize == 8


def test_a_draw_that_is_rejected_is_drawn_again() -> None:
    # two thirds of 2**32 as a bound rejects a third of all words
    row = torch.arange(200)
    philox = run(spec_of("attend random(keys = 7)"))["philox"]
    words = philox(row, torch.zeros_like(row), 0, (RANDOM, 0, 0))[0]
    bound = 3 * 2**30
    assert 20 < int(((words * bound & 0xFFFFFFFF) < 2**32 % bound).sum()) < 120
    # seeds beyond 63 bits, many keys of few
    for body in ("attend random(keys = 7, seed = 4611686018427387903)", "attend random(keys = 97)"):
        mask_mod = run(spec_of(body))["mask_mod_of"](0, (1, 2, 97, 97), "cpu", {})
        held = create_mask(mask_mod, 1, 2, 97, 97, device="cpu")[0].numpy()
        assert all((held[head] == spec_of(body).mask(97, head=head)).all() for head in range(2))


@pytest.mark.parametrize("size", [4, 64, 512])
def test_a_wrong_mask_is_found_and_beyond_all_sizes(size: int) -> None:
    spec = spec_of("attend window(radius = 3)")
    wrong = body_of(spec).replace("k - q <= 3", "k - q <= 4")
    assert is_verified(spec, run(spec)["Sample"])
    assert not is_verified(spec, run(spec, wrong)["Sample"])
    spec = spec_of(f"causal input t: length attend random_blocks(size = {size}, blocks = 3)")
    n = beyond(spec.program)
    assert mask_alone(spec.program, n, run(spec)["mask_mod_of"])[1] is None
    wrong = body_of(spec).replace(", head), True)", ", head), False)")
    assert "head 0" in (mask_alone(spec.program, n, run(spec, wrong)["mask_mod_of"])[1] or "")


def test_the_docstring_says_what_was_verified() -> None:
    document = ast.get_docstring(ast.parse(spec_of("attend window(radius = 3)").emit(True)))
    assert document is not None
    assert "attention = Sample()" in document
    assert "Verified when it was compiled: at n = 65 every pair, values and gradients;" in document
    far = spec_of("causal attend random_blocks(size = 64, blocks = 3)").emit(True)
    assert "at n = 385 the pairs of" in " ".join(far.split())
