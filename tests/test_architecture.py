"""Who imports whom, what starts light, what is registered: each check is shown a fault, too."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from import_graph import (
    Import,
    acquaintance_faults,
    all_imports,
    cycles,
    floor_faults,
    imports_of,
    inside,
    modules_of,
    names_known,
    package_of,
    private_faults,
    star_faults,
    stone_faults,
)
from package_map import MODULES, PACKAGE_DIR, PACKAGES, ROOT

FLOORS: tuple[tuple[str, ...], ...] = (
    ("version", "awaited", "text"),
    ("grammar", "ir"),
    ("graphs",),
    ("elaborate", "lower"),
    ("layout",),
    ("backends",),
    ("analysis",),
    ("runtime",),
    ("check", "verification", "distributed"),
    ("compile",),
    ("show",),
    ("spec",),
    ("model_check",),
    ("testing", "bench", "integrations", "interchange"),
    ("editor",),
    ("cli",),
    ("examples", "__main__"),
)
"""The rooms of the package from the ground up. A module imports from its own room and from floors
below it; imports in functions and for type checkers count."""

INNER: tuple[tuple[str, ...], ...] = (
    ("common",),
    ("decided",),
    ("dense", "rows", "tiles", "scattered"),
    ("torch_call",),
    ("bands",),
    ("factored", "lists", "flex"),
    ("triton",),
    ("plugins",),
    ("planner",),
)
"""The same within `attnspec.backends`."""

OVER_THE_FACE = ("examples", "plugins", "planner")
"""Rooms that take what the face of their package hands on."""

WITHOUT_TORCH = (
    *("text", "grammar", "ir", "graphs", "elaborate", "layout", "analysis", "check", "show"),
    "editor",
)
"""Rooms that never import torch, in functions and for type checkers neither."""

LIGHT = (
    "import attnspec",
    "import attnspec.grammar",
    "import attnspec.backends",
    "import attnspec.analysis.approximation.approximation",
    "run('check', SPEC)",
    "run('show', SPEC, '-n', '64')",
    "run('diff', SPEC, SPEC, '-n', '64')",
    "run('plan', SPEC, '-n', '64')",
    "run('analyse', SPEC, '-n', '256')",
    "run('calibrate', '--show')",
    "import attnspec.editor.server",
)
"""What must not load any of HEAVY; SPEC is a file of the zoo."""

HEAVY = ("torch", "matplotlib", "transformers")

SPEC = ROOT / "examples" / "bigbird.attn"


PATTERNS_HOME = "attnspec.graphs.patterns"

WORDS = ("full", "causal", "where", "where_inputs")
"""Graphs that are words of the language, as operators are: everything, order, a predicate."""

PATTERNS_KNOWN: Mapping[str, tuple[str, ...]] = {
    # how often two vectors meet in a bucket, by their angle
    "attnspec.analysis.approximation.approximation": ("lsh",),
    # who decides what: one file each
    "attnspec.backends.decided.cluster": ("cluster",),
    "attnspec.backends.decided.hashes": ("lsh",),
    "attnspec.backends.decided.lists": ("chosen",),
    "attnspec.backends.decided.lsh": ("lsh",),
    "attnspec.backends.decided.sinkhorn": ("sinkhorn",),
    "attnspec.backends.decided.topk": ("topk",),
    # labels that agree stay labels
    "attnspec.backends.common.labels": ("same",),
    # the graphs beside a mechanism that are a few diagonals
    "attnspec.backends.factored.hybrid.lag": ("window",),
    # graphs of which no formula is printed
    "attnspec.compile.standalone.formulas": ("expander", "powers", "random_", "random_blocks"),
}
"""Who knows a pattern by its class, besides the patterns themselves."""

NAMES_KNOWN: Mapping[str, tuple[str, ...]] = {
    # equal labels in a mask of others
    "attnspec.interchange.traced": (
        "prefix",
        "same",
    ),
    # what a model, or a packed batch, adds to a spec
    "attnspec.integrations.model_choices": ("chosen",),
    "attnspec.runtime.packed": ("same",),
}
"""Who makes a pattern or tells it apart by its name, besides the patterns themselves."""

MECHANISMS_HOME = "attnspec.ir.mechanisms"

MECHANISMS_KNOWN: Mapping[str, tuple[str, ...]] = {
    # how well each approaches softmax
    "attnspec.analysis.approximation.approximation": ("favor", "linformer", "nystrom", "rbf"),
    # the widths of its kernel at which its numbers are compared
    "attnspec.verification.numbers": ("rbf",),
}
"""Who knows a mechanism by its class, besides the files of it."""


@cache
def every_import() -> list[Import]:
    return all_imports(MODULES)


def test_imports_go_one_way() -> None:
    assert floor_faults(every_import(), "attnspec", FLOORS, OVER_THE_FACE) == []
    assert floor_faults(every_import(), "attnspec.backends", INNER, OVER_THE_FACE) == []
    assert stone_faults(every_import(), "torch", WITHOUT_TORCH) == []


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("attnspec.text.source", "import attnspec.grammar.nodes"),
        ("attnspec.grammar.parser", "from attnspec.ir.program import Program"),
        ("attnspec.grammar.parser", "from attnspec import load"),
        ("attnspec.graphs.bind", "def f():\n    from attnspec.elaborate import names"),
        ("attnspec.graphs.bind", "if TYPE_CHECKING:\n    import attnspec.layout.orders"),
        ("attnspec.compile.emit", "from attnspec import cli"),
        ("attnspec.attic.old", "import attnspec.text.source"),
    ],
)
def test_an_import_the_other_way_is_found(importer: str, text: str) -> None:
    imports = imports_of(importer, text, {"attnspec.cli", "attnspec.elaborate.names"})
    assert len(floor_faults(imports, "attnspec", FLOORS)) == 1


def test_an_import_of_torch_is_found() -> None:
    text = "try:\n    import torch.nn\nexcept ImportError:\n    pass"
    assert len(stone_faults(imports_of("attnspec.ir.scalars", text, ()), "torch", ["ir"])) == 1
    assert stone_faults(imports_of("attnspec.runtime.module", text, ()), "torch", ["ir"]) == []


def test_one_backend_does_not_reach_into_another() -> None:
    text = "from attnspec.backends.rows.kernel import RowsKernel"
    for importer, faults in (("dense.kernel", 1), ("common.masks", 1), ("bands.kernel", 0)):
        imports = imports_of(f"attnspec.backends.{importer}", text, ())
        assert len(floor_faults(imports, "attnspec.backends", INNER)) == faults


def test_patterns_and_mechanisms_are_known_at_home() -> None:
    of_patterns = PATTERNS_HOME, WORDS, (), PATTERNS_KNOWN
    homes = "attnspec.backends.factored", "attnspec.compile.standalone.mechanisms"
    of_mechanisms = MECHANISMS_HOME, ("declaration",), homes, MECHANISMS_KNOWN
    for package, facade, own, known in (of_patterns, of_mechanisms):
        assert acquaintance_faults(every_import(), package, facade, own, known) == []
        for importer, files in known.items():
            for file in files:
                # what nobody knows any more is not allowed either
                left = {**known, importer: tuple(x for x in files if x != file)}
                assert acquaintance_faults(every_import(), package, facade, own, left)


def test_names_of_patterns_are_known_at_home() -> None:
    names = importlib.import_module(PATTERNS_HOME).BY_NAME.keys() - set(WORDS)
    for module, path in MODULES.items():
        if not inside(module, PATTERNS_HOME):
            found = names_known(path.read_text(encoding="utf-8"), names)
            # what nobody knows any more is not allowed either
            assert found == set(NAMES_KNOWN.get(module, ())), module


@pytest.mark.parametrize(
    "text",
    [
        'if leaf.pattern == "block": ...',
        'wide = term.pattern not in ("block", "window")',
        'match leaf.pattern:\n    case "rows" | "block" if wide:\n        pass',
        'Leaf("block", (("size", 8),))',
        'at.patterns["block"](8)',
        'BY_NAME["block"]',
    ],
)
def test_a_pattern_that_is_named_is_found(text: str) -> None:
    assert names_known(text, ("block",)) == {"block"}
    assert names_known(text, ("residue", "8")) == set()


@pytest.mark.parametrize(
    ("importer", "text", "faults"),
    [
        ("attnspec.lower.lower", "from attnspec.graphs.patterns.window import Window", 1),
        ("attnspec.lower.lower", "def f():\n    import attnspec.graphs.patterns.lsh", 1),
        ("attnspec.lower.lower", "from attnspec.graphs.patterns import PATTERNS", 0),
        ("attnspec.lower.lower", "from attnspec.graphs.patterns.full import Full", 0),
        ("attnspec.graphs.patterns.band", "from attnspec.graphs.patterns.window import Window", 0),
        ("attnspec.backends.common.labels", "from attnspec.graphs.patterns.same import Same", 0),
    ],
)
def test_a_pattern_that_is_known_elsewhere_is_found(importer: str, text: str, faults: int) -> None:
    imports = imports_of(importer, text, ())
    found = acquaintance_faults(imports, PATTERNS_HOME, WORDS, (), PATTERNS_KNOWN)
    assert len(found) == faults


def test_what_the_floors_allow_is_allowed() -> None:
    text = "import torch\nfrom attnspec.grammar import nodes\nfrom attnspec.text.source import Span"
    imports = imports_of("attnspec.grammar.parser", text, {"attnspec.grammar.nodes"})
    imports += imports_of("attnspec.__main__", "from attnspec.cli import main", ())
    assert floor_faults(imports, "attnspec", FLOORS) == []


def test_the_page_for_contributors_has_the_same_floors() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- floors -->\n```\n")[2].partition("\n```")[0].splitlines()
    assert [set(line.split(", ")) for line in reversed(shown)] == [set(floor) for floor in FLOORS]


def test_the_floors_name_what_exists() -> None:
    for package, floors in (("attnspec", FLOORS), ("attnspec.backends", INNER)):
        below = [m.removeprefix(f"{package}.") for m in MODULES if m.startswith(f"{package}.")]
        rooms = {module.partition(".")[0] for module in below}
        assert rooms == {room for floor in floors for room in floor}


def test_no_circle_of_imports() -> None:
    # a face hands names on, and is imported with whatever lies behind it
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert cycles(found for found in every_import() if found.importer not in faces) == []


def test_a_cycle_is_found() -> None:
    imports = [
        *imports_of("a", "import b", ()),
        *imports_of("b", "try:\n    from c import x\nfinally:\n    pass", ()),
        *imports_of("c", "class C:\n    import a", ()),
        *imports_of("d", "def f():\n    import e", ()),
        *imports_of("e", "if typing.TYPE_CHECKING:\n    import d\nimport d.x", ()),
    ]
    assert cycles(imports) == [["a", "b", "c"], ["d", "e"]]


def test_no_star_imports() -> None:
    assert star_faults(every_import()) == []
    assert star_faults(imports_of("a", "from attnspec.text.source import *", ())) != []


def test_private_names_stay_in_their_package() -> None:
    assert private_faults(every_import(), MODULES) == []


def test_a_private_name_elsewhere_is_found() -> None:
    imports = [
        *imports_of("attnspec.grammar", "from attnspec.text.source import _starts", MODULES),
        *imports_of("attnspec.grammar.nodes", "import attnspec._hidden", MODULES),
        *imports_of("attnspec.text.source", "from attnspec.text.source import Span", MODULES),
        *imports_of(
            "attnspec.text.source", "from attnspec.text.diagnostics import _excerpt", MODULES
        ),
    ]
    assert [fault.split(":")[0] for fault in private_faults(imports, MODULES)] == [
        "attnspec.grammar",
        "attnspec.grammar.nodes",
    ]


def test_start_up_is_light() -> None:
    # one interpreter for all: what the first loads, it has after the last
    assert loaded_by("\n".join(LIGHT)) == []


def test_a_module_is_written_and_runs_without_what_traces_it_or_algebra() -> None:
    statement = """
