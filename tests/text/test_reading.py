"""Files and strings to sources: encodings, sizes, and characters that deceive."""

from __future__ import annotations

import os
import random
import time
import unicodedata
from pathlib import Path

import pytest
from spec_texts import EVERYTHING, TEXTS

from attnspec.limits import LIMITS
from attnspec.text.decoding import read_source, source_of
from attnspec.text.diagnostics import Diagnostic, SpecError


def problems_of(text: str) -> list[Diagnostic]:
    with pytest.raises(SpecError) as caught:
        source_of(text)
    return list(caught.value.diagnostics)


def problem_of_file(path: Path | str) -> Diagnostic:
    with pytest.raises(SpecError) as caught:
        read_source(path)
    (problem,) = caught.value.diagnostics
    return problem


def places(problems: list[Diagnostic]) -> list[tuple[str, int, int]]:
    return [(p.code, p.span.line, p.span.column) for p in problems if p.span is not None]


# --- files -------------------------------------------------------------------------------------


def test_a_file_is_read_with_its_path_and_name(tmp_path: Path) -> None:
    path = tmp_path / "a.attn"
    path.write_text(EVERYTHING, encoding="utf-8")
    source = read_source(path)
    assert (source.text, source.path, source.name) == (EVERYTHING, path, str(path))
    assert read_source(str(path), "shown.attn").name == "shown.attn"


def test_byte_order_mark_and_line_ends_are_normalised(tmp_path: Path) -> None:
    path = tmp_path / "a.attn"
    for data in (b"\xef\xbb\xbfa\r\n# b\r\nc", b"a\r# b\rc", b"a\n# b\r\nc"):
        path.write_bytes(data)
        assert read_source(path).text == "a\n# b\nc"
    assert source_of("\ufeffa\r# b\r\n\nc").text == "a\n# b\n\nc"
    path.write_bytes(b"")
    assert read_source(path).text == ""


