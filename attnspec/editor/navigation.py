"""From a word to its definition and its explanation."""

from __future__ import annotations

from dataclasses import dataclass

from attnspec.editor.document import Document
from attnspec.editor.documentation import declaration_of, markdown, meaning
from attnspec.editor.symbols import Definition
from attnspec.elaborate.names import INPUTS


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
