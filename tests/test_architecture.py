"""What the contracts of pyproject.toml do not say: what starts light, what is registered, which
names stay at home."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from package_map import MODULES, PACKAGE_DIR, ROOT, package_of

import attnspec
from attnspec.graphs import patterns
from attnspec.graphs.relation import Relation
from attnspec.version import __version__

HALL = 8
"""The most files right inside the package."""

WORDS = ("full", "causal", "where", "where_inputs")
"""Graphs that are words of the language, as operators are: everything, order, a predicate."""

NAMES_KNOWN = {
    # equal labels in a mask of others
    "attnspec.interchange.traced": {"prefix", "same"},
    # what a model, or a packed batch, adds to a spec
    "attnspec.integrations.model_choices": {"chosen"},
    "attnspec.runtime.packed": {"same"},
}
"""Who makes a pattern or tells it apart by its name, besides the patterns themselves."""


def test_the_hall_is_small() -> None:
    assert len([*(ROOT / "attnspec").glob("*.py")]) <= HALL


def names_known(text: str, names: Collection[str]) -> set[str]:
    """The patterns that a module makes, looks up or tells apart by their names."""
    found: list[ast.AST] = []
    may = re.search(r"\.patterns?\b|\bLeaf\(|\bBY_NAME\b", text)
    for node in ast.walk(ast.parse(text)) if may else ():
        match node:
            case ast.Compare(ast.Attribute(attr="pattern"), _, others):
                found += others
            case ast.Match(ast.Attribute(attr="pattern"), cases):
                found += [case.pattern for case in cases]
            case ast.Call(ast.Name("Leaf"), [first, *_]):
                found.append(first)
            case ast.Subscript(ast.Name("BY_NAME") | ast.Attribute(attr="patterns"), key):
                found.append(key)
            case _:
                pass
    parts = [part for node in found for part in ast.walk(node)]
    constants = {part.value for part in parts if isinstance(part, ast.Constant)}
    return {name for name in names if name in constants}


def test_names_of_patterns_are_known_at_home() -> None:
    names = patterns.BY_NAME.keys() - set(WORDS)
    for module, path in MODULES.items():
        if not module.startswith("attnspec.graphs.patterns"):
            found = names_known(path.read_text(encoding="utf-8"), names)
            # what nobody knows any more is not allowed either
            assert found == NAMES_KNOWN.get(module, set()), module

    for text in (
        'wide = term.pattern not in ("block", "window")',
        'match leaf.pattern:\n    case "rows" | "block" if wide: pass',
        'Leaf("block", (("size", 8),))',
        'at.patterns["block"](8)',
    ):
        assert names_known(text, ("block", "residue")) == {"block"}


def private_names(module: str, text: str) -> list[str]:
    """What a module imports that is private to another package."""
    imports = re.findall(r"^ *from (attnspec[\w.]*) import (\([^)]*\)|.*)", text, re.MULTILINE)
    return [
        f"{module}: {home}.{name}"
        for home, names in imports
        if package_of(module) != package_of(home)
        for name in re.findall(r"\b_\w*[a-z]\b", names if "._" not in home else "_all")
    ]


def test_private_names_stay_in_their_package() -> None:
    for module, path in MODULES.items():
        assert private_names(module, path.read_text(encoding="utf-8")) == []
    text = "from attnspec.text.source import _starts"
    assert private_names("attnspec.grammar.parser", text)
    assert not private_names("attnspec.text.diagnostics", text)


SPEC = ROOT / "examples" / "bigbird.attn"

LIGHT = """
import attnspec.backends, attnspec.analysis.approximation.approximation, attnspec.editor.server
for words in (
    "--help", "verify --help", "check SPEC", "format SPEC --check", "show SPEC -n64",
    "show SPEC -n64 -o OUT.svg", "show SPEC -n64 -o OUT.html", "diff SPEC SPEC -n64",
    "plan SPEC -n64", "analyse SPEC -n256", "explain A301", "zoo", "calibrate --show",
):
    run(*words.replace("SPEC", SPEC).replace("OUT", OUT).split())
"""
"""What loads neither torch nor a library of an extra: none of what runs one after the other."""

COMPILED = """
import torch, attnspec
q = torch.zeros(1, 12, 70, 8)
attnspec.load(SPEC).compile()(q, q, q)
attnspec.parse("attention a { attend favor(features = 8) }").compile()(q, q, q)
run('compile', SPEC, '-o', '-')
"""
"""What loads nothing that traces."""


@pytest.mark.parametrize(
    ("script", "heavy", "loaded"),
    [
        (LIGHT, ("torch", "matplotlib", "transformers"), []),
        (COMPILED, ("torch", "torch._dynamo", "torch.utils.flop_counter", "triton"), ["torch"]),
        ("import matplotlib.cm", ("torch", "matplotlib"), ["matplotlib"]),
    ],
    ids=["commands", "modules", "a heavy one"],
)
def test_start_up_is_light(
    script: str, heavy: Sequence[str], loaded: list[str], tmp_path: Path
) -> None:
    start = f"""
import sys
SPEC, OUT = {str(SPEC)!r}, {str(tmp_path / "drawn")!r}
def run(*arguments):
    from attnspec.cli import main
    main(arguments, standalone_mode=False)
"""
    end = f"\nprint()\nprint(*(name for name in {heavy!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", start + script + end], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == loaded


def test_every_pattern_is_registered_and_has_a_file_of_its_name() -> None:
    homes = {name for name in MODULES if name.startswith("attnspec.graphs.patterns.")}
    defined = [
        value
        for home in sorted(homes)
        for _, value in inspect.getmembers(importlib.import_module(home), inspect.isclass)
        if value.__module__ == home and issubclass(value, Relation)
    ]
    assert sorted(defined, key=str) == sorted(patterns.PATTERNS, key=str)
    for home in homes:
        # a keyword of Python cannot be a module's name, hence global_.py
        stem = home.rpartition(".")[2].removesuffix("_")
        assert stem == "_".join(each.name for each in defined if each.__module__ == home)


@pytest.mark.parametrize("package", sorted(set(PACKAGE_DIR) - {"attnspec"}))
def test_a_mapped_package_has_one_name(package: str) -> None:
    folder = PACKAGE_DIR[package]
    path = ROOT / folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(folder, path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"import this package as {package}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_version_is_one() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert attnspec.__version__ == __version__


def test_gradients_of_torchs_attention_are_laid_out_as_its_outputs() -> None:
    # with other strides cuDNN returned wrong ones on a GPU; in `bench` nothing is trained
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        calls = re.findall(r"^ .*\bscaled_dot_product_attention\(", text, re.M)
        if not module.startswith("attnspec.bench."):
            assert len(calls) == text.count("out.is_cuda and out.requires_grad"), module
