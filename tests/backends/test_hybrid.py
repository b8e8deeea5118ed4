"""`GRAPH + MECHANISM`: exact on the graph's pairs, the kernel elsewhere, one denominator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_checks import check_transforms, spec_of

from attnspec.backends.factored.definitions import undivided
from attnspec.runtime import CompiledAttention
from attnspec.spec import Spec
from attnspec.verification import verify

GRAPHS = (
    "window(radius = 3)",
    "(window(before = 20, after = 0) | global(first(2)))",
    "strided(stride = 8)",
    "random(keys = 3, seed = 1)",
    "window(radius = 200)",
    "columns(every(7))",
    "rows(first(4))",
    "where(k > q + 200)",
)
MECHANISMS = (
    "linear()",
    "linear(feature = exp)",
    "linear(feature = identity)",
    "favor(features = 16)",
    "favor(features = 16, kind = trig)",
    "rfa(features = 16)",
    "taylor()",
    "taylor(order = 2)",
    "rbf(features = 16)",
)


def module_of(spec: Spec) -> CompiledAttention:
    module = spec.compile(head_size=6).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    return module


def tensors(heads: int, keys: int, n_q: int, n_k: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(n_k)
    shapes = ((heads, n_q, 6), (keys, n_k, 6), (keys, n_k, 4))
    return [
        torch.randn(1, *shape, generator=source, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def written_out(
    spec: Spec,
    module: CompiledAttention,
    given: Sequence[torch.Tensor],
    inputs: Mapping[str, np.ndarray] | None = None,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output for a batch of one, and the sums of the weights' sizes over the size of their sum:
    how much may cancel."""
    q, k, v = given
    n_q, n_k = q.shape[2], k.shape[2]
    outs, sizes = [], []
    for work, heads in module.engine.binder.works(0, q.shape[1], n_q, n_k):
        alone = replace(work, hybrid=False)
        for head in heads:
            at = head // (q.shape[1] // k.shape[1])
            tables = {
                part: module.get_parameter(name)[0, 0]
                for part, name in module.engine.tables_of(work)
            }
            mask = torch.from_numpy(spec.mask(n_k, head=head, inputs=inputs)[n_k - n_q :])
            kernel = undivided(alone, head, q[0, head], k[0, at], tables)
            exact = torch.exp(q[0, head] @ k[0, at].T / 6**0.5)
            weights = torch.where(mask, exact, kernel)
            if padding is not None:
                weights = weights * padding[0]
            total = weights.sum(-1, keepdim=True)
            sizes.append((weights.abs() + kernel.abs()).sum(-1, keepdim=True) / total.abs())
            outs.append((head, weights / total @ v[0, at]))
    found = torch.stack([out for _, out in sorted(outs, key=lambda each: each[0])])
    return found[None], torch.stack(sizes).detach().max()


SHAPES = ((2, 1, 130, 130), (2, 2, 30, 100))
"""Heads, heads of keys, queries, keys: every graph and every mechanism has both."""

