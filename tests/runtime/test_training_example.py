"""The example that trains a model learns something, with other specs too."""

from __future__ import annotations

import pytest

import attnspec
from attnspec.examples import train

LAYERED = "attention layered { layers 2 causal attend window(before = 8 + 8 * layer, after = 0) }"


def test_the_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--device", "cpu", "--n", "64", "--steps", "12"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("sparse_strided_merged, n = 64, cpu; estimates")
    found = [float(line.split()[2]) for line in printed.splitlines() if line.startswith("step")]
    assert found[0] > 7 > 6 > found[-1]


def test_every_block_has_its_layer() -> None:
    losses = train.train(attnspec.parse(LAYERED), "cpu", 32, 8)
    assert losses[-1] < losses[0] - 1


def test_what_cannot_be_trained_is_said_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words, said in (
        (["--device", "cuda"], "torch finds no GPU here"),
        (["--spec", "swin"], "`attnspec zoo swin` looks in the zoo"),
    ):
        with pytest.raises(SystemExit, match="2"):
            train.main(words)
        assert said in capsys.readouterr().err
