"""What every backend does alike, and which one is chosen."""

from __future__ import annotations

import gc
import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import ALONG, GRAPHS, check_transforms, tensors, with_gradients
from limited import REFUSING
from package_map import ROOT
from population import spec_of
from sweeps import checkered
from torch import Tensor
from views import KERNELS, SHAPES, Call, Case, check, errors_of, taken
from zoo import EXAMPLES

from attnspec import AttnSpecError
from attnspec.backends import BACKENDS
from attnspec.runtime import CompiledAttention
from attnspec.spec import load

every_backend = pytest.mark.parametrize("backend", KERNELS)


def module_of(body: str, backend: str, n: int = 33) -> CompiledAttention:
    """Skips where the backend takes no such graph, or no such length."""
    spec = spec_of(body)

    def made() -> CompiledAttention:
        module, heads = spec.compile(backend), spec.heads or 1
        module(*(x.detach() for x in tensors(1, heads, n, n)))
        return module

    module: CompiledAttention | None = taken(backend, made)
    if module is None:
        pytest.skip(f"{backend} does not take it")
    return module


def equal(found: Any, meant: Any, error: float = 1e-11) -> None:
    torch.testing.assert_close(found, meant, rtol=error, atol=error)


@cache
def call_of(body: str, n: int, shape: str) -> Call:
    """What is meant is computed once."""
    return Call(Case(spec_of(body), n), shape, torch.float64)


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize(
    ("backend", "asked"),
    checkered(
        KERNELS,
        (
            # of several orders, whose results are merged; short ones are a view
            ("causal attend window(before = 20, after = 0) | residue(step = 16)", 400),
            ("attend window(radius = 9) | residue(step = 16) | rows(first(2)) score alibi()", 300),
        ),
    ),
)
def test_calls_of_every_shape(backend: str, asked: tuple[str, int]) -> None:
    body, n = asked
    found = {shape: check(call_of(body, n, shape), backend) for shape in SHAPES}
    assert {shape: faults for shape, faults in found.items() if faults} == {}


@pytest.mark.parametrize("body", [GRAPHS["window"], "attend window(radius = 3) + linear()"])
@every_backend
def test_tensors_of_any_strides(backend: str, body: str) -> None:
    module = module_of(body, backend)
    shared = torch.randn(2, 70, 3, 4, 8, dtype=torch.float64)
    before = shared.clone()
    views = [
        [shared[:, :, i].transpose(1, 2) for i in range(3)],
        [shared[:, ::2, 0].transpose(1, 2).flip(2)] * 3,
        [torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(2, 4, 35, 8)] * 3,
        [torch.randn(2, 4, 8, 35, dtype=torch.float64).transpose(2, 3)] * 3,
        # values that are wider: what is filled up keeps the order of the strides it had
        [torch.randn(size, 5, 2, 1, dtype=torch.float64).permute(3, 2, 1, 0) for size in (1, 1, 4)],
        [torch.randn(2, 5, size, 3, dtype=torch.float64).permute(0, 3, 1, 2) for size in (2, 2, 4)],
        [torch.randn(size, 1, 2, 1, dtype=torch.float64).permute(3, 2, 1, 0) for size in (1, 1, 4)],
    ]
    for each in views:
        results = []
        for q, k, v in (each, [x.clone().contiguous() for x in each]):
            given = [x.detach().requires_grad_() for x in (q, k, v)]
            # the gradient of a sum has no strides at all
            sums = torch.autograd.grad(module(*given).sum(), given)
            results.append([*with_gradients(module(*given), given), *sums])
        equal(results[0], results[1])
    assert torch.equal(shared, before)


@every_backend
@pytest.mark.parametrize("name", ["causal", "strided"])
def test_the_future_leaves_causal_rows_alone(name: str, backend: str) -> None:
    module = module_of(GRAPHS[name], backend)
    q, k, v = (x.detach() for x in tensors(1, 2, 200, 200, dtype=torch.float32))
    out = module(q, k, v)
    for x in (k, v):
        x[:, :, 111:] = torch.randn_like(x[:, :, 111:]) * 100
    assert torch.equal(module(q, k, v)[:, :, :111], out[:, :, :111])


@pytest.mark.parametrize("backend", [each for each in KERNELS if each == "edges"])
def test_keys_that_a_row_does_not_read_cannot_reach_it(backend: str) -> None:
    body = "causal attend powers(base = 3)"
    module, reads = spec_of(body).compile(backend), spec_of(body).mask(70)[:, 0]
    q, k, v = (x.detach() for x in tensors(1, 2, 70, 70))
    before = module(q, k, v)
    k[:, :, 0], v[:, :, 0] = torch.nan, torch.inf
    after = module(q, k, v)
    assert torch.equal(after[:, :, ~reads], before[:, :, ~reads])
    assert not after[:, :, reads].isfinite().any()
    # nor is anything left over for the next call
    k[:, :, 0], v[:, :, 0] = 0.0, 0.0
    assert module(q, k, v).isfinite().all()


