"""The machine in general terms, and the versions that a measurement depends on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from attnspec._version import __version__

if TYPE_CHECKING:
    from attnspec.data import Plain


def machine() -> dict[str, Plain]:
    """What a measurement depends on, and nothing that names the machine."""
    import torch

    return {
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def versions(packages: Iterable[str] = ("torch", "numpy")) -> dict[str, Plain]:
    """The versions of Python, of this package, and of those packages that are installed."""
    found: dict[str, Plain] = {"python": platform.python_version(), "attnspec": __version__}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
