"""`make wheel`: the tests of the public interface against the wheel, where no sources are.

    python tests/from_wheel.py [TORCH…] [-- OPTIONS OF PYTEST]

Without a version the packages of this environment are used. `2.9.0`, or `newest`, makes an
environment of its own with this torch and the pinned others (gigabytes, hours).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from package_map import PACKAGE_DIR, ROOT

PUBLIC = """backends compile decided distributed integrations runtime verification
test_spec.py test_zoo.py""".split()
"""Tests that use what users import."""

_MADE = shutil.ignore_patterns(".*", "build", "dist", "venv", "site", "*.egg-info", "__pycache__")


def run(python: str | Path, *arguments: str, cwd: Path, path: str | None = None) -> str:
    """What a command prints; the path of this process helps it to find nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {} if path is None else {"PYTHONPATH": path}
    done = subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def built(folder: Path) -> Path:
    """A wheel that was built from the source archive of a copy of the repository."""
    copy = folder / "copy" / "repository"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=_MADE)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=copy)
    shutil.rmtree(copy)
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed(wheel: Path, site: Path) -> None:
    """Put the wheel alone into a folder."""
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *pip, "--target", str(site), str(wheel), cwd=wheel.parent)


def with_torch(version: str) -> Path:
    """The interpreter of an environment with this torch, and the pinned versions of all else."""
    home = ROOT / ".versions" / version
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    pins = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
    others = home / "others.txt"
    others.write_text(re.sub(r"^(torch|triton|nvidia.*|cuda.*)==.*\n", "", pins, flags=re.M))
    wanted = ["--upgrade", "torch"] if version == "newest" else [f"torch=={version}"]
    for more in (wanted, ["--no-deps", "-r", str(others)]):
        run(python, "-m", "pip", "install", "--quiet", *more, cwd=ROOT)
    return python


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    torches, options = arguments[:cut], arguments[cut + 1 :]
    failed = []
    with TemporaryDirectory() as folder:
        site, tree = Path(folder) / "site", Path(folder) / "tree"
        installed(built(Path(folder)), site)
        shutil.copytree(ROOT, tree, symlinks=True, ignore=_MADE)
        for room in PACKAGE_DIR.values():
            for source in (tree / room).rglob("*.py"):
                source.unlink()
        for torch in torches or [""]:
            python = str(with_torch(torch)) if torch else sys.executable
            where = "import attnspec, torch; print(torch.__version__, attnspec.__file__)"
            told = run(python, "-c", where, cwd=tree, path=str(site))
            print("torch", told, end="", flush=True)
            if not Path(told.split()[-1]).is_relative_to(site):
                raise RuntimeError("the sources were imported in place of the wheel")
            environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
            tests = [str(Path("tests") / name) for name in PUBLIC]
            command = [python, "-m", "pytest", "-W", "default", *tests, *options]
            if subprocess.run(command, cwd=tree, env=environment).returncode:
                failed.append(torch or "this environment")
    if failed:
        print(f"failed with torch {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
