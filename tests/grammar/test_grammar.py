"""Text to tree and back: what is parsed, where it stands, and that printing loses nothing."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis.extra.lark import from_lark
from lark import Lark
from spec_texts import EVERYTHING, TEXTS
from spec_trees import EXPRESSIONS, NOWHERE, files

from attnspec.grammar import nodes
from attnspec.grammar.numbers import number_problem
from attnspec.grammar.parser import parse
from attnspec.grammar.printer import WIDTH, print_expression, print_file
from attnspec.grammar.syntax_errors import ITEMS, RESERVED, STATEMENTS
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import SpecError
from attnspec.text.source import Source, Span


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


def check_laws(text: str) -> None:
    tree = file_of(text)
    printed = print_file(tree)
    again = file_of(printed)
    assert again == tree
    assert print_file(again) == printed
    assert comments_of(tree) == comments_of(again) == comments_in(printed)
    assert sorted(comments_of(tree)) == sorted(comments_in(text))


# --- expressions -------------------------------------------------------------------------------


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
        ("--a", ["-", ["-", "a"]]),
        ("a - -b", ["-", "a", ["-", "b"]]),
        ("0 <= q - k < 4 <= n", ["<=", "<", "<=", 0, ["-", "q", "k"], 4, "n"]),
        ("a subset b", ["subset", "a", "b"]),
        ("x in 0..r + 1 and y", ["and", ["in", "x", ["..", 0, ["+", "r", 1]]], "y"]),
        ("x in {1, -2, 2 * 3,}", ["in", "x", ["{}", 1, ["-", 2], ["*", 2, 3]]]),
        ("q in first(3) | t", ["in", "q", ["|", ["first()", (None, 3)], "t"]]),
        ("(a | b) | c", ["|", ["|", "a", "b"], "c"]),
        ("a - (b - c)", ["-", "a", ["-", "b", "c"]]),
        ("q.row == k.row", ["==", "q.row", "k.row"]),
        ("f(1..2, x = 3,)", ["f()", (None, ["..", 1, 2]), ("x", 3)]),
        ("f()", ["f()"]),
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
def test_expression(text: str, expected: object) -> None:
    parsed = shape(expression_of(text))
    assert parsed == expected
    assert type(parsed) is type(expected)


def test_print_of_an_expression_has_the_fewest_brackets() -> None:
    for text in (
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
    ):
        assert print_expression(expression_of(text)) == text
        bracketed = re.sub(r"\b([a-z])\b(?! =|\.)", r"((\1))", text)
        bracketed = bracketed.replace("((f))", "f")
        assert print_expression(expression_of(f"({bracketed})")) == text


def test_long_chains_are_flat() -> None:
    for operator, count in (("|", 1200), ("+", 1201), ("and", 1200), ("<", 1200)):
        names = [f"x{i}" for i in range(count)]
        tree = expression_of(f" {operator} ".join(names))
        assert isinstance(tree, nodes.Chain)
        assert [shape(operand) for operand in tree.operands] == names
        assert tree.operators == (operator,) * (count - 1)
        check_laws(f"graph g = {f' {operator} '.join(names)}")


# --- statements and items ----------------------------------------------------------------------


def test_every_statement_has_its_node() -> None:
    attention = file_of(EVERYTHING).items[-1]
    assert isinstance(attention, nodes.Attention)
    assert [p.name for p in attention.parameters] == ["size", "heads", "layers"]
    kinds = [type(statement).__name__ for statement in attention.body]
    assert kinds == [*["Let"] * 2, *["Input"] * 3, *["Setting"] * 11, "Scope", *["Require"] * 5]
    words = [s.keyword for s in attention.body if isinstance(s, nodes.Setting)]
    settings = "layers heads sequence extra_tokens causal scale score score normalize attend attend"
    assert words == settings.split()
    promised = attention.body[2]
    assert isinstance(promised, nodes.Input)
    assert (promised.name, promised.kind) == ("important", "tokens")
    assert promised.arguments[0].name == "at_most"
    reach = attention.body[-4]
    assert isinstance(reach, nodes.Require)
    assert reach.at is not None
    assert [size.value for size in reach.at] == [64, 257]


def test_one_line_holds_several_statements() -> None:
    causal, attend, again = body_of("causal attend window(radius = 3) causal")
    assert isinstance(causal, nodes.Setting)
    assert isinstance(attend, nodes.Setting)
    assert isinstance(again, nodes.Setting)
    assert (causal.keyword, attend.keyword, again.keyword) == ("causal", "attend", "causal")
    assert again.value is None


def test_keywords_are_names_where_a_name_is_meant() -> None:
    for word in sorted(ITEMS | STATEMENTS | {"import", "at", "for", "n"}):
        text = f"attention {word}({word} = {word}) {{ let {word} = {word}({word} = {word}) + 1 }}"
        check_laws(text)
        (item,) = file_of(text).items
        assert isinstance(item, nodes.Attention)
        assert item.parameters == (
            nodes.Parameter(word, nodes.Name(word, span=NOWHERE), span=NOWHERE, name_span=NOWHERE),
        )
        assert item.body[0] == body_of(f"let {word} = {word}({word} = {word}) + 1")[0]
    for word in sorted(RESERVED):
        with pytest.raises(SpecError):
            file_of(f"attention {word} {{ attend full }}")


def test_causal_is_a_statement_and_a_graph() -> None:
    attend, statement, require = body_of("attend causal & causal causal require causal")
    assert isinstance(attend, nodes.Setting)
    assert shape(attend.value) == ["&", "causal", "causal"]
    assert isinstance(statement, nodes.Setting)
    assert statement.value is None
    assert isinstance(require, nodes.Require)
    assert shape(require.claim) == "causal"


def test_a_word_may_touch_a_bracket_but_not_another_word() -> None:
    assert body_of("attend(x)") == body_of("attend x")
    with pytest.raises(SpecError):
        body_of("attendx")
    with pytest.raises(SpecError):
        body_of("attend x at n = 3")


def test_layers_and_heads_of_a_block() -> None:
    scopes = body_of("layer 0, 2, 7..9 {} head even {} layer all { head 2 * i, i..j + 1 {} }")
    shapes = [[shape(item) for item in s.items] for s in scopes if isinstance(s, nodes.Scope)]
    assert shapes == [[0, 2, ["..", 7, 9]], ["even"], ["all"]]
    outer = scopes[2]
    assert isinstance(outer, nodes.Scope)
    (inner,) = outer.body
    assert isinstance(inner, nodes.Scope)
    assert (inner.kind, outer.kind) == ("head", "layer")


def test_items_stand_in_any_order() -> None:
    file = file_of('graph g = f\nfrom "x.attn" import f\nattention a {}\nattention b() {}')
    assert [type(item).__name__ for item in file.items] == [
        "Graph",
        "Import",
        "Attention",
        "Attention",
    ]
    imported = file.items[1]
    assert isinstance(imported, nodes.Import)
    assert (imported.path, [name.name for name in imported.names]) == ("x.attn", ["f"])


def test_strings_hold_anything_and_stay_what_they_are() -> None:
    for path in (
        "a; import os; os.system('x')",
        "{{7*7}}",
        "{% include %}",
        "# no comment",
        "é\\n",
    ):
        (item,) = file_of(f'from "{path}" import x').items
        assert isinstance(item, nodes.Import)
        assert item.path == path
        assert print_file(file_of(f'from "{path}" import x')) == f'from "{path}" import x\n'


# --- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_places_are_exact(text: str) -> None:
    for node in walk(file_of(text)):
        match node:
            case nodes.Integer() | nodes.Real():
                assert float(node.span.text.replace("_", "")) == node.value
            case nodes.Name(name):
                assert node.span.text == name
            case nodes.Attribute():
                assert node.span.text == f"{node.base.name}.{node.attribute}"
            case nodes.Call(name, _):
                assert node.name_span.text == name
                assert re.fullmatch(rf"{name}\(.*\)", node.span.text, re.DOTALL)
            case nodes.Argument(str() as name, _):
                assert node.name_span is not None
                assert node.name_span.text == name
                assert node.span.start == node.name_span.start
            case nodes.Chain(_, operators):
                assert tuple(span.text for span in node.operator_spans) == operators
            case nodes.Let(name, _) | nodes.Input(name, _, _) | nodes.Parameter(name, _):
                assert node.name_span.text == name
            case nodes.Setting(keyword, _):
                assert node.keyword_span.text == keyword
                assert node.span.start == node.keyword_span.start
            case nodes.Scope(kind, _, _):
                assert node.span.text.startswith(f"{kind} {node.items_span.text} {{")
                assert node.span.text.endswith("}")
            case nodes.Import(path, _):
                assert node.path_span.text == f'"{path}"'
            case nodes.Attention(name, _, _):
                assert node.name_span.text == name
                assert re.fullmatch(rf"attention {name}.*\}}", node.span.text, re.DOTALL)
            case nodes.Graph(name, _, _):
                assert node.name_span.text == name
                assert node.span.text.startswith(f"graph {name}")
            case nodes.File():
                assert node.span.text == text


def test_the_text_of_every_expression_is_that_expression() -> None:
    for text in TEXTS.values():
        for node in walk(file_of(text)):
            if isinstance(node, nodes.Chain | nodes.Prefix | nodes.Call | nodes.Name):
                assert expression_of(node.span.text) == node


def test_places_include_brackets_only_around_their_operands() -> None:
    tree = expression_of("((a | b) & (c))")
    assert tree.span.text == "(a | b) & (c)"
    assert isinstance(tree, nodes.Chain)
    assert [operand.span.text for operand in tree.operands] == ["a | b", "c"]
    (setting,) = body_of("scale ((a | b) & (c))")
    assert setting.span.text == "scale ((a | b) & (c))"


def test_places_do_not_count_in_comparisons() -> None:
    assert expression_of("a|b") == expression_of("  a  |  b")
    assert expression_of("a|b") != expression_of("a|c")


# --- printing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_printing_loses_nothing(text: str) -> None:
    check_laws(text)


def test_canonical_text() -> None:
    printed = print_file(file_of(EVERYTHING))
    assert (
        printed
        == """\
