"""Text to tree and back: what is parsed, where it stands, and that printing loses nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path

import pytest
import zoo
from goldens import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark
from lark import Lark

from attnspec.grammar import nodes
from attnspec.grammar.parser import keywords, parse
from attnspec.grammar.printer import WIDTH, print_expression, print_file
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import SpecError
from attnspec.text.source import Source, Span

PATHS = sorted((Path(__file__).parent / "texts").glob("*.attn"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in (*PATHS, *zoo.FILES[::6])}


def file_of(text: str) -> nodes.File:
    return parse(source_of(text))


def body_of(text: str) -> tuple[nodes.Statement, ...]:
    (item,) = file_of(f"attention a {{\n{text}\n}}").items
    assert isinstance(item, nodes.Attention)
    return item.body


def expression_of(text: str) -> nodes.Expression:
    (statement,) = body_of(f"scale {text}")
    assert isinstance(statement, nodes.Setting)
    assert statement.value is not None
    return statement.value


def shape(node: object) -> object:
    """A tree as nested lists of operators and leaves, to be read at a glance."""
    match node:
        case nodes.Chain(operands, operators):
            return [*operators, *(shape(operand) for operand in operands)]
        case nodes.Prefix(operator, operand):
            return [operator, shape(operand)]
        case nodes.Range(first, last):
            return ["..", shape(first), shape(last)]
        case nodes.Members(items):
            return ["{}", *(shape(item) for item in items)]
        case nodes.Integer(value) | nodes.Real(value) | nodes.Boolean(value):
            return value
        case nodes.Name(name):
            return name
        case nodes.Attribute(base, attribute):
            return f"{base.name}.{attribute}"
        case nodes.Call(name, arguments):
            return [f"{name}()", *((a.name, shape(a.value)) for a in arguments)]
        case _:
            raise TypeError(node)


def walk(node: object) -> Iterator[object]:
    if is_dataclass(node) and not isinstance(node, Span | Source):
        yield node
        for field in fields(node):
            yield from walk(getattr(node, field.name))
    elif isinstance(node, tuple):
        for element in node:
            yield from walk(element)


def comments_of(node: nodes.File | nodes.Item | nodes.Statement) -> list[str]:
    """The comments of a tree in the order of the text."""
    if isinstance(node, nodes.File):
        return [c for item in node.items for c in comments_of(item)] + [*filter(None, node.closing)]
    found = [c for c in (*node.comments, node.trailing) if c]
    if isinstance(node, nodes.Attention | nodes.Scope):
        found += [c for statement in node.body for c in comments_of(statement)]
        found += [c for c in (*node.closing, node.ending) if c]
    return found


def comments_in(text: str) -> list[str]:
    """The comments of a text, read without the parser; none of the texts has `#` in a string."""
    return [comment.rstrip() for comment in re.findall("#.*", text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a or b and c", ["or", "a", ["and", "b", "c"]]),
        ("not a and b", ["and", ["not", "a"], "b"]),
        ("not a == b", ["not", ["==", "a", "b"]]),
        ("a == b | c", ["==", "a", ["|", "b", "c"]]),
        ("a | b & c", ["|", "a", ["&", "b", "c"]]),
        ("a & b + c", ["&", "a", ["+", "b", "c"]]),
        ("a + b * c - d", ["+", "-", "a", ["*", "b", "c"], "d"]),
        ("a / b // c % d", ["/", "//", "%", "a", "b", "c", "d"]),
        ("-a * b", ["*", ["-", "a"], "b"]),
        ("-2 ** 2", ["-", ["**", 2, 2]]),
        ("2 ** -1", ["**", 2, ["-", 1]]),
        ("2 ** 3 ** 4", ["**", 2, ["**", 3, 4]]),
        ("(2 ** 3) ** 4", ["**", ["**", 2, 3], 4]),
        ("~a ** b & c", ["&", ["~", ["**", "a", "b"]], "c"]),
        ("a - -b", ["-", "a", ["-", "b"]]),
        ("0 <= q - k < 4 <= n", ["<=", "<", "<=", 0, ["-", "q", "k"], 4, "n"]),
        ("a subset b", ["subset", "a", "b"]),
        ("x in 0..r + 1 and y", ["and", ["in", "x", ["..", 0, ["+", "r", 1]]], "y"]),
        ("x in {1, -2, 2 * 3,}", ["in", "x", ["{}", 1, ["-", 2], ["*", 2, 3]]]),
        ("q in first(3) | t", ["in", "q", ["|", ["first()", (None, 3)], "t"]]),
        ("(a | b) | c", ["|", ["|", "a", "b"], "c"]),
        ("q.row == k.row", ["==", "q.row", "k.row"]),
        ("f(1..2, x = 3,)", ["f()", (None, ["..", 1, 2]), ("x", 3)]),
        ("f(a == b)", ["f()", (None, ["==", "a", "b"])]),
        ("1_024", 1024),
        ("9223372036854775807", 2**63 - 1),
        ("1_0.5", 10.5),
        ("1e-3", 0.001),
        ("0.5e2", 50.0),
        ("0", 0),
        ("true", True),
    ],
)
def test_expressions_have_their_trees(text: str, expected: object) -> None:
    parsed = shape(expression_of(text))
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize("operator", ["|", "+", "and", "<"])
def test_long_chains_are_flat(operator: str) -> None:
    names = [f"x{i}" for i in range(1201)]
    tree = expression_of(f" {operator} ".join(names))
    assert shape(tree) == [*[operator] * 1200, *names]
    assert expression_of(print_expression(tree)) == tree


def test_keywords_are_names_where_a_name_is_meant() -> None:
    reserved = {"and", "or", "not", "in", "subset", "true", "false"}
    for word in sorted(keywords() - reserved):
        text = f"attention {word}({word} = {word}) {{ let {word} = {word}({word} = {word}) + 1 }}\n"
        (item,) = file_of(text).items
        assert isinstance(item, nodes.Attention)
        assert item.parameters[0].name == item.name == word
        assert file_of(print_file(file_of(text))) == file_of(text)
    for word in sorted(reserved):
        with pytest.raises(SpecError):
            file_of(f"attention {word} {{ attend full }}")


def test_several_statements_stand_on_a_line() -> None:
    first, statement, require = body_of("attend causal & causal causal require causal")
    assert isinstance(first, nodes.Setting)
    assert isinstance(statement, nodes.Setting)
    assert isinstance(require, nodes.Require)
    assert shape(first.value) == ["&", "causal", "causal"]
    assert (statement.keyword, statement.value, shape(require.claim)) == ("causal", None, "causal")
    assert body_of("attend(x)") == body_of("attend x")
    for wrong in ("attendx", "attend x at n = 3"):
        with pytest.raises(SpecError):
            body_of(wrong)


@pytest.mark.parametrize("path", ["a; os.system('x')", "{{7*7}}", "# no comment", "é\\n"])
def test_strings_stay_what_they_are(path: str) -> None:
    text = f'from "{path}" import x\n'
    (item,) = file_of(text).items
    assert isinstance(item, nodes.Import)
    assert item.path == path
    assert print_file(file_of(text)) == text


# --- places ------------------------------------------------------------------------------------


def is_in_place(node: object) -> bool:
    """Whether a node's span has the words that it was read from."""
    match node:
        case nodes.Integer() | nodes.Real():
            return float(node.span.text.replace("_", "")) == node.value
        case nodes.Name(name):
            return node.span.text == name and expression_of(name) == node
        case nodes.Attribute():
            return node.span.text == f"{node.base.name}.{node.attribute}"
        case nodes.Call(name, _):
            return node.name_span.text == name and expression_of(node.span.text) == node
        case nodes.Argument(str() as name, _):
            return node.name_span is not None and node.name_span.text == name
        case nodes.Chain(_, operators):
            texts = tuple(span.text for span in node.operator_spans)
            return texts == operators and expression_of(node.span.text) == node
        case nodes.Let(name, _) | nodes.Input(name, _, _) | nodes.Parameter(name, _):
            return node.name_span.text == name
        case nodes.Setting(keyword, _):
            return node.keyword_span.text == keyword and node.span.start == node.keyword_span.start
        case nodes.Scope(kind, _, _):
            text = node.span.text
            return text.startswith(f"{kind} {node.items_span.text} {{") and text.endswith("}")
        case nodes.Import(path, _):
            return node.path_span.text == f'"{path}"'
        case nodes.Attention(name, _, _):
            text = node.span.text
            return text.startswith(f"attention {name}") and text.endswith("}")
        case nodes.Graph(name, _, _):
            return node.name_span.text == name and node.span.text.startswith(f"graph {name}")
    return True


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_places_are_exact(text: str) -> None:
    assert [node for node in walk(file_of(text)) if not is_in_place(node)] == []


