"""The two models of bytes, tiny ones, from the text to what they write; no time is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

import attnspec
from attnspec.integrations.transformers import SpecCache, convert
from benchmarks import lm
from benchmarks.readme_tables import lm_table

pytestmark = [
    pytest.mark.xdist_group("benchmarks"),
    pytest.mark.filterwarnings("ignore"),
]


def test_the_dry_run_goes_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ticks = tmp_path / "lm.json", count()
    # a clock by which every step takes as long, on a busy machine too
    monkeypatch.setattr(lm, "perf_counter", lambda: next(ticks) / 64)
    assert lm.main(["--dry-run", "--results", str(path)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert lm_table(figures) in printed
    assert set(figures["models"]) == {"full causal", "sinks_and_stride"}
    for found in figures["models"].values():
        curve, made = found["curve"], found["generation"]
        assert len(curve) == 1 + lm.DRY.evaluations
        assert curve[-1]["seconds"] >= lm.DRY.seconds
        assert [at["read"] for at in curve] == sorted({at["read"] for at in curve})
        assert curve[0]["bits"] == pytest.approx(8, abs=0.1), "257 symbols, and nothing learned"
        assert curve[-1]["bits"] < curve[0]["bits"] - 1
        assert curve[-1]["read"] == 64 * lm.DRY.seconds * lm.DRY.context
        assert made["bytes_per_second"] == 64
        assert made["equal_tokens"] == made["written"] == lm.DRY.written
        assert made["largest_difference"] < 1e-4
    full, sparse = figures["models"].values()
    assert full["keys"] == (lm.DRY.context + 1) / 2
    assert sparse["keys"] < full["keys"]
    assert sparse["generation"]["cache_bytes"] < full["generation"]["cache_bytes"]
    assert {"python", "torch", "transformers"} <= set(figures["versions"])
    assert attnspec.parse(figures["spec"]) == lm.DRY.spec()
    picture = (tmp_path / "lm.svg").read_text()
    assert "bits per byte" in picture
    assert "sinks_and_stride" in picture


def test_a_cache_that_gives_something_else_is_noticed() -> None:
    right, wrong, lost = (
        {"generation": {"largest_difference": x}} for x in (1e-6, 0.1, float("nan"))
    )
    found = lm.differing({"models": {"right": right, "wrong": wrong, "lost": lost}})
    assert [line.partition(":")[0] for line in found] == ["wrong", "lost"]


@pytest.mark.parametrize("length", [1, 63, 64])
def test_one_pass_chooses_what_generation_without_a_cache_chooses(length: int) -> None:
    settings = replace(lm.DRY, written=5)
    prompt = torch.randint(lm.BETWEEN, (length,), generator=torch.Generator().manual_seed(length))
    model = lm.model_of(settings).eval()
    convert(model, settings.spec())
    made = lm.written(model, SpecCache(model), prompt, settings)
    slow = prompt[None]
    for _ in range(settings.written):
        with torch.no_grad():
            chosen = model(input_ids=slow, use_cache=False).logits[:, -1:].argmax(-1)
        slow = torch.cat([slow, chosen], 1)
    generated = model.generate(
        prompt[None], past_key_values=SpecCache(model), max_new_tokens=5, do_sample=False
    )
    assert torch.equal(generated, slow)
    assert made["equal_tokens"] == 5
    assert made["prompt"] == length


def test_the_cache_of_the_spec_is_what_analysis_says() -> None:
    settings = replace(lm.DRY, context=128, written=2)
    model = lm.model_of(settings).eval()
    convert(model, settings.spec())
    prompt = torch.arange(settings.context)
    made = lm.written(model, SpecCache(model), prompt, settings)
    size = settings.hidden // settings.heads
    held = settings.spec().analyse(settings.context, head_dim=size).kv_cache_bytes
    assert held is not None
    # a full window is written over, so that there is a place for the key of the query, too
    assert made["cache_bytes"] == held * settings.layers


def test_the_spec_keeps_what_it_claims() -> None:
    assert attnspec.load(lm.SPEC).check() == []
    settings = lm.Settings(1)
    assert settings.spec() == attnspec.load(lm.SPEC), "the sizes that the file has by default"


def test_files_are_held_out_by_name_and_tests_left_out(tmp_path: Path) -> None:
    names = [f"m{i}.py" for i in range(60)]
    for name in [*names, "empty.py", "test/of.py", "site-packages/other.py", "notes.txt"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"" if name == "empty.py" else name.encode() + bytes([0, 255]))
    text = lm.library(tmp_path)
    assert text.files == 61
    assert text.bytes == sum(len(name) + 2 for name in names)
    both = torch.cat([text.train, text.held_out])
    assert int((both == lm.BETWEEN).sum()) == text.files
    assert len(both) == text.bytes + text.files
    assert torch.equal(text.held_out, lm.library(tmp_path).held_out)
    with pytest.raises(ValueError, match="to hold out are needed, got 1"):
        lm.library(tmp_path, 1)


def test_windows_are_the_same_for_every_model_and_cover_what_is_held_out() -> None:
    text = torch.arange(200, dtype=torch.int16)
    settings = replace(lm.DRY, context=20, windows=3)
    drawn = [next(lm.drawn(text, settings)).tolist() for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert [(w[0], w[-1]) for w in (x.tolist() for x in lm.spread(text, settings))] == [
        (0, 20),
        (89, 109),
        (179, 199),
    ]


def test_the_rate_rises_and_falls() -> None:
    assert lm.share_of_rate(0.0) == lm.FLOOR
    assert lm.share_of_rate(lm.RISE) == 1
    assert lm.share_of_rate(0.5) == pytest.approx(1 - 0.9 * 0.45 / 0.95)
    assert lm.share_of_rate(1.0) == pytest.approx(lm.FLOOR)
    assert lm.share_of_rate(1.2) == lm.FLOOR


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dry-run"], "name another file"),
        (["--minutes", "0"], "above 0 are needed, got 0 and"),
        (["--minutes", "nan"], "above 0 are needed, got nan and"),
        (["--threads", "0"], "above 0 are needed, got 4 and 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lm.main(arguments) == 2
    assert words in capsys.readouterr().err
