"""Texts that are no specs: each mistake has its code, place and advice, and nothing leaks."""

from __future__ import annotations

import random
import re
import time
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from limited import REFUSING
from spec_texts import TEXTS

import attnspec.text.decoding
from attnspec.grammar.parser import parse
from attnspec.grammar.printer import print_file
from attnspec.limits import LIMITS
from attnspec.text.catalogue import Entry, catalogue, marked
from attnspec.text.decoding import read_source, source_of
from attnspec.text.diagnostics import Diagnostic, SpecError, render_one
from attnspec.text.source import Source


def problems_of(text: str) -> list[Diagnostic]:
    with pytest.raises(SpecError) as caught:
        parse(source_of(text))
    return list(caught.value.diagnostics)


def found_in(text: str) -> list[tuple[str, str]]:
    """The code of each problem and the words it points at."""
    return [(p.code, p.span.text) for p in problems_of(text) if p.span is not None]


def in_body(text: str) -> str:
    return f"attention a {{\n{text}\n}}\n"


# --- the catalogue -----------------------------------------------------------------------------

SYNTAX = tomllib.loads(
    resources.files("attnspec.text.catalogue").joinpath("syntax.toml").read_text(encoding="utf-8")
)
ENTRIES = [catalogue()[code] for code in SYNTAX]


def test_the_catalogue_is_in_order_and_complete() -> None:
    assert list(catalogue()) == sorted(catalogue())
    assert list(SYNTAX) == sorted(SYNTAX)
    for entry in ENTRIES:
        assert entry.summary == entry.summary.strip().rstrip(".")
        assert entry.explanation
        assert (entry.bad is None) == bool(entry.bad_bytes or entry.untestable)
        assert (entry.good is None) == bool(entry.untestable)


def test_every_code_of_the_source_is_in_the_catalogue_and_back() -> None:
    grammar = resources.files("attnspec.grammar")
    texts = [
        grammar.joinpath(name).read_text(encoding="utf-8")
        for name in ("scanner.py", "numbers.py", "builder.py", "parser.py", "syntax_errors.py")
    ]
    texts.append(Path(attnspec.text.decoding.__file__).read_text(encoding="utf-8"))
    used = {code for text in texts for code in re.findall(r'"(A\d{3})"', text)}
    assert used == set(SYNTAX)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.bad], ids=lambda e: e.code)
def test_bad_texts_earn_their_code_at_the_marked_place(entry: Entry) -> None:
    assert entry.bad is not None
    text, start, end = marked(entry.bad)
    (problem,) = problems_of(text)
    assert problem.span is not None
    assert (problem.code, problem.span.start, problem.span.end) == (entry.code, start, end)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.good], ids=lambda e: e.code)
def test_good_texts_parse(entry: Entry) -> None:
    assert entry.good is not None
    assert parse(source_of(entry.good)).items


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.bad_bytes], ids=lambda e: e.code)
def test_bad_bytes_earn_their_code(entry: Entry, tmp_path: Path) -> None:
    path = tmp_path / "bad.attn"
    path.write_bytes(entry.bad_bytes or b"")
    with pytest.raises(SpecError) as caught:
        read_source(path)
    assert [problem.code for problem in caught.value.diagnostics] == [entry.code]


def test_marks() -> None:
    assert marked("ab«cd»e") == ("abcde", 2, 4)
    assert marked("ab«»") == ("ab", 2, 2)