def test_places_include_brackets_only_around_their_operands() -> None:
    tree = expression_of("((a | b) & (c))")
    assert tree.span.text == "(a | b) & (c)"
    assert isinstance(tree, nodes.Chain)
    assert [operand.span.text for operand in tree.operands] == ["a | b", "c"]
    assert body_of("scale ((a | b) & (c))")[0].span.text == "scale ((a | b) & (c))"
    assert expression_of("a|b") == expression_of("  a  |  b") != expression_of("a|c")


# --- printing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_printing_loses_nothing(text: str) -> None:
    tree = file_of(text)
    printed = print_file(tree)
    again = file_of(printed)
    assert again == tree
    assert print_file(again) == printed
    assert comments_of(tree) == comments_of(again) == comments_in(printed)
    assert sorted(comments_of(tree)) == sorted(comments_in(text))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_canonical_text(path: Path, golden: Golden) -> None:
    printed = print_file(file_of(TEXTS[path.stem]))
    assert max(len(line.partition("  #")[0]) for line in printed.splitlines()) <= WIDTH
    golden(printed, ".attn")


@pytest.mark.parametrize(
    "text",
    [
        "(a | b) & c",
        "a - (b - c)",
        "(2 ** 3) ** -4 ** 5",
        "(-2) ** 2",
        "(not a) == b",
        "not a == b",
        "x in 0..r + 1",
        "(a or b) and c",
        "f(a or b, x = c == d)",
        "x in {a - 1, (b | c)}",
        "(x in 0..3) == true",
    ],
)
def test_expressions_are_printed_with_the_fewest_brackets(text: str) -> None:
    assert print_expression(expression_of(text)) == text
    bracketed = re.sub(r"\b([a-z])\b(?! =|\.)", r"((\1))", text).replace("((f))", "f")
    assert print_expression(expression_of(f"({bracketed})")) == text


