"""Threads beside other processes: fewer where that is faster, and as many as ever elsewhere."""

from __future__ import annotations

import pytest
import torch

from attnspec.backends.common.contention import Threads, Usage


class Machine:
    """Two cores, of which `crowd` keeps one: then a call with two threads takes four times as long,
    and more than the 1.6 times of one thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crowd, self.threads, self.used, self.seen = False, 2, Usage(), list[int]()
        self.interrupted = False
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        self.shared = Threads(lambda: self.used, lambda count: setattr(self, "threads", count))

    def call(self) -> None:
        self.seen.append(self.threads)
        if self.interrupted:
            raise KeyboardInterrupt
        seconds, cores, taken = (0.05, 1.95, 5) if not self.crowd else (0.2, 1.2, 60)
        if self.threads == 1:
            seconds, cores, taken = 0.08, 1.0, 1
        self.used += Usage(seconds, seconds * cores, taken)

    def calls(self, count: int) -> list[int]:
        """The numbers of threads of so many calls."""
        self.seen = []
        for _ in range(count):
            self.shared.run("one", False, self.call)
        assert self.threads == 2
        return self.seen


def test_a_crowded_machine_is_left_a_core_until_the_crowd_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    assert set(machine.calls(100)) == {2}
    machine.crowd = True
    assert machine.calls(400)[200:].count(2) <= 3
    machine.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        machine.calls(1)
    assert machine.threads == 2
    machine.interrupted = machine.crowd = False
    assert set(machine.calls(400)[200:]) == {2}
