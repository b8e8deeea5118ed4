"""Plans and calls at lengths that no mask has: what is chosen, at what cost, and right."""

from __future__ import annotations

import pytest
import torch
from population import spec_of

from attnspec import Spec

MILLION = 1 << 20


def chosen(spec: Spec, n: int) -> str:
    (step,) = spec.plan(n).steps
    return str(step.chosen.name)


@pytest.mark.parametrize(
    ("body", "backend"),
    [
        ("attend random(keys = 8)", "edges"),
        ("attend self | expander(degree = 6)", "edges"),
        ("causal attend self | random(keys = 8)", "edges"),
        ("attend full normalize relu", "tables"),
        ("causal attend full normalize relu", "tables"),
        ("attend block(size = 32, before = n) normalize relu", "tables"),
        # no edges of a block are seen at the starts of ranges
        ("causal attend block(size = 4096)", "tables"),
        ("attend window(radius = 256)", "tables"),
        # a few queries with every key do not cut the others into pieces
        ("attend (self | random(keys = 1)) | global(first(1))", "edges"),
    ],
)
def test_graphs_of_a_million_tokens_are_planned(body: str, backend: str) -> None:
    assert chosen(spec_of(body), MILLION) == backend


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ("attend window(radius = 256)", 1.2),
        ("attend residue(step = 64)", 1.1),
        ("causal attend window(before = 300, after = 0) | columns(first(40))", 1.3),
        ("attend dilated(radius = 512, step = 8)", 1.3),
        ("attend block(size = 128)", 1.0),
        ("causal attend strided(stride = 128)", 1.3),
        ("sequence grid(n // 128, 128) attend neighborhood(7, 7)", 3.0),
        ("attend residue(step = 4) & residue(step = 6)", 1.05),
        ("attend rows(first(9)) | columns(every(512))", 1.1),
    ],
)
def test_few_pairs_are_computed_beside_those_that_count(body: str, most: float) -> None:
    report = spec_of(body).analyse(1 << 15)
    assert report.flops is not None
    assert report.useful_flops is not None
    assert report.useful_flops <= report.flops <= most * report.useful_flops


@pytest.mark.parametrize("backend", ["dense", "edges"])
def test_a_backend_refuses_a_plan_that_is_too_large_with_its_size(backend: str) -> None:
    spec = spec_of("attend where((q * 7 + k * 3) % 11 == 0)")
    with pytest.raises(ValueError, match=r"refuses: .*\d,\d{3}"):
        spec.plan(MILLION, backend=backend)


def test_one_set_of_pairs_is_planned_alike_however_it_is_spelled() -> None:
    bodies = (
        "where(q // 1024 == k // 1024 and q % 4 == 0 and k % 4 == 0)",
        "block(size = 1024) & where(q % 4 == 0) & where(k % 4 == 0)",
        "block(size = 1024) & rows(every(4)) & columns(every(4))",
    )
    found = {spec_of(f"attend {body}").plan(2048).steps[0].lines for body in bodies}
    assert found == {("order of 512 listed queries, 512 listed keys, tiles 256 x 256",)}
    nothing = spec_of("attend rows(first(300)) & rows(last(300)) & columns(first(9))")
    assert not nothing.compile("tables").pairs(*(torch.randn(1, 1, 700, 4),) * 2).any()


@pytest.mark.parametrize("n", [96, 250, 257])
def test_the_least_estimate_runs_at_every_length(n: int) -> None:
    spec = spec_of("attend window(radius = 8) | global(first(1))")
    for each in spec.plan(n, heads=8).steps:
        estimates = [c.seconds for c in each.candidates if c.refusal is None]
        assert estimates == sorted(estimates)
    band = spec_of("causal attend window(before = 8, after = 0)")
    assert band.plan(250, batch=8, heads=8).steps[0].chosen.name == "tables"


def test_documents_at_a_short_length_are_planned_by_tables() -> None:
    spec = spec_of("causal input document: ids attend same(document)")
    assert spec.plan(1024, heads=4).steps[0].chosen.name == "tables"


@pytest.mark.parametrize(
    "body", ["causal attend window(before = 9, after = 0)", "causal attend linear()", "attend full"]
)
def test_estimates_of_training_are_those_of_both_passes(body: str) -> None:
    spec, n = spec_of(body), 2048
    forward, both = (spec.plan(n, training=training) for training in (False, True))
    assert [x.backend for x in forward.steps[0].candidates] == [
        x.backend for x in both.steps[0].candidates
    ]
    before, after = (each.steps[0].candidates[0].seconds for each in (forward, both))
    report = spec.analyse(n)
    assert before is not None
    assert report.flops
    assert report.backward_flops
    assert after == pytest.approx(before * (1 + report.backward_flops / report.flops))
    assert ("forward and backward" in str(forward), "forward and backward" in str(both)) == (0, 1)
    assert (forward.to_dict().get("training"), both.to_dict().get("training")) == (None, True)
