"""The command line as its users meet it: results, messages, statuses, all that goes wrong."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnspec.cli import check_command, main
from attnspec.cli.root import CREATED
from attnspec.interchange.zoo import zoo_texts
from attnspec.spec import Spec
from attnspec.text.catalogue import catalogue
from attnspec.text.diagnostics import InternalError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

GOOD = "attention good(r = 3) { causal attend window(radius = r) require causal }\n"
WRONG = "attention wrong { attend windw(radius = 3) }\n"
FALSE = "attention untrue { attend full require causal }\n"
EMPTY_ROWS = "attention gaps { attend window(before = 3, after = 0) - self }\n"


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


def spawn(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = b"",
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "attnspec", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        cwd=cwd or ROOT,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the commands run in, with a few specs."""
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("good", GOOD),
        ("wrong", WRONG),
        ("untrue", FALSE),
        ("gaps", EMPTY_ROWS),
        ("two", GOOD + "attention second { attend full }\n"),
    ):
        (tmp_path / f"{name}.attn").write_text(text)
    return tmp_path


# --- the group ---------------------------------------------------------------------------------


def test_no_arguments_show_the_help() -> None:
    done = run()
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "compile" in done.stderr
    assert "Usage: attnspec" in done.stderr


@pytest.mark.parametrize("command", main.list_commands(None))  # type: ignore[arg-type]
def test_each_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"Example: attnspec {command}" in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout.split()[0]) == (0, "attnspec")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chek"], "did you mean `check`?"),
        (["frobnicate"], "the commands are "),
        (["check"], "SPEC"),
        (["check", "x.attn", "--nonsense"], "--nonsense"),
        (["show", "x.attn", "-n", "1k"], "write 1024 or 1000"),
        (["show", "x.attn", "-n", "1e6"], "write 1000000"),
        (["show", "x.attn", "-n", "4,096"], "write 4096"),
        (["show", "x.attn", "-n", "4.0"], "write 4"),
        (["show", "x.attn", "-n", "2.5"], "got '2.5'"),
        (["show", "x.attn", "-n", "-1"], "got '-1'"),
        (["show", "x.attn", "-n", "2147483648"], "2**31 - 1"),
        (["show", "x.attn", "-n", "9" * 5000], "2**31 - 1"),
        (["show", "x.attn", "-n", "\N{ARABIC-INDIC DIGIT FOUR}"], "integer"),
        (["show", "x.attn", "-n", "nan"], "integer"),
        (["check", "x.attn", "--set", "block"], "block=32"),
        (["check", "x.attn", "--set", "=3"], "block=32"),
        (["check", "x.attn", "--set", "r=1", "--set", "r=2"], "set twice"),
        (["format", "x.attn", "--check", "--stdout"], "contradict"),
        (["explain", "A9999"], "code"),
        (["explain", "A31"], "did you mean"),
        (["zoo", "bigbrid"], "did you mean `bigbird`?"),
        (["zoo", "../../etc/passwd"], "no spec"),
        (["zoo", "-o", "x.attn"], "NAME"),
    ],
)
def test_wrong_usage(arguments: Sequence[str], said: str, folder: Path) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


# --- check -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "status", "line"),
    [
        ("good.attn", 0, "good.attn: ok, 1 claim holds for every n"),
        ("wrong.attn", 1, "wrong.attn: 1 error"),
        ("untrue.attn", 1, "untrue.attn: 1 error"),
        ("gaps.attn", 0, "gaps.attn: ok, 1 warning"),
        ("two.attn", 0, "two.attn: ok, 1 claim holds for every n, attentions good, second"),
    ],
)
def test_check(file: str, status: int, line: str, folder: Path) -> None:
    done = run("check", file)
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.splitlines()[-1] == line


def test_check_goes_on_where_a_predicate_has_no_value(folder: Path) -> None:
    Path("odd.attn").write_text("attention odd { attend self | where(log2(q) < 3) require causal }")
    done = run("check", "odd.attn")
    assert done.exit_code == 1
    assert "odd.attn:1:17: error[A320]: `where` has no value: the logarithm" in done.stderr
    assert "`causal` is not checked at n = 1" in done.stderr


