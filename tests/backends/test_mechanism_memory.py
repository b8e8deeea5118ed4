"""Memory of mechanisms: linear in n forward and backward, never n x n or n x d x d_v numbers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from attention_checks import spec_of, tensors
from sweeps import in_turn

from benchmarks.accuracy.costs import peak_bytes

N, SIZE, HEADS = 4096, 64, 1

HELD = 4 * N * SIZE * HEADS * 4
"""Bytes of q, k, v and the output; n x n numbers, like n x d x d_v, are 16 times as many."""

KERNELS = (
    "linear()",
    "linear(feature = exp, normalize = none)",
    "favor(features = 64)",
    "favor(features = 32, kind = trig)",
    "rfa(features = 32)",
    "taylor()",
    "rbf(features = 64)",
)

BODIES = (
    *(f"attend {text}" for text in KERNELS),
    *(f"causal attend {text}" for text in KERNELS),
    "causal attend rfa(features = 32, gated = true)",
    "attend efficient()",
    "attend linformer(rank = 16, max_length = 4096)",
    "attend linformer(rank = 16, projection = conv, max_length = 4096)",
    "attend linformer(rank = 16, projection = mean)",
    "attend linformer(rank = 16, projection = max)",
    "attend nystrom(landmarks = 16, conv = 33)",
    "attend fourier()",
    "causal attend window(before = 20, after = 0) + linear()",
)


@pytest.fixture(scope="module", autouse=True)
def _settled() -> Iterator[None]:
    """What earlier tests left is looked through once, not before every measurement."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    # what the whole run keeps was frozen before
    gc.freeze()


@pytest.mark.parametrize(("body", "padded"), in_turn(BODIES, (True, False)))
def test_memory_is_that_of_a_few_tensors(body: str, padded: bool) -> None:
    module = spec_of(body).compile(head_size=SIZE)
    given = [x.detach().float().requires_grad_() for x in tensors(1, HEADS, N, N, size=SIZE)]
    padding = torch.ones(1, N, dtype=torch.bool) if padded else None

    def step() -> None:
        module(*given, key_padding_mask=padding).sum().backward()

    # what is made once for a length is not of the step
    step()
    for x in given:
        x.grad = None
    assert peak_bytes(step) < 12 * HELD