# every statement and every kind of expression
from "a.attn" import first_graph, second_graph  # an import
from "b.attn" import third

graph plain = full

graph two(a, b = 2 ** -1) = transpose(shift(first_graph, by = a)) & ~second_graph - third(b)

# in tokens
attention everything(size = 1024, heads = 8, layers = 2 * isqrt(n) // 3) {  # opens
    let x = min(size, 0.5 + 0.001) / 7 % 2
    let on = true and not false or x < 3
    input important: tokens(at_most = 64)
    input ids: ids
    input length: length
    layers layers
    heads heads
    sequence grid(8, 8)
    extra_tokens 4
    causal
    scale 1 / sqrt(d)
    score softcap(cap = 30.0)
    score alibi()
    normalize softmax1
    attend causal | (where(0 <= q - k < 4 and q.row == k.row) | where(q - k in {0, 1, -4}))
    attend where(k in 0..5) & global(positions(0, 5, 100..120) | every(step = 3))

    layer even {
        head 0, 2, 7..9 {
            attend same(ids)
        }
        head all {
            attend --~full
        }
    }

    require causal
    require reach(layers = 2) at n = 64, 257
    require plain subset two(1) and plain == plain
    require order <= n * log2(n)
    require -2 ** 2 ** -1 != (-2) ** 2 or (1 < 2) == (not true)
    # the end
}  # closed