@pytest.mark.parametrize("command", ["analyse", "plan", "verify", "bench"])
@pytest.mark.parametrize(
    "body",
    [
        "«attend where(k % q == 0) | self»",
        "attend window(radius = 2) layers 2 layer 0 { «attend where(q // (n - 40) < 3)» }",
        "scale 1 / (n - 40) «attend full»",
        "attend window(radius = «39 - n») + linear()",
        "attend «linformer(rank = 40 - n)»",
    ],
)
def test_what_has_no_value_at_a_length_says_where_it_stands(
    command: str, body: str, folder: Path
) -> None:
    before, _, after = body.partition("«")
    (folder / "odd.attn").write_text(f"attention a {{\n{before}{after.replace('»', '')} }}")
    done = run(command, "odd.attn", "-n", "40")
    assert done.exit_code == 1
    assert f"odd.attn:2:{len(before) + 1}: error[A320]" in done.stderr


def test_check_says_how_claims_hold(folder: Path) -> None:
    Path("three.attn").write_text(
        "attention a { attend global(first(1)) | self require diameter <= 2 require symmetric"
        " require degree <= n require edges <= 9 * n at n = 3, 5_000 }"
    )
    done = run("check", "three.attn")
    assert done.stderr == (
        "three.attn: ok, 4 claims hold: 2 for every n; 1 at n = 1, 2, 64, 257, 1,024;"
        " 1 at n = 3, 5,000\n"
    )
    (file,) = json.loads(run("check", "three.attn", "--json").stdout)["files"]
    assert [one["status"] for one in file["verdicts"]] == ["proven", "proven", "checked", "checked"]
    assert file["verdicts"][3] == {
        "claim": "edges <= 9 * n",
        "status": "checked",
        "lengths": [3, 5000],
        "failed_at": None,
    }
    (failed,) = json.loads(run("check", "untrue.attn", "--json").stdout)["files"]
    assert (failed["verdicts"][0]["status"], failed["verdicts"][0]["failed_at"]) == ("refuted", 2)


def test_check_says_where_and_what_to_do(folder: Path) -> None:
    done = run("check", "wrong.attn")
    assert "wrong.attn:1:26: error[A201]" in done.stderr
    assert "^^^^^" in done.stderr
    assert "did you mean `window`?" in done.stderr


def test_strict_counts_warnings(folder: Path) -> None:
    assert run("check", "gaps.attn", "--strict").exit_code == 1
    assert run("check", "good.attn", "--strict").exit_code == 0


def test_check_looks_at_every_file_and_keeps_the_gravest_status(folder: Path) -> None:
    done = run("check", "wrong.attn", "nowhere.attn", "good.attn")
    assert done.exit_code == 3
    assert "A201" in done.stderr
    assert "A180" in done.stderr
    assert "good.attn: ok" in done.stderr


def test_check_all_attentions_or_the_one_named(folder: Path) -> None:
    Path("mixed.attn").write_text(GOOD + FALSE)
    assert run("check", "mixed.attn").exit_code == 1
    assert run("check", "mixed.attn", "--name", "good").exit_code == 0
    done = run("check", "mixed.attn", "--name", "goood")
    assert done.exit_code == 1
    assert "did you mean `good`?" in done.stderr


def test_set_reaches_the_spec(folder: Path) -> None:
    Path("bound.attn").write_text(
        "attention a(r = 3) { attend window(radius = r) require degree <= 7 }"
    )
    assert run("check", "bound.attn").exit_code == 0
    assert run("check", "bound.attn", "--set", "r=1 + 2").exit_code == 0
    assert run("check", "bound.attn", "--set", "r=4").exit_code == 1
    for wrong in ("q=4", "r=import", "r=3 } attention b { attend full"):
        done = run("check", "bound.attn", "--set", wrong)
        assert done.exit_code == 1
        assert "error[A2" in done.stderr


def test_check_json(folder: Path) -> None:
    done = run("check", "wrong.attn", "good.attn", "nowhere.attn", "--json")
    value = json.loads(done.stdout)
    assert done.exit_code == value["status"] == 3
    assert done.stderr == ""
    assert [entry["ok"] for entry in value["files"]] == [False, True, False]
    assert [d["code"] for d in value["diagnostics"]] == ["A201", "A180"]
    place = value["diagnostics"][0]
    assert (place["file"], place["line"], place["column"]) == ("wrong.attn", 1, 26)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "wrong.attn", "--json"],
        ["plan", "nowhere.attn", "--json"],
        ["plan", "good.attn", "-n", "1k", "--json"],
        ["plan", "good.attn", "--backend", "nothing", "--json"],
        ["explain", "A9999", "--json"],
        ["zoo", "nothing", "--json"],
        ["check", "--json"],
    ],
)
def test_failures_are_json_too(arguments: Sequence[str], folder: Path) -> None:
    done = run(*arguments)
    value = json.loads(done.stdout)
    assert value["ok"] is False
    assert value["status"] == done.exit_code != 0
    assert value["message"]
    assert done.stderr == ""