def test_a_byte_order_mark_inside_is_not_skipped() -> None:
    assert places(problems_of("a\n \ufeffb")) == [("A104", 2, 2)]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.attn"
    path.write_bytes(b"attention a {\r\n  # caf\xe9\r\n}")
    problem = problem_of_file(path)
    assert problem.code == "A101"
    assert problem.message == "expected UTF-8 text, found byte 0xE9 at byte 22"
    assert problem.help == "the byte would be `é` in Latin-1: save the file as UTF-8"
    assert places([problem]) == [("A101", 2, 8)]
    path.write_bytes(b"a\xf0\x9f")
    assert places([problem_of_file(path)]) == [("A101", 1, 2)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be", "utf-16-le"])
def test_wide_encodings_are_recognised(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "wide.attn"
    path.write_bytes("attention a { attend full }".encode(encoding))
    with pytest.raises(SpecError) as caught:
        read_source(path)
    first = caught.value.diagnostics[0]
    assert first.code == ("A102" if encoding[-1] == "e" else "A101")
    assert encoding[:6].upper() in f"{first.message} {first.help}"
    assert "UTF-8" in (first.help or "")


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "no.attn", tmp_path / "no" / "no.attn", tmp_path / "file" / "x"):
        problem = problem_of_file(path)
        assert (problem.code, problem.span) == ("A180", None)
        assert str(path) in problem.message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads every file")
def test_files_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.attn"
    path.touch(mode=0)
    assert problem_of_file(path).code == "A181"


def test_permission_errors_have_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.attn"
    path.touch()

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    assert problem_of_file(path).code == "A181"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    found = {
        tmp_path: "a directory",
        link: "a directory",
        pipe: "a named pipe",
        Path("/dev/zero"): "a device",
    }
    start = time.monotonic()
    for path, words in found.items():
        problem = problem_of_file(path)
        assert problem.code == "A182"
        assert problem.message.endswith(f"is {words}")
    assert time.monotonic() - start < 1


def test_a_pipe_that_takes_the_place_of_a_file_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    status = os.stat(file)
    monkeypatch.setattr(os, "stat", lambda _: status)
    assert problem_of_file(pipe).code == "A182"


def test_other_failures_of_the_system(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, "x" * 5000, "a\0b"):
        assert problem_of_file(path).code == "A183"


# --- sizes -------------------------------------------------------------------------------------


def test_the_largest_text_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "large.attn"
    path.write_bytes(b"#" * LIMITS.text_size)
    assert len(read_source(path).text) == LIMITS.text_size
    assert len(source_of("#" * LIMITS.text_size).text) == LIMITS.text_size
    path.write_bytes(b"#" * (LIMITS.text_size + 1))
    assert problem_of_file(path).code == "A190"
    assert [p.code for p in problems_of("#" * (LIMITS.text_size + 1))] == ["A190"]
    # the limit is in bytes
    assert [p.code for p in problems_of("#" + "é" * (LIMITS.text_size // 2))] == ["A190"]


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.attn"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    start = time.monotonic()
    problem = problem_of_file(path)
    assert time.monotonic() - start < 0.5
    assert problem.code == "A190"
    assert f"{1 << 40:,}" in problem.message


def test_a_file_that_hides_its_size_is_read_no_further_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, small = tmp_path / "grows.attn", tmp_path / "small"
    path.write_bytes(b"#" * (LIMITS.text_size + 1))
    small.touch()
    status = os.stat(small)
    monkeypatch.setattr(os, "fstat", lambda _: status)
    assert problem_of_file(path).code == "A190"


# --- characters --------------------------------------------------------------------------------

EVERYWHERE = {
    "\0": "A102",
    "\x07": "A102",
    "\x0b": "A102",
    "\x0c": "A102",
    "\x7f": "A102",
    "\x85": "A102",
    "\u2028": "A102",
    "\u2029": "A102",
    "\ud800": "A102",
    "\U000e0041": "A102",
    **dict.fromkeys(
        "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", "A103"
    ),
}
OUTSIDE_COMMENTS = dict.fromkeys(
    "\u00a0\u00ad\u2003\u200b\u200c\u200d\u202f\u2060\u3000\ufeff", "A104"
)
OUTSIDE_PROSE = {
    **dict.fromkeys(
        "\u2212\u2013\u2014\uff11\u201c\u2264\u00d7\u2026\uff1d\u0430\u043e\u03bf", "A105"
    ),
    **dict.fromkeys("\u00e9\u00df\u0431\u4e2d\u03b1\u00b2\u2713\u20ac\U0001f600", "A106"),
}


@pytest.mark.parametrize("character", [*EVERYWHERE, *OUTSIDE_COMMENTS, *OUTSIDE_PROSE], ids=ascii)
def test_each_character_is_named_at_its_place(character: str) -> None:
    code = (EVERYWHERE | OUTSIDE_COMMENTS | OUTSIDE_PROSE)[character]
    (problem,) = problems_of(f"attention a {{\n\tattend x{character} }}")
    assert places([problem]) == [(code, 2, 10)]
    assert problem.span is not None
    assert problem.span.text == character
    assert f"U+{ord(character):04X}" in problem.message
    assert unicodedata.name(character, "") in problem.message
    in_comment = f"attention a {{ }} # {character} é ok"
    in_string = f'from "{character}" import x'
    if character in OUTSIDE_PROSE:
        assert source_of(in_comment).text == in_comment
        assert source_of(in_string).text == in_string
    else:
        assert places(problems_of(in_string)) == [(code, 1, 7)]
    if character in OUTSIDE_COMMENTS:
        assert source_of(in_comment).text == in_comment
    elif character in EVERYWHERE:
        assert places(problems_of(in_comment)) == [(code, 1, 19)]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("1 \u2212 2", "did you mean `-`?"),
        ("r = \uff11\uff12", "did you mean `12`?"),
        ("a \u2264 b", "did you mean `<=`?"),
        ("\u201cx\u201c", 'did you mean `"`?'),
        ("r\u0430dius", "did you mean `a`?"),
        ("0\u20265", "did you mean `..`?"),
        ("x\u00a0y", "write a plain space"),
        ("x\u200by", "delete it"),
    ],
)
def test_what_was_meant(text: str, advice: str) -> None:
    assert problems_of(text)[0].help == advice


def test_a_foreign_word_is_one_problem() -> None:
    (problem,) = problems_of("let r\u0430\u0434ius_\u0438x = 3")
    assert problem.span is not None
    assert problem.span.text == "\u0430\u0434ius_\u0438"
    assert problem.code == "A106"


def test_independent_problems_come_together() -> None:
    found = places(problems_of("\0a\n# \u202e é\nb \u2212 \u00e9\n\u200b# \u200b"))
    assert found == [("A102", 1, 1), ("A103", 2, 3), ("A105", 3, 3), ("A106", 3, 5), ("A104", 4, 1)]
    assert len(problems_of("é " * 5000)) == LIMITS.problems


def test_tabs_and_line_ends_are_allowed() -> None:
    assert source_of("a\t{\n\t}\r\n\r").text == "a\t{\n\t}\n\n"


def test_any_damage_to_a_file_is_read_or_explained(tmp_path: Path) -> None:
    chance = random.Random(1)
    path = tmp_path / "damaged.attn"
    outcomes = set()
    for _ in range(300):
        data = bytearray(chance.choice(list(TEXTS.values())).encode("utf-8"))
        for _ in range(chance.randint(0, 3)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        path.write_bytes(data)
        try:
            read_source(path)
        except SpecError as error:
            outcomes |= {problem.code for problem in error.diagnostics}
        else:
            outcomes.add("read")
    assert {"read", "A101", "A102"} <= outcomes
