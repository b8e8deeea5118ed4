"""What the analysis says of choices that look ahead, held against calls with other later tokens."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import FILES, sample, smaller

from attnspec import Spec, parse
from attnspec.graphs.patterns import BY_NAME
from attnspec.ir.program import leaves

TRIALS = 150


def decides(spec: Spec) -> bool:
    graphs = [attend.graph for attend in spec.program.attends if attend.graph is not None]
    return any(BY_NAME[leaf.pattern].data_dependent for graph in graphs for leaf in leaves(graph))


FAMILY = [path for path in FILES if decides(smaller(path))]

BODIES = {
    "causal attend topk(keys = 4)": True,
    "causal attend topk(keys = 4, queries = 3)": False,
    "causal attend topk(blocks = 2, size = 4)": False,
    "causal attend topk(blocks = 3, size = 4, queries = 2)": False,
    # borders of blocks lie elsewhere in each choice, so that its own blocks are more or fewer
    "causal attend topk(blocks = 3, size = 2, queries = 3)": False,
    "causal attend topk(blocks = 3, size = 3, queries = 5)": False,
    "causal attend topk(blocks = 3, size = 3, queries = 2)": False,
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


@cache
def module_of(spec: Spec) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = spec.compile(head_size=8).eval()
    draws = torch.Generator().manual_seed(0)
    for entry in module.parameters():
        # learned parts that make a difference
        entry.data = torch.randn(entry.shape, generator=draws).to(torch.float64)
    return module


def rows(spec: Spec, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The outputs of the first and the last layer, their heads added up, [1 or 2, n, d]."""
    read = sample(spec, x.shape[2]).items()
    inputs = {name: torch.as_tensor(value)[None] for name, value in read}
    # what hashes keys apart has others
    turned = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    k = x @ turned if "share_qk = false" in spec.source else x
    ends = sorted({0, spec.layers - 1})
    with torch.no_grad():
        outs = [module_of(spec)(x, k, v, layer=at, inputs=inputs)[0].sum(0) for at in ends]
    return torch.stack(outs)


def drawn(spec: Spec, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    draws = torch.Generator().manual_seed(seed)
    x, v = (
        torch.randn(1, spec.heads or 2, n, 8, generator=draws, dtype=torch.float64)
        for _ in range(2)
    )
    return x, v, draws


def changes(spec: Spec, n: int, token: int, seed: int) -> bool:
    """Whether a row before a token differs once it, or all from it on, do."""
    x, v, draws = drawn(spec, n, seed)
    if seed % 2:
        # nearly one direction, one way or the other
        sign = torch.where(torch.arange(n) <= token, 1.0, torch.randn(n, generator=draws).sign())
        x = 0.05 * x + x[:, :, :1] * sign[:, None]
    other = x.clone()
    if seed % 3:
        other[:, :, token] *= -(1.0 + seed % 5)
    else:
        other[:, :, token:] = torch.randn(other[:, :, token:].shape, generator=draws, dtype=x.dtype)
    found = (rows(spec, x, v) - rows(spec, other, v)).abs().amax((0, 2))
    return bool((found > 1e-12)[:token].any())


def hold(spec: Spec, n: int) -> None:
    """Rows change with later tokens where, and only where, the analysis says so."""
    seen = any(
        changes(spec, n, 1 + seed * 13 % (n - 1), seed)
        for seed in range(12 if spec.analyse(n).causal else TRIALS)
    )
    assert spec.analyse(n).causal is not seen


@pytest.mark.parametrize("path", FAMILY, ids=lambda path: path.stem)
def test_the_zoo_looks_ahead_as_the_analysis_says(path: Path) -> None:
    hold(smaller(path), 57)


@pytest.mark.parametrize(("body", "causal"), BODIES.items())
def test_choices_look_ahead_as_the_analysis_says(body: str, causal: bool) -> None:
    spec = parse(f"attention a {{ {body} }}")
    assert spec.analyse(57).causal is causal
    for n in (57, 12, *((9, 8) if body == "causal attend lsh(chunk = 4)" else ())):
        hold(spec, n)


@pytest.mark.parametrize("path", FAMILY, ids=lambda path: path.stem)
def test_rows_stay_as_a_text_grows_where_they_are_stable(path: Path) -> None:
    spec = smaller(path)
    kinds = {entry.kind for entry in spec.inputs.values()}
    if spec.analyse(57).stable is not True or kinds & {"choices", "scores"}:
        return
    # features beside a graph are rounded
    most = 1e-9 if any(attend.mechanism for attend in spec.program.attends) else 1e-12
    x, v, _ = drawn(spec, 57, 0)
    whole = rows(spec, x, v)
    for n in (1, 8, 31, 56):
        assert (rows(spec, x[:, :, :n], v[:, :, :n]) - whole[:, :n]).abs().max() < most


def test_a_last_choice_of_fewer_queries_looks_ahead() -> None:
    spec = parse("attention a { causal attend topk(blocks = 2, size = 2, queries = 3) }")
    # two queries of one block leave a place to another, which both choose
    assert [spec.analyse(n).causal for n in (7, 8, 9)] == [True, False, True]


def test_compiling_what_looks_ahead_warns_once() -> None:
    spec = parse("attention a { causal attend lsh(chunk = 4) }")
    with pytest.warns(UserWarning, match="A905.*borders of the chunks") as told:
        spec.compile()
    assert len(told) == 1
    assert [found.code for found in spec.check()] == ["A905"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse("attention a { causal attend lsh(chunk = 4, cut = bucket) }").compile()