def test_a_command_without_json_says_so_in_words(folder: Path) -> None:
    done = run("show", "good.attn", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--json" in done.stderr


# --- files and streams -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "show", "plan", "format"])
def test_files_that_cannot_be_read(command: str, folder: Path) -> None:
    (folder / "folder.attn").mkdir()
    for name, code in (("nowhere.attn", "A180"), ("folder.attn", "A182")):
        done = run(command, name)
        assert done.exit_code == 3
        assert code in done.stderr
        assert name in done.stderr


def test_where_there_is_no_file_a_name_is_one_of_the_zoo(folder: Path) -> None:
    for arguments in (["show", "bigbird", "-n", "9"], ["diff", "bigbird", "longformer"]):
        assert run(*arguments).exit_code == 0, arguments
    assert run("format", "bigbird", "--stdout").stdout == run("zoo", "bigbird").stdout
    # a file goes first, and what is near is offered
    (folder / "bigbird").write_text("attention mine { attend self }", encoding="utf-8")
    (folder / "near.attn").write_text("attention near { attend self }", encoding="utf-8")
    assert "attention mine {" in run("format", "bigbird", "--stdout").stdout
    for name, advice in (
        ("longforme", "did you mean `longformer`?"),
        ("near", "did you mean `near.attn`?"),
        ("zzz", "`attnspec zoo` lists its names"),
        ("longformer.attn", "`longformer`, without the ending, is the spec of the zoo"),
    ):
        done = run("check", name)
        assert (done.exit_code, f"there is no {name}" in done.stderr) == (3, True)
        assert f"help: {advice}" in done.stderr


def test_a_module_is_no_spec(folder: Path) -> None:
    (folder / "x_attn.py").write_text("import torch\n")
    found = run("check", "x_attn.py")
    assert found.exit_code == 3
    assert "`attnspec verify x_attn.py` takes a compiled module" in found.stderr


def test_where_there_is_no_folder_nothing_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spec, "emit", lambda *_, **__: pytest.fail("compiled"))
    found = run("compile", "good.attn", "-o", "nowhere/x.py")
    assert found.exit_code == 3
    assert found.stderr == "error: nowhere/x.py: no such file or directory\n"


def test_a_file_that_is_too_large_is_a_limit(folder: Path) -> None:
    Path("large.attn").write_text("#" * (1 << 20) + "\n")
    assert run("check", "large.attn").exit_code == 4
    assert run("check", "-", stdin="#" * (1 << 20) + "\n").exit_code == 4


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        (GOOD.encode(), 0, None),
        (b"\xef\xbb\xbf" + GOOD.encode().replace(b"\n", b"\r\n"), 0, None),
        (b"", 1, "A"),
        (b"attention \xe9", 1, "A101]: expected UTF-8 text, found byte 0xE9 at byte 10"),
        (GOOD.encode("utf-16"), 1, "A101]: expected UTF-8 text, found a mark of UTF-16"),
        # a limit that falls inside a character
        (b"#" + "\u00e9".encode() * (1 << 19), 4, "A190"),
        (b'from "x.attn" import a ' + GOOD.encode(), 1, "A501"),
    ],
)
def test_standard_input(text: bytes, status: int, code: str | None) -> None:
    done = run("check", "-", stdin=text)
    assert done.exit_code == status
    assert "<stdin>" in done.stderr
    assert code is None or f"error[{code}" in done.stderr


def test_closed_streams_leave_no_traceback() -> None:
    for closing in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m attnspec check - {closing}"],
            capture_output=True,
            cwd=ROOT,
            check=False,
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode in (1, 3)


