"""A session of an editor, replayed against `attnspec lsp` over its standard streams."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import attnspec
from attnspec.cli import main

TEXT = """graph ring(r) = window(radius = r)
attention a(r = 4) {
    causal
    layers 2
    attend ring(r) | residue(step = 2 * r)
    require causal
}
"""

Json = dict[str, Any]


class Editor:
    """The client's side of the protocol: messages framed by their length, answers by their id."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "attnspec", "lsp"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.folder = folder
        self.received: queue.Queue[Json | None] = queue.Queue()
        self.errors: list[bytes] = []
        self.count = 0
        self.messages: list[Json] = []
        targets = (self._read, self._drain)
        self.threads = [threading.Thread(target=each, daemon=True) for each in targets]
        for thread in self.threads:
            thread.start()

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

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def close(self) -> None:
        """The end of the process, and of what was open to it."""
        self.process.wait(10)
        for thread in self.threads:
            thread.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _send(self, message: Json) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self.process.stdin.flush()

    def _next(self) -> Json:
        message = self.received.get(timeout=60)
        assert message is not None, b"".join(self.errors).decode()
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


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "pygls"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "attnspec.editor.server", raising=False)
    monkeypatch.setitem(sys.modules, "pygls", None)
    done = CliRunner().invoke(main, ["lsp"])
    assert done.exit_code == 2
    assert 'pip install "attnspec[lsp]"' in done.output
