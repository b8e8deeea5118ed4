"""Bad texts: what each must be answered, exactly; and that damage is always answered."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zoo

from attnspec.spec import Spec, load, parse
from attnspec.text.diagnostics import AttnSpecError, Diagnostic, SpecError

Found = tuple[str, int | None, int | None]
"""Code, line and column of a message; no place where it is about a whole file."""


def said(text: str) -> list[Diagnostic]:
    """Everything that the compiler says of a text, errors or else the results of `check`."""
    try:
        spec = parse(text)
    except SpecError as error:
        return list(error.diagnostics)
    return spec.check()


def placed(diagnostics: list[Diagnostic]) -> list[Found]:
    return [
        (d.code, None, None) if d.span is None else (d.code, d.span.line, d.span.column)
        for d in diagnostics
    ]


@dataclass(frozen=True)
class Row:
    """A text of one row of the list of bad inputs, and what is said of it.

    The text is the body of an attention unless it is `whole`. `»` in it marks where a message must
    point, once for each of `codes`; `words` must stand in the messages.
    """

    number: int
    text: str
    codes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    whole: bool = field(default=False, kw_only=True)

    @property
    def marked(self) -> str:
        return self.text if self.whole else f"attention a {{ {self.text} }}"

    @property
    def clean(self) -> str:
        return self.marked.replace("»", "")

    def expected(self) -> list[Found]:
        places: list[Found] = []
        for index, match in enumerate(re.finditer("»", self.marked)):
            before = self.marked[: match.start()].replace("»", "")
            before = before.replace("\r\n", "\n").replace("\r", "\n")
            line = before.count("\n") + 1
            places.append((self.codes[index], line, len(before) - before.rfind("\n")))
        places += [(code, None, None) for code in self.codes[len(places) :]]
        return places


def attend(number: int, text: str, *rest: object, **keywords: object) -> Row:
    return Row(number, f"attend {text}", *rest, **keywords)  # type: ignore[arg-type]


def radius(number: int, text: str, *rest: object) -> Row:
    return Row(number, f"attend window(radius = {text})", *rest)  # type: ignore[arg-type]


ROWS = [
    Row(1, "»", ("A130",), ("no attention defined", "an empty file"), whole=True),
    Row(1, "»graph g = full", ("A213",), ("no attention defined",), whole=True),
    Row(2, "»# nothing\n\n \t # here\n", ("A130",), ("only comments",), whole=True),
    Row(2, "»\n\n", ("A130",), ("no attention defined",), whole=True),
    # 3: files, below
    Row(4, "\ufeffattention a { attend full }", whole=True),
    attend(5, "»\0full", ("A102",), ("U+0000",)),
    Row(6, "attention a {\r# c\rattend »ful\r}\r", ("A201",), ("`full`",), whole=True),
    Row(6, "attention a {\r\n# c\r\nattend »ful\r\n}", ("A201",), ("`full`",), whole=True),
    attend(7, "\t full"),
    attend(7, "»\u00a0full", ("A104",), ("U+00A0 NO-BREAK SPACE",)),
    attend(7, "fu»\u200bll", ("A104",), ("U+200B ZERO WIDTH SPACE",)),
    Row(8, "attention a { attend full } # »\u202ex", ("A103",), ("U+202E",), whole=True),
    Row(8, 'from "»\u2066x" import g attention a { attend g }', ("A103",), whole=True),
    Row(9, "scale »\u22121 attend full", ("A105",), ("did you mean `-`?",)),
    Row(10, "attention »\u0430b { attend full }", ("A105",), ("CYRILLIC", "`a`"), whole=True),
    Row(10, "let gr»\u00f6\u00dfe = 1 attend full", ("A106",), ("a to z",)),
    radius(11, "»\uff11\uff12", ("A105",), ("`12`",)),
    radius(11, "1_024"),
    radius(11, "»1__0", ("A110",), ("`10`",)),
    radius(11, "»1_", ("A110",)),
    radius(11, "»0x10", ("A110",), ("write `16`",)),
    radius(11, "»007", ("A110",), ("write `7`",)),
    radius(11, "»1.", ("A110",)),
    radius(11, "»1k", ("A110",)),
    radius(11, "»1e400", ("A112",), ("1.8e308",)),
    radius(11, "»nan", ("A201",)),
    radius(11, "»inf", ("A201",)),
    radius(12, "»" + "9" * 5000, ("A111",), ("5,000 digits",)),
    radius(13, "»-1", ("A306",), ("at least 0", "-1")),
    attend(13, "window(before = »-1, after = »-2)", ("A306", "A306"), ("`before`", "`after`")),
    attend(13, "residue(step = »0)", ("A306",), ("at least 1",)),
    attend(13, "strided(stride = »0)", ("A306",)),
    attend(13, "dilated(radius = 4, step = »0)", ("A306",)),
    attend(13, "block(size = »0)", ("A306",)),
    attend(13, "random_blocks(size = »0, blocks = »-1)", ("A306", "A306")),
    attend(13, "powers(base = »1)", ("A306",), ("at least 2",)),
    attend(13, "expander(degree = »3)", ("A306",), ("even",)),
    attend(13, "summary(stride = »0, cells = 1)", ("A306",)),
    attend(13, "fixed(stride = 4, cells = »0)", ("A306",)),
    attend(13, "global(first(»-1))", ("A306",)),
    attend(13, "global(every(»0))", ("A306",)),
    radius(14, "»2.5", ("A305",), ("2.5",)),
    radius(14, "»4.0", ("A305",), ("`//`",)),
    radius(14, "»8 / 2", ("A305",)),
    radius(14, "»1e3", ("A305",)),
    radius(14, "»true", ("A305",), ("a boolean",)),
    radius(14, "abs(»1 < 2)", ("A314",), ("`abs` works on numbers",)),
    attend(15, "sinkhorn(size = 4, temperature = »0)", ("A306",), ("above 0",)),
    attend(15, "sinkhorn(size = 4, temperature = »-0.5)", ("A306",)),
    attend(15, "sinkhorn(size = 4, temperature = »nan)", ("A201",)),
    attend(15, "rbf(sigma = »0)", ("A306",)),
    Row(16, "attention a { attend full»", ("A120",), ("`}` to close the `{`",), whole=True),
    Row(16, "attention a { attend self(3 »}", ("A120",), ("`)` to close the `(`",), whole=True),
    Row(16, "attention a { attend full } »}", ("A121",), ("without a `{`",), whole=True),
    attend(16, "full»)", ("A121",), ("without a `(`",)),
    attend(16, "where(q in {1, 2») ", ("A120",), ("`}` to close the `{`",)),
    attend(16, "where(q in {1, 2») | window(radius = 2)\n", ("A120",)),
    Row(
        16,
        "attention a { heads 2\nattend where(q in {1, 2»)\nhead 0 { attend self }\n»causl\n}",
        ("A120", "A132"),
        ("`}` to close the `{`", "did you mean `causal`?"),
        whole=True,
    ),
    Row(16, 'from "x import g»\nattention a { attend g }', ("A113",), whole=True),
    Row(17, "attention»", ("A142",), ("expected a name", "the end of the file"), whole=True),
    Row(17, "attention a { attend»", ("A142",), ("expected an expression",), whole=True),
    Row(17, "graph g(r) =»", ("A142",), ("expected an expression",), whole=True),
    Row(17, "from»", ("A142",), ("a file path",), whole=True),
    attend(18, "(" * 63 + "»" + "(" * 99_937 + "full" + ")" * 100_000, ("A191",), ("64",)),
    attend(19, "~" * 65 + "»" + "~" * 1935 + "full", ("A191",)),
    attend(19, f"global(»{' | '.join(f'positions({i})' for i in range(2000))})", ("A196",)),
    attend(19, " | ".join(["self"] * 2000)),
    radius(19, "»" + " + ".join(["n"] * 2000), ("A197",), ("100",)),
    attend(20, "|".join(["full"] * 1_000_000), ("A190",), ("1,048,576 bytes",)),
    attend(20, "full|" * 19_998 + "»" + "full|" * 9 + "full", ("A192",), ("40,000",)),
    Row(21, "attend " + "f" * 10_000_000, ("A190",)),
    Row(22, "attention a { attend full } #" + "x" * 20_000_000, ("A190",), whole=True),
    Row(22, " " * 20_000_000, ("A190",), whole=True),
    Row(23, "let r = 1 let »r = 2 attend window(radius = r)", ("A203",), ("`r`",)),
    Row(23, "input r: ids let »r = 1 attend window(radius = r)", ("A203",)),
    Row(23, "attention a(r = 1, »r = 2) { attend window(radius = r) }", ("A203",), whole=True),
    Row(23, "graph g = full graph »g = self attention a { attend g }", ("A203",), whole=True),
    Row(23, "graph g(r, »r) = full attention a { attend g(1, 2) }", ("A203",), whole=True),
    Row(23, "attention a { attend full } attention »a { attend self }", ("A203",), whole=True),
    attend(24, "»windwo(radius = 3)", ("A201",), ("did you mean `window`?",)),
    attend(24, "»sliding(radius = 3)", ("A201",), ("did you mean `window`?",)),
    attend(24, "»performer()", ("A201",), ("did you mean `favor`?",)),
    attend(29, "window(»size = 512)", ("A302",), ("keeps 1025 keys", "keeps the last 512")),
    Row(24, "let radius = 3 attend window(radius = »raduis)", ("A201",), ("`radius`",)),
    radius(24, "»m", ("A201",), ("`m` is not defined",)),
    attend(24, "where(»i - »j < 3)", ("A201", "A201"), ("`q` is the position of the query",)),
    attend(16, "where(»|q - k| <= 3)", ("A133",), ("`abs(…)`",)),
    attend(16, "window(radius = 1)», global(first(1))", ("A132",), ("`|` is the union",)),
    attend(16, "full causal»() ", ("A132",), ("`causal` alone",)),
    Row(16, "heads »= 8 attend full", ("A133",), ("write `heads 8`",)),
    Row(16, "attention my»-attn { attend full }", ("A134",), ("`my_attn`",), whole=True),
    attend(24, "full »// causal", ("A312",), ("`#` starts a comment",)),
    attend(24, "where(abs(»query - k) < 3)", ("A201",), ("`k` that of the key",)),
    attend(24, "where(»q_idx >= »kv_idx)", ("A201", "A201"), ("`q` is the position",)),
    Row(24, "let N = 3 attend where(q - k < »m)", ("A201",), ("`q` is the position",)),
    attend(24, "where(»row == 3)", ("A201",), ("on a grid write `q.row` or `k.row`",)),
    Row(24, "let size = 3 attend where(q - k < »sice)", ("A201",), ("did you mean `size`?",)),
    Row(
        25,
        "graph a = b | self\ngraph b = »a & full\nattention c { attend a }",
        ("A211",),
        ("a -> b -> a",),
        whole=True,
    ),
    Row(25, "graph a = »a attention c { attend a }", ("A211",), ("a -> a",), whole=True),
    *(
        Row(26, f"attention {name} {{ attend full }}", whole=True)
        for name in ("class", "torch", "__init__", "import", "None", "attention", "_", "self")
    ),
    *(
        Row(
            26,
            f"graph »{name} = full attention a {{ attend full }}",
            ("A202",),
            (name,),
            whole=True,
        )
        for name in ("self", "full", "n", "isqrt", "linear", "transpose", "first", "head")
    ),
    Row(26, "let class = 1 let __import__ = class attend window(radius = __import__)"),
    Row(26, "let »n = 1 attend full", ("A204",), ("`n`",)),
    Row(26, "let isqrt = 1 attend window(radius = isqrt)"),
    Row(27, 'attention a { attend full } # x"; import os; os.system("x") """', whole=True),
    attend(27, '"x"»; import os', ("A137",)),
    attend(27, "__import__(»'os')", ("A114",)),
    attend(27, "where(»q.__class__ == k)", ("A208",)),
    Row(27, 'from "x"»; import os\nattention a { attend full }', ("A137",), whole=True),
    Row(28, "attention a { attend full } # {{7*7}} {% include 'x' %}", whole=True),
    attend(28, "»{{7*7}}", ("A141",)),
    Row(28, "»{% include %} attend full", ("A132",)),
    attend(29, "window(radius = 3, »radius = 4)", ("A304",), ("`radius` is given twice",)),
    attend(29, "global(every(offset = 1, »3))", ("A304",), ("`offset` is given twice",)),
    attend(29, "window(radius = 3, »width = 4)", ("A302",), ("`before`", "`after`")),
    attend(29, "»window()", ("A303",), ("window(radius = …)",)),
    attend(29, "»window(before = 3)", ("A303",), ("needs `after` as well",)),
    attend(29, "»window(radius = 3, before = 1, after = 0)", ("A303",)),
    attend(29, "»residue()", ("A303",), ("`step`",)),
    attend(29, "window(radius = »full)", ("A310",), ("must be a number, got a graph",)),
    attend(29, "global(»3)", ("A310",), ("token set",)),
    attend(29, "same(»3)", ("A313",), ("input x: ids",)),
    attend(29, "where(»3)", ("A314",), ("a comparison",)),
    attend(29, "linear(feature = »3)", ("A309",), ("elu1, relu",)),
    attend(29, "random(keys = 2, per_head = »3)", ("A306",), ("true or false",)),
    attend(29, "full(»3)", ("A302",), ("no arguments",)),
    attend(30, "window(»512)", ("A301",), ("1025 keys", "before = 511, after = 0")),
    attend(30, "random(»4, seed = 1)", ("A301",), ("write `keys = …`",)),
    attend(30, "global(first(1), »last(1))", ("A302",), ("at most one argument",)),
    attend(30, "random(seed = 1, keys = 4,)"),
    attend(30, "global(every(3, offset = 1))"),
    attend(30, "global(tokens = first(count = 1))"),
    attend(30, "window(before = 3 »after = 0)", ("A135",), ("write `,`",)),
    attend(30, "window(radius »3)", ("A136",), ("radius = 3",)),
    attend(30, "window(»,)", ("A133",)),
    Row(31, "»attend window(radius = 1) - window(radius = 1)", ("A902",), ("no pairs",)),
    Row(31, "»attend self & where(q < k)", ("A902",)),
    Row(32, "causal »attend where(k > q)", ("A902",), ("no pairs",)),
    Row(
        32,
        "causal »attend window(before = 8, after = 0) - window(before = 3, after = 0)",
        ("A901",),
        ("4 of 1024 queries have no key: 0, 1, 2, 3",),
    ),
    Row(33, "»attend window(radius = 2) - rows(positions(5))", ("A901",), ("no key: 5",)),
    Row(34, "causal »normalize relu attend linear()", ("A705",), ("`linear`",)),
    Row(34, "causal attend »fourier()", ("A704",), ("no causal form",)),
    attend(34, "lsh(buckets = 4) »| linear()", ("A701",), ("a graph and a mechanism",)),
    attend(34, "linear() »| window(radius = 3)", ("A701",), ("`GRAPH + MECHANISM` has",)),
    attend(34, "linear() »& causal", ("A701",), ("`causal` before `attend`",)),
    attend(34, "linear() »+ favor()", ("A701",), ("`head 0 {",)),
    Row(34, "causal »causal attend full", ("A406",), ("said twice",)),
    Row(34, "attend linear() »attend full", ("A404",), ("same depth",)),
    Row(35, "attend self | self | window(radius = 0) require edges == n"),
    Row(35, "»require edges == 2 * n at n = 7 attend self | self", ("A606",), ("edges are 7",)),
    Row(36, "heads »0 attend full", ("A306",), ("between 1 and 4,096",)),
    Row(36, "heads »-1 attend full", ("A306",)),
    Row(36, "heads »2.0 attend full", ("A305",)),
    Row(36, "heads »n attend full", ("A315",)),
    Row(36, "heads 2 attend self head »2 { attend full }", ("A402",), ("between 0 and 1",)),
    Row(36, "heads 2 attend self head »-1 { attend full }", ("A402",)),
    Row(
        36,
        "attention »a { heads 3 head 1 { attend full } }",
        ("A408",),
        ("head 0, 2",),
        whole=True,
    ),
    attend(37, "global(positions(»-1))", ("A306",), ("`last(c)`",)),
    attend(37, "global(positions(»5..2))", ("A307",), ("5..2",)),
    attend(37, "global(positions(3, 3, 2..4, 100000))"),
    Row(38, "attend random(keys = 100000) require edges == n * n"),
    Row(38, "»attend random(keys = 0)", ("A902",)),
    attend(38, "random(keys = 2, seed = »-1)", ("A306",), ("at least 0",)),
    attend(38, "random(keys = 2, seed = »18446744073709551616)", ("A111",)),
    attend(38, "random(keys = 2, seed = »2 ** 64)", ("A308",), ("2**62",)),
    attend(38, "random(keys = 2, seed = »2.0)", ("A305",)),
    Row(38, "require random(keys = 2) == random(keys = 2, seed = 0) attend self"),
    attend(39, "lsh(buckets = »0)", ("A306",), ("at least 2",)),
    attend(39, "lsh(buckets = »3)", ("A306",), ("even",)),
    attend(39, "lsh(buckets = 4, rounds = »0)", ("A306",)),
    attend(39, "lsh(buckets = 1_000_000_000)"),
    attend(40, "linformer(rank = »0)", ("A306",)),
    attend(40, "linformer(rank = 100000)"),
    attend(40, "linear(feature = »tanh)", ("A309",), ("elu1, relu, squared_relu, exp, identity",)),
    attend(40, "favor(features = »0)", ("A306",)),
    attend(41, "dilated(radius = 1_000_000, step = 1000)"),
    Row(41, "attend dilated(radius = 2 ** 62, step = 2 ** 62) require degree == 1"),
    attend(42, "residue(step = »10 // (n - 64))", ("A320",), ("got 0 at n = 1024",)),
    Row(42, "»attend where(q // (k - k) == 1)", ("A320",), ("division by zero",)),
    radius(42, "»n / 3", ("A305",), ("an integer",)),
    radius(42, "»7 // (2 - 2)", ("A308",), ("division by zero",)),
    radius(43, "2 ** 62"),
    radius(43, "»2 ** 62 + 1", ("A308",), ("above 2**62",)),
    radius(43, "»9_223_372_036_854_775_807", ("A308",)),
    radius(43, "»3 * 2 ** 61", ("A308",)),
    radius(43, "»2 ** 1_000_000_000", ("A308",)),
    radius(43, "»10.0 ** 400", ("A308",)),
    Row(44, "»Attention a { attend full }", ("A131",), ("`attention`?",), whole=True),
    Row(44, "»Attend full", ("A132",), ("`attend`?",)),
    attend(44, "»Full", ("A201",), ("`full`?",)),
    attend(44, "»Window(radius = 3)", ("A201",), ("`window`?",)),
    attend(44, "window(»Radius = 3)", ("A302",), ("`radius`?",)),
    radius(44, "»N", ("A201",), ("`n`?",)),
    attend(44, "full normalize »Softmax", ("A309",), ("`softmax`?",)),
    attend(44, "full score »Alibi()", ("A317",), ("`alibi`?",)),
    attend(44, "full require »Causal", ("A601",), ("`causal`?",)),
    attend(44, "random(keys = 2, per_head = »True)", ("A201",), ("`true`?",)),
    Row(44, "input x: »Tokens attend global(x)", ("A212",), ("`tokens`?",)),
    Row(44, "heads 2 attend self head »EVEN { attend full }", ("A201",), ("`even`?",)),
    Row(45, "»attnspec 2\nattention a { attend full }", ("A131",), whole=True),
    Row(45, "»version 2\nattention a { attend full }", ("A131",), whole=True),
    # 46 to 48: files, below and in test_imports.py
]