@pytest.mark.parametrize("arguments", ["zoo", "explain", "show examples/full.attn -n 1000"])
def test_a_reader_that_stops_early(arguments: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m attnspec {arguments} | true"],
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_file_that_cannot_be_written() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m attnspec zoo > /dev/full"],
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 3
    assert os.strerror(errno.ENOSPC).lower() in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xff d\n.attn")
    (tmp_path / name).write_text(WRONG)
    done = spawn("check", name, cwd=tmp_path)
    assert done.returncode == 1
    assert b"b\\xff d\\n.attn:1:26: error[A201]" in done.stderr
    assert b"formatted b\\xff d\\n.attn" in spawn("format", name, cwd=tmp_path).stderr
    value = json.loads(spawn("check", name, "--json", cwd=tmp_path).stdout)
    assert value["files"][0]["file"] == "b\\xff d\\n.attn"


@pytest.mark.parametrize(
    ("setting", "command"),
    [
        ({"LANG": "C"}, "show"),
        ({"LC_ALL": "C"}, "check"),
        ({"TERM": "dumb"}, "show"),
        pytest.param({"TERM": "dumb"}, "check", marks=pytest.mark.slow),
    ],
)
def test_plain_surroundings_get_ascii(
    setting: dict[str, str], command: str, tmp_path: Path
) -> None:
    wrong = tmp_path / "c.attn"
    wrong.write_text("# één\n" + WRONG)
    arguments = ["check", str(wrong)]
    if command == "show":
        arguments = ["show", str(EXAMPLES / "causal.attn"), "-n", "9"]
    done = spawn(*arguments, env={"LC_ALL": "", "LANG": "", **setting})
    assert (done.stdout + done.stderr).isascii()
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr


def test_colour_is_for_terminals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in run("check", "wrong.attn").stderr
    monkeypatch.setattr("attnspec.cli.console.has_colour", lambda stream: True)
    assert "\x1b[31m\x1b[1merror[A201]" in run("check", "wrong.attn").stderr


# --- defects and interruptions -----------------------------------------------------------------


def test_a_defect_asks_for_a_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("the moon is in the wrong place")

    monkeypatch.setattr(check_command, "check_file", broken)
    done = run("check", "good.attn")
    assert done.exit_code == 70
    assert "the moon is in the wrong place" in done.stderr
    assert "report" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in run("--debug", "check", "good.attn").stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 4),
        (RecursionError(), 70),
        (InternalError("no"), 70),
        (PermissionError(errno.EACCES, "no", "x.attn"), 3),
    ],
)
def test_every_way_to_end_has_its_status(
    error: BaseException, status: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(check_command, "check_file", ends)
    done = run("check", "good.attn")
    assert done.exit_code == status
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


# --- explain -----------------------------------------------------------------------------------


def test_explain_shows_both_examples() -> None:
    done = run("explain", "a301")
    assert done.exit_code == 0
    assert "    attention a { attend window(512) }\n" in done.stdout
    assert f"    {' ' * 28}^^^\n" in done.stdout
    assert "window(before = 511, after = 0)" in done.stdout
    assert run("explain", "301").stdout == done.stdout


def test_explain_has_a_page_for_each_code() -> None:
    listed = run("explain").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(catalogue())
    for code in catalogue():
        assert run("explain", code).stdout.startswith(f"{code}: ")
    values = json.loads(run("explain", "--json").stdout)["codes"]
    assert [value["code"] for value in values] == list(catalogue())


# --- zoo ---------------------------------------------------------------------------------------


def test_zoo_lists_prints_and_writes(folder: Path) -> None:
    listed = run("zoo").stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(p.stem for p in EXAMPLES.glob("*.attn"))
    text = (EXAMPLES / "bigbird.attn").read_text()
    assert run("zoo", "bigbird").stdout == text
    assert run("zoo", "bigbird", "-o", "mine.attn").exit_code == 0
    assert Path("mine.attn").read_text() == text == zoo_texts()["bigbird"]
    assert json.loads(run("zoo", "bigbird", "--json").stdout)["text"] == text


def test_zoo_prints_the_patterns_written_in_the_language(folder: Path) -> None:
    text = run("zoo", "--prelude").stdout
    assert "graph residue(step) = where((q - k) % step == 0)" in text
    assert run("zoo", "--prelude", "-o", "mine.attn").exit_code == 0
    assert Path("mine.attn").read_text() == text
    assert "stands without" in run("zoo", "bigbird", "--prelude").stderr


def test_zoo_writes_over_nothing_of_yours(folder: Path) -> None:
    done = run("zoo", "bigbird", "-o", "good.attn")
    assert done.exit_code == 3
    assert Path("good.attn").read_text() == GOOD
    assert run("zoo", "bigbird", "-o", "good.attn", "--force").exit_code == 0
    assert Path("good.attn").read_text() != GOOD


# --- format ------------------------------------------------------------------------------------


def test_format_rewrites_in_place_and_keeps_comments(folder: Path) -> None:
    Path("x.attn").write_bytes(b"# why\r\nattention  a{attend full}  # that\r\n")
    done = run("format", "x.attn")
    assert (done.exit_code, done.stderr) == (0, "formatted x.attn\n")
    text = Path("x.attn").read_bytes()
    assert text.startswith(b"# why\nattention a {\n    attend full\n")
    assert b"# that" in text
    assert run("format", "x.attn").stderr == ""
    assert run("format", "x.attn", "--check").exit_code == 0


def test_format_check_and_stdout_change_nothing(folder: Path) -> None:
    before = Path("good.attn").read_bytes()
    done = run("format", "good.attn", "untrue.attn", "--check")
    assert (done.exit_code, done.stdout) == (1, "good.attn\nuntrue.attn\n")
    printed = run("format", "good.attn", "--stdout").stdout
    assert printed.startswith("attention good(r = 3) {\n    causal\n")
    assert run("format", "-", stdin=GOOD).stdout == printed
    assert run("format", "-", "--check", stdin=printed).exit_code == 0
    assert run("format", "-", "--check", stdin=GOOD).stdout == "<stdin>\n"
    assert Path("good.attn").read_bytes() == before


def test_format_leaves_wrong_files_alone_and_does_the_others(folder: Path) -> None:
    Path("broken.attn").write_text("attention {")
    done = run("format", "broken.attn", "good.attn")
    assert done.exit_code == 1
    assert Path("broken.attn").read_text() == "attention {"
    assert Path("good.attn").read_text() != GOOD


def test_format_keeps_permissions_and_links(folder: Path) -> None:
    Path("good.attn").chmod(0o640)
    Path("link.attn").symlink_to("good.attn")
    assert run("format", "link.attn").exit_code == 0
    assert Path("link.attn").is_symlink()
    assert Path("good.attn").stat().st_mode & 0o777 == 0o640
    assert Path("good.attn").read_text() != GOOD
    assert sorted(p.suffix for p in folder.iterdir()) == [".attn"] * 6


# --- plan, show --------------------------------------------------------------------------------


def test_plan(folder: Path) -> None:
    done = run("plan", "good.attn", "-n", "512")
    assert done.exit_code == 0
    assert "good, n = 512, cpu" in done.stdout
    assert "chosen" in done.stdout
    value = json.loads(run("plan", "good.attn", "-n", "512", "--json").stdout)
    assert value["ok"] is True
    chosen = value["steps"][0]["chosen"]
    assert value["steps"][0]["candidates"][0]["backend"] == chosen
    assert run("plan", "good.attn", "--backend", chosen).exit_code == 0
    value = json.loads(run("plan", "good.attn", "-n", "512", "--device", "cuda", "--json").stdout)
    candidates = value["steps"][0]["candidates"]
    assert candidates[0]["seconds"] > 0
    value = json.loads(run("plan", "good.attn", "-n", "512", "--device", "xpu", "--json").stdout)
    assert {each["seconds"] for each in value["steps"][0]["candidates"]} == {None}
    assert "no estimates for xpu" in run("plan", "good.attn", "--device", "xpu").stdout
    assert run("plan", "good.attn", "-n", "0").exit_code == 0
    done = run("plan", "good.attn", "-n", "2147483647")
    assert done.exit_code == 4
    assert "up to n = 1,048,576, got 2,147,483,647" in done.stderr
    done = run("plan", "good.attn", "--backend", "tyles")
    assert done.exit_code == 2
    assert chosen in done.stderr


def test_show(folder: Path) -> None:
    done = run("show", "good.attn", "-n", "8", "--set", "r=1")
    assert done.exit_code == 0
    assert "good(r = 1)\nn = 8\n\n15 of 64 pairs (23.4 %), 1 to 2 keys a query\n" in done.stdout
    assert done.stdout.count("██") == 15
    assert run("show", "two.attn").exit_code == 1
    assert run("show", "two.attn", "--name", "second", "-n", "0").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["good.attn", "--layer", "1"], "1 layer, counted from 0"),
        (["heads.attn", "--head", "2"], "2 heads, counted from 0"),
        (["grid.attn", "-n", "7"], "4 x 6 = 24 cells"),
        (["inputs.attn"], "--input doc=0*32,1*32 --input important=0,5,9 --input len=12"),
        (["inputs.attn", "-n", "9"], "--input doc=0*5,1*4"),
        (["good.attn", "--input", "x=1"], "declares no input `x`"),
        (["inputs.attn", "-n", "4", "--input", "doc=0,1"], "not given: `important`"),
    ],
)
def test_show_requests_that_do_not_fit(arguments: Sequence[str], said: str, folder: Path) -> None:
    _write_specs()
    done = run("show", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"doc": "0,1,2"},
        {"doc": "0,1,2,x"},
        {"doc": "0..3"},
        {"important": "4"},
        {"important": "3..1"},
        {"important": "0*2"},
        {"len": "5"},
        {"len": "1,2"},
    ],
)
def test_show_inputs_that_are_wrong(wrong: dict[str, str], folder: Path) -> None:
    _write_specs()
    given = {"doc": "0,1,1,2", "important": "0", "len": "2", **wrong}
    options = [part for name, text in given.items() for part in ("--input", f"{name}={text}")]
    done = run("show", "inputs.attn", "-n", "4", *options)
    assert done.exit_code == 2
    (name,) = wrong
    assert f"--input {name} (" in done.stderr