# nothing more
"""
    )


def test_small_attentions_are_printed_one_statement_per_line() -> None:
    printed = print_file(file_of(TEXTS["performer"]))
    assert printed == (
        "attention performer {\n    causal\n    attend favor(features = 256, seed = 0)\n}\n"
    )
    assert print_file(file_of("attention a { }")) == "attention a {}\n"


def test_long_chains_are_printed_one_operand_per_line() -> None:
    assert print_file(file_of(TEXTS["bigbird"])) == TEXTS["bigbird"]
    term = "window(radius = some_parameter_with_a_long_name)"
    printed = print_file(
        file_of(
            f"graph g(x) = {term} | {term} - full | {term}\n"
            f"attention a {{ let t = {term} & {term} & {term} require {term} or {term} at n = 3 }}"
        )
    )
    assert (
        printed
        == f"""\
graph g(x) =
      {term}
    | {term} - full
    | {term}

attention a {{
    let t =
          {term}
        & {term}
        & {term}
    require {term}
         or {term} at n = 3
}}
"""
    )
    check_laws(printed)


def test_long_parameter_lists_are_printed_one_per_line() -> None:
    names = [f"parameter_{i}" for i in range(9)]
    printed = print_file(file_of(f"attention a({', '.join(names)}) {{ attend full }}"))
    lines = printed.splitlines()
    assert lines[0] == "attention a("
    assert lines[1:10] == [f"    {name}," for name in names]
    assert lines[10] == ") {"
    assert max(map(len, lines)) <= WIDTH
    check_laws(printed)


def test_every_comment_keeps_its_place() -> None:
    text = """\
