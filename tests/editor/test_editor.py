"""What an editor is told of a text: words offered, explained, followed and given other names."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import textmate
from package_map import ROOT
from pygments.token import Comment, Error, Keyword, Name, Token

import attnspec
from attnspec.editor import checking
from attnspec.editor.completion import offers
from attnspec.editor.document import Document, specs_below
from attnspec.editor.documentation import definition_at, hover, markdown
from attnspec.editor.highlighting import COLOURED, AttnLexer
from attnspec.editor.words import words
from attnspec.elaborate.names import INPUTS
from attnspec.grammar.parser import expected, keywords
from attnspec.graphs.patterns import PATTERNS
from attnspec.ir.mechanisms import MECHANISMS
from attnspec.text.source import Source

EXAMPLES = sorted((ROOT / "examples").glob("*.attn"))
VSCODE = ROOT / "editors" / "vscode"

TEXT = """# 𝒳 stands before
graph ring(r, s = 2) = window(radius = r) | residue(step = s)
attention a(r = 4) {
    layers 2
    let w = 2 * r
    input x: tokens
    layer 0 { attend ring(r = w, s = 3) | global(x) }
    layer 1 { attend ring(r) }
    require causal
}
attention b(r = 1) { attend ring(r) }
"""


def at(marked: str) -> tuple[Document, int]:
    """A text and the place that @ marks in it."""
    place = marked.index("@")
    return Document(marked.replace("@", "")), place


def labels(marked: str) -> list[str]:
    return [offer.label for offer in offers(*at(marked))]


# --- places -----------------------------------------------------------------------------------


def test_columns_are_counted_as_editors_do() -> None:
    document = Document("# 𝒳é\r\nattention a { attend full }\n")
    for offset in range(len(document.source.text) + 1):
        assert document.offset(document.place(offset)) == offset
    assert document.place(4) == (0, 5)
    assert document.offset((0, 5)) == 4
    # beyond a line, beyond the text, inside a pair of units
    assert document.offset((0, 99)) == document.source.text.index("\n")
    assert document.offset((99, 0)) == len(document.source.text)
    assert document.offset((0, 3)) == 2


@pytest.mark.parametrize("path", EXAMPLES[::12], ids=lambda path: path.stem)
def test_no_text_is_too_broken(path: Path) -> None:
    """Whatever stands there while somebody writes: every question has an answer, or a reason."""
    rng = random.Random(path.stem)
    text = path.read_text(encoding="utf-8")
    signs = ["(", ")", "{", "}", "=", '"', "#", ",", "..", "𝒳", "let ", "graph ", "\r\n", "\0", "("]
    for _ in range(30):
        start, end = sorted(rng.sample(range(len(text)), 2))
        if rng.random() < 0.5:
            end = min(end, start + 4)
        broken = Document(text[:start] + "".join(rng.choices(signs, k=3)) + text[end:], path)
        checking.diagnostics(broken, claims=False)
        checking.formatted(broken)
        length = len(broken.source.text)
        for offset in (start, start + 1, rng.randrange(length), length):
            assert broken.offset(broken.place(offset)) in (offset, offset - 1)
            offers(broken, offset)
            hover(broken, offset)
            definition_at(broken, offset)


def test_specs_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("b.attn", "a/c.attn", ".git/d.attn", "node_modules/e.attn", "a/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert specs_below(tmp_path) == [tmp_path / "b.attn", tmp_path / "a" / "c.attn"]


def test_a_text_beyond_the_limits_has_no_words() -> None:
    document = Document("attention a { attend " + "(" * 100 + " }")
    assert document.scan.words == []
    assert offers(document, 5) == []
    assert document.word_at(5) is None


# --- what could be written --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "offered", "withheld"),
    [
        ("@", {"attention", "graph", "from"}, {"attend", "window"}),
        ("attention a { @", {"attend", "layers", "require"}, {"attention", "window"}),
        ("attention a { att@", {"attend"}, {"window"}),
        (
            "graph g = full attention a(r = 3) { let w = 2 attend @",
            {"window", "favor", "g", "r", "w", "first", "transpose"},
            {"attend", "q", "tokens"},
        ),
        ("attention a { attend window(@", {"radius", "before", "after"}, {"window", "step"}),
        ("attention a { attend window(before = 3, @", {"after"}, {"before", "full"}),
        ("attention a(r = 3) { attend window(radius = @", {"r", "n", "isqrt"}, {"radius", "full"}),
        ("attention a { attend favor(kind = @", {"positive", "relu"}, {"features", "window"}),
        ("attention a { attend favor(orthogonal = @", {"true", "false"}, {"positive", "n"}),
        (
            "attention a { input x: tokens input y: ids attend global(@",
            {"x", "first", "every"},
            {"y", "window"},
        ),
        ("attention a { input x: tokens input y: ids attend same(@", {"y"}, {"x", "first"}),
        ("attention a { attend where(@", {"q", "k", "n"}, {"window"}),
        ("attention a { attend where(q.@", {"row", "col", "time"}, {"q", "n"}),
        ("attention a { attend global(every(step = @", {"n", "isqrt"}, {"full"}),
        ("attention a { input x: @", {"tokens", "ids", "length", "choices"}, {"x", "window"}),
        ("attention a(m = 3) { input x: tokens(at_most = @", {"m", "n"}, {"x", "window"}),
        ("attention a { input x: @", {"numbers", "scores", "buckets"}, {"size", "n"}),
        ("attention a { input x: tokens(@", {"at_most"}, {"size", "n"}),
        ("attention a { input x: choices(@", {"size"}, {"at_most", "n"}),
        ("attention a { input x: choices(size = @", {"n"}, {"at_most", "size"}),
        (
            "attention a { input t: numbers input d: ids input x: tokens attend where(@",
            {"q", "t", "d", "abs"},
            {"x", "m", "window"},
        ),
        ("attention a { input t: numbers attend where(t(@", {"q", "k"}, {"t", "n", "window"}),
        ("attention a { input t: numbers attend where(t(q) <= @", {"t", "q", "n"}, {"window"}),
        ("attention a { input t: numbers attend where(abs(@", {"t", "q", "n"}, {"window"}),
        ("attention a { cross input t: numbers attend where(t(@", {"k"}, {"q", "t", "m"}),
        ("attention a { cross attend where(q * n <= @", {"m", "q", "n"}, {"window"}),
        ("attention a { cross attend window(radius = @", {"m", "n"}, {"q"}),
        ("attention b { cross attend full } attention a { attend where(@", {"n"}, {"m"}),
        ("attention a { normalize @", {"softmax", "softmax1"}, {"n", "favor"}),
        ("attention a { score @", {"alibi", "softcap", "bias"}, {"window"}),
        ("attention a { score softcap(@", {"cap"}, {"window"}),
        ("attention a { score alibi(@", {"slopes"}, {"cap"}),
        ("attention a { sequence @", {"grid"}, {"window"}),
        ("attention a { layers 2 layer @", {"even", "odd", "all"}, {"window", "attend"}),
        ("attention a { require @", {"causal", "stable", "degree", "reach"}, {"attend"}),
        ("attention a { require reach(@", {"layers"}, {"window"}),
        ("attention a { heads @", {"isqrt"}, {"window", "attend"}),
        ("attention a { attend full @", {"attend", "require"}, {"window"}),
        ("attention a { attend full # att@", set(), {"attend"}),
        ("attention a { let x = @", {"full", "n"}, {"x"}),
        ("attention a { let @", set(), {"window", "n"}),
        ("attention a(@", set(), {"n", "window"}),
        ("attention a(r = 3, s = @", {"r", "isqrt"}, {"s"}),
        ("attention @", set(), {"a", "window"}),
        ("graph g(r) = @", {"r", "window"}, {"g"}),
        ("graph ring(r, s = 2) = full attention a { attend ring(@", {"r", "s"}, set()),
        ("graph ring(r, s = 2) = full attention a { attend ring(r = 1, @", {"s"}, {"r"}),
    ],
)
def test_what_is_offered(text: str, offered: set[str], withheld: set[str]) -> None:
    found = labels(text)
    assert offered <= set(found)
    assert not withheld & set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "broken",
    [
        "attention a { foo bar\n  layers 3\n attend window(@",
        "attention a { attend (window(radius = 3)\n  let x = = 4\n attend window(@",
        "graph g = \nattention b { attend full }\nattention a {\n attend window(@",
        "attention a { attend window(radius = 1\n}\nattention b {\n attend window(@ }",
        "attention a { attend window(@\n  layers 2\n",
    ],
)
def test_mistakes_elsewhere_take_nothing_away(broken: str) -> None:
    assert "radius" in labels(broken)


@pytest.mark.parametrize("path", EXAMPLES[::9], ids=lambda path: path.stem)
def test_what_stands_there_is_offered(path: Path) -> None:
    """Every keyword, pattern and mechanism of the zoo, at its place, without what follows it."""
    text = path.read_text(encoding="utf-8")
    whole = Document(text, path)
    kinds = ("pattern", "mechanism", "function", "set", "operation")
    known = {*keywords(), *(word for kind in kinds for word in words()[kind])}
    known -= set(words()["scalar"])
    for number, word in enumerate(whole.scan.words):
        # a parameter may be called like a word of the language
        if word.kind == "name" and word.text in known and not whole.symbols.resolve(number):
            cut = Document(text[: word.start], path)
            found = {offer.label for offer in offers(cut, word.start)}
            named = text[word.end :].lstrip()[:1] == "=" and text[word.end :].lstrip()[:2] != "=="
            assert word.text in found or named, (word, text[max(0, word.start - 40) : word.start])


def test_the_parser_says_what_comes_next() -> None:
    assert expected(Source("a", "")) == {"$END", *words()["item"]}
    assert "$END" in expected(Source("a", "attention a { attend full }"))
    assert expected(Source("a", "attention a { input x:")) == {"NAME"}
    assert expected(Source("a", "from")) == {"STRING"}
    assert expected(Source("a", "]] what is this")) == set()


# --- symbols ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spot", "places"),
    [
        ("ring(r, s", [(1, 6), (6, 21), (7, 21), (10, 28)]),
        ("r, s", [(1, 11), (1, 39), (6, 26)]),
        ("s = 2", [(1, 14), (1, 59), (6, 33)]),
        ("r = 4", [(2, 12), (4, 16), (7, 26)]),
        ("w = 2", [(4, 8), (6, 30)]),
        ("x: tokens", [(5, 10), (6, 49)]),
        ("r = 1) {", [(10, 12), (10, 33)]),
        ("window", []),
        ("layers 2", []),
    ],
)
@pytest.mark.parametrize("damage", ["", "\nattention c { attend ((full }", "\n} ] graph"])
def test_every_use_leads_to_the_definition(
    spot: str, places: list[tuple[int, int]], damage: str
) -> None:
    document = Document(TEXT + damage)
    assert places or definition_at(document, TEXT.index(spot)) is None
    for place in places:
        found = definition_at(document, document.offset(place))
        assert found is not None
        assert document.place(document.ends(found)[0]) == places[0]


@pytest.mark.parametrize("kind", INPUTS)
def test_hover_on_the_kind_of_an_input_says_its_axes_and_readers(kind: str) -> None:
    text = f"attention a {{ input x: {kind} attend full }}"
    found = hover(Document(text), text.index(kind))
    assert found is not None
    assert INPUTS[kind][0] in found[0]
    assert "[B" in found[0]
    assert all(f"`{name}`" in found[0] for name in INPUTS[kind][1])
    # the same word elsewhere is no kind
    other = f"attention a {{ attend {kind} }}"
    assert hover(Document(other), other.index(kind)) is None


def test_imports_are_completed_and_defined_where_they_are_imported(tmp_path: Path) -> None:
    shared = tmp_path / "parts" / "near.attn"
    shared.parent.mkdir()
    shared.write_text("graph near(r) = window(radius = r)\ngraph far = full\n")
    main = tmp_path / "main.attn"
    main.write_text('from "parts/near.attn" import near\nattention a { attend near(2) }\n')
    document = Document(main.read_text(), main)
    found = definition_at(document, document.source.text.index("near(2)"))
    assert found is not None
    assert document.ends(found) == (30, 34)
    marked = Document('from "parts/near.attn" import ', main)
    assert {"near", "far"} == {each.label for each in offers(marked, len(marked.text))}
    assert '"parts/near.attn"' in {each.label for each in offers(Document("from ", main), 5)}


# --- explanations and figures -------------------------------------------------------------------


@pytest.mark.parametrize("declared", [*PATTERNS, *MECHANISMS], ids=lambda each: str(each.name))
def test_hover_has_formula_and_source(declared: type) -> None:
    name: str = declared.name  # type: ignore[attr-defined]
    text = f"attention a {{ attend {name}() }}"
    document = Document(text)
    found = hover(document, text.index(name) + 1)
    assert found is not None
    said, word = found
    assert said == markdown(declared)
    assert "Source: " in said
    assert said.startswith(f"```attn\n{name}")
    assert text[slice(*document.ends(word))] == name


def test_hover_on_an_argument_explains_its_pattern() -> None:
    document, place = at("attention a { attend window(rad@ius = 3) }")
    found = hover(document, place)
    assert found is not None
    assert "graph window(radius = 0, before = radius, after = radius) = where(" in found[0]
    assert hover(*at("attention a { # win@dow\n attend full }")) is None
    assert hover(*at("attention a { lay@ers 2 attend full }")) is None


def test_diagnostics_of_several_attentions_come_together() -> None:
    text = (
        "graph g = full\nattention a { attend windo(radius = 3) }\nattention b { attend full foo }"
    )
    (syntax,) = checking.diagnostics(Document(text), claims=False)
    assert syntax.span is not None
    assert syntax.span.line == 3
    (name,) = checking.diagnostics(Document(text.replace(" foo", "")), claims=False)
    assert (name.code, name.span and name.span.line) == ("A201", 2)
    false = Document("attention a { attend full require causal }")
    assert checking.diagnostics(false, claims=False) == []
    assert [each.code for each in checking.diagnostics(false, claims=True)] == ["A606"]
    assert checking.diagnostics(Document("graph g = full"), claims=True) == []
    assert [each.code for each in checking.diagnostics(Document(""), claims=True)] == ["A130"]
    assert [each.code for each in checking.diagnostics(Document("\x07"), claims=True)] == ["A102"]


def test_a_wrong_text_is_not_formatted() -> None:
    assert checking.formatted(Document("attention a{attend full}")) == (
        "attention a {\n    attend full\n}\n"
    )
    assert checking.formatted(Document("attention a{attend}")) is None


# --- colours ----------------------------------------------------------------------------------


def test_selectors_are_those_of_the_language() -> None:
    for word in words()["selector"]:
        spec = attnspec.parse(
            f"attention a {{ heads 2 head {word} {{ attend full }} attend self }}"
        )
        assert spec.mask(2, head=0).all() or spec.mask(2, head=1).all()


def test_every_keyword_has_a_kind() -> None:
    known = {word for listed in words().values() for word in listed}
    assert keywords() <= known
    kinds = set(words()) - {"coordinate"}
    assert set(COLOURED) == kinds
    assert set(textmate.SCOPES) == kinds


def test_the_lexer_knows_every_word() -> None:
    for kind, token in COLOURED.items():
        for word in words()[kind]:
            ((found, text), *_) = AttnLexer().get_tokens(f"{word} + x")
            assert text == word
            # a word of several kinds has the colour of the first
            kinds = [other for other in COLOURED if word in words()[other]]
            assert found is COLOURED[kinds[0]]
            assert found is token or len(kinds) > 1


@pytest.mark.parametrize("path", EXAMPLES[::4], ids=lambda path: path.stem)
def test_the_lexer_loses_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tokens = list(AttnLexer(ensurenl=False, stripnl=False).get_tokens(text))
    assert "".join(value for _, value in tokens) == text
    assert not [value for kind, value in tokens if kind is Error]
    assert {Keyword, Comment.Single} <= {kind for kind, _ in tokens} | {Comment.Single}


def test_the_lexer_tells_arguments_from_names() -> None:
    tokens = dict((v, k) for k, v in AttnLexer().get_tokens("attend window(radius = r, x == 3)"))
    assert tokens["radius"] is Name.Attribute
    assert tokens["window"] is Name.Builtin
    assert tokens["x"] is Name
    assert [k for k, v in AttnLexer().get_tokens("@") if v == "@"] == [Token.Error]


def test_pygments_finds_the_lexer_where_the_package_says() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'attn = "attnspec.editor.highlighting:AttnLexer"' in text
    assert (AttnLexer.__module__, AttnLexer.__name__) == (
        "attnspec.editor.highlighting",
        "AttnLexer",
    )


# --- the folder for Visual Studio Code ------------------------------------------------------------


def test_the_grammar_of_editors_is_current(tmp_path: Path) -> None:
    assert textmate.main(["--check", str(VSCODE / "syntaxes" / "attn.tmLanguage.json")]) == 0, (
        "make reference"
    )
    other = tmp_path / "other.json"
    assert textmate.main(["--check", str(other)]) == 1
    assert textmate.main([str(other)]) == 0
    assert json.loads(other.read_text()) == textmate.grammar()


def test_the_grammar_of_editors_has_the_words_of_the_language() -> None:
    text = (VSCODE / "syntaxes" / "attn.tmLanguage.json").read_text(encoding="utf-8")
    rules = json.loads(text)["repository"]
    for kind in textmate.SCOPES:
        rule = re.compile(rules[kind]["match"])
        assert all(rule.fullmatch(word) for word in words()[kind])
        assert not rule.search(f"x{words()[kind][0]}y")
    number = re.compile(rules["number"]["match"])
    found = [number.fullmatch(text) is not None for text in ("1_024", "0.5", "1e-3", "x1")]
    assert found == [True, True, True, False]
    for rule in rules.values():
        re.compile(rule["match"])


def test_the_extension_names_what_is_there() -> None:
    manifest = json.loads((VSCODE / "package.json").read_text(encoding="utf-8"))
    contributed = manifest["contributes"]
    paths = [manifest["main"], *(each["path"] for each in contributed["grammars"])]
    paths += [each["configuration"] for each in contributed["languages"]]
    assert all((VSCODE / path).is_file() for path in paths)
    configuration = json.loads((VSCODE / "language-configuration.json").read_text())
    assert configuration["comments"]["lineComment"] == "#"
    assert configuration["brackets"] == [["{", "}"], ["(", ")"], ["[", "]"]]
    command = contributed["configuration"]["properties"]["attnspec.command"]["default"]
    assert command == ["attnspec", "lsp"]
    assert not (VSCODE / "node_modules").exists()
    assert manifest["version"] == attnspec.__version__
