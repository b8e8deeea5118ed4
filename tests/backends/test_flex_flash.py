"""Plain bands go to flash-attention 4 where it is installed and runs, and nothing changes where it
does not; what it is handed is tried uncompiled, its kernels are not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_checks import GRAPHS, spec_of
from flex_checks import as_on_a_gpu, run_plainly

from attnspec.backends.dense.kernel import DenseKernel
from attnspec.backends.flex import attention, flash
from attnspec.backends.flex import kernel as flex_kernel
from attnspec.backends.flex.flash import Band, band_of
from attnspec.backends.planner import plan
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Call, Work

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

BANDS = {
    "full": Band(299, 299),
    "causal": Band(299, 0),
    "window": Band(5, 5),
    "causal window": Band(40, 0),
}
"""Those of the sample graphs that are bands of 300 positions."""


def work_of(body: str, n: int, n_q: int) -> tuple[Work, tuple[int, ...]]:
    program = spec_of(body).program
    ((work, heads),) = works_of(program, 0, program.heads or 4, n_q, n, stand_ins(program))
    return work, heads


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package by name alone."""
    for name in ("flash_attn", "flash_attn.cute"):
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """With what FlexAttention is asked, and run by plain operations."""
    found: list[Mapping[str, Any]] = []

    def flex(*given: Any, **options: Any) -> Any:
        found.append(dict(options))
        return run(*given, **{**options, "kernel_options": None})

    run: Any = attention._flex
    monkeypatch.setattr(attention, "_flex", flex)
    run_plainly(monkeypatch)
    return found


def test_bands_are_found_by_their_rows() -> None:
    for name, body in GRAPHS.items():
        work, _ = work_of(f"heads 1 {body}", 300, 300)
        assert band_of(work.relation, 300, 300) == BANDS.get(name), name
    for n_q, before in ((100, 5), (1, 5)):
        work, _ = work_of("causal attend window(before = 5, after = 2)", 300, n_q)
        assert band_of(work.relation, n_q, 300) == Band(before, 0)
    work, _ = work_of("attend where(k < q)", 300, 300)
    assert band_of(work.relation, 300, 300) in (None, Band(299, -1))


@pytest.mark.parametrize("body", [GRAPHS[name] for name in BANDS])
@pytest.mark.parametrize(
    ("n", "n_q"),
    [(257, 100), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (1, 300))],
)
def test_it_is_handed_the_band(
    body: str,
    n: int,
    n_q: int,
    asked: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex_kernel, "runs_on", lambda device: True)
    work, heads = work_of(body, n, n_q)
    kernel = as_on_a_gpu(work, heads)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, m, 64, generator=generator).half() for h, m in ((4, n_q), (2, n), (2, n))
    )
    with torch.no_grad():
        out = kernel(q, k, v, Call())
        exact = DenseKernel(work, heads, CPU)(q.double(), k.double(), v.double(), Call())
        torch.testing.assert_close(out.double(), exact, atol=4e-3, rtol=4e-3)
        assert asked[-1]["kernel_options"] == {"BACKEND": "FLASH"}
        # it gives no gradients of log-sum-exps
        assert asked[-1]["return_aux"] is None
        padding = torch.ones(2, n, dtype=torch.bool)
        for others in ((q, k, v, Call(padding)), (q.float(), k.float(), v.float(), Call())):
            kernel(*others)
            assert asked[-1]["kernel_options"] != {"BACKEND": "FLASH"}
            assert asked[-1]["return_aux"] is not None


@pytest.mark.usefixtures("installed")
def test_a_plan_says_what_runs() -> None:
    assert flash.is_installed()
    said = "natural order, tiles 128 x 128, by flash-attention 4 on a GPU of compute capability 9.0"
    assert said in str(plan(spec_of(GRAPHS["window"]).program, 4096, "cuda", "flex"))
    for body in (GRAPHS["blocks"], "causal attend window(radius = 9) score softcap(cap = 9)"):
        shown = str(plan(spec_of(body).program, 4096, "cuda", "flex"))
        assert "flash-attention" not in shown


def test_where_it_is_not_installed_nothing_changes() -> None:
    if flash.is_installed():
        pytest.skip("it is")
    shown = str(plan(spec_of(GRAPHS["window"]).program, 4096, "cuda", "flex"))
    assert "tiles 128 x 128, in Triton: the package flash-attn-4 is not installed" in shown
    work, heads = work_of(GRAPHS["window"], 300, 300)
    assert not as_on_a_gpu(work, heads).band
    assert not flash.runs_on(torch.device("cuda"))
