"""Ordinary source, taken over as it stands but for its annotations and some names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from textwrap import wrap

from attnspec.compile.standalone.expressions import WIDTH


def lifted(parts: Iterable[object], names: Mapping[str, str]) -> list[str]:
    """The text of each function or class, decorators and all, with these names replaced."""
    found = []
    for part in parts:
        text = _without_types(inspect.getsource(part).rstrip())  # type: ignore[arg-type]
        for old, new in names.items():
            text = re.sub(rf"(?<![\w.\"'`]){re.escape(old)}(?![\w\"'`])", new, text)
        found.append(text)
    return found


def _without_types(text: str) -> str:
    """The text without annotations of arguments and results: docstrings say what they are."""
    lines = text.split("\n")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: -node.lineno):
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        margin = " " * node.col_offset
        head = f"def {node.name}({ast.unparse(node.args)}):"
        wrapped = wrap(head, WIDTH, initial_indent=margin, subsequent_indent=f"{margin}    ")
        lines[node.lineno - 1 : node.body[0].lineno - 1] = wrapped
    return "\n".join(lines)


def imported(imports: str, text: str) -> str:
    """The imports of which a text uses a name, as it uses them."""
    found = []
    for line in imports.split("\n"):
        before, word, names = line.rpartition("import ")
        used = [each for each in names.split(", ") if re.search(rf"\b{each}\b", text)]
        if used or not word:
            found.append(f"{before}{word}{', '.join(used)}")
    return "\n".join(found).strip("\n")
