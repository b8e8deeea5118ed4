"""Who imports whom in the package, read from the sources without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
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


@dataclass(frozen=True)
class Rule:
    """What the modules in `of` may import.

    `only` are the parts of the package it may import besides itself (None: no such limit), `never`
    what it must not import; each name stands for a module and everything below it. `but` are
    importers that the rule leaves alone.
    """

    of: str
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


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
    for node, at_start in _statements(ast.parse(text).body, True):
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


def _statements(body: Iterable[ast.AST], at_start: bool) -> Iterator[tuple[ast.AST, bool]]:
    for node in body:
        yield node, at_start
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.body, False)
            yield from _statements(node.orelse, at_start)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _statements(ast.iter_child_nodes(node), False)
        else:
            yield from _statements(ast.iter_child_nodes(node), at_start)


def all_imports(modules: Mapping[str, Path]) -> list[Import]:
    return [
        found
        for module, path in modules.items()
        for found in imports_of(module, path.read_text(encoding="utf-8"), modules)
    ]


def direction_faults(imports: Iterable[Import], rules: Iterable[Rule]) -> list[str]:
    """Imports that a rule does not allow."""
    rules = tuple(rules)
    faults = []
    for found in imports:
        for rule in rules:
            exempt = any(inside(found.importer, part) for part in rule.but)
            if exempt or not inside(found.importer, rule.of):
                continue
            home = inside(found.target, rule.of)
            refused = [p for p in rule.never if inside(found.target, p)]
            refused = [p for p in refused if not inside(found.importer, p)]
            if refused:
                faults.append(f"{found}; {rule.of} never imports {refused[0]}")
            elif rule.only is not None and inside(found.target, "attnspec") and not home:
                if not any(inside(found.target, part) for part in rule.only):
                    faults.append(f"{found}; {rule.of} imports only {', '.join(rule.only)}")
    return faults


def sibling_faults(imports: Iterable[Import], package: str, shared: Collection[str]) -> list[str]:
    """Imports between the units of a package: its modules and sub-packages, less the `shared`."""

    def unit(module: str) -> str:
        return module.removeprefix(package + ".").partition(".")[0]

    return [
        str(found)
        for found in imports
        if found.importer.startswith(package + ".")
        and found.target.startswith(package + ".")
        and unit(found.importer) != unit(found.target)
        and unit(found.target) not in shared
    ]


def cycles(imports: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that need each other before any of them is ready."""
    graph = nx.DiGraph((i.importer, i.target) for i in imports if i.at_start)
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