@pytest.mark.parametrize("normalize", ["softmax", "softmax1", "relu", "sigmoid"])
@every_backend
def test_large_numbers_stay_finite(backend: str, normalize: str) -> None:
    module = module_of(f"{GRAPHS['window']} normalize {normalize}", backend)
    assert module(*(x * 1e10 for x in tensors(1, 1, 70, 70))).isfinite().all()


@pytest.mark.parametrize("shape", ["plain", "right", "one query", "several"])
@pytest.mark.parametrize(
    ("body", "n"),
    [
        *((f"causal attend full scale {x}", 70) for x in ("0", "-1.5", "1e-30")),
        ("causal attend full scale -1.5 normalize softmax1", 70),
        # what is static may leave no key
        ("input d: ids causal attend (window(before = 4, after = 0) - self) & same(d)", 1),
        ("input d: ids attend where(q > 9) & same(d)", 4),
        ("input d: ids attend where(q > 9) & same(d) score alibi()", 4),
        ("input d: ids attend where(q > 9) & same(d) normalize relu", 4),
        # denominators below a floor have no gradient
        ("causal attend rfa(features = 2, floor = 0.3)", 33),
        ("causal attend rfa(features = 2, floor = 0.8)", 5),
        # rows that fill up blocks have scores that are no numbers
        ("attend block(size = 24, before = 1) score s + log(48 - abs(q - k))", 301),
        ("causal attend window(before = 2, after = 0) score s * [0.5, 2, 1][q - k]", 23),
    ],
)
def test_odd_rows_are_those_of_the_definition(body: str, n: int, shape: str) -> None:
    call = Call(Case(spec_of(body), n), shape, torch.float64)
    assert not check(call, "auto")
    assert not check(call, "tables")


def test_gradients_of_parts_that_padding_cuts_add_up() -> None:
    # longer than a mask for every sample would be kept
    call = call_of("causal attend full", 730, "right")
    assert errors_of(call, call.case.spec.compile("torch")) == []


@pytest.mark.parametrize(
    ("score", "backend"), checkered(["", "score alibi()", "score bias(buckets = 8)"], KERNELS)
)
def test_long_sequences_are_those_of_the_definition(backend: str, score: str) -> None:
    # every tile of queries reads the first keys, from ever farther away, and its own
    body = f"heads 2 attend window(radius = 40) | columns(first(64)) {score}"
    module, dense = module_of(body, backend), spec_of(body).compile("dense")
    for x in module.parameters():
        torch.nn.init.normal_(x)
    dense.load_state_dict(module.state_dict())
    given = tensors(1, 2, 1024, 1024)
    found, meant = (with_gradients(each(*given), given) for each in (module, dense))
    equal(found, meant, error=1e-9)


@pytest.mark.parametrize("heads", [1, 3, 12, 40])
def test_alibi_has_the_slopes_of_its_paper(heads: int) -> None:
    """For a spec that says the number of heads, and for one that takes that of the call."""
    for said in ("", f"heads {heads}"):
        low = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (h + 1) / low) for h in range(low)]
        slopes += [2 ** (-8 * (h + 1) / (2 * low)) for h in range(0, 2 * low, 2)][: heads - low]
        q = torch.zeros(1, heads, 2, 4, dtype=torch.float64)
        v = torch.eye(2, dtype=torch.float64).expand(1, heads, 2, 2)
        out = spec_of(f"{said} attend full score alibi()").compile()(q, q, v)
        # of two keys the farther one weighs exp(-slope) of the nearer one
        found = -torch.log(out[0, :, 0, 1] / out[0, :, 0, 0])
        equal(found, torch.tensor(slopes, dtype=torch.float64))


