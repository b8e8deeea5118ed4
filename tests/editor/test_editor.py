"""What an editor is told of a text: words offered, explained and followed; colours."""

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
from attnspec.editor.documentation import definition_at, hover
from attnspec.editor.highlighting import COLOURED, AttnLexer
from attnspec.editor.words import words
from attnspec.elaborate.names import INPUTS
from attnspec.grammar.parser import keywords
from attnspec.graphs.patterns import PATTERNS
from attnspec.ir.mechanisms import MECHANISMS

EXAMPLES = sorted((ROOT / "examples").glob("*.attn"))
VSCODE = ROOT / "editors" / "vscode"


def labels(marked: str) -> list[str]:
    """The words offered where @ stands."""
    place = marked.index("@")
    return [offer.label for offer in offers(Document(marked.replace("@", "")), place)]


# --- places -----------------------------------------------------------------------------------


def test_columns_are_counted_as_editors_do() -> None:
    document = Document("# 𝒳é\r\nattention a { attend full }\n")
    for offset in range(len(document.source.text) + 1):
        assert document.offset(document.place(offset)) == offset
    assert document.place(4) == (0, 5)
    # beyond a line, beyond the text, inside a pair of units
    assert document.offset((0, 99)) == document.source.text.index("\n")
    assert document.offset((99, 0)) == len(document.source.text)
    assert document.offset((0, 3)) == 2


@pytest.mark.parametrize("path", EXAMPLES[::16], ids=lambda path: path.stem)
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
    beyond = Document("attention a { attend " + "(" * 100 + " }")
    assert (offers(beyond, 5), beyond.word_at(5)) == ([], None)


# --- what could be written --------------------------------------------------------------------

OFFERED = """
@ | attention graph from | attend window
attention a { @ | attend layers require | attention window
attention a { att@ | attend | window
graph full_1 = full attention a(r = 3) { let w = 2 attend @ | window favor full_1 r w | attend q
attention a { attend window(@ | radius before after | window step
attention a { attend window(before = 3, @ | after | before full
attention a(r = 3) { attend window(radius = @ | r n isqrt | radius full
attention a { attend favor(kind = @ | positive relu | features window
attention a { attend favor(orthogonal = @ | true false | positive n
attention a { input x: tokens input y: ids attend global(@ | x first every | y window
attention a { input x: tokens input y: ids attend same(@ | y | x first
attention a { attend where(@ | q k n | window
attention a { attend where(q.@ | row col time | q n
attention a { attend global(every(step = @ | n isqrt | full
attention a { input x: @ | tokens ids length choices numbers scores buckets | x window size n
attention a(m = 3) { input x: tokens(at_most = @ | m n | x window
attention a { input x: tokens(@ | at_most | size n
attention a { input x: choices(@ | size | at_most n
attention a { input x: choices(size = @ | n | at_most size
attention a { input t: numbers input d: ids input x: tokens attend where(@ | q t d abs | x m window
attention a { input t: numbers attend where(t(@ | q k | t n window
attention a { input t: numbers attend where(t(q) <= @ | t q n | window
attention a { cross input t: numbers attend where(t(@ | k | q t m
attention a { cross attend where(q * n <= @ | m q n | window
attention a { cross attend window(radius = @ | m n | q
attention b { cross attend full } attention a { attend where(@ | n | m
attention a { normalize @ | softmax softmax1 | n favor
attention a { score @ | alibi softcap bias | window
attention a { score alibi(@ | slopes | cap
attention a { sequence @ | grid | window
attention a { layers 2 layer @ | even odd all | window attend
attention a { require @ | causal stable degree reach | attend
attention a { require reach(@ | layers | window
attention a { attend full @ | attend require | window
attention a { attend full # att@ | | attend
attention a { let x = @ | full n | x
attention a { let @ | | window n
attention a(r = 3, s = @ | r isqrt | s
attention @ | | a window
graph g(r) = @ | r window | g
graph ring(r, s = 2) = full attention a { attend ring(@ | r s | full
graph ring(r, s = 2) = full attention a { attend ring(r = 1, @ | s | r
attention a { foo bar\\n  layers 3\\n attend window(@ | radius |
attention a { attend (window(radius = 3)\\n  let x = = 4\\n attend window(@ | radius |
graph g = \\nattention b { attend full }\\nattention a {\\n attend window(@ | radius |
attention a { attend window(radius = 1\\n}\\nattention b {\\n attend window(@ } | radius |
"""
"""Where @ stands; what is offered there, whatever is wrong elsewhere; what is not."""


@pytest.mark.parametrize("line", OFFERED.strip().splitlines())
def test_words_are_offered_where_they_can_stand(line: str) -> None:
    text, offered, withheld = (part.strip() for part in line.split("|"))
    found = labels(text.replace("\\n", "\n"))
    assert {*offered.split()} <= {*found}
    assert not {*withheld.split()} & {*found}
    assert len(found) == len({*found})


@pytest.mark.parametrize("path", EXAMPLES[::12], ids=lambda path: path.stem)
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
            named = re.match(r"\s*=(?!=)", text[word.end :])
            assert named or word.text in {offer.label for offer in offers(cut, word.start)}, word


# --- definitions and explanations ----------------------------------------------------------------

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


@pytest.mark.parametrize(
    "places",
    [
        [(1, 6), (6, 21), (7, 21), (10, 28)],
        [(1, 11), (1, 39), (6, 26)],
        [(1, 14), (1, 59), (6, 33)],
        [(2, 12), (4, 16), (7, 26)],
        [(4, 8), (6, 30)],
        [(5, 10), (6, 49)],
        [(10, 12), (10, 33)],
    ],
)
@pytest.mark.parametrize("damage", ["", "\nattention c { attend ((full }", "\n} ] graph"])
def test_every_use_leads_to_the_definition(places: list[tuple[int, int]], damage: str) -> None:
    document = Document(TEXT + damage)
    assert definition_at(document, TEXT.index("window")) is None
    for place in places:
        found = definition_at(document, document.offset(place))
        assert found is not None
        assert document.place(document.ends(found)[0]) == places[0]


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


