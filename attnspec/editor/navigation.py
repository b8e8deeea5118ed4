"""From a word to its definition and its explanation."""

from __future__ import annotations

from attnspec.editor.document import Document
from attnspec.editor.documentation import declaration_of, markdown, meaning
from attnspec.elaborate.names import INPUTS


def definition_at(document: Document, offset: int) -> int | None:
    """The word of this text that defines the one at a place; for what is imported its import."""
    word = document.word_at(offset)
    found = None if word is None else document.symbols.resolve(word)
    return None if found is None else found.word


def hover(document: Document, offset: int) -> tuple[str, int] | None:
    """What is to be said of the word at a place, as Markdown, with that word."""
    word = document.word_at(offset)
    if word is None or document.is_comment(offset):
        return None
    symbols = document.symbols
    found = symbols.resolve(word)
    if found is not None:
        return f"```attn\n{symbols.text(found)}\n```\n\n{found.kind}", word
    callee = symbols.argument_of(word)
    name = document.scan.words[word if callee is None else callee].text
    if name in INPUTS and symbols.declares(word if callee is None else callee):
        said, takes = INPUTS[name]
        rest = "".join(f"\n- `{each}`: {meaning(parameter)}" for each, parameter in takes.items())
        return f"```attn\ninput x: {name}\n```\n\n{said}\n{rest}".strip(), word
    declaration = declaration_of(name)
    return None if declaration is None else (markdown(declaration), word)