@pytest.mark.parametrize(
    ("command", "body", "line", "place"),
    [
        (
            "plan",
            "attend window(radius = 3)\nhead 1 { attend residue(step = n - 64) }",
            3,
            "n - 64",
        ),
        (
            "plan",
            "attend window(radius = 3)\nscore softcap(cap = n - 64)",
            3,
            "softcap(cap = n - 64)",
        ),
        ("plan", "attend window(radius = 3)\nscale 1 / (n - 64)", 2, "attend window"),
        (
            "plan",
            "attend full\nhead 1 { attend where(q % (n - 64) == k) | self }",
            3,
            "attend where",
        ),
        (
            "show",
            "attend full\nhead 1 { attend where(q % (n - 64) == k) | self }",
            3,
            "attend where",
        ),
        (
            "file",
            "attend full\nhead 1 { attend where(q % (n - 64) == k) | self }",
            3,
            "attend where",
        ),
    ],
)
def test_what_has_no_value_at_n_is_shown_in_the_text(
    command: str, body: str, line: int, place: str, folder: Path
) -> None:
    Path("odd.attn").write_text(f"attention odd {{ heads 2\n{body} }}\n")
    wanted = ["show", "odd.attn", "-o", "x.svg"] if command == "file" else [command, "odd.attn"]
    done = run(*wanted, "-n", "64")
    assert done.exit_code == 1
    column = body.splitlines()[line - 2].index(place) + 1
    assert done.stderr.startswith(f"odd.attn:{line}:{column}: error[A320]: ")


