"""The run time as one text, for modules that must do without this package.

Of every module that the run time needs, the definitions that can be reached are taken over, in an
order in which each finds what it uses. Imports between these modules vanish, names that two of them
define are told apart, and what only tests use is left out.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from attnspec.diagnostics import InternalError
from attnspec.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.patterns import BY_NAME

NEEDED = frozenset(
    "__future__ collections concurrent dataclasses functools json math numpy operator os pathlib"
    " sys threading torch typing bisect ctypes fractions heapq itertools warnings".split()
)
"""What a standalone module may import: torch, numpy, and of the standard library these."""

_ROOT = ("attnspec.runtime", "CompiledAttention")
_REGISTRIES = {
    "attnspec.patterns": "BY_NAME",
    "attnspec.mechanisms": "MECHANISMS_BY_NAME",
    "attnspec.factored": "KERNELS",
}
"""Modules that list what there is, and the name by which others know the list: of each, a bundle
holds what is used."""

_PACKAGE = "attnspec"
_FOR_TESTS = "samples"

_STAND_INS = {
    "attnspec.plugins": '''"""Backends of other distributions: what stands alone takes none."""


def installed_names():
    return []


def installed():
    return ()
'''
}
"""What a bundle holds in place of a module that reads what is installed."""

_PLAIN_IMPORT = "from dataclasses import dataclass"
_DATACLASS_IMPORT = "from dataclasses import dataclass as _dataclass"

_DATACLASS = '''\
def dataclass(cls=None, /, **options):
    """The decorator of the standard library, for text that may run without being imported.

    It reads annotations in the namespace of the class's module, which then does not exist.
    """
    if cls is None:
        return lambda each: dataclass(each, **options)
    home, cls.__module__ = cls.__module__, "typing"
    made = _dataclass(cls, **options)
    made.__module__ = home
    return made'''
"""What stands in a bundle for the decorator of that name."""

Name = tuple[str, str]
"""A module and a name defined at its top level."""


@dataclass(eq=False)
class Unit:
    """A top-level statement with its comment and the string that documents it."""

    names: tuple[str, ...]
    nodes: tuple[ast.stmt, ...]
    first: int
    last: int


@dataclass(eq=False)
class Part:
    """A module: its statements, what its names stand for, and what it imports from elsewhere.

    `needs` are the modules of this package that it imports at its start, `later` all of them.
    """

    module: str
    lines: list[str]
    title: str
    units: list[Unit] = field(default_factory=list)
    known: dict[str, Name] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)


def bundle(patterns: Sequence[str], mechanisms: Sequence[str], reserved: Sequence[str]) -> str:
    """The text of the run time with these patterns and mechanisms, "+" for graphs with a mechanism;
    it defines none of the `reserved` names but those that belong to the run time itself."""
    listed = _listed(patterns, mechanisms)
    parts = _ordered(_closure(listed))
    wanted = _reachable(parts, listed)
    names, foreign = _named(parts, wanted, reserved)
    sections = [
        "from __future__ import annotations",
        "\n".join(sorted({_DATACLASS_IMPORT, *foreign.values()} - {_PLAIN_IMPORT})),
        _DATACLASS,
    ]
    for part in parts.values():
        if part.module in listed:
            entries = [f'    "{key}": {names[home]},' for key, home in listed[part.module].items()]
            sections.append("\n".join([f"{_REGISTRIES[part.module]} = {{", *entries, "}"]))
            continue
        units = [unit for unit in part.units if any((part.module, n) in wanted for n in unit.names)]
        if units:
            sections.append(f"# {part.title}")
            sections.extend(_text(part, unit, names) for unit in units)
    return "\n\n\n".join(sections) + "\n"


def _listed(patterns: Iterable[str], mechanisms: Iterable[str]) -> dict[str, dict[str, Name]]:
    """What each registry holds in the bundle, with the homes of the definitions."""
    # the kernels load torch, which nothing before them needs
    from attnspec.factored import KERNELS

    chosen: dict[str, dict[str, object]] = {
        "attnspec.patterns": {name: BY_NAME[name] for name in patterns},
        "attnspec.mechanisms": {
            name: MECHANISMS_BY_NAME[name] for name in mechanisms if name in MECHANISMS_BY_NAME
        },
        "attnspec.factored": {name: KERNELS[name] for name in mechanisms},
    }
    return {
        registry: {
            name: (each.__module__, each.__name__)  # type: ignore[attr-defined]
            for name, each in entries.items()
        }
        for registry, entries in chosen.items()
    }


# --- reading -------------------------------------------------------------------------------------


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InternalError(
            f"the source of {module} is not there, and a standalone module needs it"
        )
    return Path(spec.origin).read_text(encoding="utf-8")


@cache
def _read(module: str) -> Part:
    text = _STAND_INS.get(module) or _source(module)
    tree = ast.parse(text)
    title = (ast.get_docstring(tree) or module).partition("\n")[0]
    part = Part(module, text.split("\n"), title)
    for statement in tree.body:
        _take(part, statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            part.later.append(str(node.module))
            if node in tree.body:
                part.needs.append(str(node.module))
            for alias in node.names:
                part.known[alias.asname or alias.name] = (str(node.module), alias.name)
    return part


def _take(part: Part, node: ast.stmt) -> None:
    """Sorts a top-level statement into the part."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        if not (isinstance(node, ast.ImportFrom) and _is_ours(node.module)):
            for line, name in _import_lines(node):
                part.foreign[name] = line
        return
    if isinstance(node, ast.Expr):
        # a string documents the statement above it; the first one is the module's own
        if part.units:
            last = part.units[-1]
            last.nodes, last.last = (*last.nodes, node), _end(node)
        return
    if isinstance(node, ast.If):
        # for type checkers, or the guard against a second import: nothing that runs here
        return
    names = tuple(_defined(node))
    first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
    while part.lines[first - 2].startswith("#"):
        first -= 1
    part.units.append(Unit(names, (node,), first, _end(node)))
    for name in names:
        part.known[name] = (part.module, name)


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == _PACKAGE


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _import_lines(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        renamed = f" as {alias.asname}" if alias.asname else ""
        if isinstance(node, ast.Import):
            yield f"import {alias.name}{renamed}", alias.asname or alias.name.partition(".")[0]
        elif node.module != "__future__":
            yield f"from {node.module} import {alias.name}{renamed}", alias.asname or alias.name


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
        return
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id


def _closure(listed: Mapping[str, Mapping[str, Name]]) -> dict[str, Part]:
    """All modules that the run time imports; of registries, the modules of what is listed alone."""
    parts: dict[str, Part] = {}
    waiting = [_ROOT[0]]
    while waiting:
        module = waiting.pop()
        if module in parts:
            continue
        if module in listed:
            needs = sorted({home for home, _ in listed[module].values()})
            parts[module] = Part(module, [], "", needs=needs, later=needs)
        else:
            parts[module] = _read(module)
        waiting.extend(parts[module].later)
    return parts


def _ordered(parts: dict[str, Part]) -> dict[str, Part]:
    """The parts, each after those it needs, otherwise by name."""
    done: dict[str, Part] = {}

    def visit(module: str, above: tuple[str, ...]) -> None:
        if module in above:
            raise InternalError(f"modules of the run time need each other: {module}")
        if module not in done:
            for need in sorted(parts[module].needs):
                visit(need, (*above, module))
            done[module] = parts[module]

    for module in sorted(parts):
        visit(module, ())
    return done


# --- choosing ------------------------------------------------------------------------------------


def _uses(unit: Unit) -> Iterator[str]:
    for top in unit.nodes:
        for node in _walk(top):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                for alias in node.names:
                    yield alias.asname or alias.name


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of the methods that only tests call."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and child.name == _FOR_TESTS):
            yield from _walk(child)


def _reachable(parts: dict[str, Part], listed: Mapping[str, Mapping[str, Name]]) -> set[Name]:
    units = {(m, n): u for m, part in parts.items() for u in part.units for n in u.names}
    waiting: list[Name] = [
        _ROOT,
        *[home for entries in listed.values() for home in entries.values()],
    ]
    found: set[Name] = set()
    while waiting:
        at = waiting.pop()
        if at in found or at not in units:
            continue
        module, _ = at
        found.update((module, name) for name in units[at].names)
        known = parts[module].known
        waiting.extend(known[name] for name in _uses(units[at]) if name in known)
    return found


def _named(
    parts: dict[str, Part], wanted: set[Name], reserved: Sequence[str]
) -> tuple[dict[Name, str], dict[str, str]]:
    """The name of every definition in the bundle, and the imports of what stands outside it."""
    foreign: dict[str, str] = {}
    for part in parts.values():
        used = {
            name
            for unit in part.units
            if any((part.module, n) in wanted for n in unit.names)
            for name in _uses(unit)
        }
        for name in sorted(used & set(part.foreign)):
            if foreign.setdefault(name, part.foreign[name]) != part.foreign[name]:
                raise InternalError(f"two modules of the run time mean different things by {name}")
    taken = {*foreign, *reserved, *_REGISTRIES.values()}
    names: dict[Name, str] = {}
    for module, part in parts.items():
        for unit in part.units:
            for name in unit.names:
                if (module, name) not in wanted:
                    continue
                new = name
                if name in taken and module != _ROOT[0]:
                    new = f"_{module.rpartition('.')[2].strip('_')}_{name.lstrip('_')}"
                if new in taken and new != name:
                    raise InternalError(f"two definitions of the run time are called {new}")
                taken.add(new)
                names[module, name] = new
    return names, foreign


# --- writing -------------------------------------------------------------------------------------


def _text(part: Part, unit: Unit, names: dict[Name, str]) -> str:
    """The lines of a unit with its names replaced, its own imports and its samples left out."""
    renamed = {
        local: names[home]
        for local, home in part.known.items()
        if home in names and names[home] != local
    }
    edits: list[tuple[int, int, int, str]] = []
    dropped: set[int] = set()
    for top in unit.nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                dropped.update(range(node.lineno, _end(node) + 1))
            elif isinstance(node, ast.FunctionDef) and node.name == _FOR_TESTS:
                start = min([node.lineno, *[d.lineno for d in node.decorator_list]])
                dropped.update(range(start, _end(node) + 1))
        edits.extend(_edits(top, renamed))
    lines = {n: part.lines[n - 1] for n in range(unit.first, unit.last + 1)}
    for line, start, stop, new in sorted(edits, reverse=True):
        # columns of the syntax tree count bytes
        raw = lines[line].encode()
        lines[line] = (raw[:start] + new.encode() + raw[stop:]).decode()
    kept = [text for number, text in lines.items() if number not in dropped]
    return "\n".join(kept).rstrip()


def _edits(node: ast.AST, renamed: dict[str, str]) -> Iterator[tuple[int, int, int, str]]:
    """Line, first and last column and new text of every name to replace, local names left alone."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in renamed:
        word = "def " if isinstance(node, ast.FunctionDef) else "class "
        start = node.col_offset + len(word)
        yield node.lineno, start, start + len(node.name), renamed[node.name]
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        local = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        if isinstance(node, ast.FunctionDef):
            local |= {name for statement in node.body for name in _assigned(statement)}
        renamed = {old: new for old, new in renamed.items() if old not in local}
    if isinstance(node, ast.Name) and node.id in renamed:
        start = node.col_offset
        yield node.lineno, start, start + len(node.id.encode()), renamed[node.id]
    for child in ast.iter_child_nodes(node):
        yield from _edits(child, renamed)


def _assigned(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
