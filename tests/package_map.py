"""Where the package's modules lie, as pyproject.toml states it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from import_graph import modules_of

ROOT = Path(__file__).resolve().parent.parent

_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PACKAGE_DIR: dict[str, str] = _SETTINGS["tool"]["setuptools"]["package-dir"]
"""Import name -> folder at the top level."""

PACKAGES: list[str] = _SETTINGS["tool"]["setuptools"]["packages"]
"""Every package that a wheel holds."""

MODULES = modules_of({name: ROOT / folder for name, folder in PACKAGE_DIR.items()})
"""Every module of the package -> its file."""
