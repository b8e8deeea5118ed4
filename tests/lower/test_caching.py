"""What is kept between calls: how much, for which threads and modes; values stay those of a new
module."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_checks import module_of, tensors
from population import spec_of

from attnspec.lower.cache import Cache

TIMEOUT = 30


@pytest.mark.parametrize(
    "body",
    [
        "attend window(radius = n // 10)",
        "attend window(radius = 5) score softcap(cap = n)",
        "attend global(first(n // 10)) | random(keys = 2)",
        "sequence grid(n // 10, 10) attend neighborhood(3, 3)",
        "layers 6 heads 2 attend window(radius = 9)"
        " layer 2, 5 { attend full } layer 4 { head 1 { attend window(radius = layer) } }",
        "attend window(radius = layer) | random(keys = 2)",
    ],
)
def test_lengths_layers_and_types_are_told_apart(body: str) -> None:
    module, layers = module_of(body), spec_of(body).layers
    for n, dtype in ((30, torch.float64), (60, torch.float64), (60, torch.float32)) * 2:
        for layer in range(max(2, layers)) if "layer" in body else (0,):
            parts = tensors(1, 2, n, n, dtype=dtype)
            out = module(*parts, layer=layer)
            assert out.dtype == dtype
            assert torch.equal(out, module_of(body)(*parts, layer=layer))


def test_memory_does_not_grow_with_the_number_of_lengths() -> None:
    module = module_of("causal attend window(before = 9, after = 0) | random(keys = 2)")

    def steps(first: int) -> int:
        with torch.no_grad():
            for n in range(first, first + 60):
                module(*tensors(1, 2, 1, n, size=4, dtype=torch.float32))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    steps(20)
    tracemalloc.start()
    try:
        before, after = steps(80), steps(140)
    finally:
        tracemalloc.stop()
    # tables of the longest sequences are longer by a few hundred kilobytes
    assert after - before < 300_000


def test_threads_with_new_lengths_agree_with_one_alone() -> None:
    body = "causal attend strided(stride = isqrt(n))"
    cases = [
        tensors(1, 2, n_q, n, dtype=torch.float32)
        for n in (5, 40, 41, 64, 90)
        for n_q in (1, 3, n)
        for _ in range(4)
    ]
    alone, module = module_of(body), module_of(body)
    wanted = [alone(*parts).detach() for parts in cases]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda parts: module(*parts).detach(), cases))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


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
    assert cache.get("d", lambda: 6) == len(cache) + 3
