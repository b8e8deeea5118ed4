"""A session of an editor, replayed against `attnspec lsp` over its standard streams."""

from __future__ import annotations

import itertools
import json
import queue
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import textmate
from goldens import Golden
from package_map import ROOT
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Error, Keyword, Name, Token

import attnspec
from attnspec.graphs.patterns import PATTERNS
from attnspec.ir.mechanisms import MECHANISMS

TEXT = """graph ring(r) = window(radius = r)
attention a(r = 4) {
    causal
    layers 2
    attend ring(r) | residue(step = 2 * r)
    require causal
}
"""

EXAMPLES = sorted((ROOT / "examples").glob("*.attn"))
VSCODE = ROOT / "editors" / "vscode"

Json = dict[str, Any]


class Editor:
    """The client's side of the protocol: messages framed by their length, answers by their id."""

    def __init__(self, folder: Path) -> None:
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "attnspec", "lsp"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self.folder = folder
        self.received: queue.Queue[Json | None] = queue.Queue()
        self.count = 0
        self.messages: list[Json] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while line := stream.readline():
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                while stream.readline().strip():
                    continue
                self.received.put(json.loads(stream.read(int(value))))
        self.received.put(None)

    def close(self) -> None:
        """The end of the process, and of what was open to it."""
        self.process.wait(10)
        self.thread.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            assert stream is not None
            stream.close()

    def _send(self, message: Json) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self.process.stdin.flush()

    def _next(self) -> Json:
        message = self.received.get(timeout=60)
        if message is None:
            self.errors.seek(0)
            pytest.fail(self.errors.read().decode())
        self.messages.append(message)
        return message

    def notify(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def ask(self, method: str, **params: Any) -> Any:
        """The answer to a request; an error of the server comes back whole, under "error"."""
        self.count += 1
        self._send({"id": self.count, "method": method, "params": params})
        while (message := self._next()).get("id") != self.count or "method" in message:
            continue
        return message if "error" in message else message["result"]

    def said(self, version: int) -> list[Json]:
        """The first diagnostics of a version of the text."""
        while True:
            message = self._next()
            if message.get("method") == "textDocument/publishDiagnostics":
                params = message["params"]
                if params.get("version") == version:
                    found: list[Json] = params["diagnostics"]
                    return found

    # --- one open text ---

    def uri(self, name: str = "a.attn") -> str:
        return (self.folder / name).as_uri()

    def document(self, name: str = "a.attn") -> Json:
        return {"uri": self.uri(name)}

    def open(self, text: str, version: int = 1) -> None:
        (self.folder / "a.attn").write_text(text, encoding="utf-8")
        self.notify(
            "textDocument/didOpen",
            textDocument={
                **self.document(),
                "languageId": "attn",
                "version": version,
                "text": text,
            },
        )

    def change(self, version: int, *changes: Json) -> None:
        self.notify(
            "textDocument/didChange",
            textDocument={**self.document(), "version": version},
            contentChanges=list(changes),
        )

    def at(self, method: str, line: int, character: int, **more: Any) -> Any:
        place = {"line": line, "character": character}
        return self.ask(
            f"textDocument/{method}", textDocument=self.document(), position=place, **more
        )


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    client = Editor(tmp_path)
    yield client
    if client.process.poll() is None:
        client.process.kill()
    client.close()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    """A session in which texts are opened one after the other."""
    client = Editor(tmp_path_factory.mktemp("editor"))
    client.ask("initialize", processId=None, rootUri=client.folder.as_uri(), capabilities={})
    client.notify("initialized")
    yield client
    client.process.kill()
    client.close()


def place_of(marked: str, sign: str = "@") -> tuple[int, int]:
    """The line and the column, in the units of editors, at which a sign stands."""
    lines = marked.partition(sign)[0].split("\n")
    return len(lines) - 1, len(lines[-1].encode("utf-16-le")) // 2


def labels(editor: Editor, marked: str) -> list[str]:
    """The words offered where @ stands."""
    editor.open(marked.replace("@", ""))
    offered = editor.at("completion", *place_of(marked)) or {"items": []}
    return [each["label"] for each in offered["items"]]


def insert(line: int, character: int, text: str, remove: int = 0) -> Json:
    start, end = {"line": line, "character": character}, {"line": line}
    return {
        "range": {"start": start, "end": {**end, "character": character + remove}},
        "text": text,
    }


def test_a_session(editor: Editor) -> None:
    root = editor.folder.as_uri()
    can = editor.ask("initialize", processId=None, rootUri=root, capabilities={})
    assert can["serverInfo"] == {"name": "attnspec", "version": attnspec.__version__}
    for feature in ("hover", "definition", "documentFormatting"):
        assert can["capabilities"][f"{feature}Provider"]
    editor.notify("initialized")

    # a sound text: nothing wrong
    editor.open(TEXT)
    assert editor.said(1) == []

    # a word under the pointer, and where a name comes from
    assert "residue(step)" in editor.at("hover", 4, 24)["contents"]["value"]
    place = editor.at("definition", 4, 13)
    assert (place["uri"], place["range"]["start"]) == (editor.uri(), {"line": 0, "character": 6})

    # typing: the text is broken in between, and words are offered all the same
    editor.change(2, insert(4, 21, "win"))
    editor.change(3, insert(4, 24, "dow("))
    assert [each["code"] for each in editor.said(3)] != []
    # a wrong text is not formatted
    options = {"tabSize": 4, "insertSpaces": True}
    kept = editor.ask("textDocument/formatting", textDocument=editor.document(), options=options)
    assert kept == []
    offered = [each["label"] for each in editor.at("completion", 4, 28)["items"]]
    assert offered[:3] == ["radius", "before", "after"]
    editor.change(4, insert(4, 28, "radius = r) | "))
    assert editor.said(4) == []
    editor.change(5, insert(4, 21, "windo", remove=6))
    (wrong,) = editor.said(5)
    assert (wrong["code"], wrong["severity"], wrong["source"]) == ("A201", 1, "attnspec")
    assert wrong["range"] == {
        "start": {"line": 4, "character": 21},
        "end": {"line": 4, "character": 26},
    }
    assert "`window`" in wrong["message"]

    # the whole text anew, in another layout
    editor.change(6, {"text": TEXT.replace("    causal\n", "    causal ")})
    assert editor.said(6) == []
    (whole,) = editor.ask(
        "textDocument/formatting", textDocument=editor.document(), options=options
    )
    assert whole["newText"] == TEXT.replace("attention", "\nattention")

    # a claim that does not hold is said when the text is saved, not while it is written
    editor.change(7, {"text": TEXT.replace("    causal\n", "")})
    assert editor.said(7) == []
    editor.notify("textDocument/didSave", textDocument=editor.document())
    (false,) = editor.said(7)
    assert false["code"] == "A606"
    assert false["range"]["start"]["line"] == 4

    editor.notify("textDocument/didClose", textDocument=editor.document())
    assert editor.ask("shutdown") is None
    editor.notify("exit")
    assert editor.process.wait(30) == 0
    assert not [each for each in editor.messages if each.get("method") == "window/showMessage"]


def test_mistakes_of_an_import_are_said_with_their_place(editor: Editor) -> None:
    editor.ask("initialize", processId=None, rootUri=editor.folder.as_uri(), capabilities={})
    editor.notify("initialized")
    # what an import is wrong about is said in this file, with its place in the other
    (editor.folder / "other.attn").write_text("graph ring(r) = = full\n")
    editor.open('from "other.attn" import ring\nattention a { attend ring(3) }\n')
    (wrong,) = editor.said(1)
    assert "other.attn:1:17" in wrong["message"]
    assert wrong["range"]["start"] == {"line": 0, "character": 0}


def test_without_the_library_the_way_out_is_named() -> None:
    code = "import sys; sys.modules['pygls'] = None; from attnspec.cli import main; main(['lsp'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert 'pip install "attnspec[lsp]"' in done.stderr


def test_the_editor_offers_reports_and_explains_as_approved(golden: Golden, opened: Editor) -> None:
    versions = itertools.count(1000)

    def answer(line: str) -> tuple[str, list[str]]:
        kind, _, written = line.partition(": ")
        marked = written.encode().decode("unicode_escape")
        if kind == "offered":
            words = labels(opened, marked)
            assert len(words) == len({*words}), line
            return line, textwrap.wrap(" ".join(words), 96)
        opened.open(marked.replace("@", ""), version := next(versions))
        if kind == "said":
            said = "\n".join(f"{each['code']}: {each['message']}" for each in opened.said(version))
            return line, said.splitlines()
        shown = opened.at("hover", *place_of(marked))
        return line, shown["contents"]["value"].splitlines() if shown else []

    golden.entries(answer)


@pytest.mark.parametrize("path", EXAMPLES[::16], ids=lambda path: path.stem)
def test_no_text_is_too_broken(path: Path, opened: Editor) -> None:
    """Whatever stands there while somebody writes: every question has an answer."""
    rng, text = random.Random(path.stem), path.read_text(encoding="utf-8")
    signs = ["(", ")", "{", "}", "=", '"', "#", ",", "..", "𝒳", "let ", "graph ", "\r\n", "\0", "("]
    for _ in range(10):
        start, end = sorted(rng.sample(range(len(text)), 2))
        end = min(end, start + 4) if rng.random() < 0.5 else end
        opened.open(text[:start] + "".join(rng.choices(signs, k=3)) + text[end:])
        for offset in (start, start + 1, rng.randrange(start + 2)):
            for method in ("completion", "hover", "definition"):
                answer = opened.at(method, *place_of(text[:offset] + "\1", "\1"))
                assert answer is None or "error" not in answer


USES = """# 𝒳 stands before
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
def test_every_use_leads_to_the_definition(
    places: list[tuple[int, int]], damage: str, opened: Editor
) -> None:
    opened.open(USES + damage)
    assert opened.at("definition", *place_of(USES, "window")) is None
    for place in places:
        line, column = places[0]
        start = opened.at("definition", *place)["range"]["start"]
        assert start == {"line": line, "character": column}


def test_imports_are_completed_and_defined_where_they_are_imported(opened: Editor) -> None:
    shared = opened.folder / "parts" / "near.attn"
    shared.parent.mkdir()
    shared.write_text("graph near(r) = window(radius = r)\ngraph far = full\n")
    opened.open('from "parts/near.attn" import near\nattention a { attend near(2) }\n')
    place = opened.at("definition", 1, 22)
    assert (place["uri"], place["range"]["start"]) == (opened.uri(), {"line": 0, "character": 30})
    assert {"near", "far"} == {*labels(opened, 'from "parts/near.attn" import @')}
    assert '"parts/near.attn"' in labels(opened, "from @")


@pytest.mark.parametrize("each", [*PATTERNS, *MECHANISMS], ids=lambda each: each.name)
def test_words_are_explained_where_they_have_their_meaning(each: Any, opened: Editor) -> None:
    text = f"attention a {{ attend {each.name}() }}"
    opened.open(text)
    shown = opened.at("hover", *place_of(text, f"{each.name}()"))
    assert shown["contents"]["value"].startswith(f"```attn\n{each.name}")
    assert shown["range"]["end"]["character"] == text.index("()")


@pytest.mark.parametrize("path", EXAMPLES[::8], ids=lambda path: path.stem)
def test_the_lexer_loses_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tokens = list(get_lexer_by_name("attn", ensurenl=False, stripnl=False).get_tokens(text))
    assert "".join(value for _, value in tokens) == text
    assert not [value for kind, value in tokens if kind is Error]
    assert {Keyword, Comment.Single} <= {kind for kind, _ in tokens} | {Comment.Single}


def test_the_lexer_tells_arguments_from_names() -> None:
    lexer = get_lexer_by_name("attn")
    tokens = {word: kind for kind, word in lexer.get_tokens("attend window(radius = r, x == 3)")}
    expected = {"radius": Name.Attribute, "window": Name.Builtin, "x": Name}
    assert {name: tokens[name] for name in expected} == expected
    assert [kind for kind, word in lexer.get_tokens("@") if word == "@"] == [Token.Error]


def test_the_grammar_of_editors_is_current_and_has_the_words_of_the_language(
    tmp_path: Path,
) -> None:
    path = VSCODE / "syntaxes" / "attn.tmLanguage.json"
    assert textmate.main(["--check", str(path)]) == 0, "make reference"
    assert textmate.main(["--check", str(tmp_path / "other.json")]) == 1
    rules = json.loads(path.read_text(encoding="utf-8"))["repository"]
    for kind, table in (("pattern", PATTERNS), ("mechanism", MECHANISMS)):
        names = {each.name for each in table} - {"where_inputs"}
        assert all(re.fullmatch(rules[kind]["match"], name) for name in names)
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