# --- one mistake -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "place", "advice"),
    [
        # words
        ("Attention a {}", "A131", "Attention", "did you mean `attention`?"),
        ("graf g = full", "A131", "graf", "did you mean `graph`?"),
        ("attend full", "A131", "attend", "statements stand between the braces"),
        ("def f(x): return x", "A131", "def", "`graph NAME"),
        ("import x", "A131", "import", '`from "file.attn" import NAME`'),
        ("my/bigbird.attn\n", "A131", "my", "`attnspec.load(path)` reads one"),
        ("bigbird", "A131", "bigbird", "`attnspec.zoo('bigbird')` asks the zoo for it"),
        (in_body("atend full"), "A132", "atend", "did you mean `attend`?"),
        (in_body("ATTEND full"), "A132", "ATTEND", "did you mean `attend`?"),
        (in_body("normalise relu"), "A132", "normalise", "did you mean `normalize`?"),
        (in_body("attend full\nfor x in 3"), "A132", "for", "there are no loops"),
        (in_body("window(radius = 3)"), "A132", "window", "write `attend window(…)`"),
        (in_body("x = 3"), "A132", "x", "write `let x = …`"),
        (in_body("attend a AND b"), "A132", "AND", "did you mean `and`?"),
        (in_body("graph g = full"), "A132", "graph", "`graph` stands outside an attention"),
        (in_body("let and = 3"), "A134", "and", "cannot be a name"),
        (in_body("require causal att n = 3"), "A132", "att", "did you mean `at`?"),
        # signs
        (in_body("attend a | | b"), "A133", "|", None),
        (in_body("attend a &"), "A133", "}", None),
        (in_body("let x = a == not b"), "A133", "not", "write `(not …)`"),
        (in_body("attend where(a && b)"), "A138", "&&", "write `and`"),
        (in_body("attend where(a || b)"), "A138", "||", "write `or`"),
        (in_body("attend where(!a)"), "A138", "!", "write `not`"),
        (in_body("attend where(a => b)"), "A138", "=>", "write `>=`"),
        (in_body("attend where(a <> b)"), "A138", "<>", "write `!=`"),
        (in_body("scale 2 ^ 3"), "A138", "^", "write `**`"),
        (in_body("layer 0...3 {}"), "A138", "...", "both ends"),
        (in_body("causal; attend full"), "A137", ";", "no terminator"),
        (in_body("attend x @ 3"), "A107", "@", None),
        (in_body("require degree = 4"), "A139", "=", None),
        (in_body("require degree + 1 = 4"), "A139", "=", None),
        (in_body("require a < b > c"), "A143", ">", "`a == b and b == c`"),
        (in_body("attend f(a = 1..2)"), "A140", "..", None),
        (in_body("layer {}"), "A141", "{", "`layer all"),
        # arguments
        (in_body("attend window(3 4)"), "A135", "4", "write `,` before `4`"),
        (in_body("attend window(radius 3)"), "A136", "3", "write `radius = 3`"),
        (in_body("attend window(radius r)"), "A136", "r", "write `radius = r`"),
        (in_body("attend f(a b = 2)"), "A135", "b", None),
        (in_body("attend f(a,, b)"), "A133", ",", None),
        (in_body("attend f(,)"), "A133", ",", None),
        (in_body("head 0 2 {}"), "A135", "2", None),
        (in_body("require causal at n = 4 8"), "A135", "8", None),
        (in_body("require causal at 4"), "A134", "4", "write `at n = 4`"),
        (in_body("require causal at n = 4.5"), "A134", "4.5", None),
        (in_body("score alibi"), "A134", "}", "write `alibi(…)`"),
        (in_body("input x tokens"), "A134", "tokens", None),
        # strings
        (in_body('attend "full"'), "A114", '"full"', "without quotes"),
        (in_body("attend 'full'"), "A114", "'full'", "bare"),
        ("from 'x' import y", "A114", "'x'", '"path"'),
        ("from x import y", "A134", "x", None),
        # brackets
        (in_body("attend (a\ncausal"), "A120", "causal", None),
        ("attention a { attend (a }", "A120", "}", None),
        (in_body("}"), "A121", "}", "missing `{`"),
        (in_body("attend a)"), "A121", ")", "missing `(`"),
        ("attention a {\n causal\nattention b {}", "A120", "attention", None),
        # unfinished lines
        (in_body("attend a |\nlayers 3"), "A133", "layers", "finish the line before it"),
        ("graph g = a |\nattention b {}", "A133", "attention", "finish the line before it"),
        # ends
        ("attention a {", "A120", "", None),
        ("attention a { attend", "A142", "", None),
        ("attention", "A142", "", None),
        ('from "x"', "A142", "", None),
    ],
)
def test_one_mistake(text: str, code: str, place: str, advice: str | None) -> None:
    (problem, *more) = problems_of(text)
    assert problem.span is not None
    assert (problem.code, problem.span.text) == (code, place)
    assert (advice or "") in (problem.help or "")
    assert not more or code == "A107"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (in_body("atend x"), "expected `}` or a statement, found `atend`"),
        (in_body("input x tokens"), "expected `:`, found `tokens`"),
        (in_body("let 3 = x"), "expected a name, found `3`"),
        (in_body("require causal at n = x"), "expected an integer, found `x`"),
        (in_body("attend f(a: 3)"), "expected `)`, `,`, `..`, `=` or an operator, found `:`"),
        ("from x import y", "expected a file path in double quotes, found `x`"),
        ("attention a @3", "expected a word, a number or a sign of this language, found `@`"),
        ("graph g", "expected `(` or `=`, found the end of the file"),
        ("graph g = f(x", "expected `)` to close the `(`, found the end of the file"),
        ("hello", "expected `attention`, `from`, `graph` or the end of the file, found `hello`"),
    ],
)
def test_what_was_expected_is_said_in_words(text: str, message: str) -> None:
    assert problems_of(text)[0].message == message


