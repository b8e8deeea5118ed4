"""Files and strings to sources: encodings, sizes, and characters that deceive."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import zoo

from attnspec.limits import LIMITS
from attnspec.text.decoding import read_source, source_of
from attnspec.text.diagnostics import Diagnostic, SpecError

Place = tuple[str, int, int]


def problem_of_file(path: Path | str) -> Diagnostic:
    with pytest.raises(SpecError) as caught:
        read_source(path)
    (problem,) = caught.value.diagnostics
    return problem


def placed(problems: Sequence[Diagnostic]) -> list[Place]:
    return [(p.code, p.span.line, p.span.column) for p in problems if p.span is not None]


def places(text: str) -> list[Place]:
    with pytest.raises(SpecError) as caught:
        source_of(text)
    return placed(caught.value.diagnostics)


# --- files -------------------------------------------------------------------------------------


def test_files_have_their_path_name_and_one_kind_of_line_end(tmp_path: Path) -> None:
    path = tmp_path / "a.attn"
    for data in (b"\xef\xbb\xbfa\r\n# b\r\nc", b"a\r# b\rc", b"a\n# b\r\nc"):
        path.write_bytes(data)
        source = read_source(path)
        assert (source.text, source.path, source.name) == ("a\n# b\nc", path, str(path))
    assert read_source(str(path), "shown.attn").name == "shown.attn"
    assert source_of("\ufeffa\t\r# b\r\n\nc").text == "a\t\n# b\n\nc"
    path.write_bytes(b"")
    assert read_source(path).text == ""


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"attention a {\r\n  # caf\xe9\r\n}", ("A101", 2, 8)),
        (b"a\xf0\x9f", ("A101", 1, 2)),
        ("attention a".encode("utf-16"), ("A101", 0, 0)),
        ("attention a".encode("utf-32"), ("A101", 0, 0)),
        ("attention a".encode("utf-16-be"), ("A102", 1, 1)),
        ("attention a".encode("utf-16-le"), ("A102", 1, 2)),
    ],
    ids=lambda given: given[:9] if isinstance(given, bytes) else "",
)
def test_bytes_that_are_not_utf8_have_their_place(
    data: bytes, place: Place, tmp_path: Path
) -> None:
    path = tmp_path / "wide.attn"
    path.write_bytes(data)
    with pytest.raises(SpecError) as caught:
        read_source(path)
    first = caught.value.diagnostics[0]
    assert (placed([first]) or [(first.code, 0, 0)]) == [place]
    # the encoding that it may have, or the one that it needs, is named
    assert "UTF-8" in f"{first.message} {first.help}"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("file", "secret"):
        (tmp_path / name).touch(mode=0 if name == "secret" else 0o644)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    start = time.monotonic()
    for code, names in {
        "A180": ["no.attn", "no/no.attn", "file/x"],
        "A181": ["secret"] if os.geteuid() else [],
        "A182": ["", "link", "pipe", "/dev/zero"],
        "A183": ["loop", "x" * 5000, "a\0b"],
        "A190": ["huge"],
    }.items():
        for name in names:
            path = name if "\0" in name else tmp_path / name
            assert (problem_of_file(path).code, name) == (code, name)
    assert time.monotonic() - start < 2


def test_permission_errors_have_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret").touch()
    monkeypatch.setattr(os, "open", refuse)
    assert problem_of_file(tmp_path / "secret").code == "A181"


def test_a_pipe_that_takes_the_place_of_a_file_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    status = os.stat(file)
    monkeypatch.setattr(os, "stat", lambda _: status)
    assert problem_of_file(pipe).code == "A182"


def test_texts_are_read_up_to_a_size_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, small = tmp_path / "large.attn", tmp_path / "small"
    path.write_bytes(b"#" * LIMITS.text_size)
    assert len(read_source(path).text) == LIMITS.text_size
    assert len(source_of("#" * LIMITS.text_size).text) == LIMITS.text_size
    for text in ("#" * (LIMITS.text_size + 1), "#" + "é" * (LIMITS.text_size // 2)):
        with pytest.raises(SpecError) as caught:
            source_of(text)
        assert [each.code for each in caught.value.diagnostics] == ["A190"]
    path.write_bytes(b"#" * (LIMITS.text_size + 1))
    assert problem_of_file(path).code == "A190"
    # one that hides its size
    small.touch()
    status = os.stat(small)
    monkeypatch.setattr(os, "fstat", lambda _: status)
    assert problem_of_file(path).code == "A190"


# --- characters --------------------------------------------------------------------------------

EVERYWHERE = {
    "A102": "\0\x07\x0b\x0c\x7f\x85\u2028\u2029\ud800\U000e0041",
    "A103": "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
}
OUTSIDE_COMMENTS = {"A104": "\u00a0\u00ad\u2003\u200b\u200c\u200d\u202f\u2060\u3000\ufeff"}
OUTSIDE_PROSE = {
    "A105": "\u2212\u2013\u2014\uff11\u201c\u2264\u00d7\u2026\uff1d\u0430\u043e\u03bf",
    "A106": "\u00e9\u00df\u0431\u4e2d\u03b1\u00b2\u2713\u20ac\U0001f600",
}


def test_each_character_is_named_at_its_place() -> None:
    kinds = {**EVERYWHERE, **OUTSIDE_COMMENTS, **OUTSIDE_PROSE}
    for code, character in ((code, c) for code, listed in kinds.items() for c in listed):
        with pytest.raises(SpecError) as caught:
            source_of(f"attention a {{\n\tattend x{character} }}")
        (problem,) = caught.value.diagnostics
        assert placed([problem]) == [(code, 2, 10)]
        assert problem.span is not None
        assert problem.span.text == character
        assert f"U+{ord(character):04X}" in problem.message
        comment = f"attention a {{ }} # {character} é ok"
        string = f'from "{character}" import x'
        if code in EVERYWHERE:
            assert places(comment) == [(code, 1, 19)]
        else:
            assert source_of(comment).text == comment
        if code in OUTSIDE_PROSE:
            assert source_of(string).text == string
        else:
            assert places(string) == [(code, 1, 7)]


def test_independent_problems_come_together() -> None:
    text = "\0a\n# \u202e é\nb \u2212 \u00e9\n\u200b# \u200b"
    expected = [("A102", 1, 1), ("A103", 2, 3), ("A105", 3, 3), ("A106", 3, 5), ("A104", 4, 1)]
    assert places(text) == expected
    assert len(places("é " * 5000)) == LIMITS.problems


def test_any_damage_to_a_file_is_read_or_explained(tmp_path: Path) -> None:
    chance = random.Random(1)
    texts = [path.read_bytes() for path in zoo.FILES]
    outcomes = set()
    for _ in range(300):
        data = bytearray(chance.choice(texts))
        for _ in range(chance.randint(0, 3)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        (tmp_path / "damaged.attn").write_bytes(data)
        try:
            read_source(tmp_path / "damaged.attn")
        except SpecError as error:
            outcomes |= {problem.code for problem in error.diagnostics}
        else:
            outcomes.add("read")
    assert {"read", "A101", "A102"} <= outcomes
