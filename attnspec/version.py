"""The version of the package, and the least version of torch that it computes with."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

LEAST_TORCH = (2, 9)
"""Before it, torch's fused attention on the CPU gives wrong gradients, or ends the process, where
several query heads share a key head."""


def is_older(text: str, least: tuple[int, int]) -> bool:
    """Whether a version, such as `2.13.0+cpu`, comes before the least one."""
    parts = text.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit()) < least


@cache
def is_installed(package: str, least: tuple[int, int]) -> bool:
    """Whether a package, which is there, is not older than a version."""
    try:
        return not is_older(version(package), least)
    except PackageNotFoundError:
        return True  # one that no package manager knows speaks for itself
