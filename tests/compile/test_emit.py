"""Emitted modules: the same computation, the same bytes, nothing that runs."""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import json
import keyword
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_checks import GRAPHS, spec_of, tensors

from attnspec.compile import compiler
from attnspec.compile.emit import WIDTH, check_module, class_name, emit, literal
from attnspec.compile.standalone import standalone_module
from attnspec.graphs.bind import Situation, bind_attended
from attnspec.graphs.relation import Relation
from attnspec.ir.program import Term
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import InternalError
from attnspec.verification import verify

ROOT = Path(__file__).resolve().parents[2]

BODIES = [
    *GRAPHS.values(),
    "heads 2 layers 2 attend full score bias() head 1 { attend self normalize relu }",
    "input t: tokens attend window(radius = 3) | global(t)",
    "sequence grid(4, 5) attend neighborhood(3, 3) score alibi() score softcap(cap = 4)",
    "attend expander(degree = 4) | powers(base = 3)",
]


def loaded(text: str, folder: Path, name: str = "emitted_attn") -> ModuleType:
    """The module imported from a file, as users import it."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module
    try:
        description.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_the_bytes_do_not_depend_on_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, hashlib, attnspec\n"
        "from attnspec.compile import compiler\n"
        # the trial of every backend takes long, and its words come from no set
        "compiler._verified = compiler._verified_alone = lambda *_: 'Not verified.'\n"
        "for body in sys.argv[1:]:\n"
        "    spec = attnspec.parse('attention sample { ' + body + ' }')\n"
        "    for standalone in (False, True):\n"
        "        text = spec.emit(standalone=standalone)\n"
        "        print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    bodies = [GRAPHS["blocks"], GRAPHS["complement"], BODIES[-1]]
    run = subprocess.run(
        [sys.executable, "-c", script, *bodies],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        # the hashes of this process are others
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    monkeypatch.setattr(compiler, "_verified", lambda *_: "Not verified.")
    monkeypatch.setattr(compiler, "_verified_alone", lambda *_: "Not verified.")
    here = [
        hashlib.sha256(spec_of(body).emit(standalone=standalone).encode()).hexdigest()
        for body in bodies
        for standalone in (False, True)
    ]
    assert run.stdout.split() == here


NASTY = (
    '''\
# """ ends a docstring, \\ escapes, \\N{BULLET} and \\x41 too, {braces} %s '''
    + "'''"
    + '''
# quotes at the end: " "" """"
attention sample { attend full }  # ÄÖ → "
'''
)


def nasty_spec() -> Spec:
    return parse(NASTY)


@pytest.mark.parametrize("standalone", [False, True])
def test_the_spec_stands_inert_in_the_docstring(standalone: bool) -> None:
    spec = nasty_spec()
    text = emit(
        spec.program,
        text=NASTY,
        fingerprint=spec.fingerprint,
        version="1.2.3",
        facts=["A fact."],
        body=standalone_module(spec.program, "Sample") if standalone else None,
    )
    document = ast.get_docstring(ast.parse(text), clean=False)
    assert document is not None
    assert "\n".join(f"    {line}" for line in NASTY.splitlines()) in document
    assert spec.fingerprint in document
    assert document.startswith("sample, compiled by attnspec 1.2.3.")
    assert "\nA fact.\n" in document
    if not standalone:
        lines = [line for line in text.splitlines() if spec.fingerprint not in line]
        assert max(len(line) for line in lines) <= WIDTH


@pytest.mark.usefixtures("unverified")
def test_emitted_modules_hold_no_place_or_machine() -> None:
    for standalone in (False, True):
        text = spec_of(GRAPHS["blocks"]).emit(standalone=standalone)
        assert str(ROOT) not in text
        assert os.sep + "home" not in text
        assert text.endswith("\n")
        assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.usefixtures("unverified")
