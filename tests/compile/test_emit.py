"""Emitted modules, whose values the views hold: the same bytes, nothing that runs."""

from __future__ import annotations

import ast
import builtins
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from population import BODIES, spec_of

import attnspec
from attnspec import InternalError, parse
from attnspec.compile.emit import check_module

ROOT = Path(__file__).resolve().parents[2]

BOTH = pytest.mark.parametrize("standalone", [False, True])


@pytest.mark.usefixtures("unverified")
def test_the_bytes_do_not_depend_on_hashes_or_places(tmp_path: Path) -> None:
    script = (
        "import sys, hashlib, attnspec\n"
        "from attnspec.compile import compiler\n"
        # the trial of every backend takes long, and its words come from no set
        "compiler._verified = compiler._verified_alone = lambda *_: 'Not verified.'\n"
        "for body in sys.argv[1:]:\n"
        "    for standalone in (False, True):\n"
        "        spec = attnspec.parse('attention sample { ' + body + ' }')\n"
        "        text = spec.emit(standalone=standalone)\n"
        "        print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    bodies = BODIES["blocks"], BODIES["complement"]
    run = subprocess.run(
        [sys.executable, "-c", script, *bodies],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        # the hashes of this process are others
        env={
            **os.environ,
            "PYTHONHASHSEED": "77",
            "PYTHONPATH": str(Path(attnspec.__file__).parents[1]),
        },
    )
    assert run.returncode == 0, run.stderr
    here = [spec_of(body).emit(standalone=alone) for body in bodies for alone in (False, True)]
    assert run.stdout.split() == [hashlib.sha256(text.encode()).hexdigest() for text in here]
    for text in here:
        assert str(ROOT) not in text
        assert os.sep + "home" not in text
        assert text.endswith("\n")
        assert not any(line != line.rstrip() for line in text.splitlines())


NASTY = (
    '''\
# """ ends a docstring, \\ escapes, \\N{BULLET} and \\x41 too, {braces} %s '''
    + "'''"
    + '''
# quotes at the end: " "" """"
attention sample { attend full }  # ÄÖ → "
'''
)


@BOTH
@pytest.mark.usefixtures("unverified")
def test_the_spec_stands_inert_in_the_docstring(standalone: bool) -> None:
    spec = parse(NASTY)
    text = spec.emit(standalone=standalone)
    document = ast.get_docstring(ast.parse(text), clean=False)
    assert document is not None
    assert all(f"    {line}" in document for line in spec.source.splitlines())
    assert "\\N{BULLET}" in document
    assert spec.fingerprint in document
    assert document.startswith("sample, compiled by attnspec ")
    lines = [line for line in text.splitlines() if spec.fingerprint not in line]
    assert max(len(line) for line in lines) <= 100


@BOTH
@pytest.mark.usefixtures("unverified")
def test_importing_runs_definitions_only(standalone: bool) -> None:
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    allowed |= ast.FunctionDef | ast.ClassDef
    for node in ast.parse(spec_of(BODIES["strided"]).emit(standalone=standalone)).body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant)
        elif isinstance(node, ast.Try | ast.If):
            assert not standalone
        else:
            assert isinstance(node, allowed)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("sparse_strided", "SparseStrided"),
        ("a", "A"),
        ("bigBird_2", "BigBird2"),
        ("none", "NoneAttention"),
        ("value_error", "ValueErrorAttention"),
        ("compiled_attention", "CompiledAttentionAttention"),
        ("_1", "Attention1"),
        ("__init__", "Init"),
        ("mapping", "Mapping"),
        ("HEADS", "HEADSAttention"),
        ("reCALL", "ReCALL"),
        ("SPEC", "SPECAttention"),
    ],
)
@pytest.mark.usefixtures("unverified")
def test_names_of_classes(name: str, shown: str) -> None:
    assert f"\nclass {shown}(" in parse(f"attention {name} {{ attend full }}").emit()
    assert not hasattr(builtins, shown)


@pytest.mark.usefixtures("unverified")
def test_imports_of_emitted_modules_are_checked() -> None:
    text = spec_of("attend full").emit()
    check_module(text, standalone=False)
    for line, words in (
        ("import os", "the emitted module imports"),
        ("from subprocess import run", "the emitted module imports"),
        ("import numpy.os as x", "the emitted module imports"),
        ("def", "does not parse"),
    ):
        with pytest.raises(InternalError, match=words):
            check_module(f"{text}\n{line}\n", standalone=False)


def test_a_refusal_at_the_first_length_is_the_reason_that_is_given() -> None:
    text = spec_of("attend synthesizer(max_length = 40)").emit(backend="tables")
    assert "Not verified when it was compiled: the backend 'tables' refuses" in text
