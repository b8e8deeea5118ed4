"""Backends of other distributions: found by entry points, imported late, refused by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_checks import GRAPHS, tensors
from population import spec_of
from transcripts import ROOT, blocks
from views import Call, Case, errors_of

from attnspec import AttnSpecError
from attnspec.backends import BACKENDS, plugins
from attnspec.verification.verify import verify

FUSED = next(
    block.text
    for block in blocks((ROOT / "backends" / "README.md").read_text(encoding="utf-8"))
    if block.kind == "python"
)
"""The complete example of the page."""

WINDOW = "attend window(radius = 3)"


def forget() -> None:
    """As in a new process."""
    for cached in (plugins._offered, plugins.installed):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is installed is looked up anew before and after each test."""
    forget()
    yield
    forget()
    for name in ("attnspec_fused", "attnspec_slow"):
        sys.modules.pop(name, None)


def install(
    folder: Path,
    text: str,
    *,
    name: str = "fused",
    module: str = "attnspec_fused",
    distribution: str = "attnspec-fused",
) -> None:
    """A distribution with one module and one entry point, as pip leaves it in a folder."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{name} = {module}:BACKEND\n")
    importlib.invalidate_caches()
    forget()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules and distributions are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_without_other_distributions_there_are_ours_alone() -> None:
    assert plugins.installed_names() == []
    assert plugins.installed() == ()
    assert {plugins.owner_of(backend.name) for backend in BACKENDS} == {"attnspec"}


def test_the_example_of_the_page_computes_what_specs_say(site: Path) -> None:
    install(site, FUSED)
    for name, body in GRAPHS.items():
        found = verify(spec_of(body).program, 33, ["fused"])
        assert found.ok, (name, str(found))
    call = Call(Case(spec_of(GRAPHS["empty rows"]), 19), "several", torch.float64)
    assert errors_of(call, call.case.spec.compile("fused")) == []


def test_it_is_planned_like_any_other(site: Path) -> None:
    install(site, FUSED)
    spec = spec_of(WINDOW)
    assert "fused" in {c.backend.name for c in spec.plan(512).steps[0].candidates}
    assert "one mask of 512 x 512" in str(spec.plan(512, backend="fused"))
    with pytest.raises(AttnSpecError, match="'fused' refuses: the graph reads run-time inputs"):
        spec_of("input t: tokens attend global(t)").compile(backend="fused")
    with pytest.raises(ValueError, match=r"one of auto, .*, fused, got 'fuzed'"):
        spec.plan(512, backend="fuzed")
    # a folder that is named twice counts once
    sys.path.insert(0, str(site))
    forget()
    assert "fused" in str(spec.plan(64, backend="fused"))


def test_auto_takes_the_cheapest_and_what_computes_something_else_is_not_written(
    site: Path,
) -> None:
    wrong = FUSED.replace("out.masked_fill(none, 0)", "out.masked_fill(none, 0) * 2")
    install(site, wrong.replace("5e-5 + 2.5e-9 *", "1e-15 *"))
    assert spec_of(WINDOW).plan(512).steps[0].chosen.name == "fused"
    words = r"fused of attnspec-fused 1\.2 computes something else"
    with pytest.raises(AttnSpecError, match=words):
        spec_of(WINDOW).emit(backend="fused")


def test_nothing_is_imported_before_a_plan_is_made(site: Path) -> None:
    install(site, "raise SystemError('imported')")
    # no other test has had this planned in the same process, which keeps plans
    spec = spec_of("attend window(radius = 17) | columns(every(29))")
    assert "fused" in plugins.installed_names()
    module = spec.compile()
    assert "attnspec_fused" not in sys.modules
    with pytest.raises(AttnSpecError, match="SystemError: imported"):
        module(*tensors(1, 1, 307, 307))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere", "cannot be imported from attnspec_fused:BACKEND: ModuleNotFoundError"),
        ("BACKEND = 3", "like attnspec.lower.work.Backend, got 3 without name, refuses"),
        (FUSED.replace("BACKEND = Fused()", "BACKEND = Fused"), "got the class Fused, whose inst"),
        (FUSED.replace('name = "fused"', 'name = "fuse"'), "calls itself 'fuse'"),
        (FUSED.replace("def cost", "def costs"), "without cost at attnspec_fused:BACKEND"),
    ],
)
def test_a_backend_that_fails_is_named_with_its_owner(text: str, words: str, site: Path) -> None:
    install(site, text)
    with pytest.raises(
        AttnSpecError, match=r"the backend `fused` of attnspec-fused 1\.2"
    ) as caught:
        spec_of(WINDOW).plan(64)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["dense", "auto", "fused"])
def test_a_name_is_offered_once(name: str, site: Path) -> None:
    install(site, FUSED.replace('"fused"', f'"{name}"'), name=name)
    first, last = "attnspec", r"attnspec-fused 1\.2"
    if name == "fused":
        install(site, FUSED, module="attnspec_slow", distribution="attnspec-slow")
        first, last = last, r"attnspec-slow 1\.2"
    for ask in (lambda: spec_of(WINDOW).plan(64, backend=name), lambda: spec_of(WINDOW).compile()):
        with pytest.raises(AttnSpecError, match=f"`{name}` is offered by {first} and by {last}"):
            ask()


def test_emitted_modules(site: Path) -> None:
    spec = spec_of(WINDOW)
    before = spec.emit()
    install(site, FUSED)
    # what is installed does not enter the text of a module that asks for nothing by name
    assert spec.emit() == before
    text = spec.emit(backend="fused")
    assert "values and gradients of fused;" in text
    with pytest.raises(AttnSpecError, match="a standalone module has no backends"):
        spec.emit(backend="fused", standalone=True)
    names: dict[str, Any] = {}
    exec(compile(text, "sample_attn.py", "exec"), names)
    given = tensors(1, 2, 40, 40)
    assert torch.equal(names["Sample"]()(*given), spec.compile("fused")(*given))
    # where it is not installed, the module says so
    sys.path.remove(str(site))
    forget()
    with pytest.raises(ValueError, match=r"must be one of auto, .*got 'fused'"):
        names["Sample"]()
