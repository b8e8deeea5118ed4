"""Two specs compared: counts and examples against masks, what is proven, what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attnspec
from attnspec.analysis.counting import differences
from attnspec.check.other_differences import asides, mechanisms_of
from attnspec.cli import main
from attnspec.graphs.stack import TooMuch
from attnspec.show.differences import Difference
from attnspec.spec import Spec, diff, parse
from attnspec.text.diagnostics import AttnSpecError


def spec_of(body: str, name: str = "a") -> Spec:
    return parse(f"attention {name} {{ {body} }}")


def between(first: str, second: str, n: int, **inputs: object) -> Difference:
    return diff(spec_of(first), spec_of(second, "b"), n, inputs or None)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 1])
def test_short_sequences(n: int) -> None:
    found = between("attend full", "attend self - self", n)
    assert found.only_in_a.count == n
    assert found.only_in_b.count == 0
    assert found.equal is (n == 0)
    assert not found.only_in_b
    assert str(found)


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        ("attend window(radius = 256)", "attend window(radius = 255)", (2 * (65_536 - 256), 0)),
        (
            "causal attend full",
            "causal attend window(before = 99, after = 0)",
            (65_437 * 65_436 // 2, 0),
        ),
        ("attend full", "attend random(keys = 8)", (65_536 * 65_528, 0)),
        ("attend random(keys = 8)", "attend full", (0, 65_536 * 65_528)),
    ],
)
def test_long_sequences(first: str, second: str, counts: tuple[int, int]) -> None:
    found = between(first, second, 65_536)
    assert (found.only_in_a.count, found.only_in_b.count) == counts
    assert found.equal is False
    assert "query ↓" not in str(found)


def test_what_cannot_be_counted_says_so() -> None:
    found = between("attend where(q * k % 7 == 0)", "attend full", 65_536)
    assert found.equal is None
    assert not found.proven
    assert "not compared: " in str(found)
    with pytest.raises(TooMuch, match="supports n <="):
        between("attend full", "attend self", 5_000_000)


# --- for every n ----------------------------------------------------------------------------------


def test_equal_forms_are_equal_for_every_n() -> None:
    found = between("causal attend full", "attend where(k <= q)", 10)
    assert found.equal
    assert found.proven
    assert "the same pairs for every n, by their form: 55 here" in str(found)


def test_equal_pairs_of_different_forms_are_equal_at_this_n() -> None:
    found = between("attend strided(stride = isqrt(n))", "attend strided(stride = 16)", 256)
    assert found.equal
    assert not found.proven
    assert "the same 11,536 pairs at n = 256, but not at n = 64" in str(found)
    assert found.compared[0].differ_at == 64
    assert (
        between("attend strided(stride = isqrt(n))", "attend strided(stride = 16)", 255).equal
        is False
    )


def test_lengths_at_which_pairs_are_the_same_by_chance() -> None:
    # one window, whose two halves no form joins
    halves = "attend window(before = isqrt(n), after = 0) | window(before = 0, after = isqrt(n))"
    found = between("attend window(radius = isqrt(n))", halves, 16)
    assert (found.equal, found.proven, found.compared[0].differ_at) == (True, False, None)
    assert "their forms differ, so other lengths may too" in str(found)
    assert found._repr_html_().startswith("<pre>a  a\n")


# --- heads, layers, grids, inputs -----------------------------------------------------------------


def test_heads_and_layers_are_compared_one_by_one() -> None:
    found = between(
        "layers 2 heads 3 attend self layer 1 { head 2 { attend window(radius = 1) } }",
        "layers 2 heads 3 attend self",
        16,
    )
    assert [one.slots for one in found.compared if not one.equal] == [((1, 2),)]
    assert found.only_in_a.count == 30
    assert "layer 1 head 2: they differ" in str(found)
    assert "layer 0 every head; layer 1 head 0..1: the same pairs for every n" in str(found)


def test_one_pattern_is_compared_with_every_head() -> None:
    found = between("attend window(radius = 1)", "heads 4 attend self", 8)
    assert len(found.compared) == 1
    assert len(found.compared[0].slots) == 4
    assert found.only_in_a.count == 4 * 14
    assert found.notes == ("a declares no heads: it is compared with each of the 4 heads of b",)
    one = between("attend self", "layers 1 attend self", 8)
    assert one.notes == ("a declares no layers: it is compared with the one layer of b",)


def test_what_stands_alone_is_named() -> None:
    found = between("heads 2 layers 5 attend self", "heads 4 layers 3 attend self", 8)
    assert found.equal
    assert found.notes == (
        "a has 5 layers, b 3: layers 3..4 of a stand alone, uncompared",
        "a has 2 heads, b 4: heads 2..3 of b stand alone, uncompared",
    )
    assert [len(one.slots) for one in found.compared] == [6]


def test_counts_that_differ_are_said_in_words() -> None:
    for what, one, other, said in (
        ("head", 1, 2, "a has 1 head, b 2: head 1 of b stands alone, uncompared"),
        ("head", 4, 2, "a has 4 heads, b 2: heads 2..3 of a stand alone, uncompared"),
        ("layer", 3, 2, "a has 3 layers, b 2: layer 2 of a stands alone, uncompared"),
        ("layer", 2, 5, "a has 2 layers, b 5: layers 2..4 of b stand alone, uncompared"),
        ("head", None, 3, "a declares no heads: it is compared with each of the 3 heads of b"),
        ("layer", 1, None, "b declares no layers: it is compared with the one layer of a"),
    ):
        bodies = [
            f"{what}s {count} attend self" if count else "attend self" for count in (one, other)
        ]
        a, b = (spec_of(body).elaborated for body in bodies)
        assert asides(a, b, [(0, 0)]) == [said]


def test_draws_are_compared_head_by_head() -> None:
    drawn = "heads 2 attend random(keys = 3)"
    found = between(drawn, "heads 2 attend random(keys = 3, seed = 1)", 32)
    assert len(found.compared) == 2
    assert between(drawn, drawn, 32).proven


def test_grids_and_extra_tokens() -> None:
    found = between("sequence grid(4, 8) attend axial", "attend residue(step = 8)", 32)
    assert found.only_in_b.count == 0
    assert "a stands on a grid of 4 x 8, b on a line: positions are compared by their" in str(found)
    with pytest.raises(AttnSpecError, match="32 cells, got n = 33"):
        between("sequence grid(4, 8) attend axial", "attend full", 33)
    found = between("extra_tokens 2 attend full", "attend full", 8)
    assert found.equal
    assert "a has 2 extra tokens, b 0: position 2 is not the same token in both" in str(found)


def test_inputs() -> None:
    reads = "input x: tokens attend global(x) | self"
    unknown = between(reads, "attend self", 8)
    assert unknown.equal is None
    assert "reads run-time inputs that are not given: `x`" in str(unknown)
    known = between(reads, "attend self", 8, x=np.array([3]))
    assert known.only_in_a.count == 14
    assert between(reads, reads, 8).proven
    with pytest.raises(AttnSpecError, match="neither spec declares an input `y`"):
        between(reads, reads, 8, y=3)


def test_what_has_no_pairs_is_compared_by_form() -> None:
    assert between("attend favor()", "attend favor()", 8).proven
    assert between("attend lsh(buckets = 4)", "attend lsh(buckets = 4)", 8).proven
    assert "decided by the data" in str(between("attend lsh(buckets = 4)", "attend full", 8))
    both = between("attend full + linear()", "attend full + linear(feature = relu)", 8)
    assert both.compared[0].proven
    assert not both.proven
    assert both.notes == ("what is done with the pairs differs: the mechanism",)


@pytest.mark.parametrize(
    ("first", "second", "same", "words"),
    [
        (
            "linear()",
            "linear(feature = elu1, normalize = sum)",
            True,
            "`linear` with the same options",
        ),
        (
            "favor(features = 64, seed = 3)",
            "favor(features = 128, seed = 3, redraw = 10)",
            False,
            "`favor` with other options: features: 64 in a, 128 in b; redraw: 0 in a, 10 in b",
        ),
        ("linear()", "favor()", False, "`linear` in a, `favor` in b"),
        ("favor()", "full", False, "`favor` in a, a graph in b"),
        ("full + linear()", "linear()", False, "a graph + `linear` in a, `linear` in b"),
        (
            "nystrom(landmarks = n // 4)",
            "nystrom(landmarks = 4)",
            True,
            "the same options, at n = 16",
        ),
        (
            "nystrom(landmarks = n // 2)",
            "nystrom(landmarks = 4)",
            False,
            "landmarks: 8 in a, 4 in b, at n = 16",
        ),
    ],
)
def test_mechanisms_are_compared_by_their_options(
    first: str, second: str, same: bool, words: str
) -> None:
    found = between(f"attend {first}", f"attend {second}", 16)
    assert found.equal is same
    assert words in str(found)
    assert (", at n = 16" in str(found)) == (", at n" in words)
    assert found.proven == (same and "at n" not in words)
    (one,) = json.loads(json.dumps(found.to_dict()))["compared"]
    assert one["equal"] is same
    assert words.partition(", at n")[0] in one["reason"]
    back = between(f"attend {second}", f"attend {first}", 16)
    assert back.equal is same
    assert not found.only_in_a
    assert not found.only_in_b


def test_mechanisms_of_layers_and_heads_are_compared_each() -> None:
    a = "layers 2 heads 2 attend linear() layer 1 { head 1 { attend window(radius = 1) } }"
    b = "layers 2 heads 2 attend linear() layer 1 { attend full }"
    found = between(a, b, 8)
    assert found.equal is False
    kinds = {one.slots: (one.equal, one.reason) for one in found.compared}
    assert kinds[(0, 0), (0, 1)] == (True, "`linear` with the same options")
    assert kinds[((1, 0),)] == (False, "`linear` in a, a graph in b")
    assert kinds[((1, 1),)] == (False, "")
    assert found.only_in_b.count == 64 - 22
    assert "layer 1 head 0: `linear` in a, a graph in b" in str(found)
    asked = "heads 2 attend favor(features = 8 * (head + 1))"
    other = "heads 2 attend favor(features = 8)"
    assert [one.equal for one in between(asked, other, 8).compared] == [True, False]


def test_causal_forms_are_others() -> None:
    found = between("causal attend linear()", "attend linear()", 8)
    assert found.equal is False
    assert "causal: true in a, false in b" in str(found)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (("4", "5"), "rank: 4 in a, 5 in b"),
        (("n // 4", "5"), "rank: 16 in a, 5 in b, at n = 64"),
        (("n // 4", "n // 4"), "`linformer` with the same options"),
    ],
)
def test_a_length_is_said_where_options_depend_on_it(ranks: tuple[str, str], said: str) -> None:
    a, b = (parse(f"attention a {{ attend linformer(rank = {rank}) }}") for rank in ranks)
    assert str(diff(a, b, 64)).endswith(said)


def test_options_are_compared_at_the_length_and_without_positions_at_the_shortest() -> None:
    def options(one: str, other: str, n: int) -> dict[str, list[str]]:
        a, b = (spec_of(f"attend linformer(rank = {rank})").elaborated for rank in (one, other))
        found = mechanisms_of(a, b, n, 0, 0)
        assert found is not None
        assert found.lasting == (one == other)
        return {name: values for name, *values in found.options}

    for n in (0, 1, 2, 3, 9):
        at = max(1, n)
        for one, other, ranks in (
            ("n", "2 * n - 1", (at, 2 * at - 1)),
            ("n + 1", "2 * n", (at + 1, 2 * at)),
            ("n", "n", (at, at)),
        ):
            differing = {} if ranks[0] == ranks[1] else {"rank": [*map(str, ranks)]}
            assert options(one, other, n) == differing, n


def test_mechanisms_beside_equal_graphs_are_said() -> None:
    found = between("attend full + linear()", "attend full + linear(feature = relu)", 8)
    assert (found.equal, found.proven, found.compared[0].equal) == (False, False, True)
    words = "beside the graph: `linear` with other options: feature: elu1 in a, relu in b"
    assert words in str(found)
    assert "beside the graph: no mechanism in a, `linear` in b" in str(
        between("attend full", "attend full + linear()", 8)
    )


def test_the_same_pairs_with_another_score() -> None:
    found = between("attend full score alibi() normalize relu", "attend full scale 1", 8)
    assert found.equal
    assert found.notes == (
        "what is done with the pairs differs: the scale, the changes to the score, the normaliser",
    )


def test_only_specs_are_compared() -> None:
    with pytest.raises(TypeError, match="specs are compared, got str"):
        attnspec.diff("a.attn", "b.attn", 8)  # type: ignore[arg-type]


def test_a_row_is_written_short() -> None:
    relation = spec_of("attend residue(step = 5) | window(radius = 1)").relation(64)
    assert differences.row_text(relation, 20, 64) == "0, 5, 10, …, 60"
    assert differences.row_text(relation, 1, 10) == "0..2, 6"
    assert differences.row_text(spec_of("attend self - self").relation(9), 1, 9) == "nothing"


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = {
        "old": "attention old(r = 3) { attend window(radius = r) }",
        "new": "attention new(r = 3, hubs = 1) { attend window(radius = r) | global(first(hubs)) }",
        "two": "attention one { attend full } attention two { attend causal }",
        "cells": "attention cells { sequence grid(3, 4) attend axial }",
        "needs": "attention needs(r) { input x: tokens attend window(radius = r) | global(x) }",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.attn").write_text(text)
    return tmp_path


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["diff", *arguments], input=given)


@pytest.mark.usefixtures("folder")
def test_the_command() -> None:
    done = run("old.attn", "new.attn", "-n", "16")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:5] == [
        "a  old(r = 3)  old.attn",
        "b  new(r = 3, hubs = 1)  new.attn",
        "n = 16",
        "",
        "they differ",
    ]
    assert "n = 512" in run("old.attn", "old.attn").stdout
    assert "n = 12" in run("old.attn", "cells.attn").stdout


@pytest.mark.usefixtures("folder")
def test_the_status_says_nothing_unless_asked() -> None:
    assert run("old.attn", "new.attn").exit_code == 0
    assert run("old.attn", "new.attn", "--exit-code").exit_code == 1
    assert run("old.attn", "old.attn", "--exit-code").exit_code == 0
    unknown = ("needs.attn", "old.attn", "--set", "r=3", "--exit-code")
    assert run(*unknown).exit_code == 1


@pytest.mark.usefixtures("folder")
def test_json() -> None:
    done = run("old.attn", "new.attn", "-n", "8", "--json")
    data = json.loads(done.stdout)
    assert data["ok"] is True
    assert (data["a"], data["b"], data["n"], data["equal"]) == ("old", "new", 8, False)
    assert data["only_in_b"]["count"] == 8
    assert data["only_in_b"]["examples"][0] == [0, 4]
    assert data["compared"][0]["slots"] == [[0, 0]]


@pytest.mark.usefixtures("folder")
def test_settings_go_where_they_fit() -> None:
    assert "a  old(r = 5)" in run("old.attn", "new.attn", "--set", "r=5").stdout
    assert "b  new(r = 5, hubs = 1)" in run("old.attn", "new.attn", "--set", "r=5").stdout
    done = run("old.attn", "new.attn", "--set", "hubs=0")
    assert "the same pairs at" not in done.stdout
    assert "the same 3,572 pairs" in done.stdout
    wrong = run("old.attn", "new.attn", "--set", "hub=0")
    assert wrong.exit_code == 2
    assert "neither spec has a parameter `hub`" in wrong.stderr
    assert "did you mean `hubs`?" in wrong.stderr


@pytest.mark.usefixtures("folder")
def test_names() -> None:
    done = run("two.attn", "two.attn", "--name", "one", "--name", "two", "-n", "8")
    assert done.stdout.startswith("a  one  two.attn\nb  two  two.attn")
    # one name is for the files that have it
    assert run("old.attn", "two.attn", "--name", "two").exit_code == 0
    for names in ((), ("--name", "three"), ("--name", "a", "--name", "b", "--name", "c")):
        assert run("two.attn", "two.attn", *names).exit_code in (1, 2)


@pytest.mark.usefixtures("folder")
def test_inputs_of_the_command() -> None:
    done = run("needs.attn", "old.attn", "-n", "9", "--set", "r=3", "--input", "x=4")
    assert "only in a" in done.stdout
    wrong = run("needs.attn", "old.attn", "-n", "9", "--set", "r=3", "--input", "y=4")
    assert wrong.exit_code == 2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("old.attn",), 2, "Missing argument 'B'"),
        (("old.attn", "gone.attn"), 3, "there is no gone.attn"),
        (("-", "-"), 2, "not both"),
        (("old.attn", "cells.attn", "-n", "11"), 2, "12 cells, got n = 11"),
        (("old.attn", "new.attn", "-n", "5000000"), 4, "supports n <="),
        (("needs.attn", "old.attn"), 1, "has no value"),
    ],
)
def test_what_goes_wrong(arguments: tuple[str, ...], status: int, message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == status, done.output
    assert message in done.stderr
    assert done.stdout == ""


def test_standard_input(folder: Path) -> None:
    done = run("-", "old.attn", given=(folder / "old.attn").read_text())
    assert "the same pairs for every n" in done.stdout


def test_a_comparison_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys, attnspec; a = attnspec.load('old.attn'); b = attnspec.load('new.attn');"
        "str(attnspec.diff(a, b, 64)); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
