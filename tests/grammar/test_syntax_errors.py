"""Texts that are not specs: limits, and mistakes that make no others."""

from __future__ import annotations

import re

import pytest
import zoo
from limited import REFUSING
from test_grammar import formatted

from attnspec import SpecError, parse
from attnspec.limits import LIMITS

TEXTS = [path.read_text(encoding="utf-8") for path in zoo.FILES]


def codes(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(text)
    return [problem.code for problem in caught.value.diagnostics]


def in_body(text: str) -> str:
    return f"attention a {{\n{text}\n}}\n"


def test_removing_one_bracket_is_one_mistake_near_it() -> None:
    text = next(text for text in TEXTS if "attention longformer" in text)
    for bracket in re.finditer(r"[(){}]", re.sub(r"#.*", lambda m: "#" * len(m[0]), text)):
        found = codes(text[: bracket.start()] + text[bracket.end() :])
        assert len(found) <= 2
        assert {*found} & {"A120", "A121", "A132", "A133", "A134", "A135", "A139"}


def test_the_deepest_nesting_and_the_longest_texts() -> None:
    inner = LIMITS.nesting - 1
    for opening, closing in (("(", ")"), ("f(", ")"), ("~", "")):
        printed = formatted(in_body("attend " + opening * inner + "x" + closing * inner))
        assert formatted(printed) == printed
        deeper = opening * (inner + 1) + "x" + closing * (inner + 1)
        assert codes(in_body("attend " + deeper)) == ["A191"]
    assert formatted(in_body(f"let {'x' * 64} = 3"))
    assert codes(in_body("atend x\n" * 5000)) == ["A132"] * 20
    assert codes("#" * ((1 << 20) + 1)) == ["A190"]


@pytest.mark.limits(REFUSING)
def test_the_number_of_words_is_bounded() -> None:
    # beside the union there are `attention`, a name, two braces and `attend`
    union = " | ".join(["x"] * 498)
    assert formatted(f"attention a {{ attend {union} }}")
    assert codes(f"attention a {{ attend {union} | x }}") == ["A192"]
