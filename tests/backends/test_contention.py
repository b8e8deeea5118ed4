"""Threads beside other processes: fewer where that is faster, and as many as ever elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import attnspec
from attnspec.backends.common import contention
from attnspec.backends.common.contention import LONGEST, SAMPLED, WINDOW, Threads, Usage
from attnspec.runtime.module import CompiledAttention

CALL = 0.05
"""Seconds of a call with all threads of an empty machine."""


@dataclass
class Machine:
    """Two cores, and a process that keeps one of them busy while `crowd` says so: then a call takes
    so many times as long as with a core for each thread."""

    crowd: bool = False
    slower: float = 4.0
    # of a machine that puts threads aside without slowing them down, as others may
    one_thread: float = 1.6
    used: Usage = field(default_factory=Usage)
    threads: int = 2
    seen: list[int] = field(default_factory=list)

    def put(self, count: int) -> None:
        self.threads = count

    def call(self) -> None:
        self.seen.append(self.threads)
        if self.threads == 1:
            self.pass_by(CALL * self.one_thread, 1.0, 1)
        elif self.crowd:
            self.pass_by(CALL * self.slower, 1.2, 60)
        else:
            self.pass_by(CALL, 1.95, 5)

    def pass_by(self, seconds: float, cores: float, taken: int) -> None:
        self.used += Usage(seconds, seconds * cores, taken)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(torch, "get_num_threads", lambda: found.threads)
    return found


def threads_of(machine: Machine) -> Threads:
    return Threads(lambda: machine.used, machine.put)


def calls(machine: Machine, threads: Threads, count: int, key: str = "one") -> list[int]:
    """The numbers of threads of so many calls."""
    machine.seen = []
    for _ in range(count):
        threads.run(key, False, machine.call)
    assert machine.threads == 2
    return machine.seen


def test_an_empty_machine_keeps_its_threads(machine: Machine) -> None:
    assert set(calls(machine, threads_of(machine), 100)) == {2}


def test_a_crowded_one_is_left_a_core_until_the_crowd_is_gone(machine: Machine) -> None:
    threads = threads_of(machine)
    machine.crowd = True
    seen = calls(machine, threads, 400)
    # the first call of a kind is slow for other reasons
    assert seen[:3] == [2, 2, 1]
    # now and then it is tried whether the others are gone, ever less often
    assert seen[200:].count(2) <= 3
    machine.crowd = False
    seen = calls(machine, threads, 400)
    back = seen.index(2)
    assert back * CALL * machine.one_thread <= LONGEST
    assert set(seen[back:]) == {2}


def test_time_in_which_nothing_is_called_counts(machine: Machine) -> None:
    threads = threads_of(machine)
    machine.crowd = True
    calls(machine, threads, 400)
    machine.crowd = False
    machine.pass_by(3600, 0.0, 0)
    assert set(calls(machine, threads, 20)[1:]) == {2}


@pytest.mark.parametrize("slower", [1.0, 1.5, 1.7])
def test_what_is_not_faster_with_fewer_threads_keeps_them(machine: Machine, slower: float) -> None:
    threads = threads_of(machine)
    machine.crowd, machine.slower = True, slower
    seen = calls(machine, threads, 1000)
    # threads are put aside, so that it is tried, ever less often
    assert 1 <= seen[:100].count(1)
    assert seen[500:].count(1) <= 5


def test_first_calls_say_nothing(machine: Machine) -> None:
    """They fault pages in, on one thread, and take many times as long as those that follow."""
    threads = threads_of(machine)
    for number in range(50):
        key = f"length {number}"
        threads.run(key, False, lambda: machine.pass_by(10 * CALL, 1.0, 60))
        # noise, by which threads are put aside on an empty machine too
        for _ in range(3):
            threads.run(key, False, lambda: machine.pass_by(CALL, 1.5, 6))
        machine.seen = []
        for _ in range(20):
            threads.run(key, False, machine.call)
        assert machine.seen.count(1) <= 1


def test_missing_cores_alone_are_no_crowd(machine: Machine) -> None:
    """A call that runs by one thread mostly, on an empty machine."""
    threads = threads_of(machine)
    for _ in range(50):
        threads.run("one", False, lambda: machine.pass_by(CALL, 1.1, 0))
    assert set(calls(machine, threads, 10)) == {2}


def test_a_trial_among_calls_never_seen_before_ends(machine: Machine) -> None:
    threads = threads_of(machine)
    machine.crowd = True
    assert calls(machine, threads, 3) == [2, 2, 1]
    threads.fewer, threads._tried = 1, True
    seen = [calls(machine, threads, 1, f"length {n}")[0] for n in range(12)]
    assert seen[0] == 1
    assert set(seen[8:]) == {2}


def test_more_than_two_threads_leave_as_many_cores_as_are_taken(machine: Machine) -> None:
    machine.threads, taken = 8, 3
    threads, seen = threads_of(machine), []

    def call() -> None:
        seen.append(machine.threads)
        over = machine.threads - (8 - taken)
        slower = 1 + 2 * max(0, over)
        cores = machine.threads - (0.5 if over > 0 else 0.05)
        machine.pass_by(CALL * slower, cores, 40 * slower if over > 0 else 1)

    for _ in range(200):
        threads.run("one", False, call)
    assert min(seen) == 8 - taken
    assert seen[100:].count(8 - taken) >= 95


def test_errors_leave_the_number_as_it_was(machine: Machine) -> None:
    threads = threads_of(machine)
    machine.crowd = True
    calls(machine, threads, 3)

    def fail() -> None:
        assert machine.threads == 1
        raise KeyError("no")

    with pytest.raises(KeyError):
        threads.run("one", False, fail)
    assert machine.threads == 2


@pytest.mark.parametrize("place", ["look", "put"])
def test_interrupts_leave_later_calls_as_they_were(machine: Machine, place: str) -> None:
    """Python raises them behind calls, those before and after the kernel's among them."""
    due = False

    def interrupt(here: str) -> None:
        nonlocal due
        if due and here == place:
            due = False
            raise KeyboardInterrupt

    def look() -> Usage:
        interrupt("look")
        return machine.used

    def put(count: int) -> None:
        machine.put(count)
        if count == 2:
            interrupt("put")

    threads = Threads(look, put)
    machine.crowd = True
    assert calls(machine, threads, 3) == [2, 2, 1]
    due = True
    with pytest.raises(KeyboardInterrupt):
        threads.run("one", False, machine.call)
    assert not due
    assert set(calls(machine, threads, 4)) == {1}


