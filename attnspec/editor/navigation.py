"""From a word to its definition, its uses and its explanation, and to another name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from attnspec.editor.document import Document
from attnspec.editor.documentation import declaration_of, markdown
from attnspec.editor.symbols import FILE, Definition
from attnspec.editor.words import builtin
from attnspec.elaborate.names import RESERVED
from attnspec.grammar.scanner import MAX_NAME
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
    found = document.symbols.resolve(word)
    if found is None:
        return None
    return (_imported(document, found) if found.kind == "import" else None) or Spot(
        document, found.word
    )


def _imported(document: Document, definition: Definition) -> Spot | None:
    """Where a graph is defined that a text imports."""
    item = document.symbols.items[document.symbols.home(definition.word)]
    other = document.imported(item.first + 1)
    found = None if other is None else other.symbols.graph(definition.name)
    if other is None or found is None:
        return None
    return Spot(other, found.word) if found.kind == "graph" else _imported(other, found)


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
    graph those of the texts among `others` that import it.

    Raises RenameError with the reason where that is impossible.
    """
    found = renameable(document, offset)
    _require_name(name, found, document)
    spots = uses_at(document, offset)
    if found.kind != "graph":
        return spots
    for other in others:
        imports = [
            each
            for each in other.symbols.definitions
            if each.kind == "import" and each.name == found.name and _is_from(other, each, document)
        ]
        for each in imports:
            if name in {one.name for one in other.symbols.visible(each.word)}:
                raise RenameError(f"`{name}` is defined in {other.name}, which imports this graph")
            spots += [Spot(other, word) for word in other.symbols.uses(each)]
    return spots


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


def _is_from(other: Document, definition: Definition, document: Document) -> bool:
    item = other.symbols.items[other.symbols.home(definition.word)]
    file = other.imported(item.first + 1)
    if file is None or file.path is None or document.path is None:
        return False
    return file.path.samefile(document.path)


def _require_name(name: str, found: Definition, document: Document) -> None:
    """Refuse what is no name, or means something else already."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > MAX_NAME:
        raise RenameError(
            f"a name consists of at most {MAX_NAME} letters, digits and underscores, got {name!r}"
        )
    if name in RESERVED or (found.kind == "graph" and name in builtin()):
        raise RenameError(f"`{name}` is a word of the language and cannot be a name")
    symbols = document.symbols
    homes = [symbols.home(word) for word in symbols.uses(found)]
    near = {*homes, FILE} if found.home == FILE else {found.home, FILE}
    for other in symbols.definitions:
        if other.name == name and other.home in near and other != found:
            raise RenameError(f"`{name}` is defined already, as {_a(other)}")


def _a(definition: Definition) -> str:
    return f"{'an' if definition.kind[0] in 'aeiou' else 'a'} {definition.kind}"


# --- an explanation -------------------------------------------------------------------------------


def hover(document: Document, offset: int) -> tuple[str, Spot] | None:
    """What is to be said of the word at a place, as Markdown, with that word."""
    word = document.word_at(offset)
    if word is None or document.is_comment(offset):
        return None
    spot, found = Spot(document, word), document.symbols.resolve(word)
    if found is not None:
        place = definition_at(document, offset) or Spot(document, found.word)
        home, kind = place.document, found.kind
        original = home.symbols.resolve(place.word) or found
        text = home.symbols.text(original)
        where = f", in {home.name}" if home is not document else ""
        return f"```attn\n{text}\n```\n\n{kind}{where}", spot
    callee = document.symbols.argument_of(word)
    name = document.scan.words[word if callee is None else callee].text
    declaration = declaration_of(name)
    return None if declaration is None else (markdown(declaration), spot)
