"""What every test gets: one thread, fixed seeds, golden files."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from goldens import EVERY_ITEM, Golden, golden_stem
from hypothesis import HealthCheck, settings

# workers share the cores, and one thread makes sums reproducible
os.environ["OMP_NUM_THREADS"] = "1"
# the rates that ship: what is chosen must not depend on who runs the tests
os.environ["ATTNSPEC_RATES"] = ""

TOGETHER = ("tests/editor", "tests/integrations", "tests/model_check")
"""Folders whose tests share what takes seconds to start: a language server, models."""

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    print_blob=True,
    # how long a draw takes says more of the machine than of the test
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no":
        return  # what hands tests to workers needs no torch, which takes seconds
    importlib.import_module("torch").set_num_threads(1)
    # functions of Triton's own are interpreted, or not for ever, as this says when it is imported;
    # ours are where a test says it again
    with contextlib.suppress(ImportError), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files instead of comparing with them",
    )
    parser.addoption(
        "--some",
        metavar="WORD,WORD",
        help="of a test with over 50 cases each fifteenth, and those named by one of the words",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # taken before -k and -m deselect, so that a narrow run does not see orphans
    config.stash[EVERY_ITEM] = tuple(items)
    _leave_out_what_has_other_limits(config, items)
    _thin_out(config, items)
    _skip_what_needs_another_version(items)


def _leave_out_what_has_other_limits(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of `limits("", "tiny")` a run takes what names its own: the package reads them once."""
    own = os.environ.get("ATTNSPEC_LIMITS", "")
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        mark = item.get_closest_marker("limits")
        (kept if own in (mark.args if mark else ("",)) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def _thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What `--some` asks for."""
    if config.option.some is None:
        return
    words, cases = config.option.some.split(","), Counter[str]()
    sizes = Counter(item.nodeid.partition("[")[0] for item in items)
    kept = []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        cases[test] += 1
        if sizes[test] <= 50 or cases[test] % 15 == 1 or any(word in case for word in words):
            kept.append(item)
    items[:] = kept


def _skip_what_needs_another_version(items: list[pytest.Item]) -> None:
    """What a torch beside the pinned one does not have: `make wheel` runs the rest."""
    import torch

    from attnspec.backends.flex.backend import TORCH as FLEX
    from attnspec.backends.triton.backend import NUMPY, TRITON
    from attnspec.version import is_older

    compiles = not is_older(torch.__version__, FLEX)
    with contextlib.suppress(ImportError):
        triton = importlib.import_module("triton").__version__
        if is_older(triton, TRITON) and not is_older(np.__version__, NUMPY):
            refused = pytest.mark.skip(reason=f"Triton {triton} interprets nothing with this numpy")
            for item in items:
                if "interpreted" in getattr(item, "fixturenames", ()):
                    item.add_marker(refused)
    for item in items:
        if not compiles and item.path.name.startswith("test_flex"):
            item.add_marker(pytest.mark.skip(reason=f"flex needs torch {FLEX[0]}.{FLEX[1]}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # what is imported and collected stays: to look through it again and again finds nothing
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # many small objects come and go: by default each 700 are looked through, and all that was
        # imported since far more often than there is anything to find
        gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """The cases of one function run in one worker, where they share caches."""
    from xdist.scheduler import LoadGroupScheduling

    if config.getvalue("dist") != "loadgroup":
        return None
    scheduler = LoadGroupScheduling(config, log)
    group_of = scheduler._split_scope

    def scope_of(case: str) -> str:
        folder = case.partition("/test_")[0]
        return folder if folder in TOGETHER else group_of(case).partition("[")[0]

    scheduler._split_scope = scope_of
    return scheduler


@pytest.fixture(autouse=True)
def _seeds() -> None:
    import torch

    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` takes half a millisecond: it remembers the call for every other device
    torch.default_generator.manual_seed(0)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are written without a trial of every backend, which test_verification.py has."""
    for name in ("_verified", "_verified_alone"):
        monkeypatch.setattr(f"attnspec.compile.compiler.{name}", lambda *_: "Not verified.")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with the file in tests/golden that bears the test's name."""
    folder = Path(__file__).parent / "golden"
    update = bool(request.config.getoption("--update-golden"))
    return Golden(folder / golden_stem(request.node), update)


@pytest.fixture(autouse=True)
def _no_names_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test of models registers is taken back after it."""
    if request.path.parent.name != "integrations":
        yield
        return
    # here, as it skips where transformers is not
    from tiny_models import names_restored

    with names_restored():
        yield