CASES = [
    pytest.param(
        *(graph, mechanism, causal, SHAPES[(i // 2 + at) % 2]),
        marks=() if (i + j + at) % 2 == 0 else pytest.mark.slow,
    )
    for i, graph in enumerate(GRAPHS)
    for j, mechanism in enumerate(MECHANISMS)
    for at, causal in enumerate(("", "causal"))
]
"""Every graph with every mechanism, each either causal or not and of one shape; the other way is
slow."""


@pytest.mark.parametrize(("graph", "mechanism", "causal", "shape"), CASES)
def test_values_and_gradients_are_those_of_the_formula(
    graph: str, mechanism: str, causal: str, shape: tuple[int, int, int, int]
) -> None:
    spec = spec_of(f"{causal} attend {graph} + {mechanism}")
    module = module_of(spec)
    for heads, keys, n_q, n_k in ((2, 2, 1, 1), shape):
        given = tensors(heads, keys, n_q, n_k)
        found = module(*given)
        meant, size = written_out(spec, module, given)
        grad = torch.randn(meant.shape, generator=torch.Generator().manual_seed(1)).double()
        results = [
            [out, *torch.autograd.grad(out, given, grad, allow_unused=True, materialize_grads=True)]
            for out in (found, meant)
        ]
        for one, other in zip(*results, strict=True):
            scale = max(1.0, other.detach().abs().max().item())
            error = 1e-11 * max(1.0, size.item() ** 2)
            torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=error)


READING = {
    "documents": ("input x: ids", "same(x)"),
    "marked tokens": ("input x: tokens", "(window(radius = 5) | global(x))"),
    "a prefix": ("input x: length", "(prefix(x) | window(before = 40, after = 0))"),
    "documents in a window": ("input x: ids", "(same(x) & window(radius = 30))"),
}


def inputs_of(declared: str, batch: int, n: int) -> dict[str, torch.Tensor]:
    """Inputs that differ from sample to sample; those of the first hold or mark nothing."""
    at, sample = torch.arange(n), torch.arange(batch)
    match declared.split()[-1]:
        case "ids":
            return {"x": at // (sample[:, None] * 20 + 7)}
        case "tokens":
            return {"x": (at % 9 < sample[:, None]) & (at < 70)}
        case _:
            return {"x": sample * 13}


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("what", READING)
def test_what_reads_inputs_is_planned_verified_and_emitted(what: str) -> None:
    declared, graph = READING[what]
    spec = spec_of(f"heads 2 {declared} causal attend {graph} + favor(features = 8)")
    assert "as the data of a call decide" in str(spec.plan(150))
    found = verify(spec.program, 150)
    assert found.ok, str(found)
    assert any("tiles" in check.what for check in found.checks)
    module = module_of(spec)
    given = [x.detach() for x in tensors(2, 2, 90, 90)]
    inputs = inputs_of(declared, 1, 90)
    out = module(*given, inputs=inputs)
    space: dict[str, object] = {"__name__": "emitted"}
    exec(compile(spec.emit(), "emitted", "exec"), space)
    emitted = space["Sample"]().double()  # type: ignore[operator]
    assert torch.equal(emitted(*given, inputs=inputs), out)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("graph", ["same(x)", "(same(x) & ~self)"])
def test_transforms_of_what_reads_inputs(graph: str) -> None:
    spec = spec_of(f"input x: ids causal attend {graph} + favor(features = 8)")
    module = module_of(spec)
    q, k, v = (x.detach() for x in tensors(2, 2, 70, 70))
    inputs = inputs_of("input x: ids", 1, 70)
    out = module(q, k, v, inputs=inputs)
    found = torch.func.vmap(lambda x: module(x[None], k, v, inputs=inputs)[0])(q)
    torch.testing.assert_close(found, out)
    primal = torch.func.jvp(lambda x: module(x, k, v, inputs=inputs), (q,), (q,))[0]
    torch.testing.assert_close(primal, out)


@pytest.mark.parametrize(
    "body",
    [
        "causal heads 2 attend window(before = 9, after = 0) + linear() score bias(buckets = 8)",
        "attend window(radius = 5) + favor(features = 8) scale 0.3 score softcap(cap = 2)",
        "causal heads 3 attend window(radius = 5) + taylor() head 1 { attend linear() }"
        " head 2 { attend window(radius = 5) } score alibi()",
    ],
)
def test_scores_are_changed_on_the_graph_alone(body: str) -> None:
    if "head 1" in body:
        body = body.replace("score alibi()", "")
    found = verify(spec_of(body).program, 150)
    assert found.ok, str(found)


def test_tensors_of_any_strides() -> None:
    module = module_of(spec_of("attend window(radius = 3) + linear()"))
    shapes = ((2, 30, 6), (2, 30, 6), (2, 30, 7))
    # narrow rows with channels last: what fills them up keeps the order of their strides
    given = [
        torch.randn(1, rows, size, heads, dtype=torch.float64).permute(0, 3, 1, 2).requires_grad_()
        for heads, rows, size in shapes
    ]
    plain = [x.detach().contiguous().requires_grad_() for x in given]
    for found, meant in zip(
        torch.autograd.grad(module(*given).square().sum(), given),
        torch.autograd.grad(module(*plain).square().sum(), plain),
        strict=True,
    ):
        torch.testing.assert_close(found, meant, rtol=0, atol=1e-12)
    torch.testing.assert_close(module(*given), module(*plain), rtol=0, atol=1e-12)


def test_padding_is_as_if_it_were_not_there() -> None:
    module = module_of(spec_of("causal attend where(k % 2 == 0 or q == k) + favor(features = 8)"))
    q, k, v = tensors(2, 2, 90, 90)
    padding = torch.ones(1, 90, dtype=torch.bool)
    padding[:, 70:] = False
    out = module(q, k, v, key_padding_mask=padding)[:, :, :70]
    torch.testing.assert_close(out, module(*(x[:, :, :70] for x in (q, k, v))))


def test_no_bit_of_a_row_depends_on_the_future() -> None:
    module = module_of(spec_of("causal attend window(radius = 9) + favor(features = 8)")).float()
    q, k, v = (x.detach().float() for x in tensors(2, 2, 200, 200))
    before = module(q, k, v)
    for at in (1, 64, 150):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, at:] = 20 * torch.randn_like(x[:, :, at:])
        assert torch.equal(module(*later)[:, :, :at], before[:, :, :at])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_and_export() -> None:
    module = module_of(spec_of("causal attend window(radius = 9) + favor(features = 8)"))
    q, k, v = (x.detach().expand(2, -1, -1, -1).clone() for x in tensors(2, 2, 70, 70))
    check_transforms(module, q, k, v)
    program = torch.export.export(module, (q, k, v), strict=False)
    torch.testing.assert_close(program.module()(q, k, v), module(q, k, v))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("attend window(radius = 3) + linear(normalize = none)", "has no denominator to share"),
        ("causal attend window(radius = 3) + rfa(gated = true)", "no weight of its own"),
        ("attend window(radius = 3) + linear() normalize relu", "not of `normalize relu`"),
    ],
)
def test_what_has_no_meaning_is_refused(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(body).plan(64)


@pytest.mark.parametrize(
    "text",
    ["linear()", "linear(feature = relu)", "taylor()", "favor(features = 8, kind = relu)", "rbf()"],
)
def test_exact_weights_may_be_small(text: str) -> None:
    module = spec_of(f"causal attend window(before = 3, after = 0) + {text}").compile()
    k = torch.full((1, 1, 3, 16), -3.0, dtype=torch.float64)
    q = torch.full_like(k, 2.0).requires_grad_()
    # scores of -24: far below what divisors are kept away from 0 by, and all there is
    v = torch.arange(3.0, dtype=torch.float64)[None, None, :, None].expand(1, 1, 3, 2)
    out = module(q, k, v)
    torch.testing.assert_close(out[0, 0, :, 0].detach(), torch.tensor([0.0, 0.5, 1.0]).double())
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.abs().max() < 1e-9


@pytest.mark.parametrize("text", ["favor(features = 8)", "rbf(features = 8)", "taylor()"])
@pytest.mark.parametrize("n", [1, 4, 9])
def test_rows_that_read_the_graph_alone_have_the_frame_of_their_scores(text: str, n: int) -> None:
    module = spec_of(f"causal attend window(before = 3, after = 0) + {text}").compile().double()
    source = torch.Generator().manual_seed(n)
    # scores of about -2000, whose exponentials are 0
    q = 20 + torch.rand(1, 1, n, 16, generator=source, dtype=torch.float64)
    k = -25 - torch.rand(1, 1, n, 16, generator=source, dtype=torch.float64)
    v = torch.randn(1, 1, n, 2, generator=source, dtype=torch.float64)
    given = [x.requires_grad_() for x in (q, k, v)]
    alone = spec_of("causal attend full").compile().double()
    found, meant = (f(*given)[:, :, :4] for f in (module, alone))
    for mine, right in zip(
        [found, *torch.autograd.grad(found.square().sum(), given)],
        [meant, *torch.autograd.grad(meant.square().sum(), given)],
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 3, after = 0) + linear()",
        "input x: ids attend same(x) + linear()",
        "attend topk(keys = 3) + linear()",
    ],
)
def test_there_are_no_weights_to_drop(body: str) -> None:
    module, given = module_of(spec_of(body)), tensors(2, 2, 9, 9)
    inputs = {"x": torch.arange(9)[None]} if "input" in body else {}
    with pytest.raises(ValueError, match="`a graph with `linear`` has no weights to drop"):
        module(*given, inputs=inputs, dropout_p=0.1)
