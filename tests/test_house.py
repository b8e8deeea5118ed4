"""The suite in numbers: what may become less and not more."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module

from package_map import MODULES, ROOT

LINES = 63_795
"""The most lines of the package, which becomes less."""

PATCHES = 27
"""The most calls in the tests that patch something."""

PRIVATE = 0.103
"""The largest share of tests that use a name of the package which no public module gives."""

PUBLIC = ("cli", "distributed", "integrations.transformers", "limits", "runtime", "testing")
"""Modules whose names are public, beside those of the package itself."""

REGISTRIES = {"BACKENDS", "MECHANISMS", "PATTERNS"}

Definition = tuple[str, str]
"""A module of the tests, and a name in it."""

HIDDEN = ("", "")
"""Any name of the package that no public module gives."""


@cache
def public_names() -> set[str]:
    modules = [import_module(name) for name in ("attnspec", *(f"attnspec.{x}" for x in PUBLIC))]
    return REGISTRIES.union(*(getattr(module, "__all__", vars(module)) for module in modules))


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Definition]]:
    """What a name is that is imported at any depth; a module is the definition without a name."""
    for node in nodes:
        for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            here = each.asname or each.name.partition(".")[0]
            whole = isinstance(node, ast.Import)
            module, name = (each.name, "") if whole else (str(node.module), each.name)  # type: ignore[attr-defined]
            ours = module.partition(".")[0] == "attnspec"
            known = module == "attnspec" if whole else name in public_names()
            yield here, HIDDEN if ours and not known else (module, name)


def uses_in(module: str, text: str) -> dict[Definition, set[Definition]]:
    """What each definition of a module uses, directly; fixtures are those of conftest.py."""
    tops = [(top, list(ast.walk(top))) for top in ast.parse(text).body]
    imported = dict(imported_by(node for _, nodes in tops for node in nodes))
    uses: dict[Definition, set[Definition]] = {}
    for top, nodes in tops:
        used: set[Definition] = set()
        defined: set[str] = set()
        for node in nodes:
            match node:
                case ast.Attribute(ast.Name(base), name) if imported.get(base, ("", "x"))[1] == "":
                    used.add((imported[base][0], name))
                case ast.Name(name, ast.Store()):
                    defined.add(name)
                case ast.Name(name):
                    used.add(imported.get(name, (module, name)))
                case ast.arg(name):
                    used |= {imported.get(name, (module, name)), ("conftest", name)}
                case _:
                    pass
        if isinstance(top, ast.FunctionDef | ast.ClassDef):
            defined = {top.name}
        for name in defined:
            uses.setdefault((module, name), set()).update(used)
    return uses


def hidden_share(texts: Mapping[str, str]) -> float:
    """The share of tests that use, themselves or through helpers, what is hidden."""
    uses = {key: used for module in texts for key, used in uses_in(module, texts[module]).items()}
    hidden = {HIDDEN}
    while more := {key for key in uses.keys() - hidden if not hidden.isdisjoint(uses[key])}:
        hidden |= more
    tests = {key for key in uses if key[0].startswith("test_") and key[1].startswith("test_")}
    return len(tests & hidden) / len(tests)


@cache
def suite() -> dict[str, str]:
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        package = f"{path.parent.name}." if (path.parent / "__init__.py").exists() else ""
        found[package + path.stem] = path.read_text(encoding="utf-8")
    return found


def test_the_package_does_not_grow() -> None:
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in MODULES.values()) <= LINES


def test_few_tests_use_what_is_not_public() -> None:
    assert hidden_share(suite()) <= PRIVATE


def test_little_is_patched() -> None:
    text = "\n".join(suite().values())
    assert len(re.findall(r"\b(?:monkeypatch|patch)\.\w+\(", text)) <= PATCHES


def test_a_name_that_is_not_public_is_counted() -> None:
    texts = {
        "zoo": "from attnspec.ir.program import leaves\ndef hidden(): leaves()\ndef shown(): pass",
        "conftest": "import attnspec.lower\ndef sample(): return attnspec.lower",
        "test_a": "import zoo\nfrom zoo import shown\nfrom attnspec.spec import parse"
        "\nimport attnspec\ndef test_a(): zoo.hidden()\ndef test_b(): zoo.shown(), parse()"
        "\ndef test_c(shown): pass"
        "\ndef test_d():\n    from attnspec.limits import LIMITS, where\n    attnspec.load(LIMITS)"
        "\nclass Own: x = test_a\ndef test_e(): Own()",
    }
    assert hidden_share(texts) == 2 / 5
