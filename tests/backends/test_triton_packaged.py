"""Causal linear attention by flash-linear-attention, of whose function a stub is installed: what it
is handed, when it is chosen, and what a plan says; its kernels are not run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_checks import spec_of
from interpreted import interpreted

from attnspec.backends.factored.features.kernel import BLOCKWISE, FeatureKernel, summed_up
from attnspec.backends.factored.features.linear import linear_kernel
from attnspec.backends.factored.features.spans import Given
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.sums import package
from attnspec.backends.triton.sums.packaged import Packaged
from attnspec.bench.calibrate import fitted, gpu_works
from attnspec.lower import cost_model
from attnspec.lower.cost_model import VARIABLE, Calibration, current
from attnspec.lower.lower import works_of
from attnspec.lower.rates import GpuRates
from attnspec.lower.work import Work

__all__ = ["interpreted"]

# a kernel that is built elsewhere in the process is interpreted or not as it was here
pytestmark = pytest.mark.usefixtures("interpreted")

LINEAR = "causal attend linear()"

GPU = torch.device("cuda")


def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """What fla-core 0.6 says of its function, in plain operations, without what is not asked for
    here: q, k [B, n, H, d], v [B, n, H, e]."""
    assert initial_state is cu_seqlens is None
    assert not output_final_state
    assert not normalize
    assert q.shape == k.shape
    assert k.shape[:3] == v.shape[:3]
    assert q.dtype == k.dtype == v.dtype
    weights = torch.einsum("bihd,bjhd->bhij", q, k).tril() * (
        k.shape[-1] ** -0.5 if scale is None else scale
    )
    return torch.einsum("bhij,bjhe->bihe", weights, v), None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stub in place of the package, and no rates of this machine."""
    for name in ("fla", "fla.ops", "fla.ops.linear_attn"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(module, "chunk_linear_attn", chunk_linear_attn, raising=False)
    monkeypatch.setattr(package, "version", lambda name: "0.6.0")
    monkeypatch.setenv(VARIABLE, "")
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    package.is_installed.cache_clear()
    cost_model.calibration.cache_clear()


def measured(path: Path, monkeypatch: pytest.MonkeyPatch, rates: GpuRates) -> None:
    """Rates of a GPU that were measured on this machine."""
    data = Calibration(rates, 1, "2.13.0", {"accelerator": "a card"}).data()
    (path / "rates-cuda.json").write_text(json.dumps(data))
    monkeypatch.setenv(VARIABLE, str(path / "rates.json"))
    cost_model.calibration.cache_clear()


def work_of(body: str, n: int, n_q: int | None = None) -> Work:
    ((work, _),) = works_of(spec_of(body).program, 0, 4, n_q or n, n, {})
    return dataclasses.replace(work, device="cuda")


def given_of(kind: torch.dtype, heads: tuple[int, int], n: int, padded: bool) -> Given:
    """Queries of some key heads, so many to each, keys and values."""
    torch.manual_seed(n)
    padding = torch.rand(2, n) < 0.7 if padded else None
    q = torch.randn(2, *heads, n, 6, dtype=kind)
    # what is not in one piece
    k, v = (torch.randn(2, n, heads[0], size, dtype=kind).transpose(1, 2) for size in (6, 5))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return Given(q, k, v, padding, None, {})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "heads", "n", "padded"),
    [
        ("", (2, 2), 33, True),
        ("normalize = none", (1, 3), 17, False),
        ("feature = identity", (2, 1), 9, True),
        ("feature = squared_relu", (1, 1), 1, False),
    ],
)
def test_it_is_handed_what_it_takes(
    arguments: str, heads: tuple[int, int], n: int, padded: bool
) -> None:
    kernel = linear_kernel(
        work_of(f"causal attend linear({arguments})", n), (0,), torch.device("cpu")
    )
    given = given_of(torch.float32, heads, n, padded)
    parts = given.q, given.k, given.v
    found = []
    for way in (Packaged(), BLOCKWISE):
        assert way.takes(given)
        out = summed_up(kernel.how, given, way)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        first = torch.autograd.grad(out, parts, grad, retain_graph=True)
        # the same way back once more, and derivatives of derivatives by the formula
        assert all(
            map(torch.equal, first, torch.autograd.grad(out, parts, grad, retain_graph=True))
        )
        (of_q,) = torch.autograd.grad(out, parts[:1], grad, create_graph=True)
        second = torch.autograd.grad(of_q.square().sum(), parts[1:])
        found.append([out, *first, *second])
    for one, other in zip(*found, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one / scale, other / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("installed")
def test_half_types_are_summed_in_a_type_with_their_range() -> None:
    kernel = linear_kernel(work_of(LINEAR, 40), (0,), torch.device("cpu"))
    for kind, bound in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        given = given_of(kind, (2, 2), 40, True)
        wide = dataclasses.replace(
            given, q=given.q.double(), k=given.k.double(), v=given.v.double()
        )
        with torch.no_grad():
            out, exact = (summed_up(kernel.how, x, Packaged()) for x in (given, wide))
        assert out.dtype == kind
        assert float((out - exact).abs().max()) <= bound * float(exact.abs().max())
    assert not Packaged().takes(wide)
    nothing = dataclasses.replace(given, q=given.q[:, :, :, 1:])
    assert not Packaged().takes(nothing)


# --- the choice ----------------------------------------------------------------------------------


def is_packaged(body: str, n: int, n_q: int | None = None) -> bool:
    """Whether a GPU's kernel would be the package's, and whether a plan says so."""
    work = work_of(body, n, n_q)
    kernel = TritonBackend().build(work, (0,), GPU)
    assert isinstance(kernel, FeatureKernel)
    found = isinstance(kernel.way, Packaged)
    assert found == any(
        line.endswith(f", by {package.NAME}") for line in TritonBackend().steps(work)
    )
    return found


@pytest.mark.usefixtures("installed")
def test_it_is_chosen_where_it_was_measured_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = GpuRates()
    assert not is_packaged(LINEAR, 4096)
    said = str(spec_of(LINEAR).plan(4096, device="cuda"))
    assert "is installed and was not measured: `attnspec calibrate --device cuda` does it" in said
    slow_start = GpuRates(package_call=3 * known.sums_call, package_pair=known.sums_pair / 2)
    measured(tmp_path, monkeypatch, slow_start)
    assert current("cuda") == slow_start
    assert not is_packaged(LINEAR, 256)
    assert (
        "takes more time by the rates of this machine"
        in TritonBackend().steps(work_of(LINEAR, 256))[0]
    )
    long = 1 << 20
    assert is_packaged(LINEAR, long)
    plan = spec_of(LINEAR).plan(long, device="cuda")
    assert f", by {package.NAME}" in str(plan)
    work = work_of(LINEAR, long)
    assert TritonBackend().cost(work) == slow_start.seconds(package.amounts_of(work))
    # what it does not compute, or what is not installed
    for body in ("attend linear()", "causal attend linear(feature = exp)"):
        assert not is_packaged(body, long)
    assert not is_packaged(LINEAR, long, n_q=7)
    for body in ("causal attend window(before = 7, after = 0) + linear()", "causal attend favor()"):
        assert not package.computes(work_of(body, 4096))
    for version in ("0.5.1", "unknown"):
        monkeypatch.setattr(package, "version", lambda name, it=version: it)
        package.is_installed.cache_clear()
        assert not is_packaged(LINEAR, long)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(package, "version", missing)
    package.is_installed.cache_clear()
    assert not is_packaged(LINEAR, long)
    assert package.NAME not in str(spec_of(LINEAR).plan(long, device="cuda"))


@pytest.mark.usefixtures("installed")
def test_its_rates_come_from_trials_alone() -> None:
    with_it = [amounts for *_, amounts in gpu_works("cuda")]
    known = GpuRates()
    true = dataclasses.replace(known, package_call=2e-5, package_pair=known.sums_pair / 3)
    rates = fitted(with_it, [true.seconds(each) for each in with_it], known)
    assert isinstance(rates, GpuRates)
    assert rates.package_pair == pytest.approx(true.package_pair, rel=0.1)
    assert rates.sums_pair == pytest.approx(known.sums_pair, rel=0.1)
    without = [each for each in with_it if not any("package" in name for name in each)]
    assert len(without) < len(with_it)
    rates = fitted(without, [known.seconds(each) for each in without], known)
    assert isinstance(rates, GpuRates)
    assert rates.package_call is rates.package_pair is None
