"""Score functions of FlexAttention as specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnspec import AttnSpecError, from_score_mod

SLOPES = torch.tensor([0.5, 0.25])
NEAR = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
FAR = torch.arange(33.0)
DOCUMENT = torch.tensor([0] * 5 + [1] * 12)
TIMES = torch.rand(2, 17)
PAIRS = torch.randn(2, 2, 17, 17)
LENGTHS = torch.tensor([5, 9])
HIDDEN = -float("inf")


def function(text: str) -> Callable[..., Any]:
    found: Callable[..., Any] = eval(f"lambda s, b, h, q, k: {text}", globals())
    return found


WRITTEN = {
    "s - SLOPES[h] * (q - k).abs()": "score s - [0.5, 0.25][head] * abs(q - k)",
    "30 * torch.tanh(s / 30)": "score tanh(s / 30) * 30",
    "s + NEAR[h, (q - k).clamp(-4, 4) + 4]": "[head * 9 + ",
    "s + FAR[q - k + 16]": "[q - k + 16]",
    "torch.where(q >= k, s, HIDDEN)": "score s + log(q >= k)",
    "torch.where(DOCUMENT[q] == DOCUMENT[k], s, HIDDEN)": "s + log(document(q) == document(k))",
    "torch.where(k == q, s * 2, s - torch.exp(-(q - k).abs() / 8))": "score s * 2 * (k == q) + (s",
    "s - (TIMES[b, q] - TIMES[b, k]).abs()": "score s - abs(times(q) - times(k))",
    "s + PAIRS[b, h, q, k]": "score s + pairs(q, k)",
    "s + PAIRS[0, 0][q, k] * s": "(q, k)",
    "torch.where(k < LENGTHS[b], s, s - 9)": "(k < lengths)",
}


# each is held against its function by the call itself
@pytest.mark.parametrize("text", WRITTEN)
def test_scores_are_written(text: str) -> None:
    assert WRITTEN[text] in from_score_mod(function(text), name="found").source


def test_pairs_are_those_of_the_mask() -> None:
    spec = from_score_mod(function("s + (q - k)"), mask_mod=lambda b, h, q, k: q - k < 7)
    assert spec.mask(20).sum() == sum(q - k < 7 for q in range(20) for k in range(20))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s if q > k else s * 2", "decides by the value of a position"),
        ("s * torch.rand(())", "no scores at n = 1"),
        ("s + NEAR[q % 2, k % 9]", "looks pairs up"),
        ("torch.where(q < q, s, HIDDEN)", "hides every pair"),
        ("s + b", "has an error"),
    ],
)
def test_others_are_refused(text: str, reason: str) -> None:
    with pytest.raises(AttnSpecError, match=reason):
        from_score_mod(function(text), name="found")


def test_a_function_is_needed() -> None:
    with pytest.raises(TypeError, match="function of"):
        from_score_mod(PAIRS)  # type: ignore[arg-type]