SLOW = {18, 19, 20, 21, 22}
"""Rows about limits: seconds, where the limit itself is one."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.number))
def test_a_bad_text_is_answered(row: Row) -> None:
    started = time.process_time()
    found = said(row.clean)
    assert placed(found) == row.expected()
    shown = "\n".join(str(d) for d in found)
    for word in row.words:
        assert word in shown
    assert time.process_time() - started < (10 if row.number in SLOW else 5)


def test_the_rows_are_complete() -> None:
    assert {row.number for row in ROWS} == set(range(1, 46)) - {3}


def test_other_places_are_shown() -> None:
    def related(text: str) -> list[int]:
        return [span.column for d in said(text) for _, span in d.related]

    assert related("attention a { attend full") == [13]
    assert related("attention a { let r = 1 let r = 2 attend window(radius = r) }") == [19]
    assert related("attention a { attend self attend full }") == [15]
    assert related("attention a { causal attend fourier() }") == [15]
    assert related("attention a { normalize relu attend linear() }") == [37]


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"attention a { attend full } # \xe9t\xe9", "A101", "byte 0xE9 at byte 30"),
        ("\ufeffattention a { attend full }".encode("utf-16-le"), "A101", "UTF-16"),
        (b"attention a { attend full }\xff", "A101", "UTF-8"),
    ],
    ids=["latin", "wide", "byte"],
)
def test_row_3_files_that_are_no_utf8(tmp_path: Path, data: bytes, code: str, words: str) -> None:
    path = tmp_path / "a.attn"
    path.write_bytes(data)
    with pytest.raises(SpecError) as caught:
        load(path)
    assert [d.code for d in caught.value.diagnostics] == [code]
    assert words in str(caught.value)


def test_row_21_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.attn"
    path.touch()
    os.truncate(path, 1 << 30)
    started = time.process_time()
    with pytest.raises(SpecError, match="A190"):
        load(path)
    assert time.process_time() - started < 2


def test_row_42_sizes_are_evaluated_when_n_is_known() -> None:
    spec = parse("attention a { attend residue(step = n - 5) }")
    assert spec.mask(7).sum() == 25
    with pytest.raises(SpecError, match=r"`step` must be at least 1, got -2 at n = 3") as caught:
        spec.mask(3)
    assert placed(list(caught.value.diagnostics)) == [("A320", 1, 37)]


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.attn").write_text(text, encoding="utf-8")
    return folder / "a.attn"


MAIN = "attention a { attend g }"


@pytest.mark.parametrize(
    ("files", "codes"),
    [
        ({"a": f'from "a.attn" import g {MAIN}'}, ["A505"]),
        (
            {
                "a": f'from "b.attn" import g {MAIN}',
                "b": 'from "c.attn" import g graph h = g',
                "c": 'from "b.attn" import h graph g = h',
            },
            ["A505"],
        ),
        (
            {
                "a": 'from "b.attn" import g from "c.attn" import h attention a { attend g | h }',
                "b": 'from "d.attn" import x graph g = x',
                "c": 'from "d.attn" import x graph h = x | self',
                "d": "graph x = full",
            },
            [],
        ),
    ],
    ids=["itself", "cycle", "diamond"],
)
def test_row_46_imports(tmp_path: Path, files: dict[str, str], codes: list[str]) -> None:
    path = written(tmp_path, **files)
    if codes:
        with pytest.raises(SpecError) as caught:
            load(path)
        assert [d.code for d in caught.value.diagnostics] == codes
    else:
        assert load(path).mask(4).all()


@pytest.mark.parametrize(
    ("imported", "code"),
    [
        ("../../etc/passwd", "A504"),
        ("/etc/passwd", "A503"),
        ("C:/x.attn", "A503"),
        ("C:x.attn", "A503"),
        ("~/x.attn", "A503"),
        ("file:///x.attn", "A503"),
        ("http://example.org/x.attn", "A503"),
        ("..\\x.attn", "A503"),
        ("", "A502"),
        (".", "A509"),
        ("folder", "A509"),
        ("missing.attn", "A509"),
        ("x" * 5000, "A509"),
        ("/dev/zero", "A503"),
    ],
)
def test_row_47_paths(tmp_path: Path, imported: str, code: str) -> None:
    (tmp_path / "folder").mkdir()
    path = written(tmp_path, a=f'from "{imported}" import g {MAIN}')
    with pytest.raises(SpecError) as caught:
        load(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.span is not None
    assert diagnostic.span.column == 6


def test_row_48_another_case_is_another_file(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "B.attn" import g {MAIN}', b="graph g = full")
    with pytest.raises(SpecError, match=r"A50[89]"):
        load(path)


# --- damage ------------------------------------------------------------------------------------

TOKEN = re.compile(r"[A-Za-z_]\w*|[0-9][\w.]*|\.\.|//|\*\*|[<>=!]=|\S")

NUMBERS = ("0", "1", "-1", "2", "7", "2.5", "1000000007", "4611686018427387904", "n", "head")

WORDS = ("full", "q", "k", "layer", "true", "first(2)", "window(radius = 1)", "linear()", "x", "}")


def damaged(text: str, draw: random.Random) -> str:
    """The text with one to three words deleted, swapped, doubled or replaced."""
    for _ in range(draw.randint(1, 3)):
        places = [match.span() for match in TOKEN.finditer(text)]
        if not places:
            return text
        first, last = draw.choice(places)
        start, end = draw.choice(places)
        word, other = text[first:last], text[start:end]
        match draw.randrange(6):
            case 0:
                text = f"{text[:first]} {text[last:]}"
            case 1:
                text = f"{text[:last]} {word} {text[last:]}"
            case 2:
                text = f"{text[:first]} {other} {text[last:]}"
            case 3 if last <= start:
                text = f"{text[:first]}{other}{text[last:start]}{word}{text[end:]}"
            case 4:
                text = f"{text[:first]}{draw.choice(WORDS)}{text[last:]}"
            case _:
                numbers = [m.span() for m in re.finditer(r"\b[0-9]+\b", text)]
                if numbers:
                    at, stop = draw.choice(numbers)
                    text = text[:at] + draw.choice(NUMBERS) + text[stop:]
    return text


def stands_in_its_source(diagnostic: Diagnostic) -> bool:
    spans = [diagnostic.span, *(span for _, span in diagnostic.related)]
    return all(s is None or 0 <= s.start <= s.end <= len(s.source.text) for s in spans)


def answer(act: Callable[[], object]) -> Sequence[Diagnostic] | None:
    """The diagnostics with which something is refused, None where it is done."""
    try:
        act()
    except SpecError as error:
        return error.diagnostics
    except AttnSpecError:
        return ()
    return None


def masks(spec: Spec) -> None:
    fixed = [extent for extent in spec.program.grid or () if isinstance(extent, int)]
    n = 16 if len(fixed) < 2 else fixed[0] * fixed[1]
    n = n if n <= 64 else 16
    spec.mask(n, inputs=zoo.sample(spec, n))


@pytest.mark.parametrize(
    "part",
    [*range(1), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))],
)
def test_any_damage_is_compiled_or_explained(part: int) -> None:
    draw = random.Random(part)
    texts = [path.read_text(encoding="utf-8") for path in zoo.FILES]
    good = shown = 0
    for _ in range(300):
        text = damaged(draw.choice(texts), draw)
        specs: list[Spec] = []
        refused = answer(lambda text=text, specs=specs: specs.append(parse(text)))  # type: ignore[misc]
        if refused is not None:
            assert refused
            assert all(stands_in_its_source(d) for d in refused), text
            continue
        (spec,) = specs
        good += 1
        assert parse(spec.source) == spec, text
        refused = answer(lambda spec=spec: masks(spec))  # type: ignore[misc]
        shown += refused is None
        assert all(stands_in_its_source(d) for d in refused or ())
    assert 40 < good < 270
    assert shown > 20


def test_damage_is_checked() -> None:
    draw = random.Random(9)
    texts = [path.read_text(encoding="utf-8") for path in zoo.FILES]
    checked = 0
    while checked < 40:
        try:
            spec = parse(damaged(draw.choice(texts), draw))
        except SpecError:
            continue
        checked += 1
        for diagnostic in spec.check():
            assert stands_in_its_source(diagnostic)
