"""`return_lse`: log-sum-exps of every backend against the definition, with gradients, and what they
are for, merging outputs over other keys."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import BACKEND_NAMES, GRAPHS, module_of, spec_of, tensors

from attnspec import parse
from attnspec.runtime import CompiledAttention

NAMES = ("full", "causal", "strided", "random blocks", "empty rows", "where")


def scores_of(
    module: CompiledAttention, q: torch.Tensor, k: torch.Tensor, held: torch.Tensor
) -> torch.Tensor:
    """Scaled scores [B, H, n_q, n_k], -inf where a pair is not `held`."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~held, -math.inf)


def finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > -math.inf, x, 0.0)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_the_definition(name: str, backend: str) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], backend)
    for n, n_q, padded in ((1, 1, False), (17, 17, True), (130, 130, True), (130, 40, False)):
        q, k, v = given = tensors(2, 4, n_q, n, key_heads=2, out_size=5)
        padding = None
        held = torch.stack([torch.from_numpy(spec.mask(n, head=h)) for h in range(4)])
        held = held[None, :, n - n_q :].expand(2, -1, -1, -1)
        if padded:
            padding = torch.ones(2, n, dtype=torch.bool)
            padding[0, : n // 3] = False
            held = held & padding[:, None, None]
        out, lse = module(q, k, v, key_padding_mask=padding, return_lse=True)
        exact = torch.logsumexp(scores_of(module, q, k, held), -1)
        empty = ~held.any(-1)
        assert lse.shape == (2, 4, n_q)
        assert ((lse == -math.inf) == empty).all()
        torch.testing.assert_close(finite(lse), finite(exact), rtol=0, atol=1e-12)
        plain = module(q, k, v, key_padding_mask=padding)
        torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
        # what asks for both outputs, and for the log-sum-exps alone
        weights = torch.softmax(scores_of(module, q, k, held), -1).nan_to_num(0.0)
        other = weights @ v.repeat_interleave(2, 1)
        for both in (True, False):
            losses = [
                finite(sums).sin().sum() + (found.square().sum() if both else 0.0)
                for found, sums in ((out, lse), (other, exact))
            ]
            wanted = given if both else given[:2]
            found, right = (torch.autograd.grad(x, wanted, retain_graph=True) for x in losses)
            for mine, meant in zip(found, right, strict=True):
                torch.testing.assert_close(mine, meant.nan_to_num(0.0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_outputs_over_disjoint_keys_are_merged_by_them(backend: str) -> None:
    q, k, v = tensors(2, 2, 150, 150)
    whole = module_of("causal attend full", backend)(q, k, v)
    near, far = (
        module_of(f"causal attend {body}", backend)
        for body in ("window(before = 20, after = 0)", "full - window(before = 20, after = 0)")
    )
    (o1, l1), (o2, l2) = (each(q, k, v, return_lse=True) for each in (near, far))
    share = torch.sigmoid(l2 - l1)[..., None]
    torch.testing.assert_close(torch.lerp(o1, o2, share), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "bands", "tiles", "dense"])
def test_softmax1_counts_its_own_logit(backend: str) -> None:
    module = module_of("causal attend window(before = 9, after = 0) normalize softmax1", backend)
    q, k, v = tensors(1, 2, 40, 40)
    _, lse = module(q, k, v, return_lse=True)
    at = torch.arange(40)
    held = (at <= at[:, None]) & (at >= at[:, None] - 9)
    scores = torch.cat([scores_of(module, q, k, held), q.new_zeros(1, 2, 40, 1)], -1)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "bands"])
def test_they_can_be_differentiated_twice(backend: str) -> None:
    module = module_of("attend window(radius = 4) - self", backend)
    q, k, v = tensors(1, 1, 9, 9, size=3)

    def both(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = module(*given, return_lse=True)
        return out, lse

    assert torch.autograd.gradgradcheck(both, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_they_are_float32_at_least(dtype: torch.dtype) -> None:
    module = parse("attention a { attend window(radius = 9) }").compile()
    q, k, v = (x.detach().to(dtype) for x in tensors(1, 2, 70, 70))
    out, lse = module(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(
    "body",
    [
        "attend linear()",
        "attend window(radius = 3) + linear()",
        "attend full normalize sigmoid",
        "attend full normalize relu",
        "input d: ids attend same(d) normalize relu",
    ],
)
def test_weights_that_are_no_softmax_have_none(body: str) -> None:
    module = parse(f"attention a {{ {body} }}").compile()
    inputs = {"d": torch.zeros(2, 30, dtype=torch.int64)} if "input" in body else None
    with pytest.raises(ValueError, match="log-sum-exps, and what `a` weighs by is no softmax"):
        module(*tensors(2, 2, 30, 30), inputs=inputs, return_lse=True)


def test_nothing_has_minus_infinity() -> None:
    module = parse("attention a { attend full }").compile()
    for n_q, n_k in ((0, 0), (0, 5), (3, 0)):
        q, k, v = tensors(1, 2, n_q, n_k)
        if n_q <= n_k:
            out, lse = module(q, k, v, return_lse=True)
            assert (out.shape, lse.shape) == ((1, 2, n_q, 8), (1, 2, n_q))


def test_packed_documents_have_them_for_each_sample() -> None:
    module = parse("attention a { input d: ids causal attend same(d) }").compile()
    documents = torch.arange(90).div(20, rounding_mode="floor").expand(2, -1).clone()
    documents[1, 50:] = 9
    q, k, v = tensors(2, 2, 90, 90)
    _, lse = module(q, k, v, inputs={"d": documents}, return_lse=True)
    held = (documents[:, :, None] == documents[:, None]) & torch.ones(90, 90).tril().bool()
    exact = scores_of(module, q, k, held[:, None]).logsumexp(-1)
    torch.testing.assert_close(lse, exact, rtol=0, atol=1e-12)
