"""The wheel alone: built through the source archive, installed, run where no sources are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from package_map import MODULES, PACKAGE_DIR, ROOT

from attnspec.version import LEAST_TORCH, is_older

# one worker builds, once
pytestmark = pytest.mark.xdist_group("packaging")


def run(*command: str, cwd: Path) -> str:
    # no path of this process may help the child to find the sources
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the source archive of a copy of the repository."""
    copy = tmp_path_factory.mktemp("copy") / "repository"
    made = shutil.ignore_patterns(".*", "build", "dist", "venv", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=made)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=copy)
    shutil.rmtree(copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    target = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(target), str(wheel), cwd=target)
    return target


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def foreign(files: Iterable[str]) -> set[str]:
    """Top-level names of a wheel that are not ours."""
    tops = {name.partition("/")[0] for name in files}
    return {t for t in tops if t != "attnspec" and not _is_metadata(t)}


def _is_metadata(top: str) -> bool:
    return top.startswith("attnspec-") and top.endswith(".dist-info")


def packaged(folders: dict[str, str], root: Path) -> set[str]:
    """The files that a wheel should hold: sources and data, under their import names."""
    suffixes = {".py", ".attn", ".html", ".json", ".lark", ".toml", ".typed"}
    return {
        "/".join((*package.split("."), *path.relative_to(root / folder).parts))
        for package, folder in folders.items()
        for path in (root / folder).rglob("*")
        if path.suffix in suffixes and not path.name.endswith("_attn.py")
    }


def test_the_wheel_brings_one_name(wheel: Path) -> None:
    assert foreign(names(wheel)) == set()


def test_a_second_name_is_found(wheel: Path, tmp_path: Path) -> None:
    wrong = tmp_path / wheel.name
    shutil.copy(wheel, wrong)
    with zipfile.ZipFile(wrong, "a") as archive:
        archive.writestr("grammar/__init__.py", "")
    assert foreign(names(wrong)) == {"grammar"}


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    held = {name for name in names(wheel) if not _is_metadata(name.partition("/")[0])}
    wanted = packaged(PACKAGE_DIR, ROOT)
    assert {"attnspec/py.typed", "attnspec/grammar/attn.lark"} <= wanted
    assert any(name.startswith("attnspec/text/catalogue/") for name in wanted)
    assert any(name.startswith("attnspec/examples/") and name.endswith(".attn") for name in wanted)
    assert held == wanted


def test_the_wheel_works_without_the_sources(site: Path, tmp_path: Path) -> None:
    # an editable install in this environment finds the sources by a hook or by a path
    script = f"""
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")
                    and "editable" not in getattr(f, "__name__", "").lower()]
sys.path[:] = [{str(site)!r}, *(p for p in sys.path if p != {str(ROOT)!r})]
from importlib import import_module, resources
for package in {sorted(PACKAGE_DIR)!r}:
    import_module(package)
assert (resources.files("attnspec.grammar") / "attn.lark").read_text(encoding="utf-8")
spec = resources.files("attnspec.examples") / "bigbird.attn"
import attnspec
print(attnspec.parse(spec.read_text(encoding="utf-8")).name)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "attnspec":
        print(module.__file__)
"""
    name, *files = run(sys.executable, "-c", script, cwd=tmp_path).splitlines()
    assert name == "bigbird"
    assert len(files) > len(PACKAGE_DIR)
    assert [file for file in files if not Path(file).is_relative_to(site)] == []


def test_the_sources_would_be_noticed(site: Path) -> None:
    script = "import attnspec.grammar; print(attnspec.grammar.__file__)"
    file = Path(run(sys.executable, "-c", script, cwd=ROOT).strip())
    assert not file.is_relative_to(site)
    assert file.resolve() == MODULES["attnspec.grammar"]


OLD = """
import torch
torch.__version__ = "2.8.0"
import attnspec
spec = attnspec.parse("attention a { causal attend full require causal }")
print(spec.check(), spec.analyse(9).edges)
try:
    spec.compile()
except attnspec.AttnSpecError as error:
    print(error)
"""


def test_a_torch_that_computes_wrong_gradients_is_refused() -> None:
    said = run(
        sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{OLD}", cwd=ROOT
    )
    least = "{}.{}".format(*LEAST_TORCH)
    assert said.startswith(f"[] 45\nattnspec needs torch {least} or newer, got 2.8.0: ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={least}" in project["dependencies"]
    assert [is_older(each, (2, 9)) for each in ("2.8.1", "2.9.0a0+git1", "2.13.0+cpu", "10.0")] == [
        True, False, False, False
    ]  # fmt: skip
