"""The parser's tables are those of the grammar, and give the same trees and the same messages."""

from __future__ import annotations

import json
from pathlib import Path

import lark
import pytest

from attnspec.grammar import tables
from attnspec.grammar.scanner import scan
from attnspec.text.source import Source

FILES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.attn"))

GRAMMAR = tables.GRAMMAR.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def both() -> tuple[lark.Lark, lark.Lark]:
    """The parser from the tables in the package, and the one that is computed."""
    found = json.loads(tables.TABLES.read_text(encoding="utf-8"))
    return tables.loaded(found), tables.built(GRAMMAR)


def test_the_tables_are_those_of_the_grammar() -> None:
    written = json.loads(tables.TABLES.read_text(encoding="utf-8"))
    if written["lark"] != lark.__version__:
        pytest.skip(f"they were made with lark {written['lark']}")
    assert written == json.loads(json.dumps(tables.tables_of(GRAMMAR))), (
        "write them anew: python -m attnspec.grammar.tables"
    )


def outcome(parser: lark.Lark, text: str) -> object:
    """The tree, or where and on what the parser stops and what it would take there."""
    run = parser.parse_interactive(text, "file")
    try:
        run.exhaust_lexer()
        return run.feed_eof()  # type: ignore[no-untyped-call]
    except lark.UnexpectedInput as error:
        accepted = sorted(run.accepts())  # type: ignore[no-untyped-call]
        return type(error).__name__, error.line, error.column, accepted


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_specs_have_the_same_trees(path: Path, both: tuple[lark.Lark, lark.Lark]) -> None:
    text = scan(Source(path.name, path.read_text(encoding="utf-8"))).mended
    first, second = both
    tree = outcome(first, text)
    assert isinstance(tree, lark.Tree)
    assert tree == outcome(second, text)
    # and the same end where the text is cut
    for end in range(0, len(text), max(1, len(text) // 7)):
        assert outcome(first, text[:end]) == outcome(second, text[:end])