def test_show_inputs_and_grids(folder: Path) -> None:
    _write_specs()
    options = ["--input", "doc=0*2,1,1", "--input", "important=3", "--input", "len=1"]
    done = run("show", "inputs.attn", "-n", "4", *options)
    assert done.exit_code == 0
    # two documents of 2 x 2, the row and column of 3, the column of 0
    assert "13 of 16 pairs" in done.stdout
    assert "n = 24 · grid 4 × 6" in run("show", "grid.attn").stdout


def _write_specs() -> None:
    Path("heads.attn").write_text("attention a { heads 2 attend full }")
    Path("grid.attn").write_text("attention a { sequence grid(4, 6) attend axial }")
    Path("inputs.attn").write_text(
        "attention a { input doc: ids input important: tokens input len: length"
        " attend same(doc) | global(important) | prefix(len) }"
    )


# --- start-up ----------------------------------------------------------------------------------


def test_light_commands_load_no_torch() -> None:
    spec = str(EXAMPLES / "causal.attn")
    commands = [
        ["--help"],
        ["verify", "--help"],
        ["check", spec],
        ["format", spec, "--check"],
        ["show", spec],
        ["plan", spec],
        ["explain", "A301"],
        ["zoo"],
    ]
    # one after the other in one interpreter: what none of them loads is loaded by no one of them
    script = (
        "import sys\nfrom attnspec.cli import main\n"
        f"for command in {commands!r}:\n"
        "    main(command, standalone_mode=False)\n"
        "    heavy = {'torch', 'sympy', 'matplotlib'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{command} loads {heavy}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- compile -----------------------------------------------------------------------------------


def test_compile_writes_a_module_and_says_why_in_three_lines(folder: Path) -> None:
    done = run("compile", "good.attn")
    assert (done.exit_code, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "wrote good_attn.py: class Good, for every length"
    assert lines[1].startswith("chosen: ")
    assert lines[2].startswith("because: ")
    assert len(lines) == 3
    text = Path("good_attn.py").read_text()
    assert "class Good(" in text
    assert str(folder) not in text
    # no backend of the package runs what stands alone
    alone = run("compile", "good.attn", "--standalone").stderr.splitlines()
    assert alone[0] == lines[0]
    assert alone[1] == "chosen: what stands in the file, at every length"
    assert len(alone) == 3
    # the next one replaces it without being forced
    assert run("compile", "good.attn", "--set", "r=4").exit_code == 0
    assert Path("good_attn.py").read_text() != text
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        # two backends of which each could have run both heads
        ("head 0 { attend window(radius = 64) } head 1 { attend powers(base = 2) }", "together"),
        # no backend runs a graph and a mechanism
        ("head 0 { attend linear() } head 1 { attend powers(base = 2) }", "no backend runs all"),
    ],
)
def test_compile_says_why_where_heads_differ(body: str, reason: str, folder: Path) -> None:
    done = run("compile", "-", stdin=f"attention a {{ causal heads 2 {body} }}")
    assert done.exit_code == 0
    line = done.stderr.splitlines()[2]
    assert re.match(
        rf"because: together [\d.]+ ms, .*{'' if reason == 'together' else reason}", line
    )
    assert ("bands" in line) == (reason == "together")


