"""The parser's tables are those of the grammar."""

from __future__ import annotations

import json

import lark
import pytest

from attnspec.grammar import tables

GRAMMAR = tables.GRAMMAR.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_grammar() -> None:
    written = json.loads(tables.TABLES.read_text(encoding="utf-8"))
    if written["lark"] != lark.__version__:
        pytest.skip(f"they were made with lark {written['lark']}")
    assert written == json.loads(json.dumps(tables.tables_of(GRAMMAR))), (
        "write them anew: python -m attnspec.grammar.tables"
    )
