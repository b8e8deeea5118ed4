"""`attnspec bench`: who is timed, who is refused and why, what is printed; no time is judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from limited import REFUSING

from attnspec import parse
from attnspec.bench import bench as benching
from attnspec.bench.bench import Progress, bench
from attnspec.bench.rivals import SAME, Problem, Refused, Setting, ours, rival
from attnspec.cli import main

TEXTS = {
    "near": "attention near(r = 5) { attend window(radius = r) }",
    "many": "attention many { heads 3 attend window(radius = 4) head 1 { attend self } }",
    "packed": "attention packed { input doc: ids input special: tokens input filled: length"
    " attend same(doc) | global(special) | prefix(filled) }",
    "grid": "attention cells { sequence grid(6, 8) attend neighborhood(3, 3) }",
    "gaps": "attention gaps { attend window(before = 3, after = 0) - self }",
    "random": "attention drawn { attend random(keys = 3, seed = 0) }",
    "topk": "attention a { heads 2 causal attend topk(blocks = 2, size = 8, queries = 1) }",
    "chosen": "attention a { input sel: choices(size = 8) attend chosen(sel) | self }",
    "sinkhorn": "attention a { attend sinkhorn(size = 8) }",
    "lsh": "attention a { attend lsh(rounds = 2, chunk = 8) }",
    "softcap": "attention capped { attend window(radius = 4) score softcap(cap = 5) }",
    "relu": "attention a { attend window(radius = 4) normalize relu }",
    "scales": "attention a { heads 2 attend full head 1 { attend full scale 0.5 } }",
    "favor": "attention a { attend window(radius = 3) + favor(features = 8) }",
    "layers": "attention two { layers 2 attend full layer 1 { attend self } }",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specs")
    for name, text in TEXTS.items():
        (folder / name).with_suffix(".attn").write_text(text)
    return folder


def run(folder: Path, name: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", str(folder / f"{name}.attn"), *arguments])


def problem(name: str, n: int = 48, **changes: Any) -> Problem:
    spec = parse(TEXTS[name])
    return Problem(spec, n, Setting(**{"heads": spec.heads or 2, "size": 16, **changes}))


@pytest.mark.parametrize(
    "name", ["near", "many", "packed", "gaps", "grid", "random", "topk", "chosen"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_are_those_of_the_spec_and_edges_the_mean_over_heads(
    name: str, dtype: torch.dtype
) -> None:
    task = problem(name, dtype=dtype, batch=2)
    own = task.output(ours(task, "dense" if name not in ("topk", "chosen") else "auto"))
    assert (own - task.output(rival(task, "mask"))).abs().max().item() <= SAME[dtype]
    # and it is not simply all pairs
    assert (own - task.output(rival(task, "sdpa"))).abs().max().item() > 1e-2
    if task.decided:
        assert task.edges == float(task.pairs.sum()) / 2 / task.setting.heads
    elif not task.inputs:
        masks = [task.spec.mask(48, head=head) for head in range(task.setting.heads)]
        assert task.edges == sum(mask.sum() for mask in masks) / len(masks)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_is_given_the_same_pairs_and_its_compiler_may_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what is compared is the mask, so the kernel need not be compiled
    with torch.compiler.set_stance("force_eager"):
        for name in ("near", "many", "gaps", "packed", "random"):
            task = problem(name, n=128)
            outs = [task.output(each) for each in (rival(task, "flex"), ours(task, "dense"))]
            assert (outs[0] - outs[1]).abs().max().item() <= SAME[torch.float32]
    monkeypatch.setattr(torch, "compile", lambda function, **options: 1 // 0)
    with pytest.raises(Refused, match=r"ZeroDivisionError: .*$"):
        rival(problem("near", n=128), "flex")


@pytest.mark.parametrize(
    ("spec", "name", "reason"),
    [
        ("softcap", "mask", "changes its scores"),
        ("sinkhorn", "mask", "changes its scores"),
        ("relu", "torch", "the spec says `normalize relu`"),
        ("packed", "edges", "reads the input"),
        ("scales", "mask", "different scales"),
        ("topk", "flex", "are chosen in each call"),
        ("favor", "mask", "`favor` is a formula, and a mask is not"),
    ],
)
def test_a_rival_that_cannot_says_why(spec: str, name: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        rival(problem(spec), name)


@pytest.mark.limits(REFUSING)
def test_masks_that_are_too_large_are_refused() -> None:
    rival(problem("near"), "mask")
    with pytest.raises(Refused, match="GiB"):
        rival(problem("many"), "mask")
    for name in ("mask", "flex", "dense"):
        with pytest.raises(Refused, match=r"n = 48|GiB"):
            rival(problem("near", n=49), name)


def test_results_that_differ_and_long_calls_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"mask": torch.zeros_like, "dense": lambda q: q * torch.nan}

    def rows(*arguments: Any) -> dict[str, Any]:
        *_, progress = bench(*arguments)
        assert progress.share == 1
        return {row.subject: row for row in progress.rows}

    task = problem("near")
    most = 1.1 * (task.predicted("auto") or 0.0)
    assert "a call is estimated to take" in rows([task], ["tables"], 1, most)["tables"].reason
    assert all(row.reason for row in rows([task], ["sdpa"], 1, 1e-12).values())
    monkeypatch.setattr(benching, "rival", lambda task, name: lambda q, k, v: wrong[name](q))
    found = rows([task], [*wrong], 1, 60.0)
    assert found["ours"].timing is not None
    assert all("differs from ours" in found[name].reason for name in wrong)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("packed", ["-n", "40", "--vs", "sdpa,mask,dense", "--batch", "2"]),
        ("many", ["-n", "40", "--vs", "mask,tables,edges", "--backward"]),
        ("layers", ["-n", "16", "--layer", "1", "--vs", "mask"]),
        ("near", ["-n", "1,40", "--dtype", "bfloat16", "--vs", "mask,dense", "--set", "r=2"]),
        ("grid", []),
        ("lsh", ["-n", "32", "--vs", "dense"]),
    ],
)
def test_every_kind_of_spec_is_timed(name: str, arguments: list[str], folder: Path) -> None:
    done = run(folder, name, *arguments, "--rounds", "1", "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["ok"], data["interrupted"], data["rounds"]) == (True, False, 1)
    rows = {(row["n"], row["subject"]): row for row in data["rows"]}
    for (n, subject), row in rows.items():
        assert row["timing"] is not None, row["reason"]
        assert row["timing"]["least"] <= row["timing"]["median"] <= row["timing"]["most"]
        own = rows[n, "ours"]
        assert row["ratio"] == row["timing"]["median"] / own["timing"]["median"]
        # other pairs: there is nothing to compare, and no share of them is useful
        assert subject != "sdpa" or (row["eta"], row["difference"]) == (None, None)


def test_the_table_has_a_row_for_each_length_and_subject(folder: Path) -> None:
    done = run(folder, "softcap", "-n", "32,64", "--vs", "sdpa,mask", "--rounds", "1")
    title, head, *lines = done.stdout.splitlines()
    assert title == "capped, forward, 4 heads of size 64, batch 1, float32, 1 thread"
    assert head.split() == "n subject median from to ratio eta predicted backend".split()
    subjects = [[n, name] for n in ("32", "64") for name in ("ours", "sdpa", "mask")]
    assert [line.split()[:2] for line in lines] == subjects
    assert "refused: the spec changes its scores" in lines[-1]


def test_an_interruption_prints_what_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Iterator[Progress]:
        for progress in bench(*arguments):
            yield progress
            if len(progress.rows) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(benching, "bench", interrupted)
    done = run(folder, "near", "-n", "32,64,96", "--rounds", "1")
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [
        ["32", "ours"],
        ["32", "sdpa"],
        ["64", "ours"],
    ]
