"""A bounded memory of what was built, safe to use from several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from threading import Event, Lock, Thread, current_thread
from threading import enumerate as threads
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

DRAWS = 1 << 25
"""Bytes of what is drawn, of one kind, that a process keeps: layers and calls ask for it again."""

PATIENCE = 1.0
"""Seconds after which a thread that waits for another looks whether that one still lives."""


class Cache(Generic[Key, Value]):
    """Keeps the values of the keys used last, so many and, of arrays with a `room`, as many bytes;
    the newest stays in any case. Copies and pickles of it are empty."""

    def __init__(self, size: int, room: int | None = None) -> None:
        self.size, self.room = size, room
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
                while len(self.kept) > 1 and self._is_full():
                    self.kept.popitem(last=False)
        finally:
            with self._lock:
                del self._building[key]
            done.set()
        return value

    def _is_full(self) -> bool:
        if len(self.kept) > self.size:
            return True
        arrays: Iterable[Any] = self.kept.values()
        return self.room is not None and sum(x.nbytes for x in arrays) > self.room

    def __reduce__(self) -> tuple[type[Cache[Key, Value]], tuple[int, int | None]]:
        return type(self), (self.size, self.room)
