"""Spectra against numpy."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest
from limited import REFUSING
from random_specs import spec_text

from attnspec.analysis.spectrum import spectrum
from attnspec.spec import Spec, parse


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def mask_of(spec: Spec, n: int) -> np.ndarray:
    """The union of all layers and heads."""
    heads = range(spec.heads or 1)
    masks = [spec.mask(n, layer, head) for layer in range(spec.layers) for head in heads]
    return np.asarray(np.logical_or.reduce(masks))


def eigenvalues(mask: np.ndarray) -> np.ndarray:
    both = (mask | mask.T).astype(float)
    degrees = np.maximum(both.sum(axis=1), 1)
    return np.asarray(np.linalg.eigvalsh(both / np.sqrt(degrees * degrees[:, None])))


# --- spectra --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.limits("", "tiny")
def test_gaps_of_random_compositions(seed: int) -> None:
    spec = parse(spec_text(seed))
    found = spectrum.spectral_gap(spec.stack(), 41)
    sizes = np.sort(np.abs(eigenvalues(mask_of(spec, 41))))
    assert found.value == pytest.approx(1 - sizes[-2], abs=1e-7)


def test_formulas_of_stars_rings_bands_and_expanders() -> None:
    star = spec_of("attend global(first(1)) | self").analyse(1 << 13)
    assert star.spectral_gap == pytest.approx(0.5)
    n, h = 1000, 3
    ring = spec_of(f"attend where((q - k + {h}) % n <= {2 * h})").analyse(n)
    width = 2 * h + 1
    exact = np.sin(width * pi / n) / (width * np.sin(pi / n))
    assert ring.spectral_gap == pytest.approx(1 - exact, rel=1e-6)
    # a band is half of a ring of twice its length
    band = spec_of(f"attend window(radius = {h})").analyse(1 << 10)
    assert band.spectral_gap == pytest.approx(pi**2 * h * (h + 1) / (6 * 4.0**10), rel=1e-2)
    assert band.quality["spectral_gap"] == "exact"
    four = spec_of("attend expander(degree = 4)").analyse(1 << 13)
    assert four.spectral_gap == pytest.approx(1 - sqrt(3) / 2, abs=0.02)


def test_what_falls_apart_has_no_gap() -> None:
    report = spec_of("attend dilated(radius = 8, step = 2)").analyse(100_000)
    assert report.spectral_gap == 0.0
    assert report.quality["spectral_gap"] == "exact"


@pytest.mark.parametrize(
    ("body", "n"),
    [
        ("attend window(radius = 3) - self", 1100),
        # two halves that read each other alone, and a bit beside: the least eigenvalue is slowest
        ("attend where((q - k) % 2 == 1) | where(q == 0 and k == 2)", 1100),
        # no walk needs a second step
        ("attend full - (rows(first(2)) | columns(first(2)))", 1100),
        ("attend random(keys = 4)", 1100),
    ],
)
def test_iterations_find_what_all_eigenvalues_are(body: str, n: int) -> None:
    spec = spec_of(body)
    found = spectrum.spectral_gap(spec.stack(), n)
    sizes = np.sort(np.abs(eigenvalues(mask_of(spec, n))))
    assert found.quality == "estimate"
    assert found.value == pytest.approx(1 - sizes[-2], rel=1e-5, abs=1e-12)


@pytest.mark.limits(REFUSING)
def test_what_does_not_settle_is_a_bound() -> None:
    spec = spec_of("attend strided(stride = 64)")
    report = spec.analyse(4096)
    assert report.quality["spectral_gap"] == "bound"
    (said,) = parse(
        "attention a { attend strided(stride = 64) require spectral_gap > 0.001 at n = 4096 }"
    ).check()
    assert said.code == "A609"
    found = report.spectral_gap
    assert found is not None
    # the gap is smaller: 0.0003
    assert found > 3e-4


# --- in a report ----------------------------------------------------------------------------


def test_long_sequences_leave_out_what_takes_long() -> None:
    spec = spec_of("attend window(radius = 4)")
    assert "depth" not in spec.analyse(1 << 17).to_dict()["figures"]
    middle = spec.analyse(8192).to_dict()["figures"]
    assert "depth" in middle
    assert "spectral_gap" not in middle
