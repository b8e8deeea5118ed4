"""Imports: what is loaded, what is refused, and that nothing outside the folder is opened."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from attnspec.limits import LIMITS
from attnspec.spec import Spec, load, parse
from attnspec.text.decoding import read_source
from attnspec.text.diagnostics import Diagnostic, SpecError
from attnspec.text.source import Source

RING = "graph ring(r) = window(radius = r)\n"
MAIN = "attention a { attend ring(1) }\n"


def written(folder: Path, **files: str) -> Path:
    """Files by their names, `_` for `/`, without `.attn`; the path of `a.attn`."""
    for name, text in files.items():
        path = folder / f"{name.replace('_', '/')}.attn"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "a.attn"


def refused(path: Path) -> list[Diagnostic]:
    started = time.process_time()
    with pytest.raises(SpecError) as caught:
        load(path)
    assert time.process_time() - started < 10
    return list(caught.value.diagnostics)


def codes(path: Path) -> list[str]:
    return [d.code for d in refused(path)]


def self_contained(spec: Spec) -> bool:
    """Whether the spec's source says the same without any file."""
    again = parse(spec.source)
    return again == spec and again.fingerprint == spec.fingerprint and again.source == spec.source


# --- what is loaded ----------------------------------------------------------------------------


def test_graphs_come_from_another_file(tmp_path: Path) -> None:
    path = written(
        tmp_path, a=f'from "b.attn" import ring, other\n{MAIN}', b=RING + "graph other = full"
    )
    spec = load(path)
    assert spec == parse(RING + MAIN)
    assert self_contained(spec)
    assert "import" not in spec.source


def test_folders_below_and_back(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=f'from "sub/b.attn" import ring\n{MAIN}',
        sub_b='from "../c.attn" import inner\ngraph ring(r) = inner(r) | self\n',
        c='from "sub/deep/../d.attn" import d\ngraph inner(r) = d & window(radius = r)\n',
        sub_d="graph d = causal\n",
        sub_deep_e="",
    )
    spec = load(path)
    assert spec.mask(4).sum() == 7
    assert self_contained(spec)


def test_where_the_command_is_started_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, sub_a=f'from "b.attn" import ring\n{MAIN}', sub_b=RING)
    monkeypatch.chdir(tmp_path)
    from_above = load("sub/a.attn")
    monkeypatch.chdir(tmp_path / "sub")
    assert load("a.attn") == load(Path("a.attn")) == from_above


def test_a_diamond_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(path: Path, shown: str) -> Source:
        read.append(shown)
        return read_source(path, shown)

    monkeypatch.setattr("attnspec.elaborate.imports.read_source", counted)
    path = written(
        tmp_path,
        a='from "b.attn" import b\nfrom "c.attn" import c\nattention a { attend b | c }',
        b='from "d.attn" import d\ngraph b = d',
        c='from "sub/../d.attn" import d\ngraph c = transpose(d)',
        d="graph d = causal",
        sub_x="",
    )
    assert load(path).mask(3).all()
    assert sorted(read) == ["b.attn", "c.attn", "d.attn"]


def test_what_is_imported_may_be_imported_further(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=f'from "b.attn" import ring\n{MAIN}',
        b='from "c.attn" import ring\n',
        c=RING + "attention not_this_one { attend nonsense }",
    )
    assert load(path) == parse(RING + MAIN)


def test_a_graph_sees_the_names_of_its_own_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a='from "b.attn" import outer\ngraph inner = full\nattention a { attend outer & inner }',
        b="graph inner = causal\ngraph outer = inner | where(q - k == -1)\n",
    )
    spec = load(path)
    assert spec == parse("attention a { attend causal | where(q - k == -1) }")
    assert self_contained(spec)
    assert "graph inner_2" in spec.source


# --- one self-contained text -------------------------------------------------------------------


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
    assert self_contained(spec)
    assert [int(spec.mask(9, head=head)[4].sum()) for head in range(4)] == [1, 5, 7, 1]
    assert load(path, g="left(1)").mask(9)[4].sum() == 3
    assert self_contained(load(path, g="left(1) | ring(0)"))


def test_new_names_are_not_taken_by_others(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=(
            'from "b.attn" import left\n'
            "graph g = self\ngraph g_3(g_4) = g_4\n"
            "attention a { heads 2 let g_2 = causal attend g & g_2 | g_3(self)"
            " head 1 { let g_5 = left attend g_5 } }"
        ),
        b="graph g = full\ngraph left = g & g\n",
    )
    spec = load(path)
    assert self_contained(spec)
    assert spec.mask(3).sum() == 3
    assert spec.mask(3, head=1).all()


def test_long_names_stay_names(tmp_path: Path) -> None:
    name = "g" * 64
    path = written(
        tmp_path,
        a=f'from "b.attn" import left\ngraph {name} = self\nattention a {{ attend {name} | left }}',
        b=f"graph {name} = causal\ngraph left = {name}\n",
    )
    spec = load(path)
    assert spec.mask(3).sum() == 6
    assert self_contained(spec)


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
    assert self_contained(spec)
    assert spec.program.attend(0, 0).normalize == "relu"
    mechanism = spec.program.attend(0, 1).mechanism
    assert mechanism is not None
    assert dict(mechanism.arguments)["feature"] == "elu1"


