"""Bad inputs of the command line, by the numbers of the list: what is typed, what is said.

`ELSEWHERE` says where the rest is, or why there is nothing to try.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from zoo import EXAMPLES

import attnspec
from attnspec.cli import main

GOOD = "attention good(r = 3) { causal attend window(radius = r) require causal }\n"
BAD = "attention bad { attend windw(radius = 3) }\n"

ELSEWHERE = {
    51: "test_cli.py: standard input that is empty, closed, no text",
    53: "test_cli.py: a full disk, a folder that is missing; a file is replaced at once or not",
    60: "test_cli.py: a reader that stops early",
    61: "test_cli.py: plain surroundings get ASCII, colour is for terminals",
    63: "test_cli.py: names that are no text",
    65: "no command has jobs",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.attn").write_text(GOOD)
    (tmp_path / "bad.attn").write_text(BAD)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def spawn(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "COLUMNS")}
    return subprocess.run(
        [sys.executable, "-m", "attnspec", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **env},
    )


@pytest.mark.parametrize(
    ("row", "arguments", "status", "said"),
    [
        (49, [], 2, "Usage: attnspec"),
        (50, ["check", "missing.attn"], 3, "there is no missing.attn"),
        (50, ["check", "sub"], 3, "sub is a directory"),
        (50, ["analyse", "missing.attn", "-n", "4"], 3, "there is no missing.attn"),
        (52, ["compile", "good.attn", "-o", "good.attn"], 2, "the output is the spec itself"),
        (52, ["compile", "good.attn", "-o", "sub"], 3, "is a directory"),
        (52, ["compile", "good.attn", "-o", "mine.py"], 3, "holds something else (--force"),
        (52, ["show", "good.attn", "-o", "sub"], 2, "a picture is a file of .png, .svg or .html"),
        (57, ["compile", "good.attn", "--backend", "nope"], 2, "must be one of auto, rows"),
        (57, ["compile", "good.attn", "--backend", "triton"], 2, "the backend triton refuses: its"),
        (57, ["plan", "good.attn", "--device", "warp"], 2, "is not one of 'cpu', 'cuda'"),
        (57, ["show", "good.attn", "-o", "a.bmp"], 2, ".png, .svg or .html, got 'a.bmp'"),
        (58, ["analyse", "good.attn", "-n", "-1"], 2, "an integer from 0 to 2**31 - 1"),
        (58, ["analyse", "good.attn", "-n", str(2**31)], 2, "an integer from 0 to 2**31 - 1"),
        (58, ["plan", "good.attn", "-n", str(2**63)], 2, "an integer from 0 to 2**31 - 1"),
        (58, ["plan", "good.attn", "-n", "1k"], 2, "write 1024 or 1000"),
        (58, ["show", "good.attn", "-n", "1e6"], 2, "write 1000000"),
        (58, ["bench", "good.attn", "-n", "0"], 2, "nothing to time at n = 0"),
        (58, ["analyse", "good.attn", "-n", "1000000000"], 4, "lengths up to 4,194,304"),
        (58, ["analyse", "good.attn", "-n", "0"], 0, "n = 0"),
        (59, ["format", "good.attn", "--check", "--stdout"], 2, "contradict each other"),
        (59, ["zoo", "bigbird", "--prelude"], 2, "without the NAME"),
        (64, ["check", "*.attn"], 3, "there is no *.attn"),
        (64, ["check"], 2, "Missing argument 'SPEC...'"),
        (64, ["check", "good.attn", "bad.attn", "missing.attn"], 3, "good.attn: ok"),
    ],
)
def test_what_is_said(
    row: int, arguments: Sequence[str], status: int, said: str, folder: Path
) -> None:
    (folder / "mine.py").write_text("print('mine')\n")
    before = sorted(folder.iterdir()), (folder / "good.attn").read_text()
    found = run(*arguments)
    assert (found.exit_code, said in found.output) == (status, True), found.output
    assert "Traceback" not in found.output
    # nothing is written, nothing is lost
    assert (sorted(folder.iterdir()), (folder / "good.attn").read_text()) == before
    assert (folder / "mine.py").read_text() == "print('mine')\n"
    assert row in range(49, 67)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_row_50_no_permission(folder: Path) -> None:
    (folder / "good.attn").chmod(0)
    assert run("check", "good.attn").exit_code == 3


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("my-attn.py", "cannot be imported by its name, my_attn.py could be"),
        ("1.py", "cannot be imported by its name, _1_attn.py could be"),
        ("class.py", "cannot be imported by its name, class_attn.py could be"),
        (
            "torch.py",
            "hides the module `torch` from what stands beside it, torch_attn.py would not",
        ),
    ],
)
def test_row_54_names_that_are_no_modules(output: str, said: str, folder: Path) -> None:
    found = run("compile", "good.attn", "-o", output)
    assert (found.exit_code, said in found.output) == (0, True), found.output
    compile((folder / output).read_text(), output, "exec")


@pytest.mark.usefixtures("unverified")
def test_row_55_what_stops_a_write_leaves_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("compile", "good.attn").exit_code == 0
    old = (folder / "good_attn.py").read_bytes()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    assert run("compile", "good.attn", "--set", "r=5").exit_code == 130
    assert (folder / "good_attn.py").read_bytes() == old
    assert sorted(path.name for path in folder.iterdir()) == [
        *("bad.attn", "good.attn", "good_attn.py", "sub")
    ]


def test_row_56_two_at_once_leave_one_whole(folder: Path) -> None:
    from attnspec.cli.files import write_result

    texts = [f"# {number}\n" * 20_000 for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda text: write_result("out.txt", text, force=True), texts * 4))
    assert (folder / "out.txt").read_text() in texts
    assert len(list(folder.iterdir())) == 4


def test_row_62_json_with_errors(folder: Path) -> None:
    found = spawn("check", str(folder / "bad.attn"), "--json")
    answer = json.loads(found.stdout)
    assert (found.returncode, answer["ok"], answer["status"]) == (1, False, 1)
    assert [one["code"] for one in answer["diagnostics"]] == ["A201"]
    assert found.stderr == ""


def test_row_64_many_files(folder: Path) -> None:
    for number in range(60):
        (folder / f"{number}.attn").write_text(BAD if number == 7 else GOOD)
    found = run("check", *(f"{number}.attn" for number in range(60)))
    assert found.exit_code == 1
    assert found.output.count(": ok") == 59


@pytest.mark.slow
def test_row_66_surroundings_change_no_byte(folder: Path) -> None:
    spec = str(folder / "good.attn")
    outs = [
        spawn("compile", spec, "-o", "-", **env)
        for env in (
            {"PYTHONHASHSEED": "0"},
            {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "HOME": "/nonexistent"},
        )
    ]
    assert [one.returncode for one in outs] == [0, 0], outs[0].stderr
    assert outs[0].stdout == outs[1].stdout


def test_every_row_is_tried_or_explained() -> None:
    marks = test_what_is_said.pytestmark  # type: ignore[attr-defined]
    tried = {row for row, *_ in marks[0].args[1]}
    tried |= {int(name.split("_")[2]) for name in globals() if name.startswith("test_row_")}
    assert tried | ELSEWHERE.keys() == {*range(49, 67)}
    assert not tried & ELSEWHERE.keys()


@pytest.mark.parametrize("name", ["dsa", "msa", "xattention"])
def test_inputs_of_heads_are_given_in_python(name: str) -> None:
    spec = str(EXAMPLES / f"{name}.attn")
    entry = next(iter(attnspec.zoo(name).inputs))
    found = run("show", spec, "-n", "64", "--input", f"{entry}=1*64")
    assert found.exit_code == 2
    assert "is given in Python" in found.output
