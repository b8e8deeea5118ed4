"""The language server: requests of an editor, answered by the other files of this room.

The protocol is that of https://microsoft.github.io/language-server-protocol, version 3.17.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

from attnspec.editor import checking
from attnspec.editor.completion import offers
from attnspec.editor.document import Document
from attnspec.editor.documentation import definition_at, hover
from attnspec.text.diagnostics import Diagnostic
from attnspec.text.source import Span
from attnspec.version import __version__

PAUSE = 0.2
"""Seconds without a change after which a text is examined."""

_SEVERITY = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}

_KINDS = {
    kind: types.CompletionItemKind[name]
    for name, kinds in {
        "Keyword": "keyword statement",
        "Class": "pattern",
        "Module": "mechanism",
        "Function": "graph import operation function set score",
        "Field": "argument",
        "Variable": "parameter let input",
        "File": "file",
    }.items()
    for kind in kinds.split()
}
"""How editors draw what is offered; all else is a value."""

server = LanguageServer("attnspec", __version__)


_document = lru_cache(maxsize=64)(Document)


def _opened(uri: str) -> Document:
    """An open text."""
    text = server.workspace.get_text_document(uri)
    path = uris.to_fs_path(uri) if uri.startswith("file:") else None
    return _document(text.source, Path(path) if path else None)


def _at(text: types.TextDocumentIdentifier, position: types.Position) -> tuple[Document, int]:
    document = _opened(text.uri)
    return document, document.offset((position.line, position.character))


# --- what is wrong --------------------------------------------------------------------------------


@server.feature(types.TEXT_DOCUMENT_DID_OPEN)
async def opened(params: types.DidOpenTextDocumentParams) -> None:
    """A text is shown: its mistakes are said, then whether its claims hold."""
    await _publish(params.text_document.uri, claims=False)
    await _publish(params.text_document.uri, claims=True)


@server.feature(types.TEXT_DOCUMENT_DID_SAVE)
async def saved(params: types.DidSaveTextDocumentParams) -> None:
    """A text is saved: its claims are tried again."""
    await _publish(params.text_document.uri, claims=True)


@server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
async def changed(params: types.DidChangeTextDocumentParams) -> None:
    """A text is being written: once it rests, its mistakes are said, its claims not yet tried."""
    uri, version = params.text_document.uri, params.text_document.version
    await asyncio.sleep(PAUSE)
    document = server.workspace.text_documents.get(uri)
    if document is not None and document.version == version:
        await _publish(uri, claims=False)


@server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
def closed(params: types.DidCloseTextDocumentParams) -> None:
    """A text was closed; its diagnostics are withdrawn."""
    none = types.PublishDiagnosticsParams(params.text_document.uri, [])
    server.text_document_publish_diagnostics(none)


async def _publish(uri: str, claims: bool) -> None:
    """Say what is wrong with a text, unless it has changed or closed since that was asked."""
    version, document = server.workspace.get_text_document(uri).version, _opened(uri)
    problems = await asyncio.to_thread(checking.diagnostics, document, claims)
    opened = server.workspace.text_documents.get(uri)
    if opened is None or opened.version != version:
        return
    messages = [_message(document, each, uri) for each in problems]
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, messages, version))


def _message(document: Document, found: Diagnostic, uri: str) -> types.Diagnostic:
    lines = [found.message, *(f"note: {note}" for note in found.notes)]
    if found.help:
        lines.append(f"help: {found.help}")
    span = found.span
    if span is not None and span.source.path != document.path:
        # of an imported file: said at the top, with its place
        lines[0] = f"{span.source.name}:{span.line}:{span.column}: {found.message}"
        span = None
    return types.Diagnostic(
        range=_range(document, *((0, 0) if span is None else (span.start, span.end))),
        message="\n".join(lines),
        severity=_SEVERITY[found.severity],
        code=found.code,
        source="attnspec",
        related_information=[
            types.DiagnosticRelatedInformation(_location(document, other, uri), text)
            for text, other in found.related
        ],
    )


def _location(document: Document, span: Span, uri: str) -> types.Location:
    """A place that a message points at, which may be in an imported file."""
    if span.source.path == document.path or span.source.path is None:
        return types.Location(uri, _range(document, span.start, span.end))
    other = Document(span.source.text, span.source.path)
    uri = uris.from_fs_path(str(span.source.path.resolve())) or ""
    return types.Location(uri, _range(other, span.start, span.end))


def _range(document: Document, start: int, end: int) -> types.Range:
    first, last = document.place(start), document.place(end)
    return types.Range(types.Position(*first), types.Position(*last))


# --- what could be written, and what is written ---------------------------------------------------


@server.feature(
    types.TEXT_DOCUMENT_COMPLETION,
    types.CompletionOptions(trigger_characters=[".", "(", ":", '"', " "]),
)
def complete(params: types.CompletionParams) -> types.CompletionList:
    """What could be written at a place, the likely first."""
    document, offset = _at(params.text_document, params.position)
    found = offers(document, offset)
    width = len(str(len(found)))
    items = [
        types.CompletionItem(
            label=offer.label,
            kind=_KINDS.get(offer.kind, types.CompletionItemKind.Value),
            detail=offer.detail or offer.kind,
            insert_text=offer.insert or None,
            sort_text=f"{number:0{width}}",
        )
        for number, offer in enumerate(found)
    ]
    return types.CompletionList(is_incomplete=False, items=items)


@server.feature(types.TEXT_DOCUMENT_HOVER)
def explain(params: types.HoverParams) -> types.Hover | None:
    """What is to be said of the word at a place."""
    document, offset = _at(params.text_document, params.position)
    found = hover(document, offset)
    if found is None:
        return None
    text, word = found
    content = types.MarkupContent(types.MarkupKind.Markdown, text)
    return types.Hover(content, _range(document, *document.ends(word)))


@server.feature(types.TEXT_DOCUMENT_DEFINITION)
def define(params: types.DefinitionParams) -> types.Location | None:
    """Where in this text the word at a place is defined."""
    document, offset = _at(params.text_document, params.position)
    place = definition_at(document, offset)
    if place is None:
        return None
    return types.Location(params.text_document.uri, _range(document, *document.ends(place)))


@server.feature(types.TEXT_DOCUMENT_FORMATTING)
def format_text(params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    """Canonical text; a text that is wrong stays as it is."""
    document = _opened(params.text_document.uri)
    text = checking.formatted(document)
    if text is None or text == document.source.text:
        return []
    return [types.TextEdit(_range(document, 0, len(document.source.text)), text)]
