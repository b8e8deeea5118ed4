"""From a word to its definition, its uses and its explanation, and to another name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attnspec.editor.document import Document
from attnspec.editor.documentation import declaration_of, markdown, meaning
from attnspec.editor.symbols import FILE, Definition
from attnspec.editor.words import builtin
from attnspec.elaborate.names import INPUTS, RESERVED
from attnspec.grammar.scanner import MAX_NAME
from attnspec.ir.crossing import QUERIES
from attnspec.text.diagnostics import AttnSpecError


@dataclass(frozen=True)
class Spot:
    """A word of a text, by its number."""

    document: Document
    word: int

    @property
    def ends(self) -> tuple[int, int]:
        """Its first character and the one behind its last; of a string those between the quotes."""
        found = self.document.scan.words[self.word]
        return found.start, found.end


class RenameError(AttnSpecError):
    """A name that cannot be changed, or cannot be that."""


def definition_at(document: Document, offset: int) -> Spot | None:
    """Where the word at a place is defined; for what is imported in the other file."""
    word = document.word_at(offset)
    if word is None:
        return None
    if document.scan.words[word].kind == "string":
        other = document.imported(word)
        return Spot(other, 0) if other is not None and other.scan.words else None
    found = _meaning(document, word)
    if found is None:
        return None
    home, definition = found
    return Spot(home, definition.word)


def _meaning(document: Document, word: int) -> tuple[Document, Definition] | None:
    """What a word means, with the text in which that is defined; of what cannot be followed, its
    import."""
    found = document.symbols.resolve(word)
    if found is not None:
        return document.original(found) or (document, found)
    callee = document.symbols.argument_of(word)
    graph = None if callee is None else document.symbols.resolve(callee)
    original = None if graph is None else document.original(graph)
    if original is None:
        return None
    home, definition = original
    name = document.scan.words[word].text
    named = [each for each in home.symbols.parameters(definition) if each.name == name]
    return (home, named[0]) if named else None


def uses_at(document: Document, offset: int) -> list[Spot]:
    """The definition of the word at a place with all that means it in this text."""
    word = document.word_at(offset)
    found = None if word is None else document.symbols.resolve(word)
    if found is None:
        return []
    return [Spot(document, each) for each in document.symbols.uses(found)]


# --- another name ---------------------------------------------------------------------------------


def renamed(
    document: Document, offset: int, name: str, others: Iterable[Document] = ()
) -> list[Spot]:
    """The words that become `name` where the one at a place does: those of this text, and for a
    graph or a parameter of it those of the texts among `others` that import the graph.

    Raises RenameError with the reason where that is impossible.
    """
    found = renameable(document, offset)
    _require_name(name, found, document)
    spots = uses_at(document, offset)
    graph = found if found.kind == "graph" else document.symbols.owner(found)
    if graph is None:
        return spots
    for other, imported in _importers(document, graph.name, list(others)):
        symbols = other.symbols
        if graph is not found:
            spots += [Spot(other, word) for word in symbols.arguments(imported, found.name)]
            continue
        if name in {one.name for one in symbols.definitions if one.kind != "attention"}:
            raise RenameError(f"`{name}` is defined in {other.name}, which imports this graph")
        uses = symbols.uses(imported)
        _require_no_length(name, uses, other)
        spots += [Spot(other, word) for word in uses]
    return spots


def _importers(
    document: Document, graph: str, others: list[Document]
) -> Iterator[tuple[Document, Definition]]:
    """The texts that import a graph, also by way of each other, with the import."""
    paths, left = [document.path], others
    while paths:
        path = paths.pop()
        for other in list(left):
            found = other.symbols.graph(graph)
            if found is not None and found.kind == "import" and _is_from(other, found, path):
                left.remove(other)
                paths.append(other.path)
                yield other, found


def renameable(document: Document, offset: int) -> Definition:
    """The definition whose name may be changed from a place; raises RenameError where none is."""
    word = document.word_at(offset)
    found = None if word is None else document.symbols.resolve(word)
    if found is None or word is None:
        shown = "" if word is None else f"`{document.scan.words[word].text}` is a word of the"
        raise RenameError(f"{shown} language, or not defined" if shown else "no name stands here")
    if found.kind == "import":
        raise RenameError(f"`{found.name}` is defined in another file: rename it there")
    return found


def _is_from(other: Document, definition: Definition, path: Path | None) -> bool:
    item = other.symbols.items[other.symbols.home(definition.word)]
    file = other.imported(item.first + 1)
    return (
        file is not None and file.path is not None and path is not None and file.path.samefile(path)
    )


def _require_name(name: str, found: Definition, document: Document) -> None:
    """Refuse what is no name, or means something else already."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > MAX_NAME:
        raise RenameError(
            f"a name consists of at most {MAX_NAME} letters, digits and underscores, got {name!r}"
        )
    if name in RESERVED or (found.kind == "graph" and name in builtin()):
        raise RenameError(f"`{name}` is a word of the language and cannot be a name")
    symbols = document.symbols
    uses = symbols.uses(found)
    _require_no_length(name, uses, document)
    if found.kind == "input" and symbols.calls(name, found.home):
        raise RenameError(f"`{name}` is called here: as an input it would be read at a position")
    homes = [symbols.home(word) for word in uses]
    near = {*homes, FILE} if found.home == FILE else {found.home, FILE}
    for other in symbols.definitions:
        if other.name == name and other.home in near and other != found:
            raise RenameError(f"`{name}` is defined already, as {_a(other)}")


def _require_no_length(name: str, words: Iterable[int], document: Document) -> None:
    """Refuse what words in an attention would mean already."""
    if name == QUERIES and any(document.symbols.crosses(word) for word in words):
        raise RenameError(f"`{name}` is the number of queries in an attention that says `cross`")


def _a(definition: Definition) -> str:
    return f"{'an' if definition.kind[0] in 'aeiou' else 'a'} {definition.kind}"


# --- an explanation -------------------------------------------------------------------------------


def hover(document: Document, offset: int) -> tuple[str, Spot] | None:
    """What is to be said of the word at a place, as Markdown, with that word."""
    word = document.word_at(offset)
    if word is None or document.is_comment(offset):
        return None
    spot, found = Spot(document, word), _meaning(document, word)
    if found is not None:
        home, definition = found
        where = f", in {home.name}" if home is not document else ""
        return f"```attn\n{home.symbols.text(definition)}\n```\n\n{definition.kind}{where}", spot
    callee = document.symbols.argument_of(word)
    name = document.scan.words[word if callee is None else callee].text
    if name in INPUTS and document.symbols.declares(word if callee is None else callee):
        said, takes = INPUTS[name]
        rest = "".join(f"\n- `{each}`: {meaning(parameter)}" for each, parameter in takes.items())
        return f"```attn\ninput x: {name}\n```\n\n{said}\n{rest}".strip(), spot
    declaration = declaration_of(name)
    return None if declaration is None else (markdown(declaration), spot)
