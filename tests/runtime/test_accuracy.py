"""The tasks of `make accuracy` are what they say, their answers right; no accuracy is judged."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnspec.spec import parse
from benchmarks.accuracy import causes
from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.cifar import PIXELS, TEST, TRAIN, cifar10
from benchmarks.accuracy.published import PUBLISHED
from benchmarks.accuracy.systems import SYSTEMS, spelled, text
from benchmarks.accuracy.tasks import (
    _WORDS,
    IGNORED,
    OPERATORS,
    Examples,
    Task,
    duplication,
    listops,
    recall,
)
from benchmarks.accuracy.training import Budget, Model, Size, accuracy, train
from benchmarks.readme_tables import accuracy_table


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


def test_lists_are_worth_their_labels() -> None:
    task = listops(n=60, count=200)
    for examples in (task.train, task.test):
        for row, label in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
            words = [_WORDS[token] for token in row if token]
            assert value_of(words) == label
            assert row == [_WORDS.index(word) for word in words] + [0] * (60 - len(words))
    assert len(set(task.train.labels.tolist())) == task.classes


def test_questions_are_answered_by_their_pairs() -> None:
    task = recall(pairs=5, asked=3, keys=12, count=120)
    assert task.n == 13
    for row, labels in zip(task.train.tokens.tolist(), task.train.labels.tolist(), strict=True):
        known = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(known) == 5
        assert labels[:10] == [IGNORED] * 10
        assert [known[key] - 12 for key in row[10:]] == labels[10:]


def test_the_second_half_is_the_first_one_again() -> None:
    task = duplication(n=16, symbols=9, count=60)
    for row, labels in zip(task.train.tokens.tolist(), task.train.labels.tolist(), strict=True):
        assert row[:8] == row[8:]
        assert row[0] == 0 < min(row[1:8])
        assert labels == [IGNORED] * 8 + row[9:] + [IGNORED]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "body", ["topk(blocks = 2, size = 4, queries = 1)", "window(before = 9, after = 0)"]
)
def test_the_last_places_are_those_of_the_whole(body: str, layers: int) -> None:
    task = recall(pairs=4, asked=8, keys=6, copies=8, gap=16, count=60)
    spec = parse(f"attention a {{ layers {layers} causal attend {body} }}")
    models = []
    for last in (None, 8):
        torch.manual_seed(0)
        models.append(Model(task, spec, Size(layers=layers, told=3, last=last)).double())
    whole, part = (model(task.test.tokens) for model in models)
    torch.testing.assert_close(part, whole[:, -8:], rtol=0, atol=1e-12)
    upstream = torch.randn(part.shape, dtype=torch.float64)
    grads = [
        torch.autograd.grad(out, [*model.parameters()], upstream)
        for out, model in ((whole[:, -8:], models[0]), (part, models[1]))
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    found = [accuracy(model, task.test) for model in models]
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="asks before its last 7 places"):
        Model(task, spec, Size(last=7))


def test_each_token_is_told_those_before_it() -> None:
    task = recall(pairs=4, asked=8, keys=6, count=60)
    spec = parse("attention a { attend self }")
    for told in (1, 3):
        model = Model(task, spec, Size(layers=1, told=told))
        tokens = task.test.tokens[:1]
        other = tokens.clone()
        other[0, 5] = (other[0, 5] + 1) % 12
        apart = (model(tokens) != model(other)).any(-1)[0]
        assert apart.nonzero()[:, 0].tolist() == list(range(5, 6 + told))


def test_a_model_learns_what_stands_there() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (256, 12), generator=generator)
    examples = Examples(tokens, tokens[:, 0])
    task = Task("first token", 4, 4, examples, examples)
    found = train(task, parse(text("softmax", 12)), 0, Budget(steps=60, rate=1e-2))
    assert found.accuracy > 0.9


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_makes_a_model(name: str) -> None:
    task = recall(pairs=6, asked=4, keys=9, count=12)
    model = Model(task, parse(text(name, task.n)))
    out = model(task.train.tokens)
    assert out.shape == (10, 16, 9)
    out.square().sum().backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in model.parameters())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few examples and few steps to time."""
    monkeypatch.setattr("benchmarks.accuracy.__main__.TASKS", {"recall": lambda: recall(count=120)})
    monkeypatch.setattr("benchmarks.accuracy.costs.TIMED", 2)


