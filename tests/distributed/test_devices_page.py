"""What the page starts with `torchrun` runs as it says, and the script of the benchmarks at lengths
that mean nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transcripts import ROOT

from benchmarks import distributed

PAGE = ROOT / "attnspec" / "distributed" / "README.md"


def fenced(kind: str) -> str:
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    return str(block)


@pytest.mark.slow
def test_the_script_of_the_page_runs_over_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(fenced("py"), encoding="utf-8")
    launcher, *words = fenced("sh").split()
    assert launcher == "torchrun"
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "longformer, n = 1000, 2 devices" in found.stdout


@pytest.mark.slow
def test_the_script_measures_local_ranks_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    distributed.main(["-n", "96", "--ranks", "2", "--out", str(out)])
    first = json.loads(out.read_text())
    for row in first["rows"]["2"]:
        assert row["bytes_received"] == row["bytes_planned"]
        assert row["seconds"] > 0
    assert [row["case"] for row in first["rows"]["2"]] == [*distributed.CASES]
    distributed.main(["-n", "96", "--ranks", "2", "1", "--out", str(out)])
    both = json.loads(out.read_text())["rows"]
    assert set(both) == {"1", "2"}
    assert both["2"] == first["rows"]["2"]
