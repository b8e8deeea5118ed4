"""Who imports whom in the package, read from the sources without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx as nx


@dataclass(frozen=True)
class Import:
    """One imported module, or one name imported out of it.

    `at_start` is False for what runs later or never: imports in functions and for type checkers.
    """

    importer: str
    target: str
    name: str | None
    line: int
    at_start: bool

    def __str__(self) -> str:
        taken = f"{self.target}.{self.name}" if self.name else self.target
        return f"{self.importer}:{self.line} imports {taken}"


def inside(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def package_of(module: str, modules: Mapping[str, Path]) -> str:
    """The package a module belongs to; a package belongs to itself."""
    if module in modules and modules[module].name == "__init__.py":
        return module
    return module.rpartition(".")[0]


def modules_of(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Module name -> file, for folders that each hold one package; links are not followed."""
    found = {}
    for package, folder in folders.items():
        for path in sorted(_python_files(folder)):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def imports_of(module: str, text: str, modules: Collection[str]) -> list[Import]:
    """The absolute imports of a module; `modules` tells modules from names in `from x import y`."""
    found = []
    for node, at_start in statements(ast.parse(text).body):
        if isinstance(node, ast.Import):
            found += [
                Import(module, alias.name, None, node.lineno, at_start) for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target, name = (full, None) if full in modules else (node.module, alias.name)
                found.append(Import(module, target, name, node.lineno, at_start))
    return found


def statements(body: Iterable[ast.AST], at_start: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement, at any depth, and whether it runs when the module is imported; neither
    imports nor functions with a name are part of an expression."""
    for node in body:
        yield node, at_start
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        hints = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            below = getattr(node, name, ())
            yield from statements(below, at_start and not later and not (hints and name == "body"))


def all_imports(modules: Mapping[str, Path]) -> list[Import]:
    return [
        found
        for module, path in modules.items()
        for found in imports_of(module, path.read_text(encoding="utf-8"), modules)
    ]


def floor_faults(
    imports: Iterable[Import],
    package: str,
    floors: Sequence[Sequence[str]],
    over_the_face: Collection[str] = (),
) -> list[str]:
    """Imports within a package that do not lead to the same room or to a floor below.

    `floors` name the rooms from the ground up: the modules and packages right inside it. The face
    of the package may import what it hands on, and only `over_the_face` import it.
    """
    level = {room: number for number, floor in enumerate(floors) for room in floor}

    def room(module: str) -> str:
        return module.removeprefix(package).removeprefix(".").partition(".")[0]

    faults = []
    for found in imports:
        if not (inside(found.importer, package) and inside(found.target, package)):
            continue
        here, there = room(found.importer), room(found.target)
        if not here or here == there or (not there and here in over_the_face):
            continue
        if here not in level or there not in level:
            faults.append(f"{found}; no floor has {there if here in level else here}".rstrip())
        elif level[there] >= level[here]:
            faults.append(f"{found}; {there} is not below {here}")
    return faults


def stone_faults(imports: Iterable[Import], target: str, rooms: Collection[str]) -> list[str]:
    """Imports of something, at any time, in rooms that do without it."""
    return [
        str(found)
        for found in imports
        if inside(found.target, target)
        and any(inside(found.importer, f"attnspec.{room}") for room in rooms)
    ]


def acquaintance_faults(
    imports: Iterable[Import],
    package: str,
    facade: Collection[str],
    homes: Collection[str],
    known: Mapping[str, Collection[str]],
) -> list[str]:
    """Imports of one of many files of a package in which all are registered, elsewhere than in the
    files and at their homes: of no file in `facade`, nor in `known`, by the importer."""
    return [
        str(found)
        for found in imports
        if inside(found.target, package)
        and found.target != package
        and (file := found.target.removeprefix(f"{package}.")) not in facade
        and not any(inside(found.importer, home) for home in (package, *homes))
        and file not in known.get(found.importer, ())
    ]


def names_known(text: str, names: Collection[str]) -> set[str]:
    """The patterns that a module makes, looks up or tells apart by their names."""
    found: set[object] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(ast.Attribute(attr="pattern"), _, others):
                found.update(_constants(*others))
            case ast.Match(ast.Attribute(attr="pattern"), cases):
                found.update(_constants(*(case.pattern for case in cases)))
            case ast.Call(ast.Name("Leaf"), [first, *_]):
                found.update(_constants(first))
            case ast.Subscript(ast.Name("BY_NAME") | ast.Attribute(attr="patterns"), key):
                found.update(_constants(key))
            case _:
                pass
    return {name for name in names if name in found}


def _constants(*nodes: ast.AST) -> set[object]:
    every = (part for node in nodes for part in ast.walk(node))
    return {part.value for part in every if isinstance(part, ast.Constant)}


def cycles(imports: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that import each other, in functions and for type checkers too."""
    graph = nx.DiGraph((i.importer, i.target) for i in imports)
    groups = [sorted(group) for group in nx.strongly_connected_components(graph)]
    return sorted(g for g in groups if len(g) > 1 or graph.has_edge(g[0], g[0]))


def star_faults(imports: Iterable[Import]) -> list[str]:
    return [str(found) for found in imports if found.name == "*"]


def private_faults(imports: Iterable[Import], modules: Mapping[str, Path]) -> list[str]:
    """Imports of a private name, or out of a private module, of another package of ours."""

    def private(name: str) -> bool:
        return name.startswith("_") and not name.endswith("__")

    return [
        str(found)
        for found in imports
        if inside(found.target, "attnspec")
        and any(private(part) for part in (*found.target.split("."), found.name or ""))
        and package_of(found.importer, modules) != package_of(found.target, modules)
    ]
