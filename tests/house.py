"""The package in numbers: files, rooms, circles of imports, lines and the longest functions.

    python tests/house.py [FOLDER]

prints them for the checkout in FOLDER, this one if none is given, so that two states can be
compared: give it a work tree of the other. Sources are read, nothing is imported.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
from import_graph import all_imports, cycles, modules_of, statements

HALL = 8
"""The most files right inside the package."""

LINES = 77_313
"""The most lines of the package with its examples: a ratchet."""

SCREEN = 60
"""The most lines of a function."""


@dataclass(frozen=True)
class House:
    """What is counted."""

    hall: int
    files: int
    lines: Mapping[str, int]
    """Room -> lines, those right inside the package under its name."""
    held: Mapping[str, int]
    """Folder -> files in it, not below it."""
    circles: list[list[str]]
    chain: int
    """Modules on the longest chain of imports."""
    functions: list[tuple[int, str]]
    """Lines and place of each function, the longest first."""

    @property
    def long(self) -> list[tuple[int, str]]:
        """The functions that do not fit."""
        return [found for found in self.functions if found[0] > SCREEN]


def measured(root: Path) -> House:
    """What is counted of a checkout; links are not followed."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    folders: dict[str, str] = tomllib.loads(text)["tool"]["setuptools"]["package-dir"]
    modules = modules_of({name: root / folder for name, folder in folders.items()})
    lines, held, functions = Counter[str](), Counter[str](), []
    for path in modules.values():
        source, place = path.read_text(encoding="utf-8"), path.relative_to(root)
        room = "/".join(place.parts[: 2 if place.parts[0] == "attnspec" else 1])
        lines["attnspec" if len(place.parts) == 2 and room.endswith(".py") else room] += (
            source.count("\n")
        )
        held[str(place.parent)] += 1
        functions += [
            ((node.end_lineno or 0) - node.lineno + 1, f"{place}:{node.lineno} {node.name}")
            for node, _ in statements(ast.parse(source).body)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    # a face hands names on, and is imported with whatever lies behind it
    faces = {name for name, path in modules.items() if path.name == "__init__.py"}
    ours = [
        found
        for found in all_imports(modules)
        if found.importer not in faces and found.target in modules and found.target not in faces
    ]
    graph = nx.condensation(nx.DiGraph((found.importer, found.target) for found in ours))
    return House(
        hall=held["attnspec"],
        files=len(modules),
        lines=lines,
        held=held,
        circles=cycles(ours),
        chain=nx.dag_longest_path_length(graph) + 1,
        functions=sorted(functions, reverse=True),
    )


def told(house: House) -> str:
    """What is printed."""
    circles = ", ".join(f"{len(circle)} files" for circle in house.circles) or "none"
    rows = [
        f"files in attnspec/ itself  {house.hall}",
        f"files                      {house.files}",
        f"lines                      {sum(house.lines.values()):,}",
        f"circles of imports         {circles}",
        f"longest chain of imports   {house.chain} files",
        f"longest function           {house.functions[0][0]} lines, {house.functions[0][1]}",
        f"functions over {SCREEN} lines    {len(house.long)}",
        "",
        "files  lines  room",
    ]
    for room, count in sorted(house.lines.items(), key=lambda x: -x[1]):
        files = sum(n for at, n in house.held.items() if at == room or at.startswith(f"{room}/"))
        files = house.hall if room == "attnspec" else files
        rows.append(f"{files:5} {count:6,}  {room}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(told(measured(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1])))
