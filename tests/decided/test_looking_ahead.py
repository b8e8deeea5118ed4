"""What the analysis says of choices that look ahead, held against calls with other later tokens."""

from __future__ import annotations

import warnings

import pytest
import torch
from population import spec_of
from sweeps import few

from attnspec import Spec

BODIES = {
    "causal attend topk(keys = 4)": True,
    "causal attend topk(keys = 4, queries = 3)": False,
    "causal attend topk(blocks = 2, size = 4)": False,
    # borders of blocks lie elsewhere in each choice, so that its own blocks are more or fewer
    "causal attend topk(blocks = 3, size = 2, queries = 3)": False,
    "causal attend topk(blocks = 3, size = 3, queries = 5)": False,
    "causal attend topk(blocks = 4, size = 4, queries = 3)": False,
    # own blocks leave no place to others
    "causal attend topk(blocks = 2, size = 2, queries = 3)": True,
    "causal attend topk(mass = 0.4, size = 4, queries = 1, score = mass)": True,
    "causal attend topk(mass = 0.4, size = 1, queries = 2)": False,
    "causal attend topk(above = 0.5, size = 4, queries = 1, score = max)": True,
    "attend topk(keys = 4) & causal": False,
    "attend topk(above = 0.5, size = 1) & causal": True,
    "causal attend lsh(chunk = 4)": False,
    "causal attend lsh(chunk = 4, buckets = 4, rounds = 1, share_qk = false)": False,
    "causal attend lsh(chunk = 4, bucket_mask = false)": False,
    "causal attend lsh(chunk = 4, cut = bucket)": True,
    "causal attend lsh(chunk = 4, cut = bucket, combine = mean)": True,
    "attend lsh(chunk = 4, rounds = 1, cut = bucket) & causal": False,
    "attend lsh(chunk = 4, cut = bucket, share_qk = false) & causal": True,
    "causal attend lsh(chunk = 1)": True,
    "causal attend cluster(count = 3)": False,
    "causal attend cluster(count = 3, assign = balanced)": False,
    "causal attend cluster(count = 1)": True,
    "causal attend sinkhorn(size = 4)": True,
    "attend sinkhorn(size = 4) & causal": False,
    "attend sinkhorn(size = 4, cut = 2) & causal": False,
}
"""Whether no row of 57 depends on a later token."""


def rows_change(spec: Spec, n: int, trials: int) -> bool:
    """Whether a row before a token differs once it, or all from it on, do."""
    draws = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = spec.compile(head_size=8).eval().double()
    for entry in module.parameters():
        # learned parts that make a difference
        entry.data = torch.randn(entry.shape, generator=draws).double()
    # what hashes keys apart has others
    turned = torch.randn(8, 8, generator=draws).double()
    for seed in range(trials):
        token = 1 + seed * 13 % (n - 1)
        x, v = torch.randn(2, 1, 2, n, 8, generator=draws).double()
        if seed % 2:
            # nearly one direction, one way or the other
            sign = torch.where(
                torch.arange(n) <= token, 1.0, torch.randn(n, generator=draws).sign()
            )
            x = 0.05 * x + x[:, :, :1] * sign[:, None]
        other = x.clone()
        if seed % 3:
            other[:, :, token] *= -(1.0 + seed % 5)
        else:
            other[:, :, token:] = torch.randn(2, n - token, 8, generator=draws).double()
        sides = (x, other)
        keys = [x @ turned if "share_qk = false" in spec.source else x for x in sides]
        one, two = (module(q, k, v)[0].sum(0) for q, k in zip(sides, keys, strict=True))
        if bool(((one - two).abs().amax(-1) > 1e-12)[:token].any()):
            return True
    return False


@pytest.mark.parametrize(("body", "causal"), few(BODIES.items(), 4))
def test_choices_look_ahead_as_the_analysis_says(body: str, causal: bool) -> None:
    spec = spec_of(body)
    assert spec.analyse(57).causal is causal
    for n in (57, 12, *((9, 8) if body == "causal attend lsh(chunk = 4)" else ())):
        holds = bool(spec.analyse(n).causal)
        assert rows_change(spec, n, 12 if holds else 150) is not holds


def test_a_last_choice_of_fewer_queries_looks_ahead() -> None:
    spec = spec_of("causal attend topk(blocks = 2, size = 2, queries = 3)")
    # two queries of one block leave a place to another, which both choose
    assert [spec.analyse(n).causal for n in (7, 8, 9)] == [True, False, True]


def test_compiling_what_looks_ahead_warns_once() -> None:
    spec = spec_of("causal attend lsh(chunk = 4)")
    with pytest.warns(UserWarning, match="A905.*borders of the chunks") as told:
        spec.compile()
    assert len(told) == 1
    assert [found.code for found in spec.check()] == ["A905"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec_of("causal attend lsh(chunk = 4, cut = bucket)").compile()