def test_messages_follow_the_house_rules() -> None:
    for entry in ENTRIES:
        if entry.bad is None:
            continue
        (problem,) = problems_of(marked(entry.bad)[0])
        for words in (problem.message, problem.help or ""):
            assert not words.endswith(".")
            assert "invalid" not in words
            # no name of a terminal or a rule
            assert not re.search(
                r"\b[A-Z]{4,}(?<!NAME|PATH)(?<!ASCII)\b|__|\$", words.split("U+")[0]
            )
        assert problem.message[0].islower()
        assert render_one(problem).startswith(f"<text>:{problem.span and problem.span.line}:")


def test_an_unclosed_bracket_points_at_its_opener() -> None:
    (problem,) = problems_of("attention a {\n attend f(x, (y\n causal }")
    assert problem.code == "A120"
    assert [(text, span.line, span.column) for text, span in problem.related] == [
        ("this `(` is never closed", 2, 14),
        ("this `(` is never closed", 2, 10),
    ]
    (problem,) = problems_of("attention a {\n layer 0 {\n head 1 { attend x\n\n# end\n")
    assert problem.span is not None
    # at the last word, not after the comments
    assert (problem.span.line, problem.span.column) == (3, 19)
    assert [(span.line, span.column) for _, span in problem.related] == [(3, 9), (2, 10), (1, 13)]


def test_an_unclosed_string_points_at_its_start() -> None:
    (problem,) = problems_of('from "a.attn import x\nattention a { attend full }')
    assert problem.span is not None
    assert (problem.code, problem.span.line, problem.span.column) == ("A113", 1, 22)
    assert [(span.line, span.column) for _, span in problem.related] == [(1, 6)]


@pytest.mark.parametrize("text", ["", " \n\t\n", "# only\n# comments"])
def test_nothing_at_all(text: str) -> None:
    (problem,) = problems_of(text)
    assert problem.span is not None
    assert (problem.code, problem.span.line, problem.span.column) == ("A130", 1, 1)
    assert "no attention defined" in problem.message


def test_carriage_returns_end_comments() -> None:
    assert parse(source_of("# comment\rattention a { attend full }")).items


# --- numbers and names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        ("0x10", "A110", "write `16`"),
        ("0b101", "A110", "write `5`"),
        ("0xzz", "A110", None),
        ("1__0", "A110", "write `10`"),
        ("1_", "A110", "write `1`"),
        ("007", "A110", "write `7`"),
        (".5", "A110", "write `0.5`"),
        ("5.", "A110", "write `5.0`"),
        ("1.2.3", "A110", None),
        ("3abc", "A110", "a name starts with a letter"),
        ("1e", "A110", None),
        ("1e+", "A110", None),
        ("1_e3", "A110", None),
        ("9223372036854775808", "A111", None),
        ("9" * 5000, "A111", None),
        ("9_9" * 50, "A111", None),
        ("1e400", "A112", None),
        ("1e-400", "A112", None),
        ("9" * 400 + ".0", "A112", None),
    ],
)
def test_numbers_that_are_none(number: str, code: str, advice: str | None) -> None:
    problem = problems_of(in_body(f"scale f({number}, 1)"))[0]
    assert problem.span is not None
    assert (problem.code, problem.span.start) == (code, 22)
    assert (advice or "") in (problem.help or "")
    assert len(problem.message) < 120


def test_long_names_are_refused() -> None:
    name = "x" * 64
    assert parse(source_of(in_body(f"let {name} = 3"))).items
    assert found_in(in_body(f"let {name}y = 3")) == [("A193", f"{name}y")]


# --- several mistakes --------------------------------------------------------------------------


