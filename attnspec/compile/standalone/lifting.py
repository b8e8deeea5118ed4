"""Files put together from ordinary source, which is taken over as it stands.

Settings are names in capitals: a branch on them alone is decided when a file is written, and those
that are still read stand at the top of it. Other names may be replaced.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from types import CodeType

from attnspec.backends.common import scores
from attnspec.compile.emit import constant
from attnspec.compile.standalone.sources import graph, module
from attnspec.ir.program import Program
from attnspec.lower.lower import pair_inputs

IMPORTS = """\
import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import dropout, gelu, layer_norm, pad, scaled_dot_product_attention
"""

DRAWS = "attnspec.backends.factored.text_of_draws"
"""Taken over by name: to import it loads what traces."""


@dataclass(frozen=True)
class Text:
    """Functions that are written for a spec, settings of those that they call, which function of
    the sources stands for a name, and the sources."""

    functions: dict[str, str]
    settings: dict[str, object]
    names: dict[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = (graph.__name__,)

    def file(self, program: Program, roots: Sequence[str]) -> str:
        """The definitions of some names and of all that they call, each behind what it calls: those
        that are written for this file, or else those of the sources, with other names."""
        kinds = {x.name: (x.kind.replace("tokens", "bool"), x.at_most) for x in program.inputs}
        settings = {
            "HEADS": program.heads,
            "LAYERS": program.layers,
            "INPUTS": kinds,
            "SLOTS": program.slots,
            "CROSS": program.cross,
            "PAIRS": bool(pair_inputs(program)),
            **self.settings,
        }
        names = self.names | (module.TWO_SEQUENCES if program.cross else {})
        written = self.functions
        modules = scores.__name__, *self.sources, DRAWS, module.__name__
        sources = _definitions(modules) | written
        texts: dict[str, str] = {}
        read = set[str]()

        def visit(name: str) -> None:
            text = written.get(name)
            if text is None:
                own = _names_read(sources[name])
                known = tuple((x, repr(value)) for x, value in settings.items() if x in own)
                text = _decided(sources[name], known)
                for old, new in names.items():
                    text = re.sub(rf"(?<![\w.\"'`]){re.escape(old)}(?![\w\"'`])", new, text)
            called = _names_read(text)
            read.update(called)
            for each in called:
                if each in sources and each not in texts:
                    visit(each)
            texts[name] = text

        for root in roots:
            visit(root)
        constants = [constant(name, value) for name, value in settings.items() if name in read]
        imports = []
        for line in IMPORTS.split("\n"):
            before, word, named = line.rpartition("import ")
            used = [each for each in named.split(", ") if each in read]
            imports += [f"{before}{word}{', '.join(used)}"] if used or not word else []
        sections = ["\n".join(constants), *texts.values()]
        return "\n".join(imports).strip("\n") + "\n\n" + "\n\n\n".join(sections) + "\n"


@cache
def _definitions(modules: tuple[str, ...]) -> dict[str, str]:
    """The text of each function, class and variable; settings are not variables."""
    definitions = {}
    for each in modules:
        room, _, name = each.rpartition(".")
        source = (files(room) / f"{name}.py").read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.parse(source).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                case ast.Assign(targets=[ast.Name(name)]) if not name.isupper():
                    first = node.lineno
                case _:
                    continue
            definitions[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return definitions


@cache
def _decided(text: str, settings: tuple[tuple[str, str], ...]) -> str:
    """The text without the branches on settings alone, which are names with their literals."""
    lines, values = text.split("\n"), {name: ast.literal_eval(value) for name, value in settings}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.If):
            continue
        if not {x.id for x in ast.walk(node.test) if isinstance(x, ast.Name)} <= values.keys():
            continue
        first, last = node.lineno - 1, node.end_lineno or 0
        middle = node.body[-1].end_lineno or 0
        if eval(ast.unparse(node.test), values):
            taken = [line[4:] for line in lines[node.test.end_lineno : middle]]
        else:
            # an `elif` becomes an `if`, what stands behind `else` moves to the left
            head, *taken = lines[middle:last] or [""]
            taken = [line[4:] for line in taken]
            if head.lstrip().startswith("elif"):
                taken = [head.replace("elif", "if", 1), *lines[middle + 1 : last]]
        # no two blank lines behind each other
        first -= lines[first - 1] == "" == [*taken, *lines[last:]][0]
        lines[first:last] = taken
        return _decided("\n".join(lines), settings)
    return text


@lru_cache(1024)
def _names_read(text: str) -> tuple[str, ...]:
    """The global names that a text reads, in what is nested in it too."""
    codes, names = [compile(text, "a definition", "exec", dont_inherit=True)], dict[str, None]()
    for code in codes:
        read = (x for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        names |= dict.fromkeys(each.argval for each in read)
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return tuple(names)
