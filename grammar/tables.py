"""The parser's tables, computed once: building them takes longer than reading any spec.

`attn.tables.json` holds what Lark computes from `attn.lark`, as plain data with the grammar's
sha256 and the version of Lark. Where either differs from what is found, the tables are computed
anew from the grammar. `python -m attnspec.grammar.tables` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import lark
from lark import Lark

GRAMMAR = Path(__file__).with_name("attn.lark")
TABLES = Path(__file__).with_name("attn.tables.json")


@cache
def lark_parser() -> Lark:
    """The parser of the language, from the tables or from the grammar."""
    text = GRAMMAR.read_text(encoding="utf-8")
    tables = json.loads(TABLES.read_text(encoding="utf-8"))
    return loaded(tables) if is_current(tables, text) else built(text)


def built(grammar: str) -> Lark:
    """The parser of a grammar, computed."""
    return Lark(
        grammar,
        parser="lalr",
        lexer="contextual",
        start=["file", "expression"],
        keep_all_tokens=True,
        maybe_placeholders=False,
    )


def is_current(tables: Mapping[str, Any], grammar: str) -> bool:
    """Whether tables are those of a grammar and of this version of Lark."""
    return tables.get("lark") == lark.__version__ and tables.get("grammar") == _sha(grammar)


def _sha(grammar: str) -> str:
    return sha256(grammar.encode()).hexdigest()


# --- tables as data -------------------------------------------------------------------------------


def tables_of(grammar: str) -> dict[str, Any]:
    """The tables of a grammar as JSON data; the same grammar gives the same data.

    Lark numbers symbols and states as it meets them in sets; here symbols go by their names, and
    states as they are first met from the start.
    """
    from lark.grammar import Rule
    from lark.lexer import TerminalDef

    # Lark's own way to save a parser; its version stands in the file
    from_lark: Any = built(grammar)
    data, memo = from_lark.memo_serialize([TerminalDef, Rule])
    options = data["options"]
    options.update(import_paths=[], source_path=None)
    table = data["parser"]["parser"]
    names, states = table["tokens"], table["states"]
    order = sorted(names, key=lambda token: str(names[token]))
    met = list(table["start_states"].values())
    for state in met:
        shifts = [states[state][token] for token in order if token in states[state]]
        met += dict.fromkeys(to for kind, to in shifts if kind == 0 and to not in met)
    number = {state: index for index, state in enumerate(met)}
    numbered = [
        {
            str(index): [kind, number[to] if kind == 0 else to]
            for index, token in enumerate(order)
            if token in states[state]
            for kind, to in (states[state][token],)
        }
        for state in met
    ]
    data["parser"]["parser"] = {
        "tokens": [names[token] for token in order],
        "states": numbered,
        "start_states": {name: number[at] for name, at in table["start_states"].items()},
        "end_states": {name: number[table["end_states"][name]] for name in table["start_states"]},
    }
    return {
        "lark": lark.__version__,
        "grammar": _sha(grammar),
        "data": data,
        "memo": [memo[index] for index in range(len(memo))],
    }


def loaded(tables: Mapping[str, Any]) -> Lark:
    """The parser that tables were made of."""
    data = tables["data"]
    table = data["parser"]["parser"]
    numbered = {
        **table,
        "tokens": dict(enumerate(table["tokens"])),
        "states": {
            index: {int(token): tuple(action) for token, action in actions.items()}
            for index, actions in enumerate(table["states"])
        },
    }
    data = {**data, "parser": {**data["parser"], "parser": numbered}}
    of_lark: Any = Lark
    parser: Lark = of_lark._load_from_dict(data, dict(enumerate(tables["memo"])))
    return parser


def main() -> None:
    """Write the tables of the grammar."""
    tables = tables_of(GRAMMAR.read_text(encoding="utf-8"))
    data = json.dumps(tables, separators=(",", ":"), allow_nan=False)
    TABLES.write_text(data + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
