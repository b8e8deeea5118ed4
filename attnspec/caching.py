"""A bounded memory of what was built, safe to use from several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keeps the values of the keys used last. Copies and pickles of it are empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = Lock()
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, build: Callable[[], Value]) -> Value:
        """The value of a key, built if it is not kept. Two threads may build the same at once."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = build()
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self) -> tuple[type[Cache[Key, Value]], tuple[int]]:
        return type(self), (self.size,)