def test_importing_runs_definitions_only() -> None:
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    allowed |= ast.FunctionDef | ast.ClassDef
    for standalone in (False, True):
        tree = ast.parse(spec_of(GRAPHS["strided"]).emit(standalone=standalone))
        for node in tree.body:
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
        ("true", "TrueAttention"),
        ("value_error", "ValueErrorAttention"),
        ("compiled_attention", "CompiledAttentionAttention"),
        ("_1", "Attention1"),
        ("__init__", "Init"),
        ("window", "Window"),
        ("mapping", "MappingAttention"),
        ("HEADS", "HEADSAttention"),
    ],
)
def test_names_of_classes(name: str, shown: str) -> None:
    assert class_name(name) == shown
    assert shown.isidentifier()
    assert not keyword.iskeyword(shown)
    assert not hasattr(builtins, shown)


@pytest.mark.parametrize("standalone", [False, True])
@pytest.mark.usefixtures("unverified")
def test_the_text_runs_without_being_imported(standalone: bool) -> None:
    spec = spec_of(GRAPHS["blocks"])
    given = tensors(1, 2, 100, 100)
    for names in ({}, {"__name__": "not_a_module"}):
        space: dict[str, type[torch.nn.Module]] = dict(names)  # type: ignore[arg-type]
        exec(spec.emit(standalone=standalone), space)
        torch.testing.assert_close(space["Sample"]()(*given), spec.compile()(*given))


def test_a_run_time_of_another_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attnspec.runtime

    text = spec_of("attend full").emit()
    monkeypatch.setattr(attnspec.runtime, "FORMAT", 99)
    with pytest.raises(ImportError, match=r"plans of format 1, .* has 99: compile the spec again"):
        loaded(text, tmp_path)
    monkeypatch.delattr(attnspec.runtime, "FORMAT")
    with pytest.raises(ImportError, match="compile the spec with --standalone"):
        loaded(text, tmp_path)


def test_plain_data_is_written_so_that_it_reads_back() -> None:
    data: list[object] = [
        {"a": [1, 2.5, -3, True, None], "b": {"c": "ä\"\\'\n"}, "": [], "e": {}},
        list(range(200)),
        [[0, 1], [1, 0]] * 30,
        {"x" * 60: {"y" * 40: ["z" * 30, 1e-300, 10**18]}},
    ]
    for value in data:
        text = literal(value)  # type: ignore[arg-type]
        assert ast.literal_eval(text) == value
        lines = text.splitlines()
        assert all(len(line) <= WIDTH for line in lines if "x" not in line and "y" not in line)
    assert json.loads(literal(["a\u2028b"])) == ["a\u2028b"]
    with pytest.raises(InternalError, match="cannot hold the number inf"):
        literal([float("inf")])


@pytest.mark.parametrize(
    "line", ["import os", "from subprocess import run", "import numpy.os as x"]
)
def test_what_modules_import_is_checked(line: str) -> None:
    text = spec_of("attend full").emit()
    check_module(text, standalone=False)
    with pytest.raises(InternalError, match="the emitted module imports"):
        check_module(f"{text}\n{line}\n", standalone=False)
    with pytest.raises(InternalError, match="does not parse"):
        check_module(f"{text}\ndef", standalone=False)


@pytest.mark.usefixtures("unverified")
def test_emitted_modules_are_verified(tmp_path: Path) -> None:
    spec = spec_of(GRAPHS["strided"])
    module = loaded(spec.emit(), tmp_path).Sample()
    assert verify(spec.program, 100, module=module).ok
    wrong = spec_of("causal attend residue(step = isqrt(n))")
    assert not verify(wrong.program, 100, module=module).ok


def test_each_graph_is_bound_once_for_all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []

    def counted(graph: Term, at: Situation) -> Relation:
        bound.append(at.n)
        return bind_attended(graph, at)

    monkeypatch.setattr("attnspec.lower.lower.bind_attended", counted)
    spec_of("attend window(radius = 4) | residue(step = isqrt(n) + 2)").emit()
    # for the modules of all backends together, and for the definition of all and of the last rows
    assert sorted(bound) == [65, 65, 65, 193, 193]
