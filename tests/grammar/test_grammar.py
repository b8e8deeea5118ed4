"""Text to tree and back: canonical text has the fewest brackets and loses nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import zoo
from click.testing import CliRunner
from goldens import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from package_map import ROOT

from attnspec import SpecError, parse
from attnspec.cli import main

PATHS = sorted((Path(__file__).parent / "texts").glob("*.attn"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in (*PATHS, *zoo.FILES[::6])}
LARK = (ROOT / "grammar" / "attn.lark").read_text(encoding="utf-8")
RESERVED = {"and", "or", "not", "in", "subset", "true", "false"}


def formatted(text: str) -> str:
    """Canonical text; raises ValueError where a text is wrong."""
    done = CliRunner().invoke(main, ["format", "-"], input=text)
    if done.exit_code:
        # whatever the text is, that is a diagnostic with its code
        assert done.exit_code == 1
        assert re.match(r"<stdin>:\d+:\d+: error\[A\d+\]: ", done.output), done.output
        raise ValueError(done.output)
    return done.output


def expression(text: str) -> str:
    """An expression in canonical text, on one line."""
    body = formatted(f"attention a {{ scale {text} }}")
    return " ".join(body.partition("scale")[2].rpartition("}")[0].split())


@pytest.mark.parametrize(
    ("bracketed", "plain"),
    [
        ("(a) or ((b) and (c))", "a or b and c"),
        ("(not a) and (b)", "not a and b"),
        ("not (a == b)", "not a == b"),
        ("a == (b | c)", "a == b | c"),
        ("a | (b & c)", "a | b & c"),
        ("a & (b + c)", "a & b + c"),
        ("a + (b * c) - d", "a + b * c - d"),
        ("a / b // c % d", "a / b // c % d"),
        ("(-a) * b", "-a * b"),
        ("-(2 ** 2)", "-2 ** 2"),
        ("2 ** (-1)", "2 ** -1"),
        ("2 ** (3 ** 4)", "2 ** 3 ** 4"),
        ("(2 ** 3) ** (-(4 ** 5))", "(2 ** 3) ** -4 ** 5"),
        ("(~(a ** b)) & c", "~a ** b & c"),
        ("(-2) ** 2", "(-2) ** 2"),
        ("(not a) == b", "(not a) == b"),
        ("a - (-b)", "a - -b"),
        ("a - (b - c)", "a - (b - c)"),
        ("(a | b) & c", "(a | b) & c"),
        ("(a or b) and c", "(a or b) and c"),
        ("0 <= (q - k) < 4 <= n", "0 <= q - k < 4 <= n"),
        ("(x in 0..(r + 1)) and y", "x in 0..r + 1 and y"),
        ("(x in 0..3) == true", "(x in 0..3) == true"),
        ("x in {1, (-2), (2 * 3),}", "x in {1, -2, 2 * 3}"),
        ("x in {(a - 1), (b | c)}", "x in {a - 1, (b | c)}"),
        ("q in (first(3) | t)", "q in first(3) | t"),
        ("f(1..2, x = (a == b),)", "f(1..2, x = a == b)"),
        ("f(((a) or b), x = (c == d))", "f(a or b, x = c == d)"),
    ],
)
def test_expressions_have_the_fewest_brackets(bracketed: str, plain: str) -> None:
    assert expression(bracketed) == expression(f"({bracketed})") == expression(plain) == plain


@pytest.mark.parametrize("operator", ["|", "+", "and", "<"])
def test_long_chains_are_flat(operator: str) -> None:
    text = f" {operator} ".join(f"x{i}" for i in range(901))
    assert expression(text) == text


def test_keywords_are_names_where_a_name_is_meant() -> None:
    words = set(re.findall(r"/([a-z]+)\\b/", LARK))
    assert {"attend", "graph", *RESERVED} <= words
    for word in sorted(words):
        text = (
            f"attention {word}({word} = 1) {{\n    let {word} = {word}({word} = {word}) + 1\n}}\n"
        )
        if word in RESERVED:
            with pytest.raises(ValueError, match="A1"):
                formatted(text)
        else:
            assert formatted(text) == text


def test_several_statements_stand_on_a_line() -> None:
    lines = ["attend causal & causal", "causal", "causal", "require causal"]
    body = "\n    ".join(lines)
    text = f"attention a {{\n    {body}\n}}\n"
    assert formatted(f"attention a {{ {' '.join(lines)} }}") == text
    assert formatted("attention a { attend(x) }") == formatted("attention a { attend x }")
    for wrong in ("attendx", "attend x at n = 3"):
        with pytest.raises(ValueError, match="A1"):
            formatted(f"attention a {{ {wrong} }}")


@pytest.mark.parametrize("path", ["a; os.system('x')", "{{7*7}}", "# no comment", "é\\n"])
def test_strings_stay_what_they_are(path: str) -> None:
    assert formatted(f'from "{path}" import x\n') == f'from "{path}" import x\n'


def comments_in(text: str) -> list[str]:
    """The comments of a text; none of the texts has `#` in a string."""
    return [comment.rstrip() for comment in re.findall("#.*", text)]


def words_in(text: str) -> list[str]:
    """The words of a text in their order."""
    return re.findall(r"\b[A-Za-z_]\w*", re.sub("#.*", "", text))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_printing_loses_nothing(text: str) -> None:
    printed = formatted(text)
    assert formatted(printed) == printed
    assert sorted(comments_in(printed)) == sorted(comments_in(text))
    assert words_in(printed) == words_in(text)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_canonical_text(path: Path, golden: Golden) -> None:
    printed = formatted(TEXTS[path.stem])
    assert max(len(line.partition("  #")[0]) for line in printed.splitlines()) <= 100
    golden(printed, ".attn")


OPERATORS = "or and < <= == != > >= | & + - * / // % ** subset".split()


def larger(inside: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({}) {} ({})".format, inside, st.sampled_from(OPERATORS), inside),
        st.builds("{} ({})".format, st.sampled_from(["not", "-", "~"]), inside),
        st.builds("({}) in ({})..({})".format, inside, inside, inside),
        st.builds("({}) in {{({}), ({})}}".format, inside, inside, inside),
        st.builds("attend({}, x = {})".format, inside, inside),
    )


@settings(max_examples=40)
@given(st.recursive(st.sampled_from(["a", "q.row", "3", "0.5", "at", "true"]), larger))
def test_any_expression_survives_printing(text: str) -> None:
    printed = expression(f"({text})")
    assert len(printed) <= len(text)
    assert expression(printed) == printed


def test_the_grammar_names_no_pattern() -> None:
    for pattern in ("window", "dilated", "global", "favor", "softmax", "even", "tokens"):
        assert not re.search(rf"/{pattern}\b|\"{pattern}\"", LARK)


@pytest.mark.parametrize("text", ["0", "1_0", "1.5", "1e5", "01", "1_", "1.", "1e", "1__0", "5x"])
def test_numbers_are_read_or_refused(text: str) -> None:
    if text in ("0", "1_0", "1.5", "1e5"):
        assert expression(text)
        return
    with pytest.raises(SpecError) as caught:
        parse(f"attention a {{ attend full scale {text} }}")
    assert [problem.code for problem in caught.value.diagnostics] == ["A110"]


def test_formatting_loads_nothing_heavy() -> None:
    program = (
        "import sys; from attnspec.cli import main;"
        "main(['format', '-'], standalone_mode=False);"
        "heavy = {'torch', 'scipy', 'networkx'} & set(sys.modules);"
        "print(*sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, input=""
    )
    assert done.stdout.split() == []
