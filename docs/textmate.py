"""The grammar that editors of the TextMate family colour specs with, from the language's own words.

    python docs/textmate.py FILE…

writes it; `--check` changes nothing and exits 1 where a file is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from attnspec.editor.words import words

NAME = "[A-Za-z_][A-Za-z0-9_]*"

SCOPES = {
    "operator": "keyword.operator.word.attn",
    "constant": "constant.language.attn",
    "selector": "constant.language.attn",
    "normalizer": "constant.language.attn",
    "statement": "keyword.control.attn",
    "connective": "keyword.control.attn",
    "item": "keyword.control.attn",
    "pattern": "support.class.attn",
    "mechanism": "support.class.attn",
    "operation": "support.function.attn",
    "set": "support.function.attn",
    "function": "support.function.attn",
    "score": "support.function.attn",
    "input": "support.type.attn",
    "property": "support.constant.attn",
    "figure": "support.constant.attn",
    "scalar": "variable.language.attn",
    "position": "variable.language.attn",
}
"""What each kind of word is called, the first of several; coordinates stand behind a point."""


def grammar() -> dict[str, object]:
    """The whole grammar, as plain data; what stands first is tried first."""
    kinds = {kind: _rule(scope, _any(words()[kind])) for kind, scope in SCOPES.items()}
    rules = {
        "comment": _rule("comment.line.number-sign.attn", "#.*$"),
        "string": _rule("string.quoted.double.attn", r'"[^"\n]*"'),
        "definition": _captured(
            rf"\b(attention|graph|let|input)\s+({NAME})",
            "storage.type.attn",
            "entity.name.function.attn",
        ),
        "number": _rule(
            "constant.numeric.attn",
            r"\b[0-9]+(?:_[0-9]+)*(?:\.[0-9]+(?:_[0-9]+)*)?(?:[eE][+-]?[0-9]+)?\b",
        ),
        "argument": _captured(
            rf"\b({NAME})\s*(=)(?!=)", "variable.parameter.attn", "keyword.operator.assignment.attn"
        ),
        "coordinate": _captured(
            rf"(\.)({NAME})", "punctuation.accessor.attn", "variable.other.property.attn"
        ),
        **kinds,
        "call": _rule("entity.name.function.attn", rf"\b{NAME}(?=\s*\()"),
        "sign": _rule("keyword.operator.attn", r"\.\.|\*\*|//|==|!=|<=|>=|[-+*/%|&~<>=]"),
        "punctuation": _rule("punctuation.attn", r"[(){}\[\],:]"),
    }
    return {
        "name": "attn",
        "scopeName": "source.attn",
        "fileTypes": ["attn"],
        "patterns": [{"include": f"#{name}"} for name in rules],
        "repository": rules,
    }


def _any(words: Iterable[str]) -> str:
    return rf"\b(?:{'|'.join(sorted(words))})\b"


def _rule(name: str, match: str) -> dict[str, object]:
    return {"name": name, "match": match}


def _captured(match: str, *names: str) -> dict[str, object]:
    return {
        "match": match,
        "captures": {str(place): {"name": name} for place, name in enumerate(names, 1)},
    }


def main(arguments: list[str]) -> int:
    """Write the files named, or with `--check` say which are out of date."""
    text = json.dumps(grammar(), indent=2) + "\n"
    stale = 0
    for path in (Path(argument) for argument in arguments if argument != "--check"):
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"{path}: out of date", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
