"""What is kept between calls: how much, by what, for which threads."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from attention_checks import GRAPHS, defined, module_of, spec_of, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspec.backends.common.torch_modes import apart, composed, is_surrounded
from attnspec.limits import LIMITS
from attnspec.lower.cache import Cache
from attnspec.lower.lower import Binder, stand_ins
from attnspec.runtime import CompiledAttention

TIMEOUT = 30


def step(module: CompiledAttention, n_q: int, n: int) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = module(*tensors(1, 2, n_q, n, size=4, dtype=torch.float32))
    return out


# --- what is kept --------------------------------------------------------------------------------


def test_steps_of_generation_leave_the_prompts_alone() -> None:
    for backend in ("auto", "tiles"):
        module = module_of(GRAPHS["strided"], backend)
        for n in (70, 90):
            step(module, n, n)
        prompts = list(module.engine.prepared.kept.values())
        for n in range(91, 91 + LIMITS.layouts + 10):
            step(module, 1, n)
        assert list(module.engine.prepared.kept.values()) == prompts
        assert len(module.engine.steps) == (0 if backend == "auto" else LIMITS.layouts_of_steps)


def test_the_type_is_not_told_apart() -> None:
    spec, module = spec_of(GRAPHS["strided"]), module_of(GRAPHS["strided"])
    given = [x.detach() for x in tensors(1, 2, 70, 70)]
    exact = defined(spec, *given)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for _ in range(2):
            out = module(*(x.to(dtype) for x in given))
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)
    assert len(module.engine.prepared) == 1


def test_layers_that_compute_the_same_share_what_is_kept() -> None:
    body = (
        "layers 6 heads 2 attend window(radius = 9) score bias(buckets = 4)"
        " layer 2, 5 { attend full } layer 4 { head 1 { attend window(radius = layer) } }"
    )
    spec, module = spec_of(body), module_of(body)
    torch.nn.init.normal_(module.get_parameter("bias_0"))
    alone = [module_of(body) for _ in range(6)]
    given = tensors(1, 2, 40, 40)
    for layer, other in enumerate(alone):
        other.load_state_dict(module.state_dict())
        assert torch.equal(module(*given, layer=layer), other(*given, layer=layer))
    assert not torch.equal(module(*given, layer=0), module(*given, layer=1)), "tables differ"
    assert [module.engine.binder.alike(layer) for layer in range(6)] == [0, 0, 2, 0, 4, 2]
    assert len(module.engine.prepared) == 3
    assert spec.layers == 6
    # where the graph asks for the layer, nothing is shared
    body = "attend window(radius = layer) | random(keys = 2)"
    spec, module = spec_of(body), module_of(body)
    for layer in (0, 3):
        torch.testing.assert_close(module(*given, layer=layer), defined(spec, *given, layer=layer))
    assert len(module.engine.prepared) == 2


def test_what_depends_on_the_length_is_bound_anew() -> None:
    lengths = (30, 60, 90)
    for body in (
        "attend window(radius = n // 10)",
        "attend window(radius = 5) scale 1 / n",
        "attend window(radius = 5) score softcap(cap = n)",
        "attend where(k % 7 == n % 7)",
        "attend shift(self, by = n // 3)",
        "attend global(first(n // 10)) | random(keys = 2)",
        "sequence grid(n // 10, 10) attend neighborhood(3, 3)",
        "heads 3 attend window(radius = head * 4) | random(keys = 1)",
    ):
        program = spec_of(body).program
        binder = Binder(program, stand_ins(program))
        for n in (*lengths, *lengths):
            assert binder.works(0, 3, 1, n) == Binder(program, binder.inputs).works(0, 3, 1, n)


def test_many_lengths_leave_a_bounded_memory() -> None:
    module = module_of("causal attend window(before = 9, after = 0) | columns(first(2))")
    seen: list[weakref.ref[object]] = []
    for n in range(LIMITS.rows_looked_up + 1, LIMITS.rows_looked_up + 3 * LIMITS.layouts):
        step(module, n % 50 + LIMITS.rows_looked_up + 1 if n > 80 else n, n)
        seen.append(weakref.ref(next(reversed(module.engine.prepared.kept.values()))))
        step(module, 1, n)
    gc.collect()
    assert len(module.engine.prepared) == LIMITS.layouts
    assert sum(ref() is not None for ref in seen) == LIMITS.layouts
    assert len(module.engine.steps) == 0


def test_memory_does_not_grow_with_the_number_of_lengths() -> None:
    module = module_of("causal attend window(before = 9, after = 0) | random(keys = 2)")

    def steps(first: int) -> int:
        for n in range(first, first + 60):
            step(module, 1, n)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    steps(20)
    tracemalloc.start()
    try:
        before = steps(80)
        after = steps(140)
    finally:
        tracemalloc.stop()
    # tables of the longest sequences are longer by a few hundred kilobytes
    assert after - before < 300_000


# --- threads -------------------------------------------------------------------------------------


def test_threads_that_ask_for_one_key_build_it_once() -> None:
    cache: Cache[str, object] = Cache(3)
    built: list[int] = []
    entered, go = threading.Event(), threading.Event()

    def build() -> object:
        built.append(1)
        entered.set()
        assert go.wait(TIMEOUT)
        return object()

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(cache.get, "a", build)
        assert entered.wait(TIMEOUT)
        waiting = [pool.submit(cache.get, "a", build) for _ in range(6)]
        # another key does not wait for this one
        assert cache.get("b", lambda: "other") == "other"
        go.set()
        found = {id(each.result(TIMEOUT)) for each in (first, *waiting)}
    assert len(built) == 1
    assert len(found) == 1


def test_a_build_that_raises_leaves_nothing_behind() -> None:
    cache: Cache[str, int] = Cache(3)
    entered, go = threading.Event(), threading.Event()
    tried: list[int] = []

    def fail() -> int:
        tried.append(1)
        entered.set()
        assert go.wait(TIMEOUT)
        raise KeyError("what happened")

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, "a", fail)
        assert entered.wait(TIMEOUT)
        second = pool.submit(cache.get, "a", fail)
        third = pool.submit(cache.get, "a", lambda: 3)
        go.set()
        with pytest.raises(KeyError, match="what happened"):
            first.result(TIMEOUT)
        assert third.result(TIMEOUT) == 3
        # whoever waited either builds for itself and fails too, or finds what another built
        try:
            assert second.result(TIMEOUT) == 3
        except KeyError:
            assert len(tried) == 2
    assert dict(cache.kept) == {"a": 3}
    assert cache._building == {}
    with pytest.raises(KeyboardInterrupt):
        cache.get("b", interrupted)
    assert cache._building == {}
    assert cache.get("b", lambda: 4) == 4


def interrupted() -> int:
    raise KeyboardInterrupt


def test_a_builder_that_is_no_more_is_not_waited_for() -> None:
    cache: Cache[str, int] = Cache(3)
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    # as a forked process finds it whose parent was building
    cache._building["a"] = gone, threading.Event()
    assert cache.get("a", lambda: 1) == 1
    assert cache._building == {}


def test_building_apart_forgets_the_modes_of_the_caller() -> None:
    def build() -> torch.Tensor:
        return torch.ones(2) @ torch.ones(2, 2)

    modes: dict[str, AbstractContextManager[object]] = {
        "none": nullcontext(),
        "inference": torch.inference_mode(),
        "no gradients": torch.no_grad(),
        "default device": torch.device("meta"),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "fake": FakeTensorMode(),
        "composed": composed(),
    }
    for name, mode in modes.items():
        with mode:
            inside = apart(build)
            with pytest.raises(KeyboardInterrupt):
                apart(interrupted)
        assert type(inside) is torch.Tensor, name
        assert inside.device.type == "cpu", name
        assert not inside.is_inference(), name
        assert inside.dtype == torch.float32, name
    found: list[torch.Tensor] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        found.append(apart(build))
        return x.sum()

    torch.func.grad(traced)(torch.ones(2))
    assert all(type(inside) is torch.Tensor for inside in found)
    assert not is_surrounded()


def test_threads_with_new_lengths_agree_with_one_alone() -> None:
    body = GRAPHS["strided"]
    cases = [
        (n_q, tensors(1, 2, n_q, n, dtype=torch.float32))
        for n in (40, 41, 42, 90)
        for n_q in (1, 3, n)
        for _ in range(4)
    ]
    alone = module_of(body)
    wanted = [alone(*given).detach() for _, given in cases]
    module = module_of(body)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: module(*case[1]).detach(), cases))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(module.engine.prepared) == 4
