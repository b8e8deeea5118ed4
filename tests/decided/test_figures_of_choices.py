"""Figures before tensors are there, held against what tensors decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from population import spec_of
from torch.utils.flop_counter import FlopCounterMode
from zoo import EXAMPLES

from attnspec.cli.root import main

BODIES = (
    "causal attend topk(blocks = 3, size = 8, queries = 1)",
    "attend topk(keys = 7)",
    "causal attend topk(keys = 7, queries = 3) | window(radius = 2)",
    # choices force the blocks of their queries, and those with a pair of a graph
    "causal attend topk(blocks = 1, size = 3, queries = 5)",
    "causal attend topk(blocks = 1, size = 4, queries = 3)",
    "causal attend topk(blocks = 1, size = 4, queries = 6, always = window(before = 9, after = 1))",
    "causal attend lsh(chunk = 8, rounds = 2)",
    "attend lsh(chunk = 8, rounds = 3, share_qk = false)",
    "attend cluster(count = 4)",
    "attend cluster(of = q, count = 4)",
    "causal attend sinkhorn(size = 8)",
    "attend sinkhorn(size = 8, cut = 2)",
)


@pytest.mark.parametrize("body", BODIES)
def test_bounds_before_tensors_hold(body: str) -> None:
    spec = spec_of(body)
    for n in (93, 7, 1):
        q = torch.randn(16, n, 32, generator=torch.Generator().manual_seed(0))
        before, after = spec.analyse(n), spec.analyse(n, tensors=(q, q))
        assert (before.quality["edges"], after.quality["edges"]) == ("bound", "exact")
        assert (after.edges or 0) <= 16 * (before.edges or 0)
        assert (after.degree or 0) <= (before.degree or 0) <= n


@pytest.mark.parametrize(
    ("body", "degree"),
    [
        ("causal attend topk(blocks = 3, size = 4, queries = 1)", 12),
        ("attend topk(blocks = 9, size = 4, always = columns(first(5)))", 36),
        ("causal attend topk(blocks = 2, size = 4, always = window(before = 9, after = 1))", 16),
        ("attend topk(blocks = 1, size = 4, queries = 1, always = columns(first(20)))", 20),
        ("attend topk(keys = 4, always = full)", 64),
        ("causal attend topk(blocks = 1, size = 4, queries = 6)", 8),
        ("causal attend topk(blocks = 1, size = 3, queries = 5)", 9),
    ],
)
def test_a_bound_is_what_is_forced_or_the_budget(body: str, degree: int) -> None:
    assert spec_of(body).analyse(64).degree == degree


SCORED = (
    "topk(keys = 3)",
    "topk(blocks = 2, size = 5)",
    "topk(blocks = 2, size = 5, score = max)",
    "topk(blocks = 2, size = 5, score = mass)",
    "topk(mass = 0.5, size = 5, score = bound, queries = 1)",
    "lsh(buckets = 6, rounds = 3, chunk = 4, seed = 0)",
    "lsh(buckets = 8, rounds = 3, chunk = 4, hash = hyperplanes, share_qk = false)",
    "cluster(count = 4)",
    "cluster(of = q, count = 4)",
    "cluster(count = 4, assign = balanced)",
    "sinkhorn(size = 4)",
)


@pytest.mark.parametrize("call", SCORED)
def test_scoring_takes_the_products_that_are_counted_and_the_sums_of_blocks(call: str) -> None:
    n, d, heads, batch = 60, 6, 3, 2
    spec = spec_of(f"heads {heads} attend {call}")
    q = torch.randn(batch, heads, n, d, generator=torch.Generator().manual_seed(0))
    module = spec.compile(head_size=d)
    with FlopCounterMode(display=False) as counter:
        module.pairs(q, q)
    # a block is known by a sum over its keys
    summed = "size" in call and "max" not in call and "score = mass" not in call
    report = spec.analyse(n, head_dim=d, batch=batch)
    assert report.scoring_flops == counter.get_total_flops() + summed * batch * heads * n * d
    assert report.quality["scoring_flops"] == "bound"


@pytest.mark.parametrize(
    "body",
    [
        "input s: scores(size = 4) attend topk(blocks = 1, size = 4, score = s)",
        "input x: ids attend cluster(x)",
        "input h: buckets attend lsh(h, chunk = 4)",
        "attend window(radius = 3)",
    ],
)
def test_choices_from_an_input_cost_no_scoring(body: str) -> None:
    assert spec_of(body).analyse(24).scoring_flops == 0


def test_inputs_that_decide_need_no_tensors() -> None:
    spec = spec_of("input s: scores(size = 4) attend topk(blocks = 1, size = 4, score = s)")
    scores = np.zeros((1, 3, 3))
    scores[0, :, 1] = 1
    report = spec.analyse(12, inputs={"s": scores})
    assert (report.edges, report.unread_keys) == (12 * 4, 8)


@pytest.mark.parametrize("body", ["topk(keys = 2)", "full"])
def test_tensors_of_another_shape_are_refused(body: str) -> None:
    spec, fits = spec_of(f"attend {body}"), torch.zeros(1, 8, 4)
    for other in (torch.zeros(1, 9, 4), torch.zeros(1, 1, 8, 4), torch.zeros(1, 8, 4).int()):
        with pytest.raises(ValueError, match="`tensors` must be q and k of one sample"):
            spec.analyse(8, tensors=(fits, other))
    for wrong in (None, "k", object()):
        with pytest.raises(TypeError, match=r"k of `tensors` must be an array"):
            spec.analyse(8, tensors=(fits, wrong))  # type: ignore[arg-type]


def test_a_picture_is_of_a_sample_and_says_so() -> None:
    args = ["show", str(EXAMPLES / "routing_transformer.attn"), "-n", "48"]
    one, other = (CliRunner().invoke(main, args) for _ in range(2))
    assert (one.exit_code, one.output) == (0, other.output)
    assert "a sample: pairs that random queries and keys choose" in one.output


def test_reach_says_that_tensors_choose() -> None:
    report = spec_of("causal attend topk(keys = 3)").analyse(30)
    assert "at least, as if tensors could choose any pair that is allowed" in str(report)
