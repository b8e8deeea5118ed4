"""Who imports whom, what starts light, what is registered: each check is shown a fault, too."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from import_graph import (
    Rule,
    all_imports,
    cycles,
    direction_faults,
    imports_of,
    inside,
    modules_of,
    package_of,
    private_faults,
    sibling_faults,
    star_faults,
)
from package_map import MODULES, PACKAGE_DIR, PACKAGES, ROOT

FRONT = ("attnspec.grammar", "attnspec.elaborate")
BACK = (
    "attnspec.planning",
    "attnspec.banding",
    "attnspec.layout",
    "attnspec.ordered",
    "attnspec.covering",
    "attnspec.emit",
    "attnspec.backends",
    "attnspec.runtime",
    "attnspec.show",
)
TEXT = ("attnspec.source", "attnspec.diagnostics", "attnspec.catalogue", "attnspec.reading")

RULES = (
    # text and what is said about it
    Rule("attnspec.source", only=()),
    Rule("attnspec.diagnostics", only=("attnspec.source",)),
    Rule("attnspec.catalogue", only=("attnspec.source", "attnspec.diagnostics")),
    Rule("attnspec.reading", only=TEXT[:3]),
    Rule("attnspec.grammar", only=TEXT),
    # meaning
    Rule("attnspec.relations", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.algebra", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.tokens", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.scalars", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.ir", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.patterns", never=(*FRONT, *BACK, "torch")),
    # what is computed from it
    Rule("attnspec.elaborate", never=BACK),
    Rule("attnspec.conditions", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.forms", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.graph_claims", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.reach_proofs", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.lints", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.checking", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.advice", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.differing", never=("attnspec.emit", "attnspec.planning", "torch")),
    Rule("attnspec.figures", never=(*FRONT, "attnspec.emit", "attnspec.show", "torch")),
    Rule("attnspec.analysis", never=(*FRONT, "attnspec.emit", "attnspec.show", "torch")),
    Rule("attnspec.steps", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.sides", only=("attnspec.scalars",), never=("torch",)),
    Rule("attnspec.probes", only=(), never=("torch",)),
    Rule("attnspec.periods", only=("attnspec.scalars",), never=("torch",)),
    Rule("attnspec.axes", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.knowing", only=("attnspec.relations",), never=("torch",)),
    Rule("attnspec.predicates", never=(*FRONT, *BACK, "attnspec.analysis", "torch")),
    Rule("attnspec.listable", never=(*FRONT, *BACK, "attnspec.analysis", "torch")),
    Rule("attnspec.edge_layout", never=(*FRONT, *BACK, "attnspec.analysis", "torch")),
    Rule("attnspec.edge_count", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.reordering", never=(*FRONT, "attnspec.banding", "torch")),
    Rule("attnspec.covering", never=(*FRONT, "attnspec.ordered", "attnspec.banding", "torch")),
    Rule("attnspec.ordered", never=(*FRONT, "attnspec.emit", "attnspec.show", "torch")),
    Rule("attnspec.banding", never=(*FRONT, "attnspec.emit", "attnspec.show", "torch")),
    Rule("attnspec.integrations", never=("attnspec.grammar", "attnspec.emit", "attnspec.show")),
    Rule("attnspec.planning", never=(*FRONT, "attnspec.emit", "attnspec.show")),
    Rule("attnspec.layout", never=(*FRONT, "attnspec.emit", "attnspec.show", "torch")),
    Rule("attnspec.rates", only=("attnspec.target",), never=("torch",)),
    Rule("attnspec.timing", only=("attnspec.data",), never=("torch",)),
    Rule("attnspec.machine", only=("attnspec.data", "attnspec._version")),
    Rule("attnspec.calibrating", never=("attnspec.planning", "attnspec.emit", "attnspec.show")),
    Rule("attnspec.benching", never=(*FRONT, "attnspec.emit", "attnspec.show")),
    Rule("attnspec.rivals", never=(*FRONT, "attnspec.emit", "attnspec.show")),
    Rule("attnspec.backends", never=(*FRONT, "attnspec.planning", "attnspec.emit")),
    Rule("attnspec.backends", never=("attnspec.figures", "attnspec.show")),
    Rule("attnspec.mechanism", only=(), never=("torch",)),
    Rule("attnspec.declared", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.look_back", never=(*FRONT, *BACK, "torch")),
    Rule("attnspec.factored", never=(*FRONT, "attnspec.planning", "attnspec.emit")),
    Rule("attnspec.factored", never=("attnspec.backends", "attnspec.runtime", "attnspec.show")),
    Rule("attnspec.plugins", never=(*FRONT, "attnspec.planning", "attnspec.emit", "torch")),
    Rule("attnspec.refusals", never=(*FRONT, "attnspec.emit", "attnspec.show", "torch")),
    Rule("attnspec.runtime", never=(*FRONT, "attnspec.emit", "attnspec.show")),
    Rule("attnspec.self_attention", never=(*FRONT, "attnspec.emit", "attnspec.show")),
    Rule("attnspec.verification", never=(*FRONT, "attnspec.emit", "attnspec.show")),
    # the command line stands on top
    Rule("attnspec", never=("attnspec.cli",), but=("attnspec.__main__",)),
)
"""Who may import whom; a name stands for a module and everything below it."""

INDEPENDENT: Mapping[str, tuple[str, ...]] = {"attnspec.backends": ()}
"""Packages whose modules do not import each other, with the modules that all of them may use."""

LIGHT = (
    "import attnspec",
    "import attnspec.grammar",
    "import attnspec.backends",
    "import attnspec.analysis.low_rank",
    "run('check', SPEC)",
    "run('show', SPEC, '-n', '64')",
    "run('diff', SPEC, SPEC, '-n', '64')",
    "run('plan', SPEC, '-n', '64')",
    "run('analyse', SPEC, '-n', '256')",
    "run('calibrate', '--show')",
)
"""What must not load any of HEAVY; SPEC is a file of the zoo."""

HEAVY = ("torch", "matplotlib", "transformers")

SPEC = ROOT / "examples" / "bigbird.attn"

IMPORTS = all_imports(MODULES)


def test_imports_go_one_way() -> None:
    assert direction_faults(IMPORTS, RULES) == []


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("attnspec.source", "import attnspec.diagnostics"),
        ("attnspec.grammar.parser", "from attnspec.patterns import PATTERNS"),
        ("attnspec.grammar.parser", "from attnspec import load"),
        ("attnspec.patterns.window", "def f():\n    from attnspec.grammar import nodes"),
        ("attnspec.patterns.window", "if TYPE_CHECKING:\n    import attnspec.grammar.nodes"),
        ("attnspec.relations", "try:\n    import torch.nn\nexcept ImportError:\n    pass"),
        ("attnspec.backends.tiles", "from attnspec.planning import orders"),
        ("attnspec.emit", "from attnspec import cli"),
    ],
)
def test_an_import_the_other_way_is_found(importer: str, text: str) -> None:
    imports = imports_of(importer, text, {"attnspec.cli"})
    assert len(direction_faults(imports, RULES)) == 1


def test_what_a_rule_allows_is_allowed() -> None:
    text = "import torch\nfrom attnspec.grammar import nodes\nfrom attnspec.source import Span"
    imports = imports_of("attnspec.grammar.parser", text, {"attnspec.grammar.nodes"})
    imports += imports_of("attnspec.__main__", "from attnspec.cli import main", ())
    assert direction_faults(imports, RULES) == []


def test_the_rules_name_what_exists() -> None:
    named = {p for rule in RULES for p in (rule.of, *(rule.only or ()), *rule.never, *rule.but)}
    assert {part for part in named if inside(part, "attnspec")} - set(MODULES) == set()


def test_independent_modules_do_not_import_each_other() -> None:
    for package, shared in INDEPENDENT.items():
        assert sibling_faults(IMPORTS, package, shared) == []


def test_an_import_between_independent_modules_is_found() -> None:
    text = "from attnspec.backends.dense import Dense\nfrom attnspec.backends.triton import own"
    imports = imports_of("attnspec.backends.triton.walk", text, ())
    assert len(sibling_faults(imports, "attnspec.backends", ())) == 1
    assert sibling_faults(imports, "attnspec.backends", ("dense",)) == []


def test_no_module_needs_itself_to_start() -> None:
    assert cycles(IMPORTS) == []


def test_a_cycle_is_found() -> None:
    imports = [
        *imports_of("a", "import b", ()),
        *imports_of("b", "try:\n    from c import x\nfinally:\n    pass", ()),
        *imports_of("c", "class C:\n    import a", ()),
        *imports_of("d", "def f():\n    import e", ()),
        *imports_of("e", "if typing.TYPE_CHECKING:\n    import d\nimport d.x", ()),
    ]
    assert cycles(imports) == [["a", "b", "c"]]


def test_no_star_imports() -> None:
    assert star_faults(IMPORTS) == []
    assert star_faults(imports_of("a", "from attnspec.source import *", ())) != []


def test_private_names_stay_in_their_package() -> None:
    assert private_faults(IMPORTS, MODULES) == []


def test_a_private_name_elsewhere_is_found() -> None:
    imports = [
        *imports_of("attnspec.grammar", "from attnspec.source import _starts", MODULES),
        *imports_of("attnspec.grammar.nodes", "import attnspec._version", MODULES),
        *imports_of("attnspec.source", "from attnspec._version import __version__", MODULES),
        *imports_of("attnspec.source", "from attnspec.diagnostics import _excerpt", MODULES),
    ]
    assert [fault.split(":")[0] for fault in private_faults(imports, MODULES)] == [
        "attnspec.grammar",
        "attnspec.grammar.nodes",
    ]


@pytest.mark.parametrize("statement", LIGHT)
def test_start_up_is_light(statement: str) -> None:
    assert loaded_by(statement) == []


def test_a_heavy_start_up_is_found() -> None:
    assert loaded_by("import torch.nn") == ["torch"]


def loaded_by(statement: str) -> list[str]:
    """The modules of HEAVY that a fresh interpreter has loaded after a statement."""
    script = f"""