# licence

# of the import
from "x.attn" import y  # behind the import
# of the graph
graph g =  # inside the graph
    y  # behind the graph

# of the attention
attention a(
    r = 3,  # inside the head
) {  # behind the brace
    # first

    # of causal
    causal  # behind causal

    layer 0 { # behind the inner brace
        attend x |  # inside attend
               y
        # closing the layer
    } # behind the layer
    # closing a

    # closing b
}  # behind a

# last
"""
    check_laws(text)
    assert (
        print_file(file_of(text))
        == """\
# licence

# of the import
from "x.attn" import y  # behind the import

# of the graph
# inside the graph
graph g = y  # behind the graph

# of the attention
# inside the head
attention a(r = 3) {  # behind the brace
    # first

    # of causal
    causal  # behind causal

    layer 0 {  # behind the inner brace
        # inside attend
        attend x | y
        # closing the layer
    }  # behind the layer
    # closing a

    # closing b
}  # behind a

# last
"""
    )


def test_comments_are_found_in_the_tree() -> None:
    (item,) = file_of(
        "attention a { # b\n # c\n causal # d\n\n\n # e\n heads 2 # f\n # g\n} # h"
    ).items
    assert isinstance(item, nodes.Attention)
    causal, heads = item.body
    assert (item.trailing, item.closing, item.ending) == ("# b", ("# g",), "# h")
    assert (causal.comments, causal.trailing) == (("# c",), "# d")
    assert (heads.comments, heads.trailing) == (("", "# e"), "# f")


# --- trees at random ---------------------------------------------------------------------------


@settings(max_examples=25)
@given(EXPRESSIONS)
def test_any_expression_survives_printing(expression: nodes.Expression) -> None:
    assert expression_of(print_expression(expression)) == expression


@settings(max_examples=20)
@given(files())
def test_any_file_survives_printing(file: nodes.File) -> None:
    printed = print_file(file)
    again = file_of(printed)
    assert again == file
    assert comments_of(again) == comments_of(file)
    assert print_file(again) == printed


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


# --- the files of the package ------------------------------------------------------------------


def test_the_grammar_has_no_conflicts_and_names_no_pattern() -> None:
    text = resources.files("attnspec.grammar").joinpath("attn.lark").read_text(encoding="utf-8")
    for pattern in ("window", "dilated", "global", "favor", "softmax", "even", "tokens"):
        assert not re.search(rf"/{pattern}\b|\"{pattern}\"", text)
    keywords = {re.sub(r"\\b$", "", t.pattern.value) for t in grammar_of_the_package().terminals}
    words = {word for word in keywords if word.isidentifier()}
    assert words == ITEMS | STATEMENTS | RESERVED | {"import", "at", "for", "n"}


def test_the_grammar_and_the_first_reading_have_the_same_numbers() -> None:
    terminals = {t.name: t.pattern.value for t in grammar_of_the_package().terminals}
    chance = random.Random(0)
    numbers = 0
    for _ in range(5000):
        text = chance.choice("0159") + "".join(
            chance.choices("0159_.eE+-x", k=chance.randint(0, 5))
        )
        in_grammar = any(re.fullmatch(terminals[name], text) for name in ("INTEGER", "REAL"))
        numbers += in_grammar
        problem = number_problem(text, NOWHERE)
        # the grammar knows no limits
        assert in_grammar == (problem is None or problem.code in ("A111", "A112")), text
    assert 500 < numbers < 4500


def test_importing_the_parser_loads_nothing_heavy() -> None:
    program = (
        "import sys, attnspec.grammar.parser, attnspec.grammar.printer, attnspec.text.decoding;"
        "heavy = {'torch', 'numpy', 'scipy', 'sympy', 'networkx'} & set(sys.modules);"
        "print(*sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