def run(path: Path, *more: str) -> dict[str, Any]:
    """The figures in a file after one more run of the command."""
    given = ["--tasks", "recall", "--seeds", "2", "--steps", "2", "--results", str(path)]
    assert main([*given, *more]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.usefixtures("small")
def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    figures = run(tmp_path / "accuracy.json", "--systems", "window", "linear")
    table = accuracy_table(figures).split("\n\n")[0].splitlines()
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| window", "| linear"]
    assert len({line.count("|") for line in table}) == 1
    (found,) = figures.values()
    assert list(found["systems"]) == ["window", "linear"]
    for row in found["systems"].values():
        assert len(row["accuracies"]) == 2
        assert row["mean"] == pytest.approx(sum(row["accuracies"]) / 2)
        assert row["step_seconds"] > 0
        # the gradients at least
        assert row["peak_bytes"] > 4 * row["parameters"]
    assert found["versions"]["torch"] == version("torch")


@pytest.mark.usefixtures("small")
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    first = run(path, "--systems", "window")["associative recall"]
    first["systems"]["window"] |= {"accuracies": [0.25, 0.75], "mean": 0.5, "spread": 0.125**0.5}
    path.write_text(json.dumps({"associative recall": first}))
    both = run(path, "--missing", "--systems", "window", "linear")["associative recall"]
    assert both["systems"]["window"] == first["systems"]["window"]
    assert both["systems"]["linear"]["mean"] != 0.5
    again = run(path, "--costs-only", "--systems", "window")["associative recall"]
    assert again["systems"]["window"]["mean"] == 0.5
    peaks = [each["systems"]["window"]["peak_bytes"] for each in (first, again)]
    # a run of a few steps differs from the next by up to some two per cent
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
    assert again["systems"]["linear"] == both["systems"]["linear"]
    more = run(path, "--missing", "--systems", "linear", "--seeds", "3")["associative recall"]
    assert more["systems"]["linear"]["accuracies"][:2] == both["systems"]["linear"]["accuracies"]
    assert len(more["systems"]["linear"]["accuracies"]) == 3
    assert more["seeds"] == 2
    with pytest.raises(ValueError, match=r"trained alike: .*'steps': 2.*'steps': 3"):
        run(path, "--missing", "--steps", "3")


def test_every_published_system_is_one_of_ours() -> None:
    assert set(PUBLISHED) <= {listops(count=12).name, "sequential digits"}
    for _, accuracies in PUBLISHED.values():
        assert set(accuracies) <= set(SYSTEMS)


def written(folder: Path, content: object, names: tuple[str, ...] = (*TRAIN, *TEST)) -> Path:
    for name in names:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


def test_images_are_read(tmp_path: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    data = generator.integers(0, 256, (3, 3 * PIXELS), dtype=np.uint8)
    train_part, test_part = cifar10(written(tmp_path, {b"data": data, b"labels": [3, 0, 9]}))
    assert train_part[0].shape == (15, PIXELS)
    red, green, blue = data[1].reshape(3, PIXELS).astype(float)
    np.testing.assert_array_equal(
        test_part[0][1], np.rint(0.299 * red + 0.587 * green + 0.114 * blue)
    )
    assert test_part[1].tolist() == [3, 0, 9]


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Malicious(), "has no place"),
        ({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 0]}, "must be bytes"),
        ({b"data": np.zeros((2, 3 * PIXELS)), b"labels": [0, 0]}, "must be bytes"),
        ({b"data": np.zeros((2, 3 * PIXELS), np.uint8), b"labels": [0]}, "one whole number"),
        ({b"data": np.zeros((1, 3 * PIXELS), np.uint8), b"labels": [10]}, "between 0 and 9"),
        ([1, 2], "must hold"),
    ],
)
def test_what_is_no_image_is_refused(
    content: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=said):
        cifar10(written(tmp_path, content))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("change", causes.CHANGES, ids=lambda change: change.words)
def test_every_change_makes_another_model_of_the_system(change: causes.Change) -> None:
    task = recall(count=12)
    spec = parse(spelled(change.body or SYSTEMS[change.system], task.n))
    assert (spec != parse(text(change.system, task.n))) == (change.longer == 1)
    assert Model(task, spec)(task.train.tokens).shape == (10, task.n, task.classes)