@pytest.mark.parametrize(
    "name",
    [*(str(each.name) for each in PATTERNS), *(str(each.name) for each in MECHANISMS), *INPUTS],
)
def test_words_are_explained_where_they_have_their_meaning(name: str) -> None:
    text = f"attention a {{ input x: {name} attend {name}() }}"
    is_input = name in INPUTS
    document = Document(text)
    found = hover(document, text.index(name) if is_input else text.rindex(name) + 1)
    assert found is not None
    said, word = found
    assert text[slice(*document.ends(word))] == name
    assert name in said
    if is_input:
        # its axes and its readers
        assert "[B" in said
        assert all(f"`{reader}`" in said for reader in INPUTS[name][1])
    else:
        assert said.startswith(f"```attn\n{name}")


@pytest.mark.parametrize(
    "text", ["attend window(rad@ius = 3)", "# win@dow\n attend full", "lay@ers 2"]
)
def test_arguments_are_explained_and_comments_are_not(text: str) -> None:
    marked = f"attention a {{ {text} }}"
    found = hover(Document(marked.replace("@", "")), marked.index("@"))
    assert (found is not None) == ("radius" in text.replace("@", ""))


def test_diagnostics_of_several_attentions_come_together() -> None:
    def codes(text: str, claims: bool) -> list[tuple[str, int | None]]:
        found = checking.diagnostics(Document(text), claims=claims)
        return [(each.code, each.span.line if each.span else None) for each in found]

    text = (
        "graph g = full\nattention a { attend windo(radius = 3) }\nattention b { attend full foo }"
    )
    assert codes(text, False) == [("A132", 3)]
    assert codes(text.replace(" foo", ""), False) == [("A201", 2)]
    assert codes("attention a { attend full require causal }", False) == []
    assert codes("attention a { attend full require causal }", True) == [("A606", 1)]
    assert codes("graph g = full", True) == []
    assert codes("", True) == [("A130", 1)]
    assert codes("\x07", True) == [("A102", 1)]
    assert checking.formatted(Document("attention a{attend}")) is None


# --- colours ----------------------------------------------------------------------------------


def test_every_word_has_a_kind_and_its_colour() -> None:
    assert keywords() <= {word for listed in words().values() for word in listed}
    kinds = set(words()) - {"coordinate"}
    assert set(COLOURED) == set(textmate.SCOPES) == kinds
    for kind in COLOURED:
        for word in words()[kind]:
            ((found, text), *_) = AttnLexer().get_tokens(f"{word} + x")
            # a word of several kinds has the colour of the first
            first = next(other for other in COLOURED if word in words()[other])
            assert (text, found) == (word, COLOURED[first])


@pytest.mark.parametrize("path", EXAMPLES[::8], ids=lambda path: path.stem)
def test_the_lexer_loses_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tokens = list(AttnLexer(ensurenl=False, stripnl=False).get_tokens(text))
    assert "".join(value for _, value in tokens) == text
    assert not [value for kind, value in tokens if kind is Error]
    assert {Keyword, Comment.Single} <= {kind for kind, _ in tokens} | {Comment.Single}


def test_the_lexer_tells_arguments_from_names() -> None:
    tokens = dict((v, k) for k, v in AttnLexer().get_tokens("attend window(radius = r, x == 3)"))
    expected = {"radius": Name.Attribute, "window": Name.Builtin, "x": Name}
    assert {name: tokens[name] for name in expected} == expected
    assert [k for k, v in AttnLexer().get_tokens("@") if v == "@"] == [Token.Error]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'attn = "{AttnLexer.__module__}:{AttnLexer.__name__}"' in text


# --- the folder for Visual Studio Code ------------------------------------------------------------


def test_the_grammar_of_editors_is_current_and_has_the_words_of_the_language(
    tmp_path: Path,
) -> None:
    path = VSCODE / "syntaxes" / "attn.tmLanguage.json"
    assert textmate.main(["--check", str(path)]) == 0, "make reference"
    assert textmate.main(["--check", str(tmp_path / "other.json")]) == 1
    rules = json.loads(path.read_text(encoding="utf-8"))["repository"]
    for kind in textmate.SCOPES:
        rule = re.compile(rules[kind]["match"])
        assert all(rule.fullmatch(word) for word in words()[kind])
        assert not rule.search(f"x{words()[kind][0]}y")
    number = re.compile(rules["number"]["match"])
    found = [number.fullmatch(text) is not None for text in ("1_024", "0.5", "1e-3", "x1")]
    assert found == [True, True, True, False]


def test_the_extension_names_what_is_there() -> None:
    manifest = json.loads((VSCODE / "package.json").read_text(encoding="utf-8"))
    contributed = manifest["contributes"]
    paths = [manifest["main"], *(each["path"] for each in contributed["grammars"])]
    paths += [each["configuration"] for each in contributed["languages"]]
    assert all((VSCODE / path).is_file() for path in paths)
    configuration = json.loads((VSCODE / "language-configuration.json").read_text())
    assert configuration["comments"]["lineComment"] == "#"
    command = contributed["configuration"]["properties"]["attnspec.command"]["default"]
    assert command == ["attnspec", "lsp"]
    assert not (VSCODE / "node_modules").exists()
    assert manifest["version"] == attnspec.__version__
