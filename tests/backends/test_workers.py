"""Parts of a call on threads of their own: the same results, and nothing of it is seen outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from threading import Thread, get_ident

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnspec.backends.bands import attention
from attnspec.backends.common.threads import each
from attnspec.spec import parse

SPECS = {
    "bands": "attend window(radius = 5) | residue(step = 7)",
    "bands, causal": "causal attend strided(stride = 4)",
    "scattered": "attend powers(base = 2)",
    "learned": "attend window(radius = 9) score bias(buckets = 8, max_distance = 40)",
}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    # however little there is to do
    monkeypatch.setattr(attention, "WORTH", 0)
    yield
    torch.set_num_threads(before)


def test_parts_come_back_in_order() -> None:
    assert each(lambda part: part * part, range(7)) == [part * part for part in range(7)]
    assert each(lambda part: part, []) == []


def test_each_worker_uses_its_share_of_the_threads() -> None:
    torch.set_num_threads(4)
    found = each(lambda _: (get_ident(), torch.get_num_threads()), range(2))
    assert [threads for _, threads in found] == [2, 2]
    assert get_ident() not in [thread for thread, _ in found]
    # four at once, and the fifth with all threads
    found = each(lambda _: (get_ident(), torch.get_num_threads()), range(5))
    assert [threads for _, threads in found] == [1, 1, 1, 1, 4]
    assert found[4][0] == get_ident()


def test_the_threads_of_others_are_left_alone() -> None:
    torch.set_num_threads(3)
    each(lambda part: part, range(3))
    assert torch.get_num_threads() == 3
    seen: list[int] = []
    later = Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [3]


def test_one_thread_needs_no_worker() -> None:
    torch.set_num_threads(1)
    assert each(lambda _: get_ident(), range(3)) == [get_ident()] * 3


def test_an_error_reaches_the_caller() -> None:
    def fail(part: int) -> None:
        if part == 1:
            raise ValueError("part 1")

    with pytest.raises(ValueError, match="part 1"):
        each(fail, range(4))


def test_workers_know_whether_inference_mode_is_on() -> None:
    modes = each(lambda _: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()), range(2))
    assert modes == [(False, False)] * 2
    with torch.inference_mode():
        assert each(lambda _: torch.is_inference_mode_enabled(), range(2)) == [True] * 2


def test_who_looks_on_sees_every_operation() -> None:
    a = torch.ones(3, 4)
    with FlopCounterMode(display=False) as counter:
        each(lambda _: a @ a.T, range(4))
    assert counter.get_total_flops() == 4 * 2 * 3 * 4 * 3
    with torch.device("meta"):
        assert each(lambda _: torch.empty(1).device.type, range(2)) == ["meta"] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_workers_of_its_own() -> None:
    each(lambda part: part, range(2))
    child = os.fork()
    if child == 0:
        os._exit(0 if each(lambda part: part + 1, range(2)) == [1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("name", "batch", "heads"),
    [
        ("bands", 1, 4),
        ("bands, causal", 3, 1),
        ("scattered", 2, 3),
        ("learned", 2, 3),
    ],
)
def test_attention_is_the_same_by_one_thread_and_by_two(name: str, batch: int, heads: int) -> None:
    n = 1300
    module = parse(f"attention a {{ heads {heads} {SPECS[name]} }}").compile()
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(batch, heads, n, 16, generator=generator, requires_grad=True) for _ in range(3)
    ]
    learned = [*module.parameters()]
    for parameter in learned:
        torch.nn.init.normal_(parameter, generator=generator)
    padding = torch.rand(batch, n, generator=generator) > 0.1
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = module(*inputs, key_padding_mask=padding)
        with torch.inference_mode():
            torch.testing.assert_close(
                module(*inputs, key_padding_mask=padding), out, rtol=0, atol=0
            )
        found.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, *learned])])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
