"""`return_lse`: what log-sum-exps are for, merging outputs over other keys; and who has none."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import ALONG, BACKEND_NAMES, tensors
from population import spec_of

NEAR = "window(before = 20, after = 0)"


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_outputs_over_disjoint_keys_are_merged_by_them(backend: str) -> None:
    parts = tensors(2, 2, 150, 150)
    (o1, l1), (o2, l2), (whole, _) = (
        spec_of(f"causal attend {x}").compile(backend)(*parts, return_lse=True)
        for x in (NEAR, f"full - {NEAR}", "full")
    )
    merged = torch.lerp(o1, o2, torch.sigmoid(l2 - l1)[..., None])
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("body", ["linear()", "favor(features = 64)", "taylor(order = 2)"])
def test_mechanisms_over_disjoint_keys_are_merged_by_them(body: str) -> None:
    module, (q, k, v) = spec_of(f"cross attend {body}").compile(), tensors(2, 2, 20, 90)
    (o1, l1), (o2, l2) = (
        module(q, k[:, :, part], v[:, :, part], return_lse=True)
        for part in (slice(33), slice(33, None))
    )
    merged = torch.lerp(o1, o2, torch.sigmoid(l2 - l1)[..., None])
    torch.testing.assert_close(merged, module(q, k, v), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "tables", "dense"])
@pytest.mark.parametrize(("normalize", "empty"), [("softmax", -math.inf), ("softmax1", 0.0)])
def test_many_rows_in_succession_have_no_key(backend: str, normalize: str, empty: float) -> None:
    body = f"attend window(radius = 3) - rows(first(200)) normalize {normalize}"
    out, lse = spec_of(body).compile(backend)(*tensors(1, 2, 230, 230), return_lse=True)
    assert (lse[:, :, :200] == empty).all()
    assert not out[:, :, :200].any()
    assert (lse[:, :, 200:].abs() > 0).all()


@pytest.mark.parametrize("backend", ["torch", "tables"])
def test_they_can_be_differentiated_twice(backend: str) -> None:
    module = spec_of("attend window(radius = 4) - self").compile(backend)

    def both(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = module(*given, return_lse=True)
        return out, lse

    assert torch.autograd.gradgradcheck(both, tensors(1, 1, 9, 9, size=3), **ALONG)


@pytest.mark.parametrize(
    "body",
    [
        "attend linear(feature = identity)",
        "attend linear(normalize = none)",
        "attend window(radius = 3) + favor(features = 8, kind = trig)",
        "attend rfa(features = 8)",
        "attend efficient()",
        "attend linformer(rank = 4)",
        "causal heads 2 attend full head 1 { attend rfa(features = 8) }",
        "causal attend window(radius = 2) normalize sigmoid",
        "causal attend window(radius = 2) normalize relu",
        "input d: ids attend same(d) normalize relu",
    ],
)
def test_weights_without_a_positive_denominator_have_none(body: str) -> None:
    """Nor where nothing is computed."""
    module = spec_of(body).compile(head_size=8)
    for batch, queries, n in ((2, 30, 30), (2, 0, 30), (0, 30, 30), (2, 0, 0)):
        inputs = {"d": torch.zeros(batch, n, dtype=torch.int64)} if "input" in body else None
        parts = tensors(batch, 2, queries, n)
        with pytest.raises(ValueError, match="log-sum-exps, and what `sample` divides by has no"):
            module(*parts, inputs=inputs, return_lse=True)
        module(*parts, inputs=inputs)
    if body.startswith("causal"):
        with pytest.raises(ValueError, match="divides by has no logarithm"):
            module.step(*tensors(2, 2, 5, 5), keep_all=True, return_lse=True)


@pytest.mark.parametrize("normalize", ["softmax", "softmax1"])
def test_empty_calls_have_empty_sums(normalize: str) -> None:
    module = spec_of(f"causal attend window(radius = 2) normalize {normalize}").compile()
    for batch, queries, n in ((0, 5, 5), (2, 0, 0), (1, 0, 5)):
        out, lse = module(*tensors(batch, 2, queries, n), return_lse=True)
        assert (out.shape[:3], lse.shape) == ((batch, 2, queries), (batch, 2, queries))
        assert module.step(*tensors(batch, 2, queries, queries), return_lse=True)[0][1].numel() in (
            0,
            batch * 2 * queries,
        )
