"""What bounds memory changes no result: under tiny limits, against the definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_checks import (
    BACKEND_NAMES,
    GRAPHS,
    defined,
    module_of,
    spec_of,
    tensors,
    with_gradients,
)
from pattern_samples import samples_of
from relation_checks import faults
from sweeps import in_turn
from zoo import every_attention, smaller

from attnspec.graphs.patterns import PATTERNS
from attnspec.graphs.relation import Relation
from attnspec.limits import LIMITS
from attnspec.verification import verify

pytestmark = pytest.mark.limits("tiny")


@pytest.mark.parametrize(
    "pattern", [p for p in PATTERNS if not p.data_dependent], ids=lambda pattern: pattern.name
)
def test_pairs_are_those_of_the_definition(pattern: type[Relation]) -> None:
    samples = list(samples_of(pattern))
    some = samples[:: 1 + len(samples) // 6]
    found = [fault for sample in some for fault in faults(sample, 45, (3, 16))]
    assert found == []


@pytest.mark.parametrize(("body", "backend"), in_turn(GRAPHS.values(), BACKEND_NAMES))
def test_numbers_are_those_of_the_definition(body: str, backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(2, 2, 70, 70, key_heads=1, size=4)
    found = with_gradients(module_of(body, backend)(q, k, v), (q, k, v))
    meant = with_gradients(defined(spec_of(body), q, k, v), (q, k, v))
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other)


COMPOSED = [
    "attend (window(radius = 5) | columns(first(40))) + linear()",
    "causal attend (window(radius = 20) | columns(first(40))) + favor(features = 8)",
    "attend (block(size = 8) | global(first(2))) + taylor()",
    "attend random(keys = 3) + rfa(features = 4)",
    "causal attend linear()",
    "causal attend rfa(features = 4, gated = true)",
    "attend rbf(features = 8)",
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
    found = verify(spec_of(body).program, LIMITS.every_pair)
    assert found.ok, str(found)
    assert found.exhaustive


@every_attention
def test_the_zoo_is_what_it_means(path: Path, name: str) -> None:
    spec = smaller(path, name)
    n = spec.program.fixed_length or LIMITS.every_pair - 3
    found = verify(spec.program, n)
    assert found.ok, str(found)
    assert found.exhaustive == (n <= LIMITS.every_pair)