OPERATORS = "or and < <= == != > >= | & + - * / // % ** subset".split()


def larger(inside: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({}) {} ({})".format, inside, st.sampled_from(OPERATORS), inside),
        st.builds("{} ({})".format, st.sampled_from(["not", "-", "~"]), inside),
        st.builds("({}) in ({})..({})".format, inside, inside, inside),
        st.builds("({}) in {{({}), ({})}}".format, inside, inside, inside),
        st.builds("attend({}, x = {})".format, inside, inside),
    )


@settings(max_examples=60)
@given(st.recursive(st.sampled_from(["a", "q.row", "3", "0.5", "at", "true"]), larger))
def test_any_expression_survives_printing(text: str) -> None:
    expression = expression_of(f"({text})")
    printed = print_expression(expression)
    assert len(printed) <= len(text)
    assert expression_of(printed) == expression


def grammar_of_the_package() -> Lark:
    return Lark.open_from_package("attnspec.grammar", "attn.lark", parser="lalr", start="file")


@settings(max_examples=10)
@given(from_lark(grammar_of_the_package()))
def test_texts_drawn_from_the_grammar(text: str) -> None:
    try:
        printed = print_file(file_of(text))
    except SpecError:
        # the strategy joins words without blanks and draws numbers beyond the limits
        return
    assert file_of(printed) == file_of(text)


def test_the_grammar_names_no_pattern() -> None:
    text = resources.files("attnspec.grammar").joinpath("attn.lark").read_text(encoding="utf-8")
    for pattern in ("window", "dilated", "global", "favor", "softmax", "even", "tokens"):
        assert not re.search(rf"/{pattern}\b|\"{pattern}\"", text)


@pytest.mark.parametrize("text", ["0", "1_0", "1.5", "1e5", "01", "1_", "1.", "1e", "1__0", "5x"])
def test_the_grammar_and_the_first_reading_have_the_same_numbers(text: str) -> None:
    terminals = {t.name: t.pattern.value for t in grammar_of_the_package().terminals}
    in_grammar = any(re.fullmatch(terminals[name], text) for name in ("INTEGER", "REAL"))
    if in_grammar:
        expression_of(text)
        return
    with pytest.raises(SpecError) as caught:
        expression_of(text)
    assert [d.code for d in caught.value.diagnostics] == ["A110"]


def test_importing_the_parser_loads_nothing_heavy() -> None:
    program = (
        "import sys, attnspec.grammar.parser, attnspec.grammar.printer, attnspec.text.decoding;"
        "heavy = {'torch', 'numpy', 'scipy', 'networkx'} & set(sys.modules);"
        "print(*sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
