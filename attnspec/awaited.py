"""What is done as soon as a module of others is there, whoever imports it, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


def when_imported(name: str, act: Callable[[], object]) -> None:
    """Acts now if the module of this name is loaded, else once it has been, at most once."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Awaited(name, act))


class _Awaited(MetaPathFinder):
    """Finds one module as the others do, and acts behind what it executes."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, *rest: Any) -> Any:
        """What the module is imported by, with the act behind it."""
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, *rest) for finder in others)
        module_spec = next((spec for spec in specs if spec is not None), None)
        if module_spec is not None and module_spec.loader is not None:
            execute = module_spec.loader.exec_module

            def execute_both(module: Any) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self.act()

            module_spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return module_spec
