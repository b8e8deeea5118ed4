"""Texts that are no specs: limits, damage, and mistakes that make no others."""

from __future__ import annotations

import random
import re
import time

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


@pytest.mark.parametrize(
    "text",
    [
        in_body("attend " + "(" * 100_000 + "x" + ")" * 100_000),
        in_body("attend " + "f(" * 50_000 + ")" * 50_000),
        in_body("attend " + "~" * 100_000 + "x"),
        in_body("scale " + "-" * 100_000 + "1"),
        in_body("let x = " + "not " * 100_000 + "y"),
        in_body("scale " + "2 ** " * 19_000 + "2"),
        in_body("layer 0 { " * 1000 + "}" * 1000),
        in_body("attend " + "(a or b and c | d & e + f * -" * 20 + "x" + ")" * 20),
        "{" * 100_000,
    ],
    ids=lambda text: text[14:34],
)
def test_nesting_is_bounded(text: str) -> None:
    start = time.process_time()
    assert codes(text) == ["A191"]
    assert time.process_time() - start < 5


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


# --- anything at all ---------------------------------------------------------------------------

PIECES = (
    *"(){}=,:.|&-~+*/%<>!^;'\"#@$[]?\\\n\t 0159_aé\0\u202e\u00a0",
    *("..", "**", "//", "==", "<=", "&&", "=>", " in ", " and ", " not ", " subset ", " at n = "),
    *(" attend ", " causal ", " layer ", " require ", " let ", " graph ", " attention ", " from "),
    *("1e400", "0x1", "1_", ".5", "9" * 30, "q.row", " { ", " } ", "{1, 2}", "f(x = 1)", "0..3"),
)


def damaged(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice([0, 0, 1, 1, 2, 8, 40]))
        match chance.randrange(4):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:start] + chance.choice(PIECES) + text[end:]
            case 2:
                other = chance.randrange(len(text) + 1)
                text = text[:other] + text[start:end] + text[other:]
            case _:
                text = text[:start] + text[start:end].swapcase() + text[end:]
    return text


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_any_damage_is_read_or_explained(seed: int) -> None:
    chance = random.Random(seed)
    explained = 0
    for _ in range(250):
        text = damaged(chance.choice(TEXTS), chance)
        try:
            parse(text)
        except SpecError as error:
            explained += 1
            for problem in error.diagnostics:
                assert re.fullmatch(r"A\d\d\d", problem.code)
                assert problem.span is not None
                assert 0 <= problem.span.start <= problem.span.end <= len(text)
    assert 50 < explained < 250
