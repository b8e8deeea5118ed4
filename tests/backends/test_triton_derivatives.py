"""Forward and second derivatives through the backend `triton`: found by other ways, never zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_checks import ALONG, check_transforms, module_of, tensors
from interpreted import interpreted
from torch.autograd import forward_ad

__all__ = ["interpreted"]

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

N = 4

BODIES = {
    "static": "attend window(radius = 1) | columns(first(1))",
    "biased": "heads 1 attend full score bias(buckets = 4, max_distance = 3) normalize softmax1",
    "labels": "input x: ids attend same(x)",
    "inputs": "input x: ids attend where(x(k) <= x(q)) & window(radius = 2)",
    "decided": "causal attend topk(blocks = 1, size = 2, queries = 1) | self",
    "sums": "causal attend linear()",
    "a mechanism beside": "causal attend self + linear()",
}


def called(body: str) -> Callable[..., torch.Tensor]:
    """A module as a function of q, k and v; where there is one, of its learned table too."""
    module = module_of(BODIES[body], "triton").double()
    inputs = {"x": torch.tensor([[0, 0, 1, 1]])} if "input x" in BODIES[body] else None
    learned = dict(module.named_parameters())

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        names = dict(zip(learned, own, strict=True))
        given = {"inputs": inputs} if inputs else {}
        out: torch.Tensor = torch.func.functional_call(module, names, (q, k, v), given)
        return out

    return run


def given_to(body: str) -> list[torch.Tensor]:
    """Queries, keys and values, and what is learned."""
    torch.manual_seed(3)
    learned = module_of(BODIES[body], "triton").parameters()
    more = [torch.randn(x.shape, dtype=torch.float64).requires_grad_() for x in learned]
    return [*tensors(1, 1, N, N, size=2), *more]


@pytest.mark.parametrize("body", BODIES)
def test_forward_derivatives(body: str) -> None:
    run, given = called(body), [x.detach() for x in given_to(body)]
    ways = [torch.randn_like(x) for x in given]
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, given, ways)
        moved = forward_ad.unpack_dual(run(*duals)).tangent  # type: ignore[no-untyped-call]
    step = 1e-6
    ends = [
        run(*(x + sign * step * way for x, way in zip(given, ways, strict=True)))
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]) / (2 * step)
    assert slope.abs().max() > 0.01
    assert moved is not None
    torch.testing.assert_close(moved, slope, rtol=1e-6, atol=1e-7)


# those of sums are looked at where these are tested
@pytest.mark.parametrize("body", [x for x in BODIES if x not in ("sums", "a mechanism beside")])
def test_second_derivatives(body: str) -> None:
    run, given = called(body), given_to(body)
    assert torch.autograd.gradgradcheck(run, given, **ALONG)
    grads = torch.autograd.grad(run(*given).square().sum(), given, create_graph=True)
    total = torch.stack([x.square().sum() for x in grads]).sum()
    again = torch.autograd.grad(total, given)
    assert all(x.abs().max() > 1e-6 for x in again)


@pytest.mark.parametrize("body", ["static", "labels", "inputs", "decided"])
def test_transforms(body: str) -> None:
    run = called(body)
    check_transforms(run, *(x.detach() for x in given_to(body)[:3]))  # type: ignore[arg-type]


def test_derivatives_of_log_sum_exps() -> None:
    module = module_of(BODIES["static"], "triton")

    def run(*given: torch.Tensor) -> torch.Tensor:
        lse: torch.Tensor = module(*given, return_lse=True)[1]
        return lse

    assert torch.autograd.gradgradcheck(run, given_to("static"), **ALONG)
