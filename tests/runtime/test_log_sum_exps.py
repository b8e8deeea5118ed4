"""`return_lse`: log-sum-exps of every backend against the definition, with gradients, and what they
are for, merging outputs over other keys."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import ALONG, BACKEND_NAMES, module_of, tensors

from attnspec import parse


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
@pytest.mark.parametrize(("normalize", "empty"), [("softmax", -math.inf), ("softmax1", 0.0)])
def test_many_rows_in_succession_have_no_key(backend: str, normalize: str, empty: float) -> None:
    body = f"attend window(radius = 3) - rows(first(200)) normalize {normalize}"
    out, lse = module_of(body, backend)(*tensors(1, 2, 230, 230), return_lse=True)
    assert (lse[:, :, :200] == empty).all()
    assert not out[:, :, :200].any()
    assert (lse[:, :, 200:].abs() > 0).all()


@pytest.mark.parametrize("backend", ["torch", "bands"])
def test_they_can_be_differentiated_twice(backend: str) -> None:
    module = module_of("attend window(radius = 4) - self", backend)
    q, k, v = tensors(1, 1, 9, 9, size=3)

    def both(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = module(*given, return_lse=True)
        return out, lse

    assert torch.autograd.gradgradcheck(both, (q, k, v), **ALONG)


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
        "attend full normalize sigmoid",
        "attend full normalize relu",
        "input d: ids attend same(d) normalize relu",
    ],
)
def test_weights_without_a_positive_denominator_have_none(body: str) -> None:
    module = parse(f"attention a {{ {body} }}").compile()
    inputs = {"d": torch.zeros(2, 30, dtype=torch.int64)} if "input" in body else None
    for batch, queries in ((2, 30), (2, 0), (0, 30)):
        given = None if inputs is None else {"d": inputs["d"][:batch]}
        with pytest.raises(ValueError, match="log-sum-exps, and what `a` divides by has no"):
            module(*tensors(batch, 2, queries, 30), inputs=given, return_lse=True)


@pytest.mark.parametrize(("batch", "n"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("normalize", ["relu", "sigmoid", "softmax", "softmax1"])
def test_an_empty_call_is_refused_like_others(normalize: str, batch: int, n: int) -> None:
    graph = "window(radius = 2)"
    module = parse(f"attention a {{ causal attend {graph} normalize {normalize} }}").compile()
    given = tensors(batch, 2, n, n)
    for call in (module, module.step):
        if normalize in ("relu", "sigmoid"):
            with pytest.raises(ValueError, match="log-sum-exps, and what `a` divides by has no"):
                call(*given, return_lse=True)
        else:
            call(*given, return_lse=True)
        call(*given)


@pytest.mark.parametrize("body", ["linear()", "favor(features = 64)", "taylor(order = 2)"])
def test_mechanisms_over_disjoint_keys_are_merged_by_them(body: str) -> None:
    module = parse(f"attention a {{ cross attend {body} }}").compile()
    q, k, v = tensors(2, 2, 20, 90)
    whole = module(q, k, v)
    (o1, l1), (o2, l2) = (
        module(q, k[:, :, part], v[:, :, part], return_lse=True)
        for part in (slice(33), slice(33, None))
    )
    merged = torch.lerp(o1, o2, torch.sigmoid(l2 - l1)[..., None])
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-6)
