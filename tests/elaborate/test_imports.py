"""Imports: what is loaded, what is refused, and that nothing outside the folder is opened."""

from __future__ import annotations

import os
import sys
from contextlib import chdir
from itertools import pairwise
from pathlib import Path

import pytest
from goldens import Golden

from attnspec import Spec, load, parse
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import Diagnostic, SpecError

RING = "graph ring(r) = window(radius = r)\n"
MAIN = "attention a { attend ring(1) }\n"
READS_RING = f'from "b.attn" import ring\n{MAIN}'


def written(folder: Path, **files: str) -> Path:
    """Files by their names, `_` for `/`, without `.attn`; the path of `a.attn`."""
    for name, text in files.items():
        path = folder / f"{name.replace('_', '/')}.attn"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "a.attn"


def refused(path: Path) -> list[Diagnostic]:
    with pytest.raises(SpecError) as caught:
        load(path)
    return list(caught.value.diagnostics)


def placed(path: Path) -> list[tuple[str, str, int]]:
    """The code, the file and the line of each error."""
    return [
        (d.code, d.span.source.name.removeprefix(f"{path.parent}/"), d.span.line)
        for d in refused(path)
        if d.span
    ]


def codes(path: Path) -> list[str]:
    return [d.code for d in refused(path)]


def stands_alone(spec: Spec) -> bool:
    """Whether the spec's source says the same without any file."""
    again = parse(spec.source)
    return again == spec and again.fingerprint == spec.fingerprint and again.source == spec.source


