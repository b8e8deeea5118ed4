"""What is kept between calls: how much, for which threads and modes; values stay those of a new
module."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attention_checks import module_of, tensors, with_gradients
from population import spec_of
from sweeps import checkered

from attnspec.lower.cache import Cache

TIMEOUT = 30


@pytest.mark.parametrize(
    ("backend", "body"),
    checkered(
        ("auto", "tables", "edges"),
        (
            "attend window(radius = n // 10) | columns(last(3))",
            "attend window(radius = 5) score softcap(cap = n)",
            "attend global(first(n // 10)) | random(keys = 2) score alibi()",
            "sequence grid(n // 10, 10) attend neighborhood(3, 3)",
            "layers 6 heads 2 attend window(radius = 9)"
            " layer 2, 5 { attend full } layer 4 { head 1 { attend window(radius = layer) } }",
            "layers 2 attend block(size = 64) | random_blocks(size = 64, blocks = 1)",
            # what divides has no value at some lengths
            "causal attend window(before = 2, after = 0) & where(k // (300 - q) >= 0)",
        ),
    ),
)
def test_lengths_layers_and_types_are_told_apart(body: str, backend: str) -> None:
    module = spec_of(body).compile(backend)
    for turn, n in enumerate((70, 290, 70, 20, 130, 250, 260)):
        layers = range(spec_of(body).layers) if turn < 3 else (0,)
        dtype = (torch.float64, torch.float32)[turn % 3 % 2]
        parts = tensors(1, 2, n if turn < 2 else min(n, 70), n, dtype=dtype)
        real = (torch.rand(1, n) < 0.8) if turn % 2 else None
        for layer in layers:
            given: Any = {"layer": layer, "key_padding_mask": real}
            both = module, spec_of(body).compile(backend)
            found, fresh = (with_gradients(each(*parts, **given), parts) for each in both)
            assert all(map(torch.equal, found, fresh))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lengths() -> None:
    module = module_of("causal attend window(before = 9, after = 0) | columns(first(2))")

    def steps(first: int) -> int:
        with torch.no_grad():
            for n in range(first, first + 50):
                module(*tensors(1, 2, n, n, size=4, dtype=torch.float32))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    # more lengths than are kept
    steps(20)
    steps(70)
    tracemalloc.start()
    try:
        before, after = steps(120), steps(170)
    finally:
        tracemalloc.stop()
    # tables of the longest sequences are longer by a few hundred kilobytes
    assert after - before < 300_000


def test_a_build_that_fails_or_is_gone_is_waited_for_by_nobody() -> None:
    cache: Cache[str, int] = Cache(3)
    entered, go = threading.Event(), threading.Event()

    def fail() -> int:
        entered.set()
        assert go.wait(TIMEOUT)
        raise KeyError("what happened")

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, "a", fail)
        assert entered.wait(TIMEOUT)
        other = pool.submit(cache.get, "a", lambda: 3)
        # another key does not wait for this one
        assert cache.get("b", lambda: 4) == 4
        go.set()
        with pytest.raises(KeyError, match="what happened"):
            first.result(TIMEOUT)
        assert other.result(TIMEOUT) == 3
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    # as a forked process finds it whose parent was building
    cache._building["c"] = gone, threading.Event()
    assert cache.get("c", lambda: 5) == 5
    assert [cache.get(key, lambda: 0) for key in "abc"] == [3, 4, 5]
    assert cache.get("d", lambda: 6) == len(cache.kept) + 3
