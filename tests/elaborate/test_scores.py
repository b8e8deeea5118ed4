"""`score EXPR`: gradients of a number for each pair, and what is hidden."""

from __future__ import annotations

import pytest
import torch
from population import spec_of
from views import KERNELS, Call, Case, check

from attnspec import packed, parse


def test_numbers_of_pairs_have_gradients_and_are_checked() -> None:
    spec = spec_of("heads 2 input near: pairs attend window(radius = 3) score s * 2 + near(q, k)")
    assert spec == parse(spec.source)
    assert spec.analyse(9).edges == 2 * spec.mask(9).sum()
    module, (q, k, v) = spec.compile(), torch.randn(3, 1, 2, 9, 4)
    near = torch.randn(1, 1, 9, 9, requires_grad=True)
    for run in (module, torch.compile(module, backend="eager")):
        (grad,) = torch.autograd.grad(run(q, k, v, inputs={"near": near})[..., 0].sum(), near)
        mask = torch.from_numpy(spec.mask(9))
        assert ((grad != 0) == mask).all()
    for wrong in (near[..., :-1], near[:, :, 1:], near.expand(1, 3, 9, 9)):
        with pytest.raises(ValueError, match=r"`near` must .*, got \[1, "):
            module(q, k, v, inputs={"near": wrong})
    module.check_finite = True
    module(q, k, v, inputs={"near": near.detach().fill_(-torch.inf)})
    near.detach()[0, 0, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="query 2, key 3"):
        module(q, k, v, inputs={"near": near})
    parts = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="near"):
        packed(module, parts[0], parts[1], parts[2], torch.tensor([0, 4, 9]), inputs={"near": near})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "body",
    [
        "heads 2 causal attend residue(step = 3) | window(before = 3, after = 0)",
        "heads 2 causal attend (residue(step = 3) | self) + linear()",
        "heads 2 causal attend topk(blocks = 2, size = 4)",
    ],
)
def test_scores_that_are_no_number_beside_pairs_have_no_gradient(body: str, kernel: str) -> None:
    spec = spec_of(f"{body} score bias(buckets = 4) score s * log(1 + q - k) score s / (1 + q - k)")
    for shape in ("plain", "several"):
        assert not check(Call(Case(spec, 40), shape, torch.float64), kernel)


@pytest.mark.parametrize("more", ["", " + linear()", " normalize sigmoid"])
def test_nor_has_what_an_input_says_beside_pairs(more: str) -> None:
    graph = f"window(before = 3, after = 0){more}"
    spec = spec_of(f"input near: pairs causal attend {graph} score s * log(near(q, k))")
    pairs = torch.from_numpy(spec_of("causal attend window(before = 3, after = 0)").mask(9))
    near = torch.where(pairs, torch.rand(9, 9) + 1, 0.0)[None, None].requires_grad_()
    out = spec.compile()(*torch.randn(3, 1, 1, 9, 4), inputs={"near": near})
    (grad,) = torch.autograd.grad(out.square().sum(), near)
    # one key alone has weight 1, but for sigmoid
    assert torch.equal(grad[0, 0, 1:] != 0, pairs[1:])


def test_a_row_that_is_hidden_whole_is_zero() -> None:
    module = spec_of("attend window(radius = 1) score s + log(q > 3)").compile()
    out, lse = module(*torch.randn(3, 1, 1, 8, 4), return_lse=True)
    assert not out[:, :, :4].any()
    assert (lse[:, :, :4] == -torch.inf).all()
    assert lse[:, :, 4:].isfinite().all()


def test_the_last_queries_read_their_own_numbers() -> None:
    module = spec_of("input x: numbers attend full score s * x(q) + x(k)").compile()
    (q, k, v), given = torch.randn(3, 1, 1, 9, 4), {"x": torch.randn(1, 9)}
    last = module(q[:, :, 6:], k, v, inputs=given)
    torch.testing.assert_close(last, module(q, k, v, inputs=given)[:, :, 6:])
