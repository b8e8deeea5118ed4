"""The command line as its users meet it: files, streams, results as data, all that goes wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sweeps import few
from zoo import EXAMPLES

from attnspec import InternalError, Report
from attnspec.cli import main
from attnspec.cli.console import patience

ROOT = Path(__file__).resolve().parents[2]

GOOD = "attention good(r = 3) { causal attend window(radius = r) require causal }\n"
WRONG = "attention wrong { attend windw(radius = 3) }\n"
FALSE = "attention untrue { attend full require causal }\n"
EMPTY_ROWS = "attention gaps { attend window(before = 3, after = 0) - self }\n"
BAND = "attention band(w = 2) { cross attend where(abs(q * n - k * m) <= w * m) }\n"


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


def value(*arguments: str, status: int = 0) -> dict[str, Any]:
    """What a command says as JSON."""
    done = run(*arguments, "--json")
    assert (done.exit_code, done.stderr) == (status, ""), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spawn(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "attnspec", *arguments],
        input=b"",
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        cwd=cwd or ROOT,
        check=False,
    )


def shell(command: str) -> subprocess.CompletedProcess[bytes]:
    command = command.replace("attnspec", f"{sys.executable} -m attnspec")
    return subprocess.run(["sh", "-c", command], capture_output=True, cwd=ROOT, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that the commands run in, with a few specs."""
    texts = {"good": GOOD, "wrong": WRONG, "untrue": FALSE, "gaps": EMPTY_ROWS, "band": BAND}
    for name, text in texts.items():
        (tmp_path / f"{name}.attn").write_text(text)
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("command", main.list_commands(None))  # type: ignore[arg-type]
def test_each_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert done.stdout.count(f"attnspec {command}") >= 2


@pytest.mark.usefixtures("folder")
def test_figures_are_of_a_usual_length_and_have_titles_of_their_own() -> None:
    assert value("analyse", "good.attn", "--only", "edges")["n"] == 4096
    assert value("analyse", "swin", "--only", "edges")["n"] == 784
    titles = [entry.title for entry in Report.entries.values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.usefixtures("folder")
def test_plans_and_modules_as_json() -> None:
    (step,) = value("plan", "good.attn", "-n", "512")["steps"]
    assert step["candidates"][0]["backend"] == step["chosen"]
    assert run("plan", "good.attn", "--backend", step["chosen"]).exit_code == 0
    (step,) = value("plan", "good.attn", "-n", "512", "--device", "cuda")["steps"]
    assert step["candidates"][0]["seconds"] > 0
    (step,) = value("plan", "good.attn", "-n", "512", "--device", "xpu")["steps"]
    assert {each["seconds"] for each in step["candidates"]} == {None}
    found = value("compile", "gaps.attn")
    assert (found["file"], found["name"]) == ("gaps_attn.py", "gaps")
    assert [d["code"] for d in found["diagnostics"]] == ["A901"]


@pytest.mark.usefixtures("folder")
def test_every_command_that_takes_a_length_takes_both_of_two_sequences() -> None:
    for command in ("analyse", "plan", "verify"):
        found = value(command, "band.attn", "-m", "9", "-n", "20")
        assert (found["m"], found["n"]) == (9, 20)
    assert value("diff", "band.attn", "band.attn", "-m", "9", "-n", "20")["equal"]
    assert value("analyse", "band.attn", "-n", "20")["m"] == 20
    for suffix in ("png", "svg", "html"):
        assert run("show", "band.attn", "-m", "9", "-n", "20", "-o", f"b.{suffix}").exit_code == 0
    for options in ([], ["--standalone"]):
        assert run("compile", "band.attn", *options, "-o", "made.py", "--force").exit_code == 0
        assert value("verify", "made.py", "-m", "9", "-n", "20")["ok"]


def test_explain_and_zoo_have_a_page_for_each() -> None:
    listed = run("explain").stdout.splitlines()
    codes = [line.split()[0] for line in listed]
    assert len(codes) > 100
    assert all(run("explain", code).stdout.startswith(f"{code}: ") for code in codes)
    assert [each["code"] for each in value("explain")["codes"]] == codes
    assert run("explain", "301").stdout == run("explain", "a301").stdout
    names = [line.split()[0] for line in run("zoo").stdout.splitlines()]
    assert names == sorted(path.stem for path in EXAMPLES.glob("*.attn"))
    text = (EXAMPLES / "bigbird.attn").read_text()
    assert run("zoo", "bigbird").stdout == value("zoo", "bigbird")["text"] == text
    assert text == run("format", "bigbird", "--stdout").stdout


def test_zoo_writes_over_nothing_of_yours(folder: Path) -> None:
    assert run("zoo", "--prelude", "-o", "mine.attn").exit_code == 0
    assert Path("mine.attn").read_text() == run("zoo", "--prelude").stdout
    assert run("zoo", "bigbird", "-o", "good.attn").exit_code == 3
    assert Path("good.attn").read_text() == GOOD
    assert run("zoo", "bigbird", "-o", "good.attn", "--force").exit_code == 0
    # a file goes before a spec of the zoo
    (folder / "bigbird").write_text(GOOD)
    assert "attention good(" in run("format", "bigbird", "--stdout").stdout


def test_format_rewrites_in_place_and_keeps_the_rest(folder: Path) -> None:
    Path("x.attn").write_bytes(b"# why\r\nattention  a{attend full}  # that\r\n")
    Path("x.attn").chmod(0o640)
    Path("link.attn").symlink_to("x.attn")
    Path("broken.attn").write_text("attention {")
    files = sorted(folder.iterdir())
    assert run("format", "broken.attn", "link.attn").exit_code == 1
    text = Path("x.attn").read_bytes()
    assert text.startswith(b"# why\nattention a {\n    attend full\n")
    assert b"# that" in text
    assert Path("link.attn").is_symlink()
    assert Path("x.attn").stat().st_mode & 0o777 == 0o640
    assert Path("broken.attn").read_text() == "attention {"
    assert run("format", "x.attn").stderr == ""
    assert run("format", "x.attn", "--check").exit_code == 0
    assert sorted(folder.iterdir()) == files


@pytest.mark.usefixtures("folder", "unverified")
def test_compile_writes_and_prints_a_module() -> None:
    done = run("compile", "good.attn")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (0, "", 3)
    text = Path("good_attn.py").read_text()
    assert "class Good(" in text
    assert str(Path.cwd()) not in text
    assert run("compile", "good.attn", "-o", "-").stdout == text
    # named after the file, or after the attention where there is none
    Path("other.attn").write_text(GOOD)
    assert value("compile", "other.attn")["file"] == "other_attn.py"
    Path("good_attn.py").unlink()
    assert run("compile", "-", stdin=GOOD).exit_code == 0
    assert Path("good_attn.py").read_text() == text
    # the next one replaces it without being forced
    assert run("compile", "good.attn", "--set", "r=4").exit_code == 0
    assert Path("good_attn.py").read_text() != text
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]
    warned = run("compile", "gaps.attn")
    assert (warned.exit_code, "[A901]" in warned.stderr) == (0, True)
    alone = run("compile", "good.attn", "--standalone", "-o", "alone.py").stderr
    assert not any(name in alone for name in ("tables", "edges"))


