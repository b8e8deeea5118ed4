"""The parser's tables are those of the grammar, and give the same trees and the same messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lark
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_grammar_gives_the_same_bytes(seed: int) -> None:
    # Lark holds the rules that a file may start with in sets, whose order is the process's own
    script = (
        "import json; from attnspec.grammar import tables;"
        "data = tables.tables_of(tables.GRAMMAR.read_text(encoding='utf-8'))['data'];"
        "print(json.dumps(data['parser']['parser']['end_states']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split('"')[1::2] == ["file", "expression"]


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


@given(
    st.lists(
        st.sampled_from(
            "attention graph attend a window ( ) { } = , 3 radius | & - ~ 1.5 causal heads from"
            " import require at n layer : / \n".split(" ")
        ),
        max_size=12,
    )
)
def test_any_words_are_read_alike(both: tuple[lark.Lark, lark.Lark], words: list[str]) -> None:
    text = " ".join(words)
    first, second = both
    assert outcome(first, text) == outcome(second, text)


def test_tables_of_another_grammar_or_version_are_not_used() -> None:
    start = "file: expression\nexpression: WORD\n"
    grammar, other = f"{start}WORD: /a+/\n", f"{start}WORD: /b+/\n"
    made = tables.tables_of(grammar)
    assert tables.is_current(made, grammar)
    assert not tables.is_current(made, other)
    assert not tables.is_current({**made, "lark": "0.1"}, grammar)
    first, second = tables.loaded(made), tables.built(grammar)
    assert outcome(first, "aa") == outcome(second, "aa")
