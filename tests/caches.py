"""What functions of a package have cached, forgotten."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

_CACHING = type(cache(len))

_known: dict[str, tuple[int, list[Any]]] = {}


def _caching(package: str) -> Iterator[Any]:
    """Functions that cache, of modules and of their classes. The garbage collector would not name
    them all: what is frozen is no longer in its lists."""
    for name, module in [*sys.modules.items()]:
        if name == package or name.startswith(f"{package}."):
            for value in vars(module).values():
                inside = vars(value).values() if isinstance(value, type) else ()
                for each in (value, *inside):
                    found = getattr(each, "__func__", each)
                    if isinstance(found, _CACHING):
                        yield found


def forget(package: str) -> None:
    """Empty them all; they are looked for anew where a module has come."""
    loaded = len(sys.modules)
    if _known.get(package, (0,))[0] != loaded:
        _known[package] = loaded, list({id(each): each for each in _caching(package)}.values())
    for each in _known[package][1]:
        each.cache_clear()