@pytest.mark.usefixtures("folder", "unverified")
@pytest.mark.parametrize(
    ("output", "better"),
    [
        ("my-attn.py", "my_attn.py"),
        ("1.py", "_1_attn.py"),
        ("class.py", "class_attn.py"),
        ("torch.py", "torch_attn.py"),
        ("json.py", "json_attn.py"),
    ],
)
def test_names_that_are_no_modules_are_warned_of(output: str, better: str) -> None:
    done = run("compile", "good.attn", "-o", output)
    assert (done.exit_code, better in done.stderr) == (0, True)
    compile(Path(output).read_text(), output, "exec")


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("standalone", [[], ["--standalone"]])
def test_compile_writes_over_no_edit(standalone: list[str], folder: Path) -> None:
    arguments = ["compile", "good.attn", *standalone]
    assert run(*arguments).exit_code == 0
    written = Path("good_attn.py").read_bytes()
    for edited in (
        written.replace(b"attention(", b"mine(", 1),
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


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("call", "error", "status"),
    [
        ("replace", KeyboardInterrupt(), 130),
        ("fsync", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 3),
    ],
)
def test_an_interrupted_write_leaves_the_old_file(
    call: str, error: BaseException, status: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise error

    assert run("compile", "good.attn").exit_code == 0
    old, files = (folder / "good_attn.py").read_bytes(), sorted(folder.iterdir())
    monkeypatch.setattr(os, call, stopped)
    assert run("compile", "good.attn", "--set", "r=5").exit_code == status
    assert (folder / "good_attn.py").read_bytes() == old
    assert sorted(folder.iterdir()) == files


@pytest.mark.usefixtures("folder", "unverified")
def test_files_look_changed_and_links_are_kept() -> None:
    # Python takes a compilation for that of a file of the same size and second
    times = []
    for number in range(4):
        Path("x.attn").write_text(f"attention a {{ attend full scale 1.{number} }}")
        assert run("compile", "x.attn", "-o", "x.py").exit_code == 0
        stat = Path("x.py").stat()
        times.append((stat.st_size, int(stat.st_mtime)))
    assert len({*times}) == 4
    Path("link.py").symlink_to("missing.py")
    assert run("compile", "good.attn", "-o", "link.py").exit_code == 3
    assert not Path("missing.py").exists()
    assert run("compile", "good.attn", "-o", "link.py", "--force").exit_code == 0
    assert Path("missing.py").exists()


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


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_modules_are_verified(options: list[str]) -> None:
    assert run("compile", "good.attn", *options).exit_code == 0
    found = value("verify", "good_attn.py", "-n", "9")
    assert found["ok"]
    assert found["checks"]


@pytest.mark.usefixtures("folder")
def test_a_module_that_computes_something_else_fails() -> None:
    run("compile", "good.attn")
    path = Path("good_attn.py")
    text = path.read_text()
    wrong = text.replace("__init__(PLAN, head_size)", "__init__(OTHER, head_size)")
    other = "import copy\nOTHER = copy.deepcopy(PLAN)\nOTHER['program']['causal'] = False\n"
    path.write_text(wrong.replace("\nclass Good", f"\n{other}\nclass Good"))
    assert value("verify", "good_attn.py", "-n", "9", status=1)["ok"] is False
    path.write_text(
        text.replace("'causal': True", "'causal': False").replace(
            '"causal": True', '"causal": False'
        )
    )
    assert run("verify", "good_attn.py").exit_code == 1


def test_closed_and_full_streams_leave_no_traceback() -> None:
    for closing in ("<&-", ">&- 2>&-", "<&- >&- 2>&-"):
        done = shell(f"attnspec check - {closing}")
        assert b"Traceback" not in done.stderr
        assert done.returncode in (1, 3)
    # a reader that stops early
    for arguments in ("zoo", "show examples/full.attn -n 1000"):
        assert shell(f"attnspec {arguments} | true").stderr == b""
    if Path("/dev/full").exists():
        done = shell("attnspec zoo > /dev/full")
        assert done.returncode == 3
        assert os.strerror(errno.ENOSPC).lower() in done.stderr.decode()
    # a limit that falls inside a character
    assert run("check", "-", stdin=b"#" + "\u00e9".encode() * (1 << 19)).exit_code == 4


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xff d\n.attn")
    (tmp_path / name).write_text(WRONG)
    done = spawn("check", name, cwd=tmp_path)
    assert done.returncode == 1
    assert b"b\\xff d\\n.attn:1:26: error[A201]" in done.stderr
    assert b"b\\xff d\\n.attn" in spawn("format", name, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("setting", "command"),
    few([({"LC_ALL": "C"}, "check"), ({"LANG": "C"}, "show"), ({"TERM": "dumb"}, "show")]),
)
def test_plain_surroundings_get_ascii(
    setting: dict[str, str], command: str, tmp_path: Path
) -> None:
    wrong = tmp_path / "c.attn"
    wrong.write_text("# één\n" + WRONG)
    shown = ["show", str(EXAMPLES / "causal.attn"), "-n", "9"]
    arguments = shown if command == "show" else ["check", str(wrong)]
    done = spawn(*arguments, env={"LC_ALL": "", "LANG": "", **setting})
    assert (done.stdout + done.stderr).isascii()
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.usefixtures("folder")
def test_colour_is_for_terminals() -> None:
    assert "\x1b" not in run("check", "wrong.attn").stderr
    script = (
        f"import pty, sys\npty.spawn([{sys.executable!r}, '-m', 'attnspec', 'check', 'wrong.attn'])"
    )
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    env.pop("NO_COLOR", None)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, check=True)
    assert b"\x1b[31m" in done.stdout


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("the moon is in the wrong place"), 70),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 4),
        (RecursionError(), 70),
        (InternalError("no"), 70),
        (PermissionError(errno.EACCES, "no", "x.attn"), 3),
    ],
)
@pytest.mark.usefixtures("folder")
def test_every_way_to_end_has_its_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("attnspec.cli.check_command.check_file", ends)
    done = run("check", "good.attn")
    assert done.exit_code == status
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr
    if isinstance(error, RuntimeError):
        assert "Traceback" in run("--debug", "check", "good.attn").stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "after", "said"),
    [(Terminal(), 0.0, True), (Terminal(), 60.0, False), (io.StringIO(), 0.0, False)],
)
def test_a_long_wait_is_announced_on_a_terminal(
    stream: io.StringIO, after: float, said: bool
) -> None:
    with contextlib.redirect_stderr(stream), patience("counting depth", after):
        end = time.monotonic() + (10 if said else 0.05)
        while not stream.getvalue() and time.monotonic() < end:
            time.sleep(0.001)
    assert ("counting depth" in stream.getvalue()) == said
