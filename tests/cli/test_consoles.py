"""What commands print and how they end: tests/golden/test_consoles has a table of them.

An entry is `STATUS: attnspec ARGUMENTS`, where ` < FILE` gives standard input; below it stand the
lines of standard output after `|`, those of standard error after `!`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from goldens import Golden
from transcripts import SETTINGS

from attnspec.cli import main

GOOD = "attention good(r = 3) { causal attend window(radius = r) require causal }\n"
NOT_AT_40 = {
    "rest": "attend where(k % q == 0) | self",
    "layer": "attend window(radius = 2) layers 2 layer 0 { attend where(q // (n - 40) < 3) }",
    "scale": "scale 1 / (n - 40) attend full",
    "cap": "attend full score softcap(cap = n - 40)",
    "step": "heads 2 attend self head 1 { attend residue(step = n - 40) }",
    "radius": "attend window(radius = 39 - n) + linear()",
    "rank": "attend linformer(rank = 40 - n)",
}
"""What has no value at n = 40, which errors say by its place."""

FILES: dict[str, str | bytes] = {
    **{f"{x}.attn": f"attention a {{\n    {body}\n}}\n" for x, body in NOT_AT_40.items()},
    "good.attn": GOOD,
    "wrong.attn": "attention wrong { attend windw(radius = 3) }\n",
    "untrue.attn": "attention untrue { attend full require causal }\n",
    "gaps.attn": "attention gaps { attend window(before = 3, after = 0) - self }\n",
    "two.attn": GOOD + "attention second { attend full }\n",
    "mixed.attn": GOOD + "attention untrue { attend full require causal }\n",
    "bound.attn": "attention a(r = 3) { attend window(radius = r) require degree <= 7 }\n",
    "odd.attn": "attention odd { attend self | where(log2(q) < 3) require causal }\n",
    "three.attn": "attention a { attend global(first(1)) | self require diameter <= 2"
    " require symmetric require degree <= n require edges <= 9 * n at n = 3, 5_000 }\n",
    "since.attn": "attention a { causal attend window(before = 3, after = 0)"
    " require causal for n >= 9 require degree == 4 for n >= 4 }\n",
    "relu.attn": "attention a { attend full normalize relu }\n",
    "forty.attn": "attention a { heads 40 attend self }\n",
    "heads.attn": "attention a { heads 2 attend full }\n",
    "grid.attn": "attention a { sequence grid(4, 6) attend axial }\n",
    "inputs.attn": "attention a { input doc: ids input important: tokens input len: length"
    " attend same(doc) | global(important) | prefix(len) }\n",
    "formula.attn": "attention a { attend lsh(buckets = 4) }\n",
    "deep.attn": "attention deep { layers 9 heads 2 attend window(radius = 64 * (layer + head)) }",
    "mechanism.attn": "attention mixed { heads 2 attend self head 1 { attend linear() } }\n",
    "stack.attn": "attention a { layers 3 heads 2 attend window(radius = 1)"
    " layer 1 { head 1 { attend full } } layer 2 { attend linear() } }\n",
    "many.attn": "attention a { heads 12 attend window(radius = head)"
    " head 0..5 { attend full } head 11 { attend linear() } }\n",
    "choices.attn": "attention a { input c: choices(size = 4) causal attend chosen(c) }\n",
    "formula_alone.attn": "attention a { attend linear() }\n",
    "hubs.attn": "attention hubs(r = 3, hubs = 1)"
    " { attend window(radius = r) | global(first(hubs)) }\n",
    "needs.attn": "attention needs(r) { input x: tokens attend window(radius = r) | global(x) }\n",
    "band.attn": "attention band(w = 2) { cross attend where(abs(q * n - k * m) <= w * m) }\n",
    "other.attn": "attention band { cross attend where(q * n >= k * m) }\n",
    "big.attn": "attention big { attend columns(first(2**62)) }\n",
    "latin.attn": b"attention \xe9",
    "wide.attn": GOOD.encode("utf-16"),
    "bom.attn": b"\xef\xbb\xbf" + GOOD.encode().replace(b"\n", b"\r\n"),
    "importing.attn": b'from "x.attn" import a ' + GOOD.encode(),
    "empty.attn": "",
    "yours.py": "mine = 1\n",
    "ends.py": "raise SystemExit(0)\n",
    "broken.py": "(\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the commands read."""
    made = tmp_path_factory.mktemp("specs")
    for name, text in FILES.items():
        (made / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (made / "sub").mkdir()
    (made / "link.py").symlink_to("good.attn")
    (made / "large.attn").write_text("#" * (1 << 20) + "\n")
    return made


@pytest.mark.parametrize("table", ["usage", "specs", "figures", "modules", "pictures"])
def test_consoles(table: str, golden: Golden, folder: Path) -> None:
    def held() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = held()

    def answer(line: str) -> tuple[str, list[str]]:
        command, _, given = line.partition(": attnspec ")[2].partition(" < ")
        done = CliRunner(env=SETTINGS).invoke(
            main, shlex.split(command), input=(folder / given).read_bytes() if given else None
        )
        assert "Traceback" not in done.output, line
        if "--json" in command and done.stdout:
            value = json.loads(done.stdout)
            assert (value["ok"], done.stderr) == (done.exit_code == 0, ""), line
            assert value["ok"] or value["status"] == done.exit_code, line
        elif done.exit_code > 1:
            assert (done.stdout, bool(done.stderr)) == ("", True), line
        # nothing is written, nothing is lost
        assert held() == before, line
        words = [f"| {each}".rstrip() for each in done.stdout.splitlines()]
        # how it is used, and where help is, stands below each
        usual = re.compile(rf"attnspec {command.partition(' ')[0]} (\[|--help)")
        errors = [x for x in done.stderr.splitlines() if not (command and usual.search(x))]
        words += [f"! {each}".rstrip() for each in errors]
        return f"{done.exit_code}: {line.partition(': ')[2]}", words

    with contextlib.chdir(folder):
        golden.entries(answer)
