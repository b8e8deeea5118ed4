"""The example that trains a model learns something, with other specs too."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ["--device", "cuda"],
            "torch finds no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["--spec", "swin"], "`attnspec zoo swin`, in Python"),
    ],
)
def test_the_training_example_refuses_without_a_traceback(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.main(words)
    assert said in capsys.readouterr().err