def test_compile_prints_and_takes_standard_input(folder: Path) -> None:
    run("compile", "good.attn", "-o", "x_attn.py")
    printed = run("compile", "good.attn", "-o", "-")
    assert printed.stdout == Path("x_attn.py").read_text()
    assert run("compile", "-", "-o", "-", stdin=GOOD).stdout == printed.stdout
    assert run("compile", "-", stdin=GOOD).exit_code == 0
    assert Path("good_attn.py").read_text() == printed.stdout
    assert run("compile", "two.attn", "--name", "second").exit_code == 0
    assert "class Second(" in Path("two_attn.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["wrong.attn"], 1, "A201"),
        (["untrue.attn"], 1, "A606"),
        (["formula.attn", "--standalone"], 2, "queries and keys decide"),
        (["two.attn"], 1, "A214"),
        (["nowhere.attn"], 3, "A180"),
        (["good.attn", "--backend", "tyles"], 2, "tyles"),
        (["good.attn", "-o", "good.attn"], 2, "the spec itself"),
        (["good.attn", "-o", "link.py"], 2, "the spec itself"),
        (["good.attn", "-o", "yours.py"], 3, "--force"),
        (["good.attn", "-o", "."], 3, "directory"),
        (["good.attn", "-o", ""], 2, "a file's name"),
        (["good.attn", "-o", "nowhere/x.py"], 3, "nowhere/x.py"),
    ],
)
def test_compile_writes_nothing_unless_all_is_well(
    arguments: Sequence[str], status: int, said: str, folder: Path
) -> None:
    Path("formula.attn").write_text("attention a { attend lsh(buckets = 4) }")
    Path("yours.py").write_text("mine = 1\n")
    Path("link.py").symlink_to("good.attn")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    done = run("compile", *arguments)
    assert done.exit_code == status
    assert said in done.stderr
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_standalone_module_names_no_backend(folder: Path) -> None:
    done = run("compile", "good.attn", "--standalone", "-o", "alone.py")
    assert done.exit_code == 0
    assert "needs torch alone, and such a one plans nothing" in done.output
    assert not any(f"{name} " in done.output for name in ("bands", "torch call", "scattered"))


@pytest.mark.parametrize("standalone", [[], ["--standalone"]])
def test_compile_writes_over_no_edit(standalone: list[str], folder: Path) -> None:
    arguments = ["compile", "good.attn", *standalone]
    assert run(*arguments).exit_code == 0
    written = Path("good_attn.py").read_bytes()
    for edited in (
        written.replace(b"import torch", b"import torch  # mine", 1),
        written + b"mine = 1\n",
        written.replace(b"\n", b"\r\n"),
        # what says nothing of the lines above
        written.rpartition(b"\n#")[0] + b"\n",
    ):
        Path("good_attn.py").write_bytes(edited)
        done = run(*arguments)
        assert (done.exit_code, "--force" in done.stderr) == (3, True)
        assert Path("good_attn.py").read_bytes() == edited
    assert run(*arguments, "--force").exit_code == 0
    assert Path("good_attn.py").read_bytes() == written


def test_compile_forced_and_warned(folder: Path) -> None:
    Path("yours.py").write_text("mine = 1\n")
    assert run("compile", "good.attn", "-o", "yours.py", "--force").exit_code == 0
    assert "class Good(" in Path("yours.py").read_text()
    done = run("compile", "good.attn", "-o", "my-own.py")
    assert done.exit_code == 0
    assert "my_own_attn.py could be" in done.stderr
    assert "hides the module `json`" in run("compile", "good.attn", "-o", "json.py").stderr
    warned = run("compile", "gaps.attn")
    assert warned.exit_code == 0
    assert "warning[A901]" in warned.stderr


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
@pytest.mark.usefixtures("folder", "unverified")
def test_compile_into_a_pipe() -> None:
    read, write = os.pipe()
    try:
        assert run("compile", "good.attn", "-o", f"/dev/fd/{write}").exit_code == 0
    finally:
        os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        assert pipe.read() == run("compile", "good.attn", "-o", "-").stdout


