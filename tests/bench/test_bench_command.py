"""`attnspec bench`: who is timed, who is refused and why, what is printed; no time is judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from limited import REFUSING

from attnspec.bench import bench as benching
from attnspec.bench import rivals, timing
from attnspec.bench.bench import Progress, Row, bench, expected
from attnspec.bench.rivals import RIVALS, SAME, Problem, Refused, Setting, ours, rival
from attnspec.cli import bench_command, main
from attnspec.spec import parse

WINDOW = "attention near(r = 5) { attend window(radius = r) }\n"
HEADS = "attention many { heads 3 attend window(radius = 4) head 1 { attend self } }\n"
PACKED = (
    "attention packed { input doc: ids input special: tokens input filled: length"
    " attend same(doc) | global(special) | prefix(filled) }\n"
)
SOFTCAP = "attention capped { attend window(radius = 4) score softcap(cap = 5) }\n"
RELU = "attention rectified { attend window(radius = 4) normalize relu }\n"
GRID = "attention cells { sequence grid(6, 8) attend neighborhood(3, 3) }\n"
GAPS = "attention gaps { attend window(before = 3, after = 0) - self }\n"
CHANCE = "attention chance { attend random(keys = 3, seed = 0) }\n"
SCALES = "attention a { heads 2 attend full head 1 { attend full scale 0.5 } }\n"
LAYERS = "attention two { layers 2 attend full layer 1 { attend self } }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # a subject is called a few times, not for a twentieth of a second
    monkeypatch.setattr(timing, "LEAST", 0.0)
    for name, text in (
        ("near", WINDOW),
        ("heads", HEADS),
        ("packed", PACKED),
        ("grid", GRID),
        ("capped", SOFTCAP),
        ("layers", LAYERS),
    ):
        (tmp_path / f"{name}.attn").write_text(text)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    done = run(*arguments, "--rounds", "1", "--json")
    assert done.exit_code == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def problem(text: str, n: int = 48, **changes: Any) -> Problem:
    spec = parse(text)
    return Problem(spec, n, Setting(**{"heads": spec.heads or 2, "size": 8, **changes}))


# --- subjects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "attention a { heads 2 causal attend topk(blocks = 2, size = 8, queries = 1) }",
        "attention a { input sel: choices(size = 8) attend chosen(sel) | self }",
    ],
)
def test_pairs_that_tensors_decide_are_those_of_the_run(text: str) -> None:
    task = problem(text)
    outs = [task.output(ours(task, "auto")), task.output(rival(task, "mask"))]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    assert task.edges == float(task.pairs.sum()) / task.setting.heads
    with pytest.raises(Refused, match="queries and keys decide the pairs"):
        rival(task, "flex")


def test_what_tensors_decide_and_learn_is_timed() -> None:
    for text in (
        "attention a { attend sinkhorn(size = 8) }",
        "attention a { attend lsh(rounds = 2, chunk = 8) }",
    ):
        task = problem(text)
        outs = [task.output(ours(task, name)) for name in ("lists", "dense")]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
        with pytest.raises(Refused, match="changes its scores"):
            rival(task, "mask")


@pytest.mark.parametrize("text", [WINDOW, HEADS, PACKED, GAPS, GRID, CHANCE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mask_is_that_of_the_spec(text: str, dtype: torch.dtype) -> None:
    task = problem(text, dtype=dtype, batch=2)
    ours = task.output(rivals.ours(task, "dense"))
    theirs = task.output(rival(task, "mask"))
    assert (ours - theirs).abs().max().item() <= SAME[dtype]
    # and it is not simply all pairs
    assert (ours - task.output(rival(task, "sdpa"))).abs().max().item() > 1e-2


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("text", [WINDOW, HEADS, GAPS, PACKED, CHANCE])
def test_flex_is_given_the_same_pairs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # what is compared is the mask, so the kernel need not be compiled
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    task = problem(text, n=128, size=16)
    theirs = task.output(rival(task, "flex"))
    ours = task.output(rivals.ours(task, "dense"))
    assert (ours - theirs).abs().max().item() <= SAME[torch.float32]


def test_edges_are_the_mean_over_heads() -> None:
    for text in (WINDOW, HEADS, GRID):
        task = problem(text)
        masks = [task.spec.mask(48, head=head) for head in range(task.setting.heads)]
        assert task.edges == np.mean([mask.sum() for mask in masks])


def test_gradients_are_those_of_the_inputs() -> None:
    task = problem(WINDOW, backward=True)
    grads = task.call(rivals.ours(task, "auto"))()
    assert isinstance(grads, tuple)
    assert [grad.shape for grad in grads] == [x.shape for x in task.tensors]
    assert not any(x.requires_grad for x in problem(WINDOW).tensors)


@pytest.mark.parametrize(
    ("text", "name", "changes", "said"),
    [
        (SOFTCAP, "mask", {}, "changes its scores"),
        (SOFTCAP, "flex", {}, "changes its scores"),
        (RELU, "bands", {}, "results that `relu` normalises"),
        (PACKED, "tiles", {}, "run-time input"),
        (WINDOW, "flex", {"backward": True}, "no backward on the CPU"),
        (SCALES, "mask", {}, "different scales"),
    ],
)
def test_a_rival_that_cannot_says_why(
    text: str, name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        rival(problem(text, **changes), name)


def test_a_mechanism_is_no_mask() -> None:
    text = "attention a { attend window(radius = 3) + favor(features = 8) }"
    for name in ("mask", "flex"):
        with pytest.raises(Refused, match="`favor` is a formula, and a mask is not"):
            rival(problem(text), name)


@pytest.mark.limits(REFUSING)
def test_masks_that_are_too_large_are_refused() -> None:
    rival(problem(WINDOW), "mask")
    with pytest.raises(Refused, match="GiB"):
        rival(problem(HEADS), "mask")
    for name in ("mask", "flex", "dense"):
        with pytest.raises(Refused, match=r"n = 48|GiB"):
            rival(problem(WINDOW, n=49), name)


def test_a_compiler_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, **options: object) -> Callable[..., torch.Tensor]:
        raise RuntimeError("no working compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(Refused, match=r"RuntimeError: no working compiler$"):
        rival(problem(WINDOW, n=128), "flex")


# --- a run ---------------------------------------------------------------------------------------


def last(*given: Any) -> tuple[Row, ...]:
    *_, progress = bench(*given)
    assert isinstance(progress, Progress)
    assert progress.share == 1
    return progress.rows


def test_rows_hold_what_they_say(folder: Path) -> None:
    task = problem(WINDOW)
    names = ["sdpa", "mask", "dense", "scattered"]
    rows = {row.subject: row for row in last([task], names, 2, 60.0)}
    assert list(rows) == ["ours", *names]
    own, sdpa = rows["ours"].timing, rows["sdpa"].timing
    assert own is not None
    assert sdpa is not None
    for row in rows.values():
        assert row.timing is not None
        assert row.timing.least <= row.timing.median <= row.timing.most
        assert row.ratio == row.timing.median / own.median
        assert row.predicted == task.predicted("auto" if row.subject == "ours" else row.subject)
        if row.subject != "sdpa":
            assert task.edges is not None
            assert row.eta == task.edges / 48**2 * sdpa.median / row.timing.median
    # other pairs: there is nothing to compare, and no share of them is useful
    assert (rows["sdpa"].eta, rows["sdpa"].difference) == (None, None)
    assert rows["ours"].backends == tuple(task.plan)


def test_results_that_differ_are_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"mask": torch.zeros_like, "dense": lambda q: q * torch.nan}

    def other(task: Problem, name: str) -> rivals.Attention:
        return lambda q, k, v: wrong[name](q)

    monkeypatch.setattr(benching, "rival", other)
    rows = {row.subject: row for row in last([problem(WINDOW)], ["mask", "dense"], 1, 60.0)}
    assert rows["ours"].timing is not None
    for name in wrong:
        assert rows[name].timing is None
        assert "differs from ours" in str(rows[name].reason)


def test_a_call_that_takes_too_long_is_left_out(folder: Path) -> None:
    task = problem(WINDOW)
    most = 1.1 * (task.predicted("auto") or 0.0)
    rows = {row.subject: row for row in last([task], ["mask", "tiles"], 1, most)}
    assert "a call is estimated to take" in str(rows["tiles"].reason)
    (own,) = last([task], [], 1, 1e-12)
    assert "a call is estimated to take" in str(own.reason)


def test_no_time_of_ours_leaves_none_to_compare_with(folder: Path) -> None:
    rows = last([problem(WINDOW)], ["sdpa"], 1, 1e-12)
    assert [row.subject for row in rows] == ["ours", "sdpa"]
    assert all(row.timing is None and row.reason for row in rows)


def test_rounds_end_when_the_time_is_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(benching, "perf_counter", lambda: float(next(now)))
    for most, rounds in ((1e6, 7), (3.0, 4)):
        (row,) = last([problem(WINDOW)], [], 7, most)
        assert row.timing is not None
        assert row.timing.calls == rounds


def test_the_estimate_of_a_run_grows_with_it() -> None:
    short, long = problem(WINDOW, n=64), problem(WINDOW, n=2048)
    about = expected([short], ["sdpa"], 3, 60.0)
    assert 0 < about < expected([long], ["sdpa"], 3, 60.0)
    assert about < expected([short], ["sdpa"], 5, 60.0)
    assert about < expected([short, long], ["sdpa"], 3, 60.0)
    # flex has no estimate, and who refuses takes no time
    assert expected([problem(RELU)], ["flex", "bands"], 3, 60.0) == expected(
        [problem(RELU)], [], 3, 60.0
    )


# --- the command ---------------------------------------------------------------------------------


def test_the_table(folder: Path) -> None:
    done = run("near.attn", "-n", "32,64", "--vs", "sdpa,bands", "--rounds", "1")
    assert done.exit_code == 0
    title, head, *lines = done.stdout.splitlines()
    assert title == "near, forward, 4 heads of size 64, batch 1, float32, 1 thread"
    assert head.split() == "n subject median from to ratio eta predicted backend".split()
    assert [line.split()[:2] for line in lines] == [
        [n, name] for n in ("32", "64") for name in ("ours", "sdpa", "bands")
    ]
    assert done.stderr == ""


def test_the_table_says_who_was_refused(folder: Path) -> None:
    done = run("capped.attn", "-n", "32", "--vs", "mask", "--rounds", "1")
    assert done.exit_code == 0
    line = done.stdout.splitlines()[-1]
    assert line.split(maxsplit=2)[2].startswith("refused: the spec changes its scores")


def test_json(folder: Path) -> None:
    done = run(
        *("near.attn", "-n", "32", "--backward", "--rounds", "2", "--heads", "2"),
        *("--head-size", "16", "--batch", "3", "--dtype", "float64", "--set", "r=2", "--json"),
    )
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    rows = found.pop("rows")
    assert {name: found[name] for name in found if name not in ("machine", "versions")} == {
        "ok": True,
        "interrupted": False,
        "name": "near",
        "layer": 0,
        "heads": 2,
        "head_size": 16,
        "batch": 3,
        "dtype": "float64",
        "backward": True,
        "rounds": 2,
    }
    assert [row["subject"] for row in rows] == ["ours", "sdpa"]
    assert set(rows[0]["timing"]) == {"median", "least", "most", "calls"}
    assert rows[0]["timing"]["calls"] == 2
    assert rows[1]["reason"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["packed.attn", "-n", "40", "--vs", "sdpa,mask,dense", "--batch", "2"],
        ["heads.attn", "-n", "40", "--vs", "mask,tiles,bands,scattered", "--backward"],
        ["layers.attn", "-n", "16", "--layer", "1", "--vs", "mask"],
        ["near.attn", "-n", "40", "--dtype", "bfloat16", "--vs", "mask,dense"],
        ["near.attn", "-n", "1", "--vs", "mask,dense"],
    ],
)
def test_every_kind_of_spec_is_timed(arguments: list[str], folder: Path) -> None:
    for row in rows_of(*arguments):
        assert row["timing"] is not None, row["reason"]


def test_a_grid_has_its_own_length(folder: Path) -> None:
    assert {row["n"] for row in rows_of("grid.attn")} == {48}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["near.attn", "--vs", "flx"], "there is no rival 'flx': did you mean `flex`?"),
        (["near.attn", "--vs", "nothing"], f"the rivals are {', '.join(RIVALS)}"),
        (["near.attn", "-n", "0"], "nothing to time at n = 0"),
        (["near.attn", "-n", "4,096"], "write 4096"),
        (["near.attn", "-n", "64,1k"], "write 1024 or 1000"),
        (["near.attn", "-n", ""], "an integer"),
        (["near.attn", "--rounds", "0"], "an integer from 1"),
        (["near.attn", "--heads", "x"], "integer"),
        (["near.attn", "--head-size", "0"], "an integer from 1"),
        (["near.attn", "--seconds", "0"], "0.1"),
        (["near.attn", "--dtype", "int8"], "float32"),
        (["near.attn", "--layer", "1"], "1 layer"),
        (["near.attn", "--backend", "tile"], "one of auto"),
        (["packed.attn", "--backend", "tiles", "-n", "64"], "run-time input"),
        (["heads.attn", "--heads", "2"], "`many` has 3 heads, got --heads 2"),
        (["grid.attn", "-n", "47"], "6 x 8 = 48 cells"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, folder: Path) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_length_that_is_not_planned_is_a_limit(folder: Path) -> None:
    # looking for a plan asked for more than 8 GB
    Path("big.attn").write_text("attention big { attend columns(first(2**62)) }")
    done = run("big.attn", "-n", "16,2147483647")
    assert done.exit_code == 4
    assert "lengths up to n = 1,048,576 are timed, got 2,147,483,647" in done.stderr
    assert done.stdout == ""


def test_what_tensors_decide_is_timed_by_its_name(folder: Path) -> None:
    Path("lsh.attn").write_text("attention a { attend lsh(buckets = 4, seed = 0) }")
    (ours, *_) = rows_of("lsh.attn", "-n", "32")
    assert ours["eta"] > 0


def test_a_long_run_is_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "LONG", 0.0)
    done = run("near.attn", "-n", "32", "--rounds", "1")
    assert "--seconds, --rounds or a shorter -n make it less" in done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interruption_prints_what_is_known(
    as_json: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> Iterator[Progress]:
        steps = bench(*given)
        for progress in steps:
            yield progress
            if len(progress.rows) == 3 and progress.rows[-1].n == 64:
                raise KeyboardInterrupt

    monkeypatch.setattr(benching, "bench", interrupted)
    done = run("near.attn", "-n", "32,64,96", "--rounds", "2", *["--json"] * as_json)
    assert done.exit_code == 130
    assert done.stderr == "interrupted\n"
    if as_json:
        found = json.loads(done.stdout)
        assert (found["ok"], found["interrupted"], len(found["rows"])) == (False, True, 3)
    else:
        lines = done.stdout.splitlines()[2:]
        assert [line.split()[:2] for line in lines] == [
            ["32", "ours"],
            ["32", "sdpa"],
            ["64", "ours"],
        ]


def test_an_interruption_before_anything_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(*given: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(benching, "expected", at_once)
    done = run("near.attn", "-n", "32")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")
