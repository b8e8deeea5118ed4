"""Partial results of disjoint keys, merged, are those of all keys."""

from __future__ import annotations

import math
import re

import pytest
import torch
from package_map import ROOT

from attnspec.backends.common.merging import in_one_frame, merge, merged, with_zero

ROWS = ((True, True), (True, False), (False, True), (False, False))
"""Which of two parts has a key for a query."""


def part(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over some keys as its definition says, 0 and -inf for a row without one."""
    found, sums = [], []
    for row in scores:
        here = row > -math.inf
        found.append(row[here].softmax(0) @ v[here])
        sums.append(row[here].logsumexp(0) if here.any() else row.new_tensor(-math.inf))
    return torch.stack(found), torch.stack(sums)


def given(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [4, 10] of two times five keys, those of parts that a row does not have -inf, and
    values [10, 3]."""
    generator = torch.Generator().manual_seed(seed)
    scores = 5 * torch.randn(4, 10, generator=generator, dtype=torch.float64)
    held = torch.tensor(ROWS).repeat_interleave(5, 1)
    v = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    return scores.masked_fill(~held, -math.inf), v


def test_merged_parts_are_the_whole() -> None:
    scores, v = given()
    first, second = part(scores[:, :5], v[:5]), part(scores[:, 5:], v[5:])
    expected = part(scores, v)
    torch.testing.assert_close(merged(first, second), expected)
    # a row of one part keeps its very bits
    out, lse = merged(first, second)
    assert torch.equal(out[1], first[0][1])
    assert torch.equal(out[2], second[0][2])
    assert torch.equal(lse[1:], expected[1][1:])
    merge(first, second)
    torch.testing.assert_close(first, expected)


def test_far_apart_parts_are_merged() -> None:
    out, lse = torch.ones(2, 3), torch.tensor([1e4, -1e4])
    found, sums = merged((out, lse), (2 * out, -lse))
    assert found.tolist() == [[1.0] * 3, [2.0] * 3]
    assert sums.tolist() == [1e4, 1e4]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("logit", [None, 0.7, -200.0, 200.0])
def test_a_key_of_value_0_beside_others(logit: float | None, in_place: bool) -> None:
    scores, v = given(1)
    scores[0] *= 30
    one = scores.new_full((4, 1), logit or 0.0)
    expected = part(torch.cat([scores, one], 1), torch.cat([v, v.new_zeros(1, 3)]))
    score = None if logit is None else torch.tensor(logit, dtype=torch.float64)
    torch.testing.assert_close(with_zero(part(scores, v), score, in_place), expected)


def test_derivatives_of_any_order_where_a_query_has_no_key() -> None:
    outs = torch.randn(2, 4, 3, dtype=torch.float64)
    none = ~torch.tensor(ROWS).T
    outs[none] = 0.0

    def run(first: torch.Tensor, second: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        # a log-sum-exp without keys stays without
        l1, l2 = lse.masked_fill(none, -math.inf)
        out, total = merged((first, l1), (second, l2))
        beside, more = with_zero((out, total))
        return torch.cat([x.flatten() for x in (out, total[:3], beside, more)])

    finite = torch.randn(2, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*outs.clone(), finite)]
    leaves = [x.detach().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("power", [torch.exp, torch.exp2])
def test_a_frame_of_nothing(power) -> None:  # type: ignore[no-untyped-def]
    logs = torch.tensor([[0.5, 2.0], [-math.inf, 1.0], [-math.inf, -math.inf]])
    top, weights = in_one_frame(logs, 1, power)
    assert top.tolist() == [[2.0], [1.0], [-math.inf]]
    base = power(torch.ones(())).item()
    assert weights.flatten().tolist() == pytest.approx([base**-1.5, 1, 0, 1, 0, 0])


def test_nothing_else_merges_log_sum_exps() -> None:
    merging = re.compile(r"logaddexp|\.lerp_?\(|torch\.lerp|torch\.sigmoid\([^)]* - ")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("attnspec", "backends")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if merging.search(path.read_text("utf-8"))
    }
    assert found == {"backends/common/merging.py"}