import torch, attnspec
q = torch.zeros(1, 12, 70, 8)
attnspec.load(SPEC).compile()(q, q, q)
attnspec.parse("attention a { attend favor(features = 8) }").compile()(q, q, q)
run('compile', SPEC, '-o', '-')"""
    heavy = "torch", "torch._dynamo", "sympy", "torch.utils.flop_counter", "triton"
    assert loaded_by(statement, heavy) == ["torch"]


def test_a_heavy_start_up_is_found() -> None:
    assert loaded_by("import matplotlib.cm") == ["matplotlib"]


def loaded_by(statement: str, heavy: Sequence[str] = HEAVY) -> list[str]:
    """The heavy modules that a fresh interpreter has loaded after a statement."""
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
print("\\n" + " ".join(name for name in {heavy!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_every_pattern_has_one_line() -> None:
    patterns = importlib.import_module("attnspec.graphs.patterns")
    relation = importlib.import_module("attnspec.graphs.relation").Relation
    defined: dict[str, list[type]] = {}
    for name in MODULES:
        if name.startswith("attnspec.graphs.patterns."):
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
        if "_".join(str(getattr(p, "name", "")) for p in patterns) != stem.removesuffix("_"):
            faults.append(f"{stem}.py does not hold the pattern {stem}")
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
        "missing.py does not hold the pattern missing",
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
    version = importlib.import_module("attnspec.version").__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert importlib.import_module("attnspec").__version__ == version
