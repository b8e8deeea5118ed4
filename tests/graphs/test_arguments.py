"""Arguments of patterns and mechanisms: their names, kinds, ranges and defaults are promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest
from goldens import Golden

from attnspec.graphs.patterns import PATTERNS
from attnspec.ir.mechanisms import MECHANISMS

DECLARED: list[Any] = [*PATTERNS, *MECHANISMS]


def lines() -> Iterator[str]:
    for declared in DECLARED:
        for entry in fields(declared):
            one = entry.metadata["parameter"]
            said = [f"{declared.name}.{entry.name}: {one.context or one.kind}"]
            said += [f"above {one.above}"] if one.above is not None else []
            said += [f"least {one.least}"] if one.least is not None else []
            said += [f"most {one.most}"] if one.most is not None else []
            said += ["odd"] * one.odd + ["even"] * one.even + ["needs no name"] * one.positional
            said += [" | ".join(one.choices)] if one.choices else []
            said += [f"default {entry.default!r}"] if entry.default is not MISSING else []
            yield ", ".join(said)


def test_arguments_are_those_that_are_promised(golden: Golden) -> None:
    golden("\n".join(lines()) + "\n")


@pytest.mark.parametrize("declared", DECLARED, ids=lambda c: c.name)
def test_defaults_are_admissible(declared: Any) -> None:
    for entry in fields(declared):
        one, default = entry.metadata["parameter"], entry.default
        if one.kind == "choice":
            assert default is None or default in one.choices
        if isinstance(default, int | float) and one.kind in ("integer", "real"):
            assert one.least is None or default >= one.least
            assert one.above is None or default > one.above
            assert one.most is None or default <= one.most
            assert not (one.odd and default % 2 == 0)
            assert not (one.even and default % 2)


def test_names_are_unique_and_mechanisms_say_why_they_are_not_causal() -> None:
    names = [declared.name for declared in DECLARED]
    assert len({*names}) == len(names)
    assert [m.name for m in MECHANISMS if m.causal == bool(m.why_not_causal)] == []
