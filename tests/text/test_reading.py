"""Files and strings to sources: encodings, sizes, and characters that deceive."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from attnspec import Diagnostic, SpecError, load, parse
from attnspec.limits import LIMITS

Place = tuple[str, int, int]


def problem_of_file(path: Path | str) -> Diagnostic:
    with pytest.raises(SpecError) as caught:
        load(path)
    (problem,) = caught.value.diagnostics
    return problem


def placed(problems: Sequence[Diagnostic]) -> list[Place]:
    return [(p.code, p.span.line, p.span.column) for p in problems if p.span is not None]


def codes_of(text: str) -> list[tuple[str]]:
    with pytest.raises(SpecError) as caught:
        parse(text)
    return [(problem.code,) for problem in caught.value.diagnostics]


def places(text: str) -> list[Place]:
    with pytest.raises(SpecError) as caught:
        parse(text)
    return placed(caught.value.diagnostics)


def test_files_have_one_kind_of_line_end(tmp_path: Path) -> None:
    path = tmp_path / "a.attn"
    for end in (b"\r\n", b"\r", b"\n"):
        path.write_bytes(b"\xef\xbb\xbf# b" + end + b"attention a { attend full }")
        assert load(path).source == "# b\nattention a {\n    attend full\n}\n"
    path.write_bytes(b"attention a {\r\n attend ful }")
    assert placed([problem_of_file(path)]) == [("A201", 2, 9)]
    path.write_bytes(b"")
    assert problem_of_file(path).code == "A130"


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
        load(path)
    first = caught.value.diagnostics[0]
    assert (placed([first]) or [(first.code, 0, 0)]) == [place]
    # the encoding that it may have, or the one that it needs, is named
    assert "UTF-8" in f"{first.message} {first.help}"


def test_paths_that_are_not_readable_files_are_refused_at_once(tmp_path: Path) -> None:
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


def test_texts_are_read_up_to_a_size_in_bytes(tmp_path: Path) -> None:
    path, attention = tmp_path / "large.attn", "attention a { attend full }\n"
    size = LIMITS.text_size - len(attention)
    path.write_bytes(attention.encode() + b"#" * size)
    assert load(path) == parse(attention + "#" * size)
    for text in ("#" * (size + 1), "#" + "é" * (size // 2)):
        assert [code for code, *_ in codes_of(attention + text)] == ["A190"]
    path.write_bytes(attention.encode() + b"#" * (size + 1))
    assert problem_of_file(path).code == "A190"


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
            parse(f"attention a {{\n\tattend x{character} }}")
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
            assert codes_of(comment)[0][0] > "A107"
        if code in OUTSIDE_PROSE:
            assert codes_of(string)[0][0] > "A107"
        else:
            assert places(string) == [(code, 1, 7)]


def test_independent_problems_come_together() -> None:
    text = "\0a\n# \u202e é\nb \u2212 \u00e9\n\u200b# \u200b"
    expected = [("A102", 1, 1), ("A103", 2, 3), ("A105", 3, 3), ("A106", 3, 5), ("A104", 4, 1)]
    assert places(text) == expected
    assert len(places("é " * 5000)) == LIMITS.problems
