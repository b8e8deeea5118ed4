"""What bounds memory changes no result: under tiny limits, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from population import population
from test_views import NAMES, call_of, case_of, views_of
from views import KERNELS, check, differing
from zoo import every_attention, smaller

from attnspec import parse
from attnspec.limits import LIMITS
from attnspec.verification import verify

pytestmark = pytest.mark.limits("tiny")


@pytest.mark.parametrize("part", range(8))
def test_views_in_pieces(part: int) -> None:
    for name in NAMES[part::48]:
        case = case_of(name, 2)
        if not any(x.mechanism for x in population()[name].program.attends):
            assert differing(case, views_of(case.spec)) == [], name
        turn = NAMES.index(name)
        call = replace(call_of(case, turn), dtype=torch.float64)
        for kernel in ("auto", KERNELS[1 + turn // 48 % (len(KERNELS) - 1)]):
            assert not check(call, kernel), (name, kernel)


COMPOSED = [
    "attend (window(radius = 5) | columns(first(40))) + linear()",
    "causal attend (window(radius = 20) | columns(first(40))) + favor(features = 8)",
    "attend random(keys = 3) + rfa(features = 4)",
    "causal attend rfa(features = 4, gated = true)",
    "attend nystrom(landmarks = 7, conv = 5)",
    "attend linformer(rank = 7, projection = conv, max_length = 64)",
    "attend linformer(rank = 7, max_length = 64)",
    "causal attend synthesizer(max_length = 64, products = true)",
    "attend topk(keys = 5)",
    "causal attend topk(blocks = 2, size = 8, score = mean)",
    "attend lsh(buckets = 4, rounds = 2, chunk = 8, share_qk = false)",
    "attend cluster(count = 3)",
    "causal attend cluster(count = 3) | window(radius = 3)",
    "attend sinkhorn(size = 8)",
]


@pytest.mark.parametrize("body", COMPOSED)
def test_numbers_are_those_of_the_whole(body: str) -> None:
    found = verify(parse(f"attention a {{ {body} }}").program, LIMITS.every_pair)
    assert found.ok, str(found)
    assert found.exhaustive


@every_attention
def test_the_zoo_is_what_it_means(path: Path, name: str) -> None:
    spec = smaller(path, name)
    n = spec.program.fixed_length or LIMITS.every_pair - 3
    found = verify(spec.program, n)
    assert found.ok, str(found)
    assert found.exhaustive == (n <= LIMITS.every_pair)