def test_calls_within_calls_are_parts_of_them(machine: Machine) -> None:
    threads = threads_of(machine)
    machine.crowd = True
    for _ in range(4):
        threads.run("outer", False, lambda: threads.run("inner", False, machine.call))
    assert machine.seen[:3] == [2, 2, 1]
    assert {key for key, _ in threads._usual} == {"outer"}


def test_small_calls_are_looked_at_now_and_then(machine: Machine) -> None:
    looked: list[Usage] = []

    def look() -> Usage:
        looked.append(machine.used)
        return machine.used

    threads = Threads(look, machine.put)
    for _ in range(10 * SAMPLED):
        threads.run("one", True, machine.call)
    assert len(looked) == 2 * 10
    machine.crowd = True
    for _ in range(20 * SAMPLED):
        threads.run("one", True, machine.call)
    assert machine.seen[-SAMPLED:].count(1) >= SAMPLED - 1


def test_windows_hold_several_short_calls(machine: Machine) -> None:
    """A single short call says little."""
    threads = threads_of(machine)
    short = WINDOW / 10
    for _ in range(1 + 9):
        threads.run("one", False, lambda: machine.pass_by(short, 1.0, 5))
    assert threads.fewer == 0
    for _ in range(3):
        threads.run("one", False, lambda: machine.pass_by(short, 1.0, 5))
    assert threads.fewer == 1


# --- the kernels ---------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for this one."""
    before, put = torch.get_num_threads(), contention._SET
    assert put is not None
    put(2)
    try:
        assert torch.get_num_threads() == 2
        yield
    finally:
        put(before)


KERNELS = {
    "window(radius = 9) | global(first(2))": "bands",
    "random(keys = 4, seed = 1)": "scattered",
    "topk(blocks = 2, size = 16)": "lists",
}


@pytest.mark.parametrize("body", KERNELS)
def test_kernels_are_asked_forward_and_backward(
    body: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = attnspec.parse(f"attention a {{ attend {body} }}").compile(backend=KERNELS[body])
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 300, 16, generator=generator) for _ in range(3)]
    asked: list[object] = []

    def found(threads: int) -> list[torch.Tensor]:
        def shared(key: object, q: torch.Tensor, call: Callable[[], object]) -> object:
            asked.append(key)
            assert contention._SET is not None
            contention._SET(threads)
            return call()

        for place in ("common.exact", "scattered.kernel"):
            monkeypatch.setattr(f"attnspec.backends.{place}.shared", shared)
        given = [x.clone().requires_grad_() for x in tensors]
        out = module(*given)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]

    for one, two in zip(found(1), found(2), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    # each way has a key of its own, and every call the same
    assert len(set(asked)) >= 2
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]


def test_deterministic_algorithms_keep_their_threads(machine: Machine) -> None:
    """In whose order sums are rounded."""
    threads = threads_of(machine)
    machine.crowd = True
    q = torch.empty(1, 1, 1, contention.SMALL)
    held, contention._mine.threads = contention._mine.threads, threads
    try:
        torch.use_deterministic_algorithms(True)
        for _ in range(20):
            contention.shared("one", q, machine.call)
        assert set(machine.seen) == {2}
        torch.use_deterministic_algorithms(False)
        for _ in range(20):
            contention.shared("one", q, machine.call)
        assert 1 in machine.seen
    finally:
        torch.use_deterministic_algorithms(False)
        contention._mine.threads = held


def test_only_the_thread_that_calls_has_fewer(two_threads: None) -> None:
    put = contention._SET
    assert put is not None
    found: list[int] = []
    put(1)
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert torch.get_num_threads() == 1
    # what the environment says, not what this thread was told
    put(2)
    again = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    again.start()
    again.join()
    assert found[0] == found[1]


def test_what_is_small_has_one_thread_and_later_calls_all(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(contention, "_SET", put.append)
    with contention.one_thread():
        assert put == [1]
    assert put == [1, 4]
    with contextlib.suppress(KeyError), contention.one_thread():
        raise KeyError
    assert put == [1, 4, 1, 4]


def test_a_module_is_verified_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    forward = CompiledAttention.forward

    def noting(*given: Any, **named: Any) -> Any:
        seen.add(torch.get_num_threads())
        return forward(*given, **named)

    monkeypatch.setattr(CompiledAttention, "forward", noting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        attnspec.parse("attention sample { attend window(radius = 3) }").emit()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