LOADED = {
    "of another file": (
        dict(a=f'from "b.attn" import ring, other\n{MAIN}', b=f"{RING}graph other = full"),
        "window(radius = 1)",
    ),
    "folders below and back": (
        dict(
            a=f'from "sub/b.attn" import ring\n{MAIN}',
            sub_b='from "../c.attn" import inner\ngraph ring(r) = inner(r) | self\n',
            c='from "sub/deep/../d.attn" import d\ngraph inner(r) = d & window(radius = r)\n',
            sub_d="graph d = causal\n",
            sub_deep_e="",
        ),
        "causal & window(radius = 1)",
    ),
    "a diamond": (
        dict(
            a='from "b.attn" import b\nfrom "c.attn" import c\nattention a { attend b | c }',
            b='from "d.attn" import d\ngraph b = d',
            c='from "sub/../d.attn" import d\ngraph c = transpose(d)',
            d="graph d = causal",
            sub_x="",
        ),
        "full",
    ),
    "imported further": (
        dict(
            a=READS_RING,
            b='from "c.attn" import ring\n',
            c=RING + "attention not_this_one { attend nonsense }",
        ),
        "window(radius = 1)",
    ),
    "names of its own file": (
        dict(
            a='from "b.attn" import outer\ngraph inner = full\n'
            "attention a { attend outer & inner }",
            b="graph inner = causal\ngraph outer = inner | where(q - k == -1)\n",
        ),
        "causal | where(q - k == -1)",
    ),
    "new names are not taken by others": (
        dict(
            a='from "b.attn" import left\ngraph g = self\ngraph g_3(g_4) = g_4\n'
            "attention a { let g_2 = causal attend g & g_2 | g_3(self) & left }",
            b="graph g = full\ngraph left = g & g\n",
        ),
        "self",
    ),
    "long names": (
        dict(
            a=f'from "b.attn" import left\ngraph {"g" * 64} = self\n'
            f"attention a {{ attend {'g' * 64} | left }}",
            b=f"graph {'g' * 64} = causal\ngraph left = {'g' * 64}\n",
        ),
        "causal",
    ),
    "the name of a foreign graph": (
        dict(
            a='from "b.attn" import left\nattention inner { attend left }',
            b="graph inner = causal\ngraph left = inner",
        ),
        "causal",
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_graphs_come_from_other_files(name: str, tmp_path: Path) -> None:
    files, meant = LOADED[name]
    spec = load(written(tmp_path, **files))
    assert (spec.mask(7) == parse(f"attention a {{ attend {meant} }}").mask(7)).all()
    assert stands_alone(spec)
    assert "import" not in spec.source


def test_where_the_command_is_started_does_not_matter(tmp_path: Path) -> None:
    written(tmp_path, sub_a=READS_RING, sub_b=RING)
    with chdir(tmp_path):
        from_above = load("sub/a.attn")
    with chdir(tmp_path / "sub"):
        assert load("a.attn") == load(Path("a.attn")) == from_above


def test_graphs_of_one_name_from_two_files(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=(
            'from "b.attn" import left\nfrom "c.attn" import right\n'
            "graph ring(r) = self\n"
            "attention a(g = ring(1)) { heads 4 let h = ring(2) attend g"
            " head 1 { attend left(2) } head 2 { attend right(3, 1) }"
            " head 3 { attend h & left(1) }"
            " require ring(1) subset left(1) at n = 9 require left(2) == left(2) }"
        ),
        b="graph ring(r) = window(radius = r)\ngraph left(ring) = ring_of(ring)\n"
        "graph ring_of(r) = ring(r)\n",
        c="graph ring(r, b) = dilated(radius = r, step = b)\n"
        "graph right(r, b, x = ring(r, b)) = transpose(x) | ring(1, b)\n",
    )
    spec = load(path)
    assert spec.check() == []
    assert stands_alone(spec)
    assert [int(spec.mask(9, head=head)[4].sum()) for head in range(4)] == [1, 5, 7, 1]
    assert load(path, g="left(1)").mask(9)[4].sum() == 3
    assert stands_alone(load(path, g="left(1) | ring(0)"))


def test_options_and_figures_are_no_graphs(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=(
            'from "b.attn" import x, y\nfrom "c.attn" import z\n'
            "attention a { heads 2 attend x | z normalize relu"
            " head 1 { attend (x | y) + linear(feature = elu1) normalize softmax }"
            " require depth <= 4 require (depth) <= 4 require y subset x }"
        ),
        b="graph relu = causal\ngraph depth = self\ngraph elu1 = self\n"
        "graph x = relu\ngraph y = depth & elu1",
        c="graph relu = self\ngraph depth = full\ngraph elu1 = self\ngraph z = relu | depth | elu1",
    )
    spec = load(path)
    assert stands_alone(spec)
    assert spec.program.attend(0, 0).normalize == "relu"
    assert "linear(feature = elu1)" in spec.source


REFUSED = {
    "two files": dict(a='from "c.attn" import ring\n' + READS_RING, b=RING, c=RING),
    "the file itself": dict(a="graph ring(r) = full\n" + READS_RING, b=RING),
    "twice": dict(a='from "b.attn" import ring\n' + READS_RING, b=RING),
    "in one import": dict(a=f'from "b.attn" import ring, ring\n{MAIN}', b=RING),
    "another name": dict(a=f'from "b.attn" import rign\n{MAIN}', b=RING),
    "an attention": dict(a=f'from "b.attn" import b, ring\n{MAIN}', b=RING + "attention b { }"),
    "itself": dict(a=f'from "a.attn" import ring\n{MAIN}'),
    "a cycle": dict(
        a=READS_RING, b='from "sub/c.attn" import ring\n', sub_c='from "../b.attn" import ring\n'
    ),
    "a mistake": dict(
        a=f'from "sub/b.attn" import ring\n{MAIN}',
        sub_b="# a comment\ngraph ring(r) =\n    windw(radius = r)\n",
    ),
    "several files": dict(
        a='from "b.attn" import b\nfrom "c.attn" import c\nfrom "d.attn" import d\n'
        "attention a { attend b | c | d | windw }",
        b="graph b = nonsense",
        c="graph c = @",
    ),
    "a missing one": dict(a=READS_RING, b='from "missing.attn" import ring\n'),
    "many times a wrong one": dict(
        a="".join(f'from "b.attn" import g{i}\n' for i in range(2000))
        + "attention a { attend g1 }",
        b="graph @",
    ),
}
"""What each is refused with, and where, stands in the approved file."""


def test_wrong_imports_are_shown_in_their_files(tmp_path: Path, golden: Golden) -> None:
    shown = []
    for name, files in REFUSED.items():
        path = written(tmp_path / name.replace(" ", ""), **files)
        shown += [f"# {name}", *(str(d).replace(f"{path.parent}/", "") for d in refused(path))]
    golden("\n".join(shown) + "\n")


def test_a_text_imports_nothing(tmp_path: Path) -> None:
    written(tmp_path, b=RING)
    with chdir(tmp_path), pytest.raises(SpecError) as caught:
        parse(READS_RING)
    assert [d.code for d in caught.value.diagnostics] == ["A501"]


def chain(folder: Path, length: int) -> Path:
    names = ["a", *(f"f{i}" for i in range(length))]
    for name, target in pairwise(names):
        text = MAIN if name == "a" else ""
        written(folder, **{name: f'from "{target}.attn" import ring\n{text}'})
    return written(folder, **{names[-1]: RING})


def fan(folder: Path, width: int) -> Path:
    for index in range(width):
        written(folder, **{f"f{index}": f"graph g{index} = self\n"})
    imports = "".join(f'from "f{index}.attn" import g{index}\n' for index in range(width))
    return written(folder, a=f"{imports}attention a {{ attend g{width - 1} }}\n")


def test_depth_and_number_of_files_are_bounded(tmp_path: Path) -> None:
    assert load(chain(tmp_path, LIMITS.files_deep - 1)).mask(3).sum() == 7
    assert codes(chain(tmp_path, LIMITS.files_deep)) == ["A195"]
    assert codes(chain(tmp_path, 1000)) == ["A195"]
    assert load(fan(tmp_path, LIMITS.files)).mask(3).sum() == 3
    assert set(codes(fan(tmp_path, LIMITS.files + 50))) == {"A195"}


@pytest.mark.parametrize(
    ("code", "paths"),
    [
        ("A502", [""]),
        (
            "A503",
            [
                *("/etc/passwd", "/dev/zero", "//server/share/x.attn", "\\\\server\\share\\x.attn"),
                *("C:\\x.attn", "c:/x.attn", "c:x.attn", "sub\\x.attn", "~/x.attn", "~root/x.attn"),
                *("file:x.attn", "file:///etc/passwd", "https://example.org/x.attn"),
            ],
        ),
        ("A504", ["../secret.attn", "sub/../../secret.attn", "./../a/../../secret.attn"]),
        (
            "A509",
            [
                *(".", "sub", "sub/", "missing.attn", "missing/x.attn", "a.attn/x.attn"),
                *("a" * 300, "a" * 5000, "a/" * 3000, "$HOME/x.attn", "{{x}}.attn"),
            ],
        ),
    ],
)
def test_paths_that_are_refused(code: str, paths: list[str], tmp_path: Path) -> None:
    (tmp_path / "secret.attn").write_text("graph ring(r) = full\n", encoding="utf-8")
    for imported in paths:
        path = written(tmp_path / "tree", a=f'from "{imported}" import ring\n{MAIN}', sub_x=RING)
        (found,) = refused(path)
        assert (found.code, found.span and found.span.column) == (code, 6), imported


def test_links_inside_the_tree_are_followed_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "secret.attn").write_text("graph ring(r) = full\n", encoding="utf-8")
    path = written(tmp_path / "tree", a=f'from "link.attn" import ring\n{MAIN}', sub_b=RING)
    link = tmp_path / "tree" / "link.attn"
    for target, expected in (
        (path, {"A505"}),
        (tmp_path / "secret.attn", {"A504"}),
        (Path("/dev/zero"), {"A504"}),
        (Path("../secret.attn"), {"A504"}),
        (link, {"A502", "A509"}),
    ):
        link.symlink_to(target)
        assert {*codes(path)} <= expected, target
        link.unlink()
    link.symlink_to(tmp_path / "tree" / "sub" / "b.attn")
    assert load(path).mask(3).sum() == 7
    (tmp_path / "tree" / "out").symlink_to(tmp_path)
    path = written(tmp_path / "tree", a=f'from "out/secret.attn" import ring\n{MAIN}')
    assert codes(path) == ["A504"]


def test_a_link_to_the_main_file_keeps_its_folder(tmp_path: Path) -> None:
    written(tmp_path / "real", a=READS_RING, b="graph ring(r) = full")
    other = tmp_path / "other"
    written(other, b=RING)
    (other / "link.attn").symlink_to(tmp_path / "real" / "a.attn")
    assert load(other / "link.attn").mask(3).sum() == 7
    assert load(tmp_path / "real" / "a.attn").mask(3).sum() == 9


def test_pipes_and_large_files_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, a=READS_RING, b=RING)
    os.truncate(tmp_path / "b.attn", 1 << 30)
    assert codes(path) == ["A509"]
    (tmp_path / "b.attn").write_bytes(b"graph ring(r) = full # \xff")
    assert placed(path) == [("A101", "b.attn", 1)]
    (tmp_path / "b.attn").unlink()
    # another case is another file
    (tmp_path / "B.attn").write_text(RING)
    assert codes(path) in (["A508"], ["A509"])
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "b.attn")
        assert codes(path) == ["A509"]
