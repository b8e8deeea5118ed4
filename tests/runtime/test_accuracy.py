"""The tasks of `benchmarks.accuracy` have right answers; no accuracy is judged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.cifar import PIXELS, TEST, TRAIN, cifar10
from benchmarks.accuracy.tasks import _WORDS, IGNORED, OPERATORS, duplication, listops, recall


def value_of(words: list[str]) -> int:
    """The value of an expression, read from its words alone."""
    stack: list[tuple[str, list[int]]] = [("", [])]
    for word in words:
        if word.startswith("["):
            stack.append((word[1:], []))
        elif word == "]":
            name, values = stack.pop()
            stack[-1][1].append(OPERATORS[name](values))
        else:
            stack[-1][1].append(int(word))
    ((_, (value,)),) = stack
    return value


def test_answers_are_right() -> None:
    task = listops(n=60, count=200)
    for examples in (task.train, task.test):
        for row, label in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
            words = [_WORDS[token] for token in row if token]
            assert value_of(words) == label
            assert row == [_WORDS.index(word) for word in words] + [0] * (60 - len(words))
    task = recall(pairs=5, asked=3, keys=12, count=120)
    for row, labels in zip(task.train.tokens.tolist(), task.train.labels.tolist(), strict=True):
        known = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(known) == 5
        assert labels == [IGNORED] * 10 + [known[key] - 12 for key in row[10:]]
    task = duplication(n=16, symbols=9, count=60)
    for row, labels in zip(task.train.tokens.tolist(), task.train.labels.tolist(), strict=True):
        assert row[:8] == row[8:]
        assert row[0] == 0 < min(row[1:8])
        assert labels == [IGNORED] * 8 + row[9:] + [IGNORED]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few examples and few steps to time."""
    monkeypatch.setattr("benchmarks.accuracy.__main__.TASKS", {"recall": lambda: recall(count=120)})
    monkeypatch.setattr("benchmarks.accuracy.costs.TIMED", 2)


def run(path: Path, *more: str) -> dict[str, Any]:
    """The figures in a file after one more run of the command."""
    given = ["--tasks", "recall", "--seeds", "2", "--steps", "2", "--results", str(path)]
    assert main([*given, *more]) == 0
    found: dict[str, Any] = json.loads(path.read_text())["associative recall"]
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    first = run(path, "--systems", "window")
    row = first["systems"]["window"]
    assert row["mean"] == pytest.approx(sum(row["accuracies"]) / 2)
    # the gradients at least
    assert row["peak_bytes"] > 4 * row["parameters"]
    row |= {"accuracies": [0.25, 0.75], "mean": 0.5, "spread": 0.125**0.5}
    path.write_text(json.dumps({"associative recall": first}))
    both = run(path, "--missing", "--systems", "window", "linear")["systems"]
    assert both["window"] == row
    again = run(path, "--costs-only", "--systems", "window")["systems"]
    assert (again["window"]["mean"], again["linear"]) == (0.5, both["linear"])
    more = run(path, "--missing", "--systems", "linear", "--seeds", "3")["systems"]["linear"]
    assert more["accuracies"][:2] == both["linear"]["accuracies"]
    assert len(more["accuracies"]) == 3
    with pytest.raises(ValueError, match=r"trained alike: .*'steps': 2.*'steps': 3"):
        run(path, "--missing", "--steps", "3")


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Malicious(), "has no place"),
        ({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 0]}, "must be bytes"),
        ({b"data": np.zeros((2, 3 * PIXELS), np.uint8), b"labels": [0]}, "one whole number"),
        ({b"data": np.zeros((1, 3 * PIXELS), np.uint8), b"labels": [10]}, "between 0 and 9"),
    ],
)
def test_files_without_images_are_refused(
    content: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*TRAIN, *TEST):
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match=said):
        cifar10(tmp_path)
    assert capsys.readouterr().out == ""
