"""Changed scores in bands: in every order the same as the definition, with gradients."""

from __future__ import annotations

import pytest
import torch
from attention_checks import ALONG, module_of, tensors

from attnspec.backends.bands.kernel import SteppedKernel

GRAPHS = {
    "window": "attend window(radius = 9)",
    "strided": "attend strided(stride = 8)",
    "causal": "causal attend strided(stride = 8) | global(first(2))",
    "dilated": "attend dilated(radius = 30, step = 5)",
    "empty rows": "attend window(radius = 9) & rows(every(2))",
    "boxes": "sequence grid(10, 13) attend neighborhood(5, 5)",
    "predicate": "attend where(q * 5 % n - k * 5 % n <= 20 and k * 5 % n - q * 5 % n <= 20)",
    "inputs": "causal input x: ids attend same(x)",
}
SCORES = {
    "alibi": "score alibi()",
    "bias": "score bias(buckets = 8, max_distance = 40)",
    "softcap": "score softcap(cap = 2)",
    "all": "score bias(buckets = 8) score softcap(cap = 3) score alibi()",
    "softmax1": "normalize softmax1",
    "alibi, softmax1": "score alibi() normalize softmax1",
}


def test_gradients_of_gradients_of_changed_scores() -> None:
    for scores in ("alibi", "bias", "softcap", "softmax1"):
        module = module_of(f"heads 2 {GRAPHS['strided']} {SCORES[scores]}", "bands").double()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        given = [torch.randn(1, 2, 9, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        assert torch.autograd.gradcheck(module, given, **ALONG)
        assert torch.autograd.gradgradcheck(module, given, **ALONG)


@pytest.mark.parametrize("scores", ["alibi", "bias", "softcap"])
def test_blocks_of_one_strip_may_lie_unequally_far_apart(scores: str) -> None:
    # every tile of queries reads the first keys, from ever farther away, and its own
    body = f"heads 2 attend window(radius = 40) | columns(first(64)) {SCORES[scores]}"
    bands, dense = (module_of(body, name) for name in ("bands", "dense"))
    for parameter in bands.parameters():
        torch.nn.init.normal_(parameter)
    dense.load_state_dict(bands.state_dict())
    given = tensors(1, 2, 1024, 1024)
    torch.testing.assert_close(bands(*given), dense(*given), rtol=1e-5, atol=1e-5)
    kernel = bands.engine.prepare(0, 2, 2, 1024, 1024, "cpu").groups[0].kernel
    assert isinstance(kernel, SteppedKernel)
    strips = [strip for step in kernel.attention.steps for strip in step.strips]
    assert any(strip.blocks > 1 and strip.apart is None for strip in strips)
    assert any(strip.apart is not None for strip in strips)
