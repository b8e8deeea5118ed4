"""Reach through mechanisms: what they let through, held against the gradients of what runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import spec_of

from attnspec.graphs.stack import Stack, has_mechanism, influence

MECHANISMS = {
    "linear": "attend linear()",
    "favor": "attend favor(features = 16)",
    "rfa": "attend rfa(features = 16)",
    "taylor": "attend taylor(order = 2)",
    "efficient": "attend efficient()",
    "rbf": "attend rbf(features = 16)",
    "linformer": "attend linformer(rank = 4, max_length = 16)",
    "nystrom": "attend nystrom(landmarks = 4)",
    "fourier": "attend fourier()",
    "synthesizer": "attend synthesizer(kind = random, max_length = 16)",
    "mixer": "attend mixer(hidden = 8, max_length = 16)",
    "gmlp": "attend gmlp(max_length = 16)",
    "causal linear": "causal attend linear()",
    "causal favor": "causal attend favor(features = 16)",
    "causal gmlp": "causal attend gmlp(max_length = 16)",
    "hybrid": "causal attend window(before = 2, after = 0) + linear()",
}
N = 12


@pytest.mark.parametrize("body", MECHANISMS.values(), ids=MECHANISMS)
def test_what_is_let_through_is_what_gradients_reach(body: str) -> None:
    spec = spec_of(body)
    module = spec.compile()
    torch.manual_seed(0)
    given = [torch.randn(1, 1, N, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = module(*given)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    out = module(*given)
    weights = torch.randn(8, dtype=torch.float64)
    reached = np.zeros((N, N), bool)
    for query in range(N):
        found = torch.autograd.grad(
            out[0, 0, query] @ weights, given, retain_graph=True, allow_unused=True
        )
        for grad in found:
            if grad is not None:
                # a query's own row is no key
                reached[query] |= grad[0, 0].abs().sum(-1).numpy() > 0
    np.testing.assert_array_equal(reached, Stack(influence(spec.program)).mask(N))


@pytest.mark.parametrize("body", MECHANISMS.values(), ids=MECHANISMS)
def test_reports_reach_through_mechanisms(body: str) -> None:
    report = spec_of(body).analyse(N)
    assert (report.depth, report.diameter, report.path_length) == (1, 1, 1.0)
    assert report.quality["depth"] == "exact"
    wanted = [1] * N if "causal" not in body else [1] * 6 + [-1] * (N - 6)
    found = report.hops(5)
    wanted[5] = int(found[5])
    assert found.tolist() == wanted
    assert report.path(5, 3) == ((0, 0, 3),)
    assert report.edges is None


def test_layers_are_counted_in_order() -> None:
    body = (
        "causal layers 3 layer 0 { attend window(before = 1, after = 0) }"
        " layer 1 { attend window(before = 1, after = 0) } layer 2 { attend linear() }"
    )
    spec = spec_of(body)
    assert spec.analyse(40).hops(20)[:20].tolist() == [3] * 18 + [2, 1]
    assert spec.analyse(40).depth == 3
    alone = spec_of("attend window(radius = 1)").program
    assert influence(alone) is alone
    assert has_mechanism(spec.program)
    assert not has_mechanism(influence(spec.program))
    assert influence(spec.program) != spec.program


def test_claims_on_reach_hold_through_mechanisms() -> None:
    for claim, status in (("reach(layers = 1)", "proven"), ("diameter > 1", "refuted")):
        (verdict,) = spec_of(f"attend nystrom(landmarks = 4) require {claim}").verdicts
        assert verdict.status == status
    body = "layers 2 layer 0 { attend self } layer 1 { attend fourier() } require depth <= 1"
    assert [d.code for d in spec_of(body).check()] == ["A606"]
