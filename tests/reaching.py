"""Which test files a change can reach, by the import graph, read without importing anything.

`python tests/reaching.py [BASE]` prints the test files that reach what differs from BASE (HEAD if
none is given), untracked files included, one a line; nothing if none does.

Imports in functions count where the function's name is used, a method's after a dot: that keeps a
test of the grammar apart from the kernels, though `Spec.compile` would load them. What a string
names counts as used.
A file that is no module reaches those that name it, or files of its kind; if none does, every test.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from import_graph import modules_of
from package_map import MODULES, ROOT

SAYS_NOTHING = (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)
"""Every second node: whether a name is read or written, and which operation this is."""


@dataclass
class Uses:
    """What a piece of code imports, by module, and the names in it, those after a dot with it."""

    modules: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


@dataclass
class File:
    """What a file always uses; what its functions that import use, by name; its strings."""

    always: Uses = field(default_factory=Uses)
    later: list[tuple[str, Uses]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    """Names of imported modules that are none of ours: what they have is no method of ours."""


def read(text: str, modules: Collection[str]) -> File:
    """`modules` tells modules from names in `from x import y`."""
    file = File()
    _read(ast.parse(text), file, file.always, modules, "")
    if "-m" in file.texts:
        run = (f"{text}.__main__" for text in file.texts)
        file.always.modules.update(module for module in run if module in modules)
    return file


def _read(node: ast.AST, file: File, uses: Uses, modules: Collection[str], dot: str) -> None:
    # the most frequent first: it is every file of the repository
    match node:
        case ast.Name():
            uses.names.add(node.id)
            return
        case ast.Constant(value=str() as text):
            file.texts.append(text)
            if text.isidentifier():
                uses.names |= {text, f".{text}"}
            uses.modules.update(_mentioned(text, modules))
            return
        case ast.Constant():
            return
        case ast.Attribute(value=ast.Name(home), attr=name) if home in file.others:
            uses.names.add(name)
        case ast.Attribute():
            uses.names |= {node.attr, f".{node.attr}"}
        case ast.Call() | ast.Tuple() | ast.Subscript() | ast.BinOp() | ast.arguments():
            pass
        case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                _read(other, file, uses, modules, dot)
            return
        case ast.Assign(targets=[ast.Name("__all__")]):
            return
        case ast.ClassDef():
            dot = "."
        case ast.FunctionDef() if uses is file.always and _imports(node):
            uses = Uses()
            file.later.append(("" if node.name.startswith("__") else dot + node.name, uses))
        case ast.Import():
            uses.modules.update(alias.name for alias in node.names)
            file.others.update({alias.name for alias in node.names} - set(modules))
        case ast.ImportFrom(module=str() as home):
            for alias in node.names:
                full = f"{home}.{alias.name}"
                uses.modules.add(full if full in modules else home)
                uses.names.add(alias.name)
        case ast.Dict() if homes := _homes(node, modules):
            file.later += [(name, Uses({module})) for name, module in homes]
            return
        case ast.JoinedStr() if named := _formatted(node, modules):
            file.later += [(name, Uses({module})) for name, module in named]
            return
        case ast.Expr(value=ast.Constant()):
            return
    for name in node._fields:
        held = getattr(node, name, None)
        for below in held if type(held) is list else (held,):
            if isinstance(below, ast.AST) and not isinstance(below, SAYS_NOTHING):
                _read(below, file, uses, modules, dot)


def _imports(node: ast.AST) -> bool:
    """Whether a statement in it imports; expressions are not looked into."""
    return isinstance(node, ast.Import | ast.ImportFrom) or any(
        isinstance(below, ast.stmt | ast.excepthandler | ast.match_case) and _imports(below)
        for below in ast.iter_child_nodes(node)
    )


def _homes(node: ast.Dict, modules: Collection[str]) -> list[tuple[str, str]]:
    """A table from names to the modules that have them."""
    pairs = [
        (key.value, value.value)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
    ]
    if len(pairs) < len(node.keys) or not all(value in modules for _, value in pairs):
        return []
    return [(str(key), str(value)) for key, value in pairs]


def _formatted(node: ast.JoinedStr, modules: Collection[str]) -> list[tuple[str, str]]:
    """The modules whose name is made of a shorter one, with that."""
    first = node.values[0]
    if not isinstance(first, ast.Constant) or not str(first.value).startswith("attnspec."):
        # looking through all modules takes a while, and most texts name none
        return []
    fixed = [re.escape(part.value) if isinstance(part, ast.Constant) else r"(\w+)"  # type: ignore[type-var]
             for part in node.values]  # fmt: skip
    if fixed.count(r"(\w+)") != 1 or fixed[0] == r"(\w+)":
        return []
    found = ((re.fullmatch("".join(map(str, fixed)), module), module) for module in modules)
    return [(match[1], module) for match, module in found if match]


def _mentioned(text: str, modules: Collection[str]) -> Iterator[str]:
    """Modules that a string names, as a path to be patched or a script to be run."""
    for word in re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", text):
        while "." in word and word not in modules:
            word = word.rpartition(".")[0]
        if word in modules and "." in word:
            yield word
    scripted = re.findall(r"\b(?:import|from|-m)\s+(\w+)", text)
    yield from (word for word in scripted if word in modules)


@cache
def packages_of(module: str) -> tuple[str, ...]:
    """A module and the packages that it lies in."""
    parts = module.split(".")
    return tuple(".".join(parts[: i + 1]) for i in range(len(parts)))


@dataclass(frozen=True)
class Sources:
    """Module -> what it holds, and the files of modules."""

    files: Mapping[str, File]
    paths: Mapping[str, Path]
    known: dict[str, set[str]] = field(default_factory=dict, repr=False)
    """What modules were found to reach."""

    @classmethod
    def of(cls, paths: Mapping[str, Path]) -> Sources:
        files = {
            module: read(path.read_text(encoding="utf-8"), paths) for module, path in paths.items()
        }
        return cls(files, paths)

    def reached(self, module: str) -> set[str]:
        """The modules that a module may run, itself included."""
        if module not in self.known:
            self.known[module] = self._found(module)
        return self.known[module]

    def _found(self, module: str) -> set[str]:
        found: set[str] = set()
        names: set[str] = {""}
        new, later = {module}, []
        while new:
            for each in self._with_packages(new) - found:
                found.add(each)
                names |= self.files[each].always.names
                new |= self.files[each].always.modules
                later += self.files[each].later
            used = [uses for name, uses in later if name in names]
            later = [entry for entry in later if entry[0] not in names]
            for uses in used:
                names |= uses.names
                new |= uses.modules
            new = self._with_packages(new) - found
        return found

    def _with_packages(self, modules: Iterable[str]) -> set[str]:
        return {each for module in modules for each in packages_of(module) if each in self.files}

    def naming(self, path: Path) -> set[str]:
        """The modules that name a file, or all files of its kind."""
        kinds = (path.suffix, f"*{path.suffix}") if path.suffix else ()
        return {
            module
            for module, file in self.files.items()
            if any(path.name in text or text.endswith(kinds[1:]) or text in kinds
                   for text in file.texts)
        }  # fmt: skip


def files_reaching(changed: Iterable[Path], sources: Sources) -> list[Path]:
    """The test files that can see a difference; all of them for what nobody is known to read."""
    tests = {m: p for m, p in sources.paths.items() if p.name.startswith("test_")}
    modules = {path: module for module, path in sources.paths.items()}
    roots: set[str] = set()
    for path in changed:
        found = {modules[path]} if path in modules else set()
        if path.suffix != ".py":
            found = sources.naming(path)
        if not found or path.name in ("conftest.py", "pyproject.toml", "constraints-dev.txt"):
            return sorted(tests.values())
        roots |= found
    shared = {module for module, path in sources.paths.items() if path.name == "conftest.py"}
    if any(roots & sources.reached(module) for module in shared):
        return sorted(tests.values())
    return sorted(path for module, path in tests.items() if roots & sources.reached(module))


def sources_of(root: Path, package: Mapping[str, Path]) -> Sources:
    """The package, the benchmarks, and the tests, which import each other by the last name."""
    tests = modules_of({"": root / "tests"})
    paths = {**package, **modules_of({"benchmarks": root / "benchmarks"})}
    for module, path in tests.items():
        name = module.removeprefix(".")
        inside = (path.parent / "__init__.py").exists()
        paths[name if inside or path.name == "conftest.py" else path.stem] = path
    return Sources.of(paths)


def changed_files(base: str) -> list[Path]:
    def lines(*command: str) -> list[str]:
        done = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    different = lines("diff", "--name-only", "--no-renames", base)
    return [ROOT / name for name in different + lines("ls-files", "-o", "--exclude-standard")]


def main(arguments: list[str]) -> int:
    base = arguments[0] if arguments else "HEAD"
    try:
        changed = changed_files(base)
    except subprocess.CalledProcessError as error:
        print(f"cannot compare with {base}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    for path in files_reaching(changed, sources_of(ROOT, MODULES)):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
