"""What is wrong with a text, and how it is written: the compiler asked about a document."""

from __future__ import annotations

from attnspec.editor.document import Document
from attnspec.elaborate import attention_names
from attnspec.grammar.printer import canonical
from attnspec.spec import Spec
from attnspec.text.diagnostics import Diagnostic, SpecError, in_order


def diagnostics(document: Document, claims: bool) -> list[Diagnostic]:
    """What is wrong with all attentions of a text, in its order; lints and claims too if `claims`,
    which takes longer."""
    problems: list[Diagnostic] = []
    try:
        source = document.checked()
        names: list[str | None] = [*attention_names(source)]
        if not names and not document.symbols.definitions:
            # gets the message that says so; a file of graphs alone is there to be imported
            names = [None]
        for name in names:
            try:
                spec = Spec(source, name=name)
                problems += spec.check() if claims else spec.elaborated.warnings
            except SpecError as error:
                problems += error.diagnostics
    except SpecError as error:
        problems += error.diagnostics
    return in_order(problems)


def formatted(document: Document) -> str | None:
    """The canonical text, None where it is wrong: then it stays as it is."""
    try:
        return canonical(document.checked())
    except SpecError:
        return None