@pytest.mark.parametrize("n_q", [1, 130])
@every_backend
def test_dropout_keeps_the_mean_and_follows_the_seed(backend: str, n_q: int) -> None:
    module = module_of("attend window(radius = 40)", backend, n_q)
    q, k, v = (x.detach() for x in tensors(8, 4, n_q, 130, dtype=torch.float32))
    v = torch.ones_like(v).requires_grad_()
    torch.manual_seed(3)
    dropped = module(q, k, v, dropout_p=0.25)
    assert abs(dropped.mean() - 1) < 0.04
    assert 0.01 < dropped.std() < 0.5
    torch.manual_seed(3)
    assert torch.equal(module(q, k, v, dropout_p=0.25), dropped)
    # the output is linear in v, whatever was dropped
    (slope,) = torch.autograd.grad(dropped.sum(), v)
    torch.testing.assert_close((slope * v).sum(), dropped.sum())
    # a call says what is dropped, whatever the module's mode is
    parts = [x.requires_grad_() for x in (q, k, v)]
    found = with_gradients(module.eval()(*parts, dropout_p=1.0), parts)
    assert not found[0].any()
    assert all(x.isfinite().all() for x in found)


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("backend", ["auto", "torch", "dense"])
def test_dropout_leaves_a_row_without_a_key_zero(backend: str) -> None:
    module, parts = spec_of("attend where(k > q)").compile(backend), tensors(2, 2, 40, 40)
    for last in (39, 38):
        real = None if last == 39 else torch.arange(40).expand(2, 40) <= last
        out = module(*parts, key_padding_mask=real, dropout_p=0.3).any(-1)
        assert not out[:, :, last:].any()
        assert out[:, :, :30].sum() > 60


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize("name", ["attend full", "attend synthesizer(max_length = 600)"])
def test_the_last_queries_of_many_keys_are_those_of_a_whole_call(name: str) -> None:
    q, k, v = tensors(1, 2, 600, 600)
    module = spec_of(f"causal {name}").compile("torch" if "full" in name else "auto").double()
    torch.testing.assert_close(module(q[:, :, -130:], k, v), module(q, k, v)[:, :, -130:])


def test_groups_of_heads_where_torchs_call_takes_the_larger_alone() -> None:
    # ten heads of 700 x 700 scores go through it under dropout, two by the definition
    spec = load(EXAMPLES / "blockbert.attn")
    q, k, v = tensors(1, 12, 700, 700, dtype=torch.float32)
    dropped = spec.compile("torch")(q, k, v, dropout_p=1e-12)
    equal(dropped, spec.compile("dense")(q, k, v), error=1e-4)