def test_compile_json(folder: Path) -> None:
    done = run("compile", "gaps.attn", "--json")
    value = json.loads(done.stdout)
    assert (value["ok"], value["file"], value["name"]) == (True, "gaps_attn.py", "gaps")
    assert [d["code"] for d in value["diagnostics"]] == ["A901"]
    assert done.stderr == ""


def test_a_full_disk_leaves_the_old_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("compile", "good.attn")
    before = Path("good_attn.py").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = run("compile", "good.attn", "--set", "r=9")
    assert done.exit_code == 3
    assert "good_attn.py: no space left" in done.stderr
    assert Path("good_attn.py").read_bytes() == before
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".attn") == ["good_attn.py"]


# --- verify ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_verify_a_spec_and_its_module(options: Sequence[str], folder: Path) -> None:
    assert run("compile", "good.attn", *options).exit_code == 0
    for subject in ("good.attn", "good_attn.py"):
        done = run("verify", subject, "-n", "33")
        assert done.exit_code == 0
        assert "good, n = 33" in done.stdout
        assert ", 0 failed" in done.stdout
        value = json.loads(run("verify", subject, "-n", "33", "--json").stdout)
        assert value["ok"] is True
        assert value["checks"]


def test_verify_with_every_backend(folder: Path) -> None:
    done = run("verify", "good.attn", "-n", "20", "--backend", "all")
    assert done.exit_code == 0
    for name in ("dense", "tiles", "bands", "scattered", "rows"):
        assert f", {name}: " in done.stdout
    assert "not looked at: other queries than the last 5" in done.stdout


def test_verify_samples_a_long_sequence(folder: Path) -> None:
    done = run("verify", "good.attn", "-n", "5000")
    assert done.exit_code == 0
    assert "not every pair was looked at" in done.stdout
    assert "at 64 of 5,000 queries" in done.stdout
    value = json.loads(run("verify", "good.attn", "-n", "5000", "--json").stdout)
    assert value["exhaustive"] is False
    assert {check["queries"] for check in value["checks"]} <= {16, 64, 5000}


def test_verify_finds_a_module_that_computes_something_else(folder: Path) -> None:
    run("compile", "good.attn")
    text = Path("good_attn.py").read_text()
    wrong = text.replace("__init__(PLAN, head_size)", "__init__(OTHER, head_size)").replace(
        "\nclass Good",
        "\nimport copy\nOTHER = copy.deepcopy(PLAN)\n"
        "OTHER['program']['causal'] = False\n\nclass Good",
    )
    Path("good_attn.py").write_text(wrong)
    done = run("verify", "good_attn.py", "-n", "9")
    assert done.exit_code == 1
    assert "FAIL" in done.stdout
    assert json.loads(run("verify", "good_attn.py", "-n", "9", "--json").stdout)["ok"] is False


@pytest.mark.parametrize(
    ("subject", "options", "status", "said"),
    [
        ("good.attn", ["-n", "1048577"], 4, "1,048,576"),
        ("good.attn", ["-n", "20000", "--backend", "dense"], 4, "too long for the backend dense"),
        ("good.attn", ["-n", "0"], 2, "n = 0"),
        ("good.attn", ["--backend", "tyles"], 2, "tyles"),
        ("wrong.attn", [], 1, "A201"),
        ("good_attn.py", ["--set", "r=3"], 2, "--set"),
        ("good_attn.py", ["--backend", "all"], 2, "--backend"),
        ("nowhere.py", [], 3, "nowhere.py"),
        ("yours.py", [], 1, "no module that"),
        ("edited.py", [], 1, "fingerprint"),
        ("broken.py", [], 1, "SyntaxError"),
    ],
)
def test_verify_what_cannot_be(
    subject: str, options: Sequence[str], status: int, said: str, folder: Path
) -> None:
    run("compile", "good.attn")
    text = Path("good_attn.py").read_text()
    Path("yours.py").write_text("raise SystemExit(0)\n")
    Path("edited.py").write_text(
        text.replace("'causal': True", "'causal': False").replace(
            '"causal": True', '"causal": False'
        )
    )
    Path("broken.py").write_text(text + "(")
    done = run("verify", subject, *options)
    assert done.exit_code == status
    assert said in done.stderr


def test_garbage_is_looked_for_less_often_while_a_command_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, before, seen = gc.get_threshold(), (700, 10, 10), []
    gc.set_threshold(*before)

    def check(spec: Spec) -> tuple[()]:
        seen.append(gc.get_threshold())
        return ()

    monkeypatch.setattr(Spec, "check", check)
    try:
        run("check", str(EXAMPLES / "window.attn"))
        assert seen == [(CREATED, *before[1:])]
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*held)
