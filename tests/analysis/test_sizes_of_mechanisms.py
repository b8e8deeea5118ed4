"""Stacks of graphs and mechanisms: counts of the graph heads, reach of all; spectra."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from limited import REFUSING
from oracle import truth
from population import spec_of
from specs import ten
from sweeps import few
from views import Case

from attnspec import parse

N = 12

GRAPH_HEADS = ("graph_edges", "graph_density", "graph_degree", "graph_min_degree")

GRAPHS = (
    "window(radius = 1)",
    "dilated(radius = 6, step = 3)",
    "columns(first(2))",
    "random(keys = 2, seed = 3)",
    "self",
)
ANY = ("linear()", "favor(features = 4)", "linear() + window(radius = 1)")
BOTH_WAYS = ("fourier()", "nystrom(landmarks = 2)", "mixer(hidden = 4, max_length = 64)")


@pytest.mark.parametrize("seed", few(range(3), 3))
def test_graph_heads_are_counted_and_mechanisms_reach_every_position(seed: int) -> None:
    """As the stack of graphs in which every mechanism is `full`."""

    def asked(causal: bool, layers: int, heads: int, bodies: list[int], formula: int) -> None:
        known = ANY if causal else (*ANY, *BOTH_WAYS)
        chosen = [(GRAPHS + known)[x % len(GRAPHS + known)] for x in bodies[: layers * heads]]
        chosen[0] = known[formula % len(known)]

        def stack(texts: list[str]) -> str:
            return f"{'causal ' * causal}layers {layers} heads {heads} " + " ".join(
                f"layer {at // heads} {{ head {at % heads} {{ attend {text} }} }}"
                for at, text in enumerate(texts)
            )

        report = parse(f"attention a {{ {stack(chosen)} }}").analyse(N)
        # what stands beside a mechanism is not a graph head
        meant = Case(spec_of(stack([x if x in GRAPHS else "full" for x in chosen])), N)
        held = [x for at, x in enumerate(meant.masks.reshape(-1, N, N)) if chosen[at] in GRAPHS]
        assert report.edges is None
        assert report.depth == truth.figure("depth", meant.attention, meant.masks)
        assert np.array_equal(report.hops(5), meant.report.hops(5))
        assert (report.diameter, report.path_length) == (1, 1.0)
        figures = report.to_dict()["figures"]
        assert "every position" in figures["depth"]["note"]
        if not held:
            assert report.graph_edges is None
            assert not set(GRAPH_HEADS) & set(figures)
            return
        assert [each.edges for each in report.per_head.values()] == [x.sum() for x in held]
        assert report.graph_edges == np.sum(held)
        assert report.graph_density == pytest.approx(np.mean(held))
        degrees = np.sum(held, axis=-1)
        assert (report.graph_degree, report.graph_min_degree) == (degrees.max(), degrees.min())
        assert figures["graph_edges"]["note"].startswith("graph heads only: ")

    some = st.lists(st.integers(0, 99), min_size=9, max_size=9)
    ten(asked, seed, st.booleans(), st.integers(1, 3), st.integers(1, 3), some, st.integers(0, 5))


def test_a_stack_of_graphs_has_its_own_figures() -> None:
    report = spec_of("layers 2 attend window(radius = 1)").analyse(N)
    assert not set(GRAPH_HEADS) & set(report.to_dict()["figures"])
    assert (report.graph_edges, report.graph_degree) == (report.edges, report.degree)
    body = "heads 2 {} head 0 {{ attend linear() }} head 1 {{ attend {} }}"
    empty = spec_of(body.format("", "window(radius = 1)")).analyse(0)
    assert (empty.graph_edges, empty.graph_density, empty.graph_degree) == (0, 0.0, 0)
    read = spec_of(body.format("input x: ids", "same(x)"))
    assert read.analyse(4).graph_edges is None
    assert read.analyse(4, inputs={"x": np.array([0, 0, 1, 1])}).graph_edges == 8


@pytest.mark.parametrize(
    "body",
    [
        *("attend favor(features = 16)", "attend linformer(rank = 4, max_length = 16)"),
        *("attend nystrom(landmarks = 4)", "attend fourier()", "attend gmlp(max_length = 16)"),
        *("causal attend linear()", "causal attend window(radius = 2) + linear()"),
    ],
)
def test_a_mechanism_reaches_what_gradients_reach(body: str) -> None:
    spec = spec_of(body)
    module, sample = spec.compile(), [torch.randn(1, 1, N, 8).double() for _ in range(3)]
    module(*sample)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    leaves = [x.requires_grad_() for x in sample]
    out, report = module(*leaves), spec.analyse(N)
    for query in range(N):
        grads: Any = torch.autograd.grad(
            out[0, 0, query].sin().sum(), leaves, retain_graph=True, allow_unused=True
        )
        # a query's own row is not a key
        reached = {int(x) for g in grads if g is not None for x in g[0, 0].abs().sum(-1).nonzero()}
        read = np.flatnonzero(report.hops(query) >= 0)
        assert reached | {query} == {int(x) for x in read}
    assert (report.depth, report.diameter, report.quality["depth"]) == (1, 1, "exact")
    assert report.path(5, 3) == ((0, 0, 3),)


def test_claims_on_reach_hold_through_mechanisms() -> None:
    for claim, status in (("reach(layers = 1)", "proven"), ("diameter > 1", "refuted")):
        (verdict,) = spec_of(f"attend nystrom(landmarks = 4) require {claim}").verdicts
        assert verdict.status == status
    body = "layers 2 layer 0 { attend self } layer 1 { attend fourier() } require depth <= 1"
    assert [d.code for d in spec_of(body).check()] == ["A606"]
    layers = (
        "causal layers 3 layer 0 { attend window(before = 1, after = 0) }"
        " layer 1 { attend window(before = 1, after = 0) } layer 2 { attend linear() }"
    )
    assert spec_of(layers).analyse(40).hops(20)[:20].tolist() == [3] * 18 + [2, 1]
    assert spec_of(layers).analyse(40).depth == 3


def test_spectra_of_stars_rings_bands_and_expanders() -> None:
    star = spec_of("attend global(first(1)) | self").analyse(1 << 11)
    assert star.spectral_gap == pytest.approx(0.5)
    n, h = 1000, 3
    ring = spec_of(f"attend where((q - k + {h}) % n <= {2 * h})").analyse(n)
    width = 2 * h + 1
    exact = np.sin(width * pi / n) / (width * np.sin(pi / n))
    assert ring.spectral_gap == pytest.approx(1 - exact, rel=1e-6)
    # a band is half of a ring of twice its length
    band = spec_of(f"attend window(radius = {h})").analyse(1 << 10)
    assert band.spectral_gap == pytest.approx(pi**2 * h * (h + 1) / (6 * 4.0**10), rel=1e-2)
    assert band.quality["spectral_gap"] == "exact"
    four = spec_of("attend expander(degree = 4)").analyse(1 << 11)
    assert four.spectral_gap == pytest.approx(1 - sqrt(3) / 2, abs=0.03)
    apart = spec_of("attend dilated(radius = 8, step = 2)").analyse(100_000)
    assert (apart.spectral_gap, apart.quality["spectral_gap"]) == (0.0, "exact")


@pytest.mark.limits(REFUSING)
def test_an_eigenvalue_that_does_not_converge_is_a_bound() -> None:
    spec = spec_of("attend strided(stride = 64) require spectral_gap > 0.001 at n = 4096")
    report = spec.analyse(4096)
    assert report.quality["spectral_gap"] == "bound"
    assert [said.code for said in spec.check()] == ["A609"]
    # the gap is smaller: 0.0003
    assert report.spectral_gap is not None
    assert report.spectral_gap > 3e-4