def test_an_attention_may_have_the_name_of_a_foreign_graph(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a='from "b.attn" import left\nattention inner { attend left }',
        b="graph inner = causal\ngraph left = inner",
    )
    spec = load(path)
    assert spec.name == "inner"
    assert self_contained(spec)


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('from "b.attn" import ring', 'from "c.attn" import ring'),
        ('from "b.attn" import ring', "graph ring = full"),
        ("graph ring(r) = full", 'from "b.attn" import ring'),
        ('from "b.attn" import ring', 'from "b.attn" import ring'),
    ],
)
def test_imported_names_clash_with_both_places(tmp_path: Path, first: str, second: str) -> None:
    path = written(tmp_path, a=f"{first}\n{second}\n{MAIN}", b=RING, c=RING)
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A203"
    assert diagnostic.span is not None
    ((_, other),) = diagnostic.related
    assert (diagnostic.span.line, diagnostic.span.text) == (2, "ring")
    assert (other.line, other.text) == (1, "ring")


def test_a_name_twice_in_one_import(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "b.attn" import ring, ring\n{MAIN}', b=RING)
    assert codes(path) == ["A203"]


def test_what_is_not_there_is_not_imported(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "b.attn" import rign\n{MAIN}', b=RING)
    first, second = refused(path)
    assert (first.code, first.help) == ("A506", "did you mean `ring`?")
    assert second.code == "A201"
    path = written(tmp_path, a=f'from "b.attn" import b, ring\n{MAIN}', b=RING + "attention b { }")
    assert codes(path) == ["A507"]


def test_a_text_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, b=RING)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        parse(f'from "b.attn" import ring\n{MAIN}')
    assert [d.code for d in caught.value.diagnostics] == ["A501"]


# --- cycles and numbers ------------------------------------------------------------------------


def test_cycles_are_shown(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=f'from "b.attn" import ring\n{MAIN}',
        b='from "sub/c.attn" import ring\n',
        sub_c='from "../b.attn" import ring\n',
    )
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A505"
    assert "b.attn -> c.attn -> b.attn" in diagnostic.message
    assert diagnostic.span is not None
    assert diagnostic.span.source.name == "sub/c.attn"
    path = written(tmp_path, a=f'from "a.attn" import ring\n{MAIN}')
    assert codes(path) == ["A505"]


def test_a_cycle_through_a_link(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "link.attn" import ring\n{MAIN}')
    (tmp_path / "link.attn").symlink_to(path)
    assert codes(path) == ["A505"]


def chain(folder: Path, length: int) -> Path:
    names = ["a", *(f"f{i}" for i in range(length))]
    for name, target in pairwise(names):
        text = MAIN if name == "a" else ""
        written(folder, **{name: f'from "{target}.attn" import ring\n{text}'})
    return written(folder, **{names[-1]: RING})


def test_the_depth_of_imports_is_bounded(tmp_path: Path) -> None:
    assert load(chain(tmp_path, LIMITS.files_deep - 1)).mask(3).sum() == 7
    assert codes(chain(tmp_path, LIMITS.files_deep)) == ["A195"]
    assert codes(chain(tmp_path, 1000)) == ["A195"]


def fan(folder: Path, width: int) -> Path:
    for index in range(width):
        written(folder, **{f"f{index}": f"graph g{index} = self\n"})
    imports = "".join(f'from "f{index}.attn" import g{index}\n' for index in range(width))
    return written(folder, a=f"{imports}attention a {{ attend g{width - 1} }}\n")


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    assert load(fan(tmp_path, LIMITS.files)).mask(3).sum() == 3
    assert set(codes(fan(tmp_path, LIMITS.files + 50))) == {"A195"}


def test_a_bad_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(path: Path, shown: str) -> Source:
        read.append(shown)
        return read_source(path, shown)

    monkeypatch.setattr("attnspec.elaborate.imports.read_source", counted)
    imports = "".join(f'from "b.attn" import g{index}\n' for index in range(2000))
    path = written(tmp_path, a=f"{imports}{MAIN}".replace("ring(1)", "g1"), b="graph @")
    (diagnostic,) = refused(path)
    assert diagnostic.span is not None
    assert diagnostic.span.source.name == "b.attn"
    assert read == ["b.attn"]


# --- what is refused ---------------------------------------------------------------------------

SECRET = "graph ring(r) = full\n"


@pytest.mark.parametrize(
    ("imported", "code"),
    [
        ("../secret.attn", "A504"),
        ("sub/../../secret.attn", "A504"),
        ("./../a/../../secret.attn", "A504"),
        ("/etc/passwd", "A503"),
        ("/dev/zero", "A503"),
        ("//server/share/x.attn", "A503"),
        ("\\\\server\\share\\x.attn", "A503"),
        ("C:\\x.attn", "A503"),
        ("c:/x.attn", "A503"),
        ("c:x.attn", "A503"),
        ("sub\\x.attn", "A503"),
        ("~/x.attn", "A503"),
        ("~root/x.attn", "A503"),
        ("file:x.attn", "A503"),
        ("file:///etc/passwd", "A503"),
        ("https://example.org/x.attn", "A503"),
        ("", "A502"),
        (".", "A509"),
        ("sub", "A509"),
        ("sub/", "A509"),
        ("missing.attn", "A509"),
        ("missing/x.attn", "A509"),
        ("a.attn/x.attn", "A509"),
        ("a" * 300, "A509"),
        ("a/" * 3000, "A509"),
        ("$HOME/x.attn", "A509"),
        ("{{x}}.attn", "A509"),
    ],
)
def test_paths(tmp_path: Path, imported: str, code: str) -> None:
    (tmp_path / "secret.attn").write_text(SECRET, encoding="utf-8")
    path = written(tmp_path / "tree", a=f'from "{imported}" import ring\n{MAIN}', sub_x=RING)
    (diagnostic,) = refused(path)
    assert diagnostic.code == code
    assert diagnostic.span is not None
    assert (diagnostic.span.line, diagnostic.span.column) == (1, 6)


def test_links_inside_the_tree_are_followed_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "secret.attn").write_text(SECRET, encoding="utf-8")
    path = written(tmp_path / "tree", a=f'from "link.attn" import ring\n{MAIN}', sub_b=RING)
    link = tmp_path / "tree" / "link.attn"
    link.symlink_to(tmp_path / "tree" / "sub" / "b.attn")
    assert load(path).mask(3).sum() == 7
    for target in (tmp_path / "secret.attn", Path("/dev/zero"), Path("../secret.attn")):
        link.unlink()
        link.symlink_to(target)
        assert codes(path) == ["A504"]
    link.unlink()
    link.symlink_to("link.attn")
    assert codes(path) in (["A502"], ["A509"])
    link.unlink()
    (tmp_path / "tree" / "out").symlink_to(tmp_path)
    path = written(tmp_path / "tree", a=f'from "out/secret.attn" import ring\n{MAIN}')
    assert codes(path) == ["A504"]


def test_a_link_to_the_main_file_keeps_its_folder(tmp_path: Path) -> None:
    written(tmp_path / "real", a=f'from "b.attn" import ring\n{MAIN}', b="graph ring(r) = full")
    other = tmp_path / "other"
    written(other, b=RING)
    (other / "link.attn").symlink_to(tmp_path / "real" / "a.attn")
    assert load(other / "link.attn").mask(3).sum() == 7
    assert load(tmp_path / "real" / "a.attn").mask(3).sum() == 9


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "pipe.attn" import ring\n{MAIN}')
    os.mkfifo(tmp_path / "pipe.attn")
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A509"
    assert "a named pipe" in diagnostic.message


def test_the_limits_of_a_file_hold_for_imports(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "b.attn" import ring\n{MAIN}', b=RING)
    os.truncate(tmp_path / "b.attn", 1 << 30)
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A509"
    assert "1,048,576 bytes" in diagnostic.message
    (tmp_path / "b.attn").write_bytes(b"graph ring(r) = full # \xff")
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A101"
    assert diagnostic.span is not None
    assert diagnostic.span.source.name == "b.attn"


def test_another_case_is_another_file(tmp_path: Path) -> None:
    path = written(tmp_path, a=f'from "B.attn" import ring\n{MAIN}', b=RING)
    folds = (tmp_path / "B.attn").exists()
    assert codes(path) == ["A508" if folds else "A509"]


# --- where errors are shown --------------------------------------------------------------------


def test_errors_of_an_imported_file_are_shown_there(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=f'from "sub/b.attn" import ring\n{MAIN}',
        sub_b="# a comment\ngraph ring(r) =\n    windw(radius = r)\n",
    )
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A201"
    assert str(diagnostic).startswith("sub/b.attn:3:5: error[A201]: `windw` is not defined")
    assert "3 |     windw(radius = r)" in str(diagnostic)


def test_errors_of_several_files_come_together(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a='from "b.attn" import b\nfrom "c.attn" import c\nfrom "d.attn" import d\n'
        "attention a { attend b | c | d | windw }",
        b="graph b = nonsense",
        c="graph c = @",
    )
    found = {(d.span.source.name, d.code) for d in refused(path) if d.span}
    assert found == {
        ("b.attn", "A201"),
        ("c.attn", "A107"),
        (str(path), "A509"),
        (str(path), "A201"),
    }


def test_a_name_whose_import_failed_makes_no_other_errors(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=f'from "b.attn" import ring\n{MAIN}',
        b='from "missing.attn" import ring\n',
    )
    (diagnostic,) = refused(path)
    assert diagnostic.code == "A509"
    assert diagnostic.span is not None
    assert diagnostic.span.source.name == "b.attn"
