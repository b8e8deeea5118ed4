"""What a change can reach: imports now and later, names in strings, files that are no modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_map import MODULES, ROOT
from reaching import files_reaching, main, sources_of

FILES = {
    "attnspec/__init__.py": '_HOMES = {"load": "attnspec.spec", "draw": "attnspec.show"}\n',
    "attnspec/grammar.py": 'TABLE = "table.json"\n',
    "attnspec/kernel.py": "",
    "attnspec/show.py": "import attnspec.grammar\n",
    "attnspec/spec.py": """
import re
from typing import TYPE_CHECKING
import attnspec.grammar
if TYPE_CHECKING:
    from attnspec.show import Picture
WORDS = re.compile("x")
class Spec:
    def compile(self):
        from attnspec.kernel import run
        return run(self)
def load(path): return Spec()
""",
    "benchmarks/__init__.py": "",
    "tests/conftest.py": "import json\n",
    "tests/helpers/zoo.py": 'import attnspec\nFILES = "*.attn"\nloaded = attnspec.load\n',
    "tests/front/test_grammar.py": "from attnspec.grammar import TABLE\n",
    "tests/front/test_spec.py": "from attnspec.spec import load\nload('x').name\n",
    "tests/back/test_kernel.py": "from zoo import loaded\nloaded('x').compile()\n",
    "tests/back/test_patched.py": 'PATCHED = "attnspec.kernel.run"\n',
    "tests/show/test_show.py": "import attnspec\nattnspec.draw('x')\n",
    "tests/test_words.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


EVERY = ["grammar", "kernel", "patched", "show", "spec", "words"]


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        # a package is run before its modules, as in `import attnspec.grammar`
        ("attnspec/__init__.py", ["grammar", "kernel", "patched", "show", "spec"]),
        ("attnspec/grammar.py", ["grammar", "kernel", "show", "spec"]),
        # `re.compile` is not `Spec.compile`, hints are not run, and a path may be in a string
        ("attnspec/kernel.py", ["kernel", "patched"]),
        ("attnspec/show.py", ["show"]),
        ("attnspec/spec.py", ["kernel", "spec"]),
        ("attnspec/table.json", ["grammar", "kernel", "show", "spec"]),
        ("examples/window.attn", ["kernel"]),
        ("tests/helpers/zoo.py", ["kernel"]),
        ("tests/front/test_spec.py", ["spec"]),
        ("benchmarks/__init__.py", []),
        ("tests/conftest.py", EVERY),
        ("pyproject.toml", EVERY),
        ("attnspec/gone.py", EVERY),
        ("LICENSE", EVERY),
    ],
)
def test_a_change_reaches_what_may_run_it(root: Path, changed: str, reached: list[str]) -> None:
    package = {
        "attnspec" if path.stem == "__init__" else f"attnspec.{path.stem}": path
        for path in (root / "attnspec").glob("*.py")
    }
    found = files_reaching([root / changed], sources_of(root, package))
    assert sorted(path.stem.removeprefix("test_") for path in found) == reached


def test_the_tests_of_this_repository() -> None:
    sources = sources_of(ROOT, MODULES)

    def reaching(module: str) -> set[str]:
        return {path.name for path in files_reaching([sources.paths[module]], sources)}

    drawing = reaching("attnspec.show.svg")
    assert "test_picture_files.py" in drawing
    assert "test_cli.py" in drawing
    assert "test_grammar.py" not in drawing
    assert "test_reach.py" not in drawing


def test_a_base_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-base"]) == 2
    assert "cannot compare with no-such-base" in capsys.readouterr().err
