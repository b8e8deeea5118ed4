"""Where the package's modules lie, as pyproject.toml states it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PACKAGE_DIR: dict[str, str] = _SETTINGS["tool"]["setuptools"]["package-dir"]
"""Import name -> folder at the top level."""


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGE_DIR.items():
        # links lead to the other folders
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == path.resolve():
                parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()
"""Every module of the package -> its file."""


def package_of(module: str) -> str:
    """The package a module belongs to; a package belongs to itself."""
    is_package = module in MODULES and MODULES[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]
