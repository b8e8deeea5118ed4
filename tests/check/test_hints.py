"""A claim on reach that fails names one change, which parses, holds and breaks no other claim."""

from __future__ import annotations

import re

import pytest

import attnspec
from attnspec.spec import parse

CASES = (
    "attend window(radius = 1)\nrequire diameter <= 4",
    "heads 2 attend block(size = 8) head 1 { attend self }\nrequire path_length <= 2 at n = 64",
    "causal attend block(size = 32)\nrequire depth <= 16 at n = 512",
    "causal attend window(before = 31, after = 0)\nrequire depth <= 3 at n = 1000",
)


@pytest.mark.parametrize("body", CASES)
def test_hints_can_be_pasted_and_hold(body: str) -> None:
    text = f"attention a {{\n{body}\n}}"
    (refuted,) = [d for d in parse(text).check() if d.code == "A606"]
    found = re.match(
        r"it holds with `(attend .*)` in place of the `attend` of line 2", refuted.help or ""
    )
    assert found is not None, refuted.help
    mended = parse(re.sub(r"attend [^\n{]*(?= head|\n)", lambda _: found[1], text, count=1))
    assert [d for d in mended.check() if d.severity == "error"] == []


def test_what_reads_earlier_ones_alone_is_asked_to_say_causal() -> None:
    (refuted,) = parse(
        "attention a { attend window(before = 9, after = 0) require depth <= 9 at n = 64 }"
    ).check()
    assert (
        refuted.help
        == "it holds with `causal` at the head of the attention (no more pairs at n = 64)"
    )


@pytest.mark.parametrize(
    "body",
    [
        "attend window(radius = 1) require degree <= 3 require diameter <= 4",
        "causal attend self require depth <= 1",
        "attend window(radius = 1) require depth >= 99 at n = 64",
    ],
)
def test_nothing_is_named_that_does_not_help_or_breaks_another_claim(body: str) -> None:
    assert not any(
        "it holds with" in (d.help or "") for d in parse(f"attention a {{ {body} }}").check()
    )


def test_names_that_were_public_say_what_to_use() -> None:
    for name in attnspec._GONE:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*`"):
            getattr(attnspec, name)
