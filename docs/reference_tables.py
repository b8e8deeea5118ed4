"""The tables of the language reference, from the code.

    python docs/reference_tables.py FILE…

Each table stands between two comments, `<!-- patterns -->` and `<!-- /patterns -->` for example;
`--check` changes nothing and exits 1 where a table is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from attnspec.editor.documentation import formula_and_source, page_of, ways
from attnspec.graphs.patterns import PATTERNS
from attnspec.graphs.relation import Relation
from attnspec.ir.mechanisms import MECHANISMS
from attnspec.text.catalogue import catalogue


def patterns() -> str:
    """One row for each pattern: how it is written, what it means, where it comes from."""
    rows = ["| written | pairs | source |", "|---|---|---|"]
    for pattern in PATTERNS:
        if pattern.word:
            continue
        text, source = _documentation(page_of(pattern))
        rows.append(f"| `{_written(pattern)}` | {text} | {source} |")
    return "\n".join(rows)


def lengths() -> str:
    """One row for each pattern: whether its pairs stay as they are when positions come after them,
    or before them."""
    head = "| pattern | more positions at the end | more positions at the start |"
    rows = [head, "|---|---|---|"]
    for pattern in PATTERNS:
        if pattern.data_dependent or pattern.word:
            continue
        rows.append(f"| `{pattern.name}` | {_after(pattern)} | {_before(pattern)} |")
    return "\n".join(rows)


def _after(pattern: type[Relation]) -> str:
    """What more positions at the end change, growth or padding."""
    fact = pattern.changing(causal=False)
    kinds = {entry.metadata["parameter"].kind for entry in fields(pattern)}  # type: ignore[arg-type]
    if fact is not None:
        kept = "the same under the statement `causal`; otherwise " if not fact.under_causal else ""
        return f"{kept}other pairs: it {fact.why}"
    if "tokens" in kinds:
        return "the same pairs, except with `last(c)`"
    if "predicate" in kinds:
        return "the same pairs where the predicate does not read n"
    if pattern.needs_grid:
        return "the same pairs where all extents but the first are numbers"
    return "the same pairs"


def _before(pattern: type[Relation]) -> str:
    """What more positions at the start change, padding on the left."""
    if not pattern.anchored:
        return "the same pairs, moved"
    kinds = {entry.metadata["parameter"].kind for entry in fields(pattern)}  # type: ignore[arg-type]
    if "tokens" in kinds:
        return "the same pairs for inputs and `last(c)`; other sets count from the first position"
    if "predicate" in kinds:
        return "the same pairs where the predicate reads q - k alone"
    return "counts from the first position, padding included"


def mechanisms() -> str:
    """One row for each mechanism."""
    rows = ["| written | what it is | causal form | source |", "|---|---|---|---|"]
    for mechanism in MECHANISMS:
        text, source = _documentation(page_of(mechanism))
        causal = "yes" if mechanism.causal else "no"
        rows.append(f"| `{_written(mechanism)}` | {text} | {causal} | {source} |")
    return "\n".join(rows)


def options() -> str:
    """One row for each argument of a data-dependent pattern or a mechanism."""
    rows = ["| of | argument | meaning |", "|---|---|---|"]
    declared: list[Any] = [*(x for x in PATTERNS if x.data_dependent), *MECHANISMS]
    for each in declared:
        for entry in fields(each):
            argument = entry.metadata.get("parameter")
            if argument is not None and argument.kind != "context":
                choices = " · ".join(f"`{choice}`" for choice in argument.choices)
                meaning = _cell(argument.doc) + (f": {choices}" if choices else "")
                rows.append(f"| `{each.name}` | `{entry.name}` | {meaning} |")
    return "\n".join(rows)


def codes() -> str:
    """One row for each diagnostic."""
    rows = ["| code | summary |", "|---|---|"]
    rows.extend(f"| {entry.code} | {entry.summary} |" for entry in catalogue().values())
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "patterns": patterns,
    "lengths": lengths,
    "mechanisms": mechanisms,
    "options": options,
    "codes": codes,
}


def refreshed(text: str) -> str:
    """The text with every marked table written anew."""
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = block.sub(lambda match, new=table: match[1] + new() + "\n" + match[2], text)  # type: ignore[misc]
    return text


def main(arguments: list[str]) -> int:
    """Refresh the files named, or with `--check` say which are out of date."""
    check = "--check" in arguments
    stale = 0
    for name in (argument for argument in arguments if argument != "--check"):
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            stale += 1
            if check:
                print(f"{name}: a table is out of date", file=sys.stderr)
            else:
                path.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


def _documentation(page: str) -> tuple[str, str]:
    formula, source = formula_and_source(page)
    return _cell(formula), _cell(source)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _written(declaration: type) -> str:
    return "`, `".join(ways(declaration))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
