"""`GRAPH + MECHANISM`: exact on the graph's pairs, the kernel elsewhere, one denominator."""

from __future__ import annotations

import pytest
import torch
from attention_checks import tensors
from population import spec_of
from sweeps import checkered, few
from views import Call, Case, errors, errors_of

MECHANISMS = (
    "linear()",
    "favor(features = 16)",
    "rbf(features = 16)",
    "taylor()",
    "taylor(order = 2)",
    "linear(feature = exp)",
    "favor(features = 16, kind = trig)",
    "rfa(features = 16)",
    "linear(feature = identity)",
)


NEARLY_ALL = [
    *(f"attend window(radius = 16) + {text}" for text in MECHANISMS[:6]),
    *(
        f"heads 2 {causal} attend {graph} + linear() score bias(buckets = 4)"
        for causal in ("", "causal")
        for graph in ("strided(stride = 2)", "(window(radius = 30) | columns(first(2)))")
    ),
    "attend block(size = 32) + linear()",
    "attend window(radius = 16) + linear() scale 0.3",
    "input s: length attend prefix(s) + linear()",
    # no rows, few rows, drawn pairs
    "attend where(k > q + 200) + rbf(features = 16)",
    "attend rows(first(4)) + taylor(order = 2)",
    "causal attend random(keys = 3, seed = 1) + linear()",
]


@pytest.mark.limits("", "tiny")
@pytest.mark.parametrize(("body", "n"), checkered(NEARLY_ALL, [1, 20, 40, 70], of=3))
def test_nothing_cancels_where_few_keys_are_left(body: str, n: int) -> None:
    call = Call(Case(spec_of(body), n), "left" if n > 40 else "plain", torch.float32, sharp=True)
    assert errors_of(call, call.case.spec.compile()) == []


def test_a_graph_of_all_pairs_leaves_the_kernel_none() -> None:
    module = spec_of("input x: ids attend same(x) + linear()").compile()
    call = Call(Case(spec_of("attend full"), 40), "plain", torch.float32, sharp=True)
    out = module(*call.tensors, inputs={"x": torch.zeros(2, 40, dtype=torch.int64)})
    grads = torch.autograd.grad(out.sum(), call.tensors)
    full = spec_of("attend full").compile()(*call.tensors)
    meant = [full, *torch.autograd.grad(full.sum(), call.tensors)]
    for one, other in zip((out, *grads), meant, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mechanism", ["linear()", "favor(features = 16)", "taylor(order = 2)"])
@pytest.mark.parametrize("graph", ["window(radius = 16)", "global(first(9))"])
def test_transforms_and_steps_are_as_exact(graph: str, mechanism: str) -> None:
    causal = "causal" if "window" in graph else ""
    spec = spec_of(f"{causal} attend {graph} + {mechanism}")
    call, module = Call(Case(spec, 70), "plain", torch.float32, sharp=True), spec.compile()
    parts = [x.detach() for x in call.tensors]
    outs = [torch.func.vmap(lambda *x: module(*(y[None] for y in x))[0])(*parts)]
    if causal:
        steps, state = [], None
        for q, k, v in zip(*(torch.split(x, [40, 1, 1, 28], 2) for x in parts), strict=True):
            out, state = module.step(q, k, v, state)
            steps.append(out)
        outs.append(torch.cat(steps, 2))
    meant, rough = (call.meant(kind, True)[:1] for kind in (torch.float64, torch.float32))
    for out in outs:
        assert errors([out], meant, rough) == []


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
@pytest.mark.parametrize("n", [1, 9])
def test_rows_that_read_the_graph_alone_have_the_frame_of_their_scores(text: str, n: int) -> None:
    q, k, v = tensors(1, 1, n, n, size=16)
    # scores of about -2000, whose exponentials are 0
    given = [20 + q.detach().sigmoid(), -25 - k.detach().sigmoid(), v.detach()]
    found = []
    for body in (f"window(before = 3, after = 0) + {text}", "full"):
        leaves = [x.clone().requires_grad_() for x in given]
        out = spec_of(f"causal attend {body}").compile()(*leaves)[:, :, :4]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


LISTED = (
    "attend (topk(blocks = 2, size = 32) | window(radius = 4)) + linear()",
    "attend lsh(buckets = n // 32, chunk = 64, share_qk = false) + favor(features = 64)",
)


@pytest.mark.parametrize("body", few(LISTED))
def test_operations_beside_lists_grow_like_their_pairs(body: str) -> None:
    counts = []
    for n in (1024, 4096):
        module, given = spec_of(body).compile(), tensors(1, 1, n, n, size=32, dtype=torch.float32)
        with torch.profiler.profile(with_flops=True) as seen:
            module(*given)
        counts.append(sum(event.flops for event in seen.key_averages()))
    assert counts[1] < 4**1.3 * counts[0]
