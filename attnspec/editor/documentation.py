"""What patterns and mechanisms say of themselves: how they are written, their formula, arguments
and source."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, fields

from attnspec.editor.document import Document
from attnspec.elaborate.arguments import parameters_of
from attnspec.elaborate.names import INPUTS
from attnspec.graphs.forms import prelude
from attnspec.graphs.patterns import BY_NAME as PATTERNS
from attnspec.graphs.relation import Relation
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS
from attnspec.ir.parameters import Parameter
from attnspec.text.diagnostics import as_written


def declaration_of(name: str) -> type | None:
    """The pattern or mechanism of a name."""
    return PATTERNS.get(name) or MECHANISMS.get(name)


def ways(declaration: type) -> list[str]:
    """How a pattern or mechanism may be written, with its defaults."""
    name: str = declaration.name  # type: ignore[attr-defined]
    signatures = getattr(declaration, "signatures", None)
    if signatures:
        return [f"{name}({', '.join(map(str, way))})" for way in signatures]
    parts = [
        entry.name
        if entry.default in (MISSING, None)
        else f"{entry.name} = {as_written(entry.default)}"
        for entry in fields(declaration)
        if entry.name in parameters_of(declaration)
    ]
    bare = not parts and issubclass(declaration, Relation)
    return [name if bare else f"{name}({', '.join(parts)})"]


def page_of(declaration: type) -> str:
    """The docstring that has the source: that of the class, or of the file that is about it."""
    text = inspect.getdoc(declaration) or ""
    return text if "Source:" in text else sys.modules[declaration.__module__].__doc__ or ""


def formula_and_source(page: str) -> tuple[str, str]:
    """The first paragraph of a docstring and what follows `Source:`, on one line each."""
    paragraph = page.strip().split("\n\n")[0]
    source = re.search(r"^Source: (.*?)(?=\n\n|\n[A-Z]\w+: |\Z)", page, re.MULTILINE | re.DOTALL)
    return " ".join(paragraph.split()), " ".join(source[1].split()) if source else ""


def markdown(declaration: type) -> str:
    """All that an editor shows of a pattern or mechanism."""
    name: str = declaration.name  # type: ignore[attr-defined]
    written = "\n".join(ways(declaration))
    definition = prelude.definitions().get(name)
    if definition is not None and issubclass(declaration, Relation):
        written += f"\n# {' '.join(definition.span.text.split())}"
    arguments = [
        f"- `{argument}`: {escaped(meaning(parameter))}"
        for argument, parameter in parameters_of(declaration).items()
    ]
    parts = [f"```attn\n{written}\n```", escaped(page_of(declaration).strip())]
    return "\n\n".join([*parts, "\n".join(arguments)]).strip()


def meaning(parameter: Parameter) -> str:
    """What an argument is, with its bounds or choices."""
    ends = (("above", parameter.above), ("at least", parameter.least), ("at most", parameter.most))
    bounds = [f"{words} {end:,}" for words, end in ends if end is not None]
    bounds += [word for word in ("odd", "even") if getattr(parameter, word)]
    if parameter.choices:
        bounds.append(f"one of {', '.join(parameter.choices)}")
    return f"{parameter.doc} ({', '.join(bounds)})" if bounds else parameter.doc


def escaped(text: str) -> str:
    """Plain text as Markdown: formulas keep their stars, and `Source:` its line."""
    safe = re.sub(r"([\\*_<>|\[\]])", r"\\\1", text)
    return re.sub(r"\n(?=[A-Z][\w, -]*: )", "  \n", safe)


def definition_at(document: Document, offset: int) -> int | None:
    """The word of this text that defines the one at a place; for what is imported its import."""
    word = document.word_at(offset)
    definition = None if word is None else document.symbols.resolve(word)
    return None if definition is None else definition.word


def hover(document: Document, offset: int) -> tuple[str, int] | None:
    """What is to be said of the word at a place, as Markdown, with that word."""
    word = document.word_at(offset)
    if word is None or document.is_comment(offset):
        return None
    symbols = document.symbols
    definition = symbols.resolve(word)
    if definition is not None:
        return f"```attn\n{symbols.text(definition)}\n```\n\n{definition.kind}", word
    callee = symbols.argument_of(word)
    name = document.scan.words[word if callee is None else callee].text
    if name in INPUTS and symbols.declares(word if callee is None else callee):
        text, takes = INPUTS[name]
        rest = "".join(f"\n- `{each}`: {meaning(parameter)}" for each, parameter in takes.items())
        return f"```attn\ninput x: {name}\n```\n\n{text}\n{rest}".strip(), word
    declaration = declaration_of(name)
    return None if declaration is None else (markdown(declaration), word)
