"""The wheel alone: built through the source archive, installed, run where no sources are."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from from_wheel import built, run
from package_map import PACKAGE_DIR, ROOT

from attnspec.version import LEAST_TORCH, is_older


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(tmp_path: Path) -> None:
    suffixes = {".py", ".attn", ".html", ".json", ".lark", ".toml", ".typed"}
    wanted = {
        "/".join((*package.split("."), *path.relative_to(ROOT / folder).parts))
        for package, folder in PACKAGE_DIR.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and not path.name.endswith("_attn.py")
    }
    assert {"attnspec/py.typed", "attnspec/grammar/attn.lark"} <= wanted
    with zipfile.ZipFile(built(tmp_path)) as archive:
        names = [x for x in archive.namelist() if ".dist-info/" not in x]
    assert set(names) == wanted


OLD = f"""
import re
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.__version__ = "2.8.0"
import attnspec
spec = attnspec.parse("attention a {{ causal attend full require causal }}")
print(spec.check(), spec.analyse(9).edges)
try:
    spec.compile()
except attnspec.AttnSpecError as error:
    print(error)
"""


def test_a_torch_that_computes_wrong_gradients_is_refused() -> None:
    least = "{}.{}".format(*LEAST_TORCH)
    wanted = f"[] 45\nattnspec needs torch {least} or newer, got 2.8.0: "
    assert run(sys.executable, "-c", OLD, cwd=ROOT).startswith(wanted)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={least}" in project["dependencies"]
    needed = {re.split("[^a-z]", each)[0] for each in project["dependencies"]}
    assert needed == {"click", "lark", "networkx", "numpy", "rich", "scipy", "torch"}
    holding = [
        x for x, more in project["optional-dependencies"].items() if "matplotlib>=3.8" in more
    ]
    assert holding == ["plot", "dev"]
    assert is_older("2.8.1", (2, 9))
    assert not any(is_older(x, (2, 9)) for x in ("2.9.0a0+git1", "2.13.0+cpu", "10.0"))
