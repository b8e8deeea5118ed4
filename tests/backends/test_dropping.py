"""Weights that are dropped by counters: alike in every tiling, type, derivative and run again."""

from __future__ import annotations

import pytest
import torch
from attention_checks import ALONG, GRAPHS, tensors, with_gradients
from interpreted import interpreted
from population import spec_of
from sweeps import few
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnspec.graphs.counter_rng import DROPOUT, philox

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted")

BODIES = {
    "strided": GRAPHS["strided"],
    "empty rows": GRAPHS["empty rows"],
    "changed": "heads 2 attend window(radius = 9) score bias(buckets = 4, max_distance = 9)"
    " normalize softmax1",
    "documents": "causal input x: ids attend same(x)",
    "marks": "input x: tokens attend window(radius = 1) | global(x)",
    "chosen": "input x: choices(size = 4) causal attend chosen(x) | window(before = 2, after = 0)",
}


def inputs_of(name: str, n: int) -> dict[str, Tensor]:
    labels = torch.arange(n).expand(2, n) // 4
    given = {
        "documents": labels,
        "marks": labels == 1,
        "chosen": torch.randint(-1, n // 4, (2, 1, n, 2)),
    }
    return {"x": given[name]} if name in given else {}


@pytest.mark.parametrize("name", few(BODIES))
def test_kernels_of_a_gpu_drop_what_the_counters_say(name: str) -> None:
    """With unit values the output is the weights; drops do not depend on graph or tiles."""
    n, inputs = 12, inputs_of(name, 12) or None
    q, k, _ = (x.detach().float() for x in tensors(2, 2, n, n))
    v = torch.eye(n).expand(2, 2, n, n)
    kept = []
    for body in (BODIES[name], "attend full"):
        module = spec_of(body).compile("triton")
        given = inputs if "input" in body else None
        torch.manual_seed(5)
        dropped, plain = module(q, k, v, inputs=given, dropout_p=0.4), module(q, k, v, inputs=given)
        kept.append(torch.where(plain > 0, dropped > 0, True))
        torch.testing.assert_close(dropped, plain * kept[-1] / 0.6, rtol=1e-4, atol=1e-5)
    # what is not a pair of the graph counts as kept
    assert not (~kept[0] & kept[1]).any()
    torch.manual_seed(5)
    seed = int(torch.randint(1 << 62, (1,)))
    # by sample and head, query and key
    words = [
        philox((q, k, line, DROPOUT), (seed & 0xFFFFFFFF, seed >> 32))[0] >> 1
        for line in range(4)
        for q in range(n)
        for k in range(n)
    ]
    assert kept[1].flatten().tolist() == [word >= round(0.4 * 2**31) for word in words]


@pytest.mark.parametrize("name", few(["strided", "documents", "marks"], 3))
def test_a_module_drops_anew_and_alike_in_all_derivatives(name: str) -> None:
    module, inputs = spec_of(BODIES[name]).compile("triton"), inputs_of(name, 3)
    given = [x.detach() for x in tensors(2, 1, 3, 3, size=2)]

    def run(*parts: Tensor) -> Tensor:
        torch.manual_seed(5)
        found: Tensor = module(*parts, dropout_p=0.4, inputs=inputs or None)
        return found

    first = run(*given)
    assert torch.equal(run(*given), first)
    again = [module(*given, dropout_p=0.4, inputs=inputs or None) for _ in range(3)]
    assert any(not torch.equal(x, first) for x in again)
    parts = [x.requires_grad_() for x in given]
    assert torch.autograd.gradgradcheck(run, parts, **ALONG, check_undefined_grad=False)
    # what is computed again for its gradients drops the same, and what is differentiated again
    torch.manual_seed(5)
    later = checkpoint(
        lambda *x: module(*x, dropout_p=0.4, inputs=inputs or None), *parts, use_reentrant=False
    )
    for one, other in zip(*(with_gradients(x, parts) for x in (later, run(*parts))), strict=True):
        assert torch.equal(one, other)
    twice = torch.autograd.grad(torch.cos(run(*parts)).sum(), parts, create_graph=True)
    once = torch.autograd.grad(torch.cos(run(*parts)).sum(), parts)
    torch.testing.assert_close([x.detach() for x in twice], [*once])
