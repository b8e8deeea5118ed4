"""A bounded memory of what was built, safe to use from several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Event, Lock, Thread, current_thread
from threading import enumerate as threads
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

PATIENCE = 1.0
"""Seconds after which a thread that waits for another looks whether that one still lives."""


class Cache(Generic[Key, Value]):
    """Keeps the values of the keys used last. Copies and pickles of it are empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = Lock()
        self._building: dict[Key, tuple[Thread, Event]] = {}
        self.kept: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, build: Callable[[], Value]) -> Value:
        """The value of a key, built if it is not kept.

        Threads that ask for a key while another builds it wait for that one. Where building raises,
        nothing is kept, and each of them builds for itself. `build` may not ask for its own key.
        """
        while True:
            with self._lock:
                if key in self.kept:
                    self.kept.move_to_end(key)
                    return self.kept[key]
                builder, done = self._building.get(key, (None, Event()))
                # a process that was forked while a thread built has the entry, but not the thread
                if builder not in threads():
                    done = Event()
                    self._building[key] = current_thread(), done
                    break
            done.wait(PATIENCE)
        try:
            value = build()
            with self._lock:
                self.kept[key] = value
                while len(self.kept) > self.size:
                    self.kept.popitem(last=False)
        finally:
            with self._lock:
                del self._building[key]
            done.set()
        return value

    def __len__(self) -> int:
        return len(self.kept)

    def __reduce__(self) -> tuple[type[Cache[Key, Value]], tuple[int]]:
        return type(self), (self.size,)
