"""`make demo` with any spec: its own length, made-up inputs, and a module that is wrong."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from sweeps import few

from attnspec.cli import main as attnspec_main

demo = runpy.run_module("attnspec.examples.demo")["main"]
"""`python -m attnspec.examples.demo`."""

SPECS = {
    "packed": "input document: ids input prompt: length attend same(document) | prefix(prompt)",
    "marked": "heads 2 input a: tokens input b: tokens(at_most = 2) attend global(a) | columns(b)",
    "small grid": "sequence grid(2, 2) extra_tokens 1 input a: tokens attend axial | global(a)",
    "layers": "layers 2 attend window(radius = 2 + layer)",
    "biased": "heads 2 attend full score bias()",
    "scaled": "attend full scale 0.5 normalize relu",
    "empty": "attend where(k < q // 2)",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    with contextlib.chdir(tmp_path):
        yield


def compiled(body: str, name: str = "x") -> list[str]:
    """The arguments of the demonstration for a spec of this body."""
    Path(f"{name}.attn").write_text(f"attention trial {{ {body} }}\n")
    assert CliRunner().invoke(attnspec_main, ["compile", f"{name}.attn"]).exit_code == 0
    return [f"{name}.attn", f"{name}_attn.py"]


@pytest.mark.parametrize("body", few(SPECS.values(), 3))
def test_any_spec_is_verified_and_drawn(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = compiled(body)
    assert demo(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("verified: x_attn.py")
    assert ("masked softmax" in printed) == ("score" not in body and "scale" not in body)
    assert demo(arguments[:1]) == 0
    options = capsys.readouterr().out.split()
    done = CliRunner().invoke(attnspec_main, ["show", "x.attn", *options])
    assert done.exit_code == 0, done.stderr
    assert f"n = {5 if 'grid' in body else 64}" in done.stdout


def test_a_module_of_another_spec_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    spec, _ = compiled(SPECS["packed"])
    _, module = compiled(SPECS["packed"].replace("|", "&"), "y")
    assert demo([spec, module]) == 1
    assert "differs from its definition" in capsys.readouterr().err