def test_independent_mistakes_come_together() -> None:
    text = """\
attention a(r = 3) {
    heds 12
    atend window(radius = 3)
    layer 0..3 {
        attend dilated(radius = 3, step 2)
        head 0 { attend x y }
    }
    scale 0x10
    require degree <=
    require a b
}

graf f(x) = y

attention b {
    attend foo(x,, y)
    normalise relu
}
"""
    assert found_in(text) == [
        ("A132", "heds"),
        ("A132", "atend"),
        ("A136", "2"),
        ("A132", "y"),
        ("A110", "0x10"),
        ("A133", "require"),
        ("A132", "b"),
        ("A131", "graf"),
        ("A133", ","),
        ("A132", "normalise"),
    ]


def test_one_mistake_makes_no_others() -> None:
    rest = "    layer 0 {\n        attend x\n    }\n    require causal\n}\ngraph g = f(x)\n"
    for mistake in (
        "attend f(x",
        "attend f(x,\n        y z,\n        layers = 3,\n    )",
        "attend {1, 2}",
        "attend |",
        "layer 3 x { attend y head 0 { attend z } }",
        "input x = tokens",
        "attend x in {1, 2",
        "let = 3",
        "score f",
        "attend x @ y",
        'attend "x',
    ):
        assert len(problems_of(f"attention a {{\n    {mistake}\n{rest}")) == 1, mistake


def test_removing_one_bracket_is_one_mistake_near_it() -> None:
    text = TEXTS["longformer"]
    for bracket in re.finditer(r"[(){}]", re.sub(r"#.*", lambda m: "#" * len(m[0]), text)):
        damaged = text[: bracket.start()] + text[bracket.end() :]
        problems = problems_of(damaged)
        assert len(problems) <= 2
        assert {p.code for p in problems} & {"A120", "A121", "A132", "A133", "A134", "A135", "A139"}


def test_many_mistakes_are_bounded() -> None:
    assert len(problems_of(in_body("atend x\n" * 5000))) == 20


# --- limits ------------------------------------------------------------------------------------


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
    (problem,) = problems_of(text)
    assert time.process_time() - start < 10
    assert problem.code == "A191"


def test_many_brackets_are_refused_at_once() -> None:
    parse(source_of(in_body("attend x")))
    start = time.process_time()
    problems_of(in_body("attend " + "(" * 100_000 + "x" + ")" * 100_000))
    assert time.process_time() - start < 1


def test_the_deepest_nesting() -> None:
    inner = LIMITS.nesting - 1
    for opening, closing in (("(", ")"), ("f(", ")"), ("~", "")):
        text = in_body("attend " + opening * inner + "x" + closing * inner)
        tree = parse(source_of(text))
        assert parse(source_of(print_file(tree))) == tree
        deeper = in_body("attend " + opening * (inner + 1) + "x" + closing * (inner + 1))
        assert [code for code, _ in found_in(deeper)] == ["A191"]


@pytest.mark.limits(REFUSING)
def test_the_number_of_words_is_bounded() -> None:
    # beside the union there are `attention`, a name, two braces and `attend`
    union = " | ".join(["x"] * 498)
    assert parse(source_of(f"attention a {{ attend {union} }}")).items
    (problem,) = problems_of(f"attention a {{ attend {union} | x }}")
    assert problem.code == "A192"


def test_the_size_of_a_text_is_bounded_for_the_parser_too() -> None:
    with pytest.raises(SpecError) as caught:
        parse(Source("long", "#" * ((1 << 20) + 1)))
    assert [problem.code for problem in caught.value.diagnostics] == ["A190"]


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


@pytest.mark.parametrize(
    "seed",
    [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))],
)
def test_any_damage_is_parsed_or_explained(seed: int) -> None:
    chance = random.Random(seed)
    texts = list(TEXTS.values())
    parsed = explained = 0
    for _ in range(200):
        text = damaged(chance.choice(texts), chance)
        try:
            # half of them skip the checks of reading, which catch much
            checked = chance.random() < 0.5
            tree = parse(source_of(text) if checked else Source("raw", text))
        except SpecError as error:
            explained += 1
            for problem in error.diagnostics:
                assert problem.code in SYNTAX
                assert problem.span is not None
                assert 0 <= problem.span.start <= problem.span.end <= len(text)
                assert render_one(problem)
        else:
            parsed += 1
            assert parse(Source("printed", print_file(tree))) == tree
    assert parsed > 10
    assert explained > 50