@pytest.mark.parametrize(
    ("backend", "body"),
    checkered(
        KERNELS,
        (
            GRAPHS["window"],
            "causal attend random(keys = 6)",
            "attend where(k * 3 == q or k + 9 == q)",
            "heads 2 causal attend strided(stride = 4) score bias(buckets = 8)",
            "heads 2 attend window(radius = 2) | columns(first(2)) score alibi()"
            " normalize softmax1",
            "heads 2 attend window(radius = 2) score softcap(cap = 2)",
        ),
    ),
)
def test_derivatives_of_derivatives(backend: str, body: str) -> None:
    module = module_of(body, backend, 9).double()
    for x in module.parameters():
        torch.nn.init.normal_(x)

    def both(*parts: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = module(*parts, return_lse=True)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    for n_q in (1, 7):
        given = tensors(1, 2, n_q, 9, size=2)
        once = taken(backend, partial(torch.autograd.gradcheck, both, given, **ALONG))
        if once is None:
            continue
        assert once
        assert torch.autograd.gradgradcheck(both, given, **ALONG)


@pytest.mark.parametrize(
    ("body", "traced"),
    [
        ("window(radius = 3)", False),
        ("window(radius = 3)", True),
        ("linear()", False),
        ("window(radius = 3) + linear()", False),
        ("lsh(rounds = 2, chunk = 8)", False),
        ("sinkhorn(size = 8)", False),
        ("sinkhorn(size = 8)", True),
    ],
)
@every_backend
def test_gradients_that_are_differentiated_again_are_the_same(
    body: str, traced: bool, backend: str
) -> None:
    """Of keys that are made of the queries, too: each has its own share."""
    if traced and backend != "auto":
        pytest.skip("one is enough")
    spec = spec_of(f"attend {body}")
    module = taken(backend, lambda: spec.compile(backend, head_size=8))
    if module is None:
        pytest.skip(f"{backend} does not take it")

    def attend(q: Tensor) -> Tensor:
        k = q if "lsh" in body else q.roll(1, 3) * 0.7
        out: Tensor = module(q, k, k * 2)
        return out

    run = torch.compile(attend, backend="eager") if traced else attend
    q = torch.randn(1, 2, 40, 8).requires_grad_()

    def grad(more: bool) -> Tensor:
        return torch.autograd.grad(run(q).square().sum(), q, create_graph=more)[0]

    once = taken(backend, lambda: grad(False))
    if once is None:
        pytest.skip(f"{backend} does not take it")
    equal(once, grad(True), error=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["blocks", "random", "empty rows"])
@every_backend
def test_transforms(backend: str, name: str) -> None:
    module = module_of(GRAPHS[name], backend, 40)
    q, k, v = (x.detach() for x in tensors(2, 2, 40, 40))
    check_transforms(module, q, k, v)
    many = torch.func.vmap(
        lambda *each: module(*(x[None] for x in each), return_lse=True), out_dims=1
    )(q, k, v)
    for one, other in zip(many, module(q, k, v, return_lse=True), strict=True):
        equal(one[0], other)


def test_heads_of_several_graphs_are_transformed_and_traced() -> None:
    body = (
        "heads 4 attend block(size = 16) | global(first(16)) | random_blocks(size = 16, blocks = 2)"
    )
    module, same = spec_of(body).compile(), spec_of(body).compile("dense")
    q, k, v = (x.detach() for x in tensors(2, 4, 40, 40, key_heads=2))
    many = torch.func.vmap(lambda *x: module(*(y[None] for y in x))[0])(q, k, v)
    equal(many, same(q, k, v))
    traced = torch.compile(lambda *x: module(*x, return_lse=True), backend="eager", fullgraph=True)
    equal(traced(q, k, v), same(q, k, v, return_lse=True))


@pytest.mark.parametrize("seen", [True, False], ids=["torch", "numpy"])
@pytest.mark.parametrize("what", ["labels", "padding"])
def test_arguments_written_to_between_calls_are_read_again(what: str, seen: bool) -> None:
    """Also by numpy, whose writing torch does not count."""
    labels, given = what == "labels", tensors(1, 1, 40, 40)
    body = "input d: ids attend where(d(q) - d(k) <= 0)" if labels else "attend window(radius = 9)"
    spec, array = spec_of(body), np.full((1, 40), not labels, np.int64 if labels else bool)
    module, x = spec.compile(), torch.from_numpy(array)

    def call(module: CompiledAttention, x: Tensor) -> Tensor:
        more: Any = {"inputs": {"d": x}} if labels else {"key_padding_mask": x}
        out: Tensor = module(*given, **more)
        return out

    before = call(module, x)
    (x if seen else array)[:, 4:] = labels
    after = call(module, x)
    assert torch.equal(after, call(spec.compile(), x.clone()))
    assert not torch.equal(after, before)


def bytes_alive() -> int:
    """The bytes of all tensors that live, each storage once."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) is Tensor)
    # what a transform wrapped, kept by the error of another test, has no storage
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    storages = (x.untyped_storage() for x in tensors if not wrapped(x))
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def test_masks_go_with_their_modules_and_those_of_many_paddings_are_bounded() -> None:
    before = bytes_alive()
    module = spec_of("attend window(radius = 5)").compile("torch")
    padding = torch.arange(500) < torch.tensor([[400], [500]])
    module(*torch.zeros(3, 2, 1, 500, 4).unbind(0), key_padding_mask=padding)
    assert bytes_alive() > before + 4 * 500**2
    del module
    assert bytes_alive() < before + 500**2
    module = spec_of("attend window(radius = 5)").compile("torch")
    for batch in range(1, 60):
        padding = torch.arange(40).expand(batch, -1) >= batch % 40
        module(*torch.zeros(3, batch, 1, 40, 4).unbind(0), key_padding_mask=padding)
    # the last 4, of 56 to 59 samples, and the one without padding
    assert bytes_alive() < before + 2 * 4 * 40**2 * sum(range(56, 61))


@pytest.mark.parametrize(
    ("n_q", "body", "backend"),
    checkered(
        [1, 130],
        [GRAPHS["strided"], GRAPHS["random"], "heads 4 attend window(radius = 9) score alibi()"],
        KERNELS,
    ),
)
def test_modes_of_the_caller_reach_no_kernel_and_no_next_call(
    body: str, backend: str, n_q: int
) -> None:
    given, padding = tensors(2, 4, n_q, 130), torch.ones(2, 130, dtype=torch.bool)
    padding[1, 90:] = False
    plain = module_of(body, backend, n_q)(*given, key_padding_mask=padding)
    wanted = with_gradients(plain, given)
    for enter in (torch.inference_mode, partial(torch.device, "meta"), torch.no_grad):
        module = spec_of(body).compile(backend)
        with enter():
            equal(module(*given, key_padding_mask=padding).detach(), wanted[0])
        found = with_gradients(module(*given, key_padding_mask=padding), given)
        equal(found, wanted)
    module, (q, k, v) = spec_of(body).compile(backend), (x.detach() for x in given)
    torch.func.grad(lambda q: module(q, k, v, key_padding_mask=padding).sum())(q)
    equal(module(q, k, v, key_padding_mask=padding), wanted[0])
    narrow = [x.float() for x in (q, k, v)]
    torch.set_default_dtype(torch.float64)
    try:
        assert spec_of(body).compile(backend)(*narrow).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "body", ["where(q != k // (n // 2))", "where(q // (n // 2) < 3) + linear()"]
)
@every_backend
def test_a_length_without_a_value_says_nothing_of_a_backend(body: str, backend: str) -> None:
    module = module_of(f"attend {body}", backend, 6)
    # it divides by 0
    with pytest.raises(ValueError, match="division by zero"):
        module(*tensors(1, 1, 1, 1))


def test_refusals_are_named() -> None:
    spec = spec_of("input t: tokens attend window(radius = 3) | global(t)")
    refused = {c.backend.name: c.refusal for c in spec.plan(4096).steps[0].candidates}
    assert refused.keys() == {each.name for each in BACKENDS}
    some = [name for name, reason in refused.items() if reason and "`t`" in reason]
    assert some
    for name in some:
        with pytest.raises(AttnSpecError, match=f"'{name}' refuses: .*`t`"):
            spec.plan(64, backend=name)
        assert f"refused: {refused[name]}" in str(spec.plan(4096))
    for ask in (spec.plan, spec_of("attend full").plan):
        with pytest.raises(AttnSpecError, match=r"one of auto, .*got 'quick'"):
            ask(0, backend="quick")


@pytest.mark.limits(REFUSING)
def test_a_mask_larger_than_the_limit_is_refused() -> None:
    for body, refused in (("window(radius = 5)", True), ("full", False)):
        steps = spec_of(f"attend {body}").plan(41).steps[0].candidates
        reasons = {c.backend.name: c.refusal for c in steps}
        assert bool(reasons["torch"]) == refused


def test_the_cheapest_is_chosen_and_named_ones_are_kept() -> None:
    spec = spec_of("attend window(radius = 64)")
    for n in (64, 16384):
        ranked = spec.plan(n).steps[0].candidates
        seconds = [c.seconds for c in ranked if c.refusal is None]
        assert seconds == sorted(seconds)
    assert spec.plan(16384).steps[0].chosen.name != "dense"
    assert spec.plan(16384, backend="dense").steps[0].chosen.name == "dense"
    assert str(spec.plan(0)) == "sample, n = 0, cpu: nothing to run"
    with pytest.raises(ValueError, match="has 2 x 3 = 6 cells, got n = 0"):
        spec_of("sequence grid(2, 3) attend axial").plan(0)


def test_estimates_are_shown_for_the_device_that_they_are_about() -> None:
    spec = spec_of("attend window(radius = 3)")
    assert "forward, by default rates (NVIDIA H200)" in str(spec.plan(512, device="cuda:1"))
    head, *lines = str(spec.plan(512, device="mps")).splitlines()
    assert "no estimates for mps" in head
    assert any("not on mps" in line for line in lines)
    assert not any(line.endswith((" s", " ms", " us")) for line in lines)
    assert any(line.endswith((" s", " ms", " us")) for line in str(spec.plan(512)).splitlines())


def test_every_backend_has_a_row_on_their_page() -> None:
    page = (ROOT / "backends" / "README.md").read_text(encoding="utf-8")
    assert [each.name for each in BACKENDS if f"`{each.name}`" not in page] == []


@pytest.mark.parametrize("backend", ["torch", "tables"])
@pytest.mark.parametrize(
    "body",
    [
        "scale 2.0 ** 100 attend window(radius = 3)",
        "attend window(radius = 3) score s - 6e29",
        "causal attend full score s - 1e31 * (1 + abs(q - k))",
    ],
)
def test_scores_of_any_size_lie_above_what_is_masked(body: str, backend: str) -> None:
    parts = torch.randn(3, 1, 1, 20, 8)
    meant = spec_of(body).compile(backend="dense")(*parts)
    torch.testing.assert_close(spec_of(body).compile(backend=backend)(*parts), meant)


@pytest.mark.parametrize(
    "body",
    [
        "attend window(radius = 8) & where(q >= 512) | residue(step = 64)",
        "attend residue(step = 64) & where(q % 64 < 32) | window(radius = 8)",
    ],
)
def test_nothing_is_read_that_was_not_written(body: str) -> None:
    # the first of two steps has not every query; torch fills fresh memory with NaN in this mode
    parts = torch.randn(3, 1, 2, 1024, 8)
    meant = spec_of(body).compile(backend="dense")(*parts)
    torch.use_deterministic_algorithms(True)
    try:
        found = spec_of(body).compile(backend="tables")(*parts)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, meant)