import sys

def run(*arguments):
    from attnspec.cli import main
    sys.argv = ["attnspec", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise

SPEC = {str(SPEC)!r}
{statement}
print("\\n" + " ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_every_pattern_has_one_line() -> None:
    patterns = importlib.import_module("attnspec.patterns")
    relation = importlib.import_module("attnspec.relations").Relation
    defined: dict[str, list[type]] = {}
    for name in MODULES:
        if name.startswith("attnspec.patterns."):
            module = importlib.import_module(name)
            defined[name.rpartition(".")[2]] = [
                value
                for _, value in inspect.getmembers(module, inspect.isclass)
                if value.__module__ == name and issubclass(value, relation)
            ]
    assert defined
    assert registry_faults(defined, patterns.PATTERNS) == []


def registry_faults(defined: Mapping[str, Sequence[type]], registered: Sequence[type]) -> list[str]:
    """Patterns that do not stand in the registry exactly once, or not in a file of their name."""
    faults = []
    every = [pattern for patterns in defined.values() for pattern in patterns]
    for pattern in every:
        if registered.count(pattern) != 1:
            faults.append(f"{pattern.__name__} is registered {registered.count(pattern)} times")
    faults += [f"{p.__name__} is defined elsewhere" for p in registered if p not in every]
    for stem, patterns in defined.items():
        # a keyword of Python cannot be a module's name, hence global_.py
        if [getattr(p, "name", None) for p in patterns] != [stem.removesuffix("_")]:
            faults.append(f"{stem}.py does not hold the one pattern {stem}")
    return faults


def test_a_wrong_registry_is_found() -> None:
    class Once:
        name = "once"

    class Global:
        name = "global"

    class Missing:
        name = "other"

    defined: dict[str, list[type]] = {"once": [Once], "global_": [Global], "missing": [Missing]}
    assert registry_faults(defined, (Once, Global, Global, str)) == [
        "Global is registered 2 times",
        "Missing is registered 0 times",
        "str is defined elsewhere",
        "missing.py does not hold the one pattern missing",
    ]


def test_map_links_and_folders_agree() -> None:
    assert layout_faults(ROOT, PACKAGE_DIR, PACKAGES) == []


def layout_faults(root: Path, mapped: Mapping[str, str], listed: Sequence[str]) -> list[str]:
    """Where the map of pyproject.toml, its list of packages, the links and the folders differ."""
    faults = []
    for package, folder in mapped.items():
        link = root.joinpath(*package.split("."))
        if package == "attnspec":
            continue
        if not link.is_symlink() or str(link.readlink()) != f"../{folder}":
            faults.append(f"{package} is not a link to ../{folder}")
        if not (root / folder).is_dir():
            faults.append(f"{folder} is not a folder")
    for path in sorted((root / "attnspec").iterdir()):
        if path.is_symlink() and f"attnspec.{path.name}" not in mapped:
            faults.append(f"attnspec/{path.name} is a link that the map does not name")
    modules = modules_of({p: root / f for p, f in mapped.items() if (root / f).is_dir()})
    on_disk = {package_of(module, modules) for module in modules} - {""}
    faults += [f"{package} is not listed" for package in sorted(on_disk - set(listed))]
    faults += [f"{package} is not on disk" for package in sorted(set(listed) - on_disk)]
    return faults


def test_a_wrong_layout_is_found(tmp_path: Path) -> None:
    for folder in ("attnspec", "attnspec/new", "grammar", "backends"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "attnspec" / "grammar").symlink_to(tmp_path / "grammar")
    (tmp_path / "attnspec" / "examples").symlink_to("../backends")
    mapped = {"attnspec": "attnspec", "attnspec.grammar": "grammar", "attnspec.gone": "gone"}
    listed = ["attnspec", "attnspec.grammar", "attnspec.gone"]
    assert layout_faults(tmp_path, mapped, listed) == [
        "attnspec.grammar is not a link to ../grammar",
        "attnspec.gone is not a link to ../gone",
        "gone is not a folder",
        "attnspec/examples is a link that the map does not name",
        "attnspec.new is not listed",
        "attnspec.gone is not on disk",
    ]


@pytest.mark.parametrize("package", sorted(set(PACKAGE_DIR) - {"attnspec"}))
def test_a_mapped_package_has_one_name(package: str) -> None:
    importlib.import_module(package)
    with pytest.raises(ImportError, match=f"import this package as {package}"):
        import_as(PACKAGE_DIR[package], ROOT / PACKAGE_DIR[package] / "__init__.py")


def test_a_package_without_the_guard_is_found(tmp_path: Path) -> None:
    path = tmp_path / "__init__.py"
    path.write_text('"""A package that takes any name."""\n')
    import_as("grammar", path)


def import_as(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_version_is_one() -> None:
    version = importlib.import_module("attnspec._version").__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert importlib.import_module("attnspec").__version__ == version
