"""A bounded memory of what was built, safe to use from several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keeps the values of the keys used last. Copies and pickles of it are empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = Lock()
        self.kept: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, build: Callable[[], Value]) -> Value:
        """The value of a key, built if it is not kept. Two threads may build the same at once.

        What is built outlives the call, so it is built in a thread of its own, which knows nothing
        of the modes of the caller: tracing, torch.func, inference mode, a default device.
        """
        with self._lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        with ThreadPoolExecutor(max_workers=1) as fresh:
            value = fresh.submit(build).result()
        with self._lock:
            self.kept[key] = value
            self.kept.move_to_end(key)
            while len(self.kept) > self.size:
                self.kept.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self.kept)

    def __reduce__(self) -> tuple[type[Cache[Key, Value]], tuple[int]]:
        return type(self), (self.size,)
