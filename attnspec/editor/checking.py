"""What is wrong with a text, and what its attentions read: the compiler asked about a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnspec.analysis.quality import Unknown
from attnspec.editor.document import Document
from attnspec.elaborate import attention_names
from attnspec.grammar.printer import canonical
from attnspec.graphs.stack import TooMuch
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError, in_order

LENS_LENGTH = 512
"""The length at which an attention is counted while it is written."""


def diagnostics(document: Document, claims: bool) -> list[Diagnostic]:
    """What is wrong with all attentions of a text, in its order; lints and claims too if `claims`,
    which takes longer."""
    found: list[Diagnostic] = []
    try:
        source = document.checked()
        names: list[str | None] = [*attention_names(source)]
        if not names and not document.symbols.definitions:
            # gets the message that says so; a file of graphs alone is there to be imported
            names = [None]
        for name in names:
            try:
                spec = Spec(source, name=name)
                found += spec.check() if claims else spec.elaborated.warnings
            except SpecError as error:
                found += error.diagnostics
    except SpecError as error:
        found += error.diagnostics
    return in_order(found)


def formatted(document: Document) -> str | None:
    """The canonical text, None where it is wrong: then it stays as it is."""
    try:
        return canonical(document.checked())
    except SpecError:
        return None


@dataclass(frozen=True)
class Lens:
    """A line above an attention: its name, and the number of the word that is it."""

    attention: str
    word: int


def lenses(document: Document) -> Iterator[Lens]:
    """One for each attention of a text, right or wrong."""
    for each in document.symbols.definitions:
        if each.kind == "attention":
            yield Lens(each.name, each.word)


def lens_text(document: Document, attention: str, n: int = LENS_LENGTH) -> str:
    """`n = 512: 12,345 pairs, 3.2 % of all, every pair joined after 2 layers`."""
    try:
        spec = Spec(document.checked(), name=attention)
        n = spec.program.fixed_length or n
        report = spec.analyse(n)
        edges, depth = report.figure("edges"), report.figure("depth")
    except SpecError:
        return "not counted: see the messages"
    except (AttnSpecError, TooMuch) as error:
        return f"n = {n:,}: {str(error).splitlines()[0]}"
    parts = []
    if isinstance(edges, Unknown):
        parts.append(f"pairs not known: {edges.reason}")
    else:
        share = report.figure("density")
        of_all = "" if isinstance(share, Unknown) else f" ({100 * share.value:.3g} %)"
        parts.append(f"{_mark(edges.quality)}{edges.value:,} pairs{of_all}")
    if isinstance(depth, Unknown):
        if not isinstance(edges, Unknown) or edges.reason != depth.reason:
            parts.append(f"depth not known: {depth.reason}")
    elif depth.value is None:
        parts.append("some pairs are never joined")
    else:
        parts.append(f"depth {_mark(depth.quality)}{depth.value}")
    return f"n = {n:,}: {', '.join(parts)}"


def _mark(quality: str) -> str:
    return {"exact": "", "bound": "≤ ", "estimate": "≈ "}[quality]
